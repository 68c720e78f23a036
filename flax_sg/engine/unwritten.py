"""Leafless pytree nodes that carry facts into and out of a trace of ``nn.jit``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Unwritten:
    """Replaces, in the output of ``nn.jit``, a leaf that the body did not write.

    A cache hit runs no Python, so the pytree structure of the output has to say this.
    """

    leaf: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sown:
    """The variables that a jitted body has sown."""

    keys: frozenset[tuple[str, tuple[str, ...]]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Names:
    """How the open blocks name the variables that a jitted body may write.

    ``nn.jit`` shares one trace among modules at different paths. A variable that the
    body writes in a selected collection and reads again is rewritten inside the trace,
    by name. So modules whose names differ need traces of their own.
    """

    names: tuple[tuple[Any, ...], ...]
