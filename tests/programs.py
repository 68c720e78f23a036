"""Compiled programs: what they cost. `flax_sg.testing` compares them."""

from collections.abc import Callable
from typing import Any

import jax


def compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """The compiled program of a function."""
    return jax.jit(fn).lower(*args).compile()


def flops(fn: Callable[..., Any], *args: Any) -> float:
    """Floating point operations of the compiled program."""
    return compiled(fn, *args).cost_analysis()['flops']


def temporary_bytes(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes of temporary memory of the compiled program."""
    return compiled(fn, *args).memory_analysis().temp_size_in_bytes
