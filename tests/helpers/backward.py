"""Gradient rules written by hand, as references for those of flax_sg.

This file does not import flax_sg. Trees of parameters go through one
``jax.custom_vjp`` for each leaf, or through one for all leaves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def identity(fn: Callable[[Any], Any], value: Any) -> Any:
    """``value``; its cotangent, a tree like it, goes through ``fn``."""

    @jax.custom_vjp
    def through(value: Any) -> Any:
        return value

    through.defvjp(lambda value: (value, None), lambda _, ct: (fn(ct),))
    return through(value)


def each(fn: Callable[[str, Any], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    """Copies nested dicts; ``fn(path, cotangent)`` maps each leaf's cotangent."""
    if isinstance(tree, Mapping):
        return {name: each(fn, value, (*path, name)) for name, value in tree.items()}
    return identity(lambda ct: fn('/'.join(path), ct), tree)


def scaled(factor: float, tree: Any) -> Any:
    """A copy with gradients multiplied by a number."""
    return each(lambda _, ct: ct * factor, tree)


def squared(tree: Any) -> Any:
    """A copy with gradients squared: what is added up first makes a difference."""
    return each(lambda _, ct: ct * ct, tree)


def clipped_together(bound: float, tree: Any) -> Any:
    """A copy whose gradients have at most this norm, all together."""

    def clip(cts: Any) -> Any:
        squares = [jnp.sum(jnp.square(ct)) for ct in jax.tree.leaves(cts)]
        square = functools.reduce(operator.add, squares)
        over = square > bound * bound
        # The square root has no derivative at zero.
        factor = jnp.where(over, bound / jnp.sqrt(jnp.where(over, square, 1)), 1)
        return jax.tree.map(lambda ct: ct * factor, cts)

    return identity(clip, tree)
