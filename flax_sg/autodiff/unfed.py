"""Warns of a filter whose leaves have no gradient, whatever the values are.

``wrt='encoder/**'`` for a model that stops the gradient of the encoder gives zeros. The
leaves go through an identity function: while it traces, JAX calls the backward rule of
that function with the cotangents. So this costs no run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from flax_sg import filters
from flax_sg.filters.paths import Path
from flax_sg.internals.places import Place, warn_once
from flax_sg.internals.types import PyTree


def watched(live: Sequence[Any], fed: set[int]) -> list[Any]:
    """The leaves, through an identity function that notes which have a gradient.

    While JAX traces the backward pass, their positions are added to ``fed``.
    """

    @jax.custom_vjp
    def identity(leaves: list[Any]) -> list[Any]:
        return leaves

    def forward(leaves: list[Any]) -> tuple[list[Any], None]:
        return [leaf.value for leaf in leaves], None

    def backward(_: None, cotangents: list[Any]) -> tuple[list[Any]]:
        gradients = [None if isinstance(ct, SymbolicZero) else ct for ct in cotangents]
        fed.update(n for n, ct in enumerate(gradients) if ct is not None)
        return (gradients,)

    identity.defvjp(forward, backward, symbolic_zeros=True)
    return identity(list(live))


def warn(fun: str, where: filters.Filter, live: Sequence[Path], fed: set[int]) -> None:
    """Warns if no leaf that a part of the filter means has a gradient.

    Args:
        fun: what the function is called.
        where: the filter.
        live: the paths of the leaves that are differentiated.
        fed: the positions of those that got a cotangent.
    """
    named = set[int]()
    parts = dict.fromkeys((where, *where.parts, *where.atoms))
    for part in parts if len(fed) < len(live) else ():
        meant = [n for n, path in enumerate(live) if filters.is_meant(part(path))]
        if not (named.issuperset(meant) or fed.intersection(meant)):
            named.update(meant)
            path = str(live[meant[0]])
            warn_once(
                f'wrt={part!r} gives zeros alone: in {fun} no gradient flows to '
                f'{path!r}{" and the others" if len(meant) > 1 else ""}.\n'
                'The function does not depend on it, or stops its gradient: '
                f"sg.gradient_flow(fun, *args).why('output', {path!r}) tells where.\n"
                "If that is meant, pass unused='ignore'.",
                Place.here(),
            )


def is_switched_off(out: PyTree) -> bool:
    """Whether a function returned a number of Python or NumPy, as ``return 0.0`` does.

    So does a loss that is switched off: no filter is to blame for it. What JAX has
    computed looks alike, whether it was computed of stopped parameters or of none.
    """
    return not any(isinstance(x, jax.Array) for x in jax.tree.leaves(out)[:1])
