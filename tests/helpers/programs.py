"""The cost of compiled programs. `flax_sg.testing` compares programs."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax


def compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """The compiled program of a function, which ``jax.pmap`` may have mapped."""
    mapped = fn if hasattr(fn, 'lower') else jax.jit(fn)
    return mapped.lower(*args).compile()


def flops(fn: Callable[..., Any], *args: Any) -> float:
    """Floating point operations of the compiled program."""
    return compiled(fn, *args).cost_analysis()['flops']


def temporary_bytes(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes of temporary memory of the compiled program."""
    return compiled(fn, *args).memory_analysis().temp_size_in_bytes


_COLLECTIVE = re.compile(
    r'= (?P<shapes>.+?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|'
    r'collective-permute)(-start)?\('
)
_SHAPE = re.compile(r'(?P<type>[a-z]+)(?P<bits>\d*)\[(?P<dims>[\d,]*)\]')


def collectives(compiled: Any) -> dict[str, int]:
    """Bytes that come out of each kind of collective of a compiled program."""
    out: dict[str, int] = {}
    for found in _COLLECTIVE.finditer(compiled.as_text()):
        for shape in _SHAPE.finditer(found['shapes']):
            size = math.prod(map(int, filter(None, shape['dims'].split(','))))
            bits = int(shape['bits'] or 8)
            out[found['kind']] = out.get(found['kind'], 0) + size * bits // 8
    return out
