"""Compiled programs, as things to compare."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax

_METADATA = re.compile(r', metadata=\{[^}]*\}')
_LOCATIONS = ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames')


def compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """The compiled program of a function."""
    return jax.jit(fn).lower(*args).compile()


def optimized_hlo(fn: Callable[..., Any], *args: Any) -> str:
    """Optimized HLO of a function without names and metadata.

    Instructions and computations are called by the order in which they first appear,
    so that two texts are equal exactly if the programs are.
    """
    return without_names(compiled(fn, *args).as_text())


def without_names(text: str) -> str:
    """HLO text with names replaced by numbers, without metadata."""
    text = _METADATA.sub('', text)
    lines = []
    skipping = False
    for line in text.splitlines():
        if line.strip() in _LOCATIONS:  # Tables of source lines at the head or end.
            skipping = True
        elif not line.strip():
            skipping = False
        if not skipping:
            lines.append(line)
    text = '\n'.join(lines)
    # The head of a computation repeats the names of its parameters.
    text = re.sub(r'\b[\w.-]+: (?=[a-z]+\d*\[|\()', '', text)
    names: dict[str, str] = {}
    for match in re.finditer(r'%[\w.-]+', text):
        names.setdefault(match.group(), f'%{len(names)}')
    text = re.sub(r'%[\w.-]+', lambda match: names[match.group()], text)
    return re.sub(r'^HloModule [\w.-]+', 'HloModule', text)


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
