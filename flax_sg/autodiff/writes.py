"""Warns of what a function writes to a model of NNX while it is differentiated.

``jax.grad`` and ``sg.grad`` take a model apart and give the function a copy, so what is
written to the copy is lost: new batch statistics, and the count of random keys, so that
each step draws the same ones. ``nnx.grad`` updates the model itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

from flax_sg.filters.predicates import describe
from flax_sg.internals.optional import is_nnx_model
from flax_sg.internals.places import Place, warn_once
from flax_sg.internals.types import Leaf, PyTree
from flax_sg.trees.leaves import leaves_of


def watched(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that warns if ``fun`` changes a model of NNX among its arguments."""

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _values(args)
        out = fun(*args, **kwargs)
        after = _values(args)
        if len(before) != len(after) or not all(map(operator.is_, before, after)):
            warn_once(
                f'{describe(fun)} writes to a copy of a model of NNX, and that is '
                'lost: batch statistics, counts of random keys.\nWrite nnx.grad(loss, '
                'argnums=nnx.DiffState(0, nnx.where(model, where))), or return what is '
                'written as aux: has_aux=True.\nWith graph=False, Flax refuses '
                'DiffState: write nnx.grad(loss) of a view, and sg.freeze(tx, ~live).',
                Place.here(),
                UserWarning,
            )
        return out

    return call


def _values(args: PyTree) -> list[Leaf]:
    """The leaves of all models of NNX in some arguments."""
    nodes = jax.tree.leaves(args, is_leaf=is_nnx_model)
    return [x for node in nodes if is_nnx_model(node) for x in leaves_of(node).values]
