"""Leafless pytree nodes: what a trace of ``nn.jit`` has found out, or has to know."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Unwritten:
    """Stands, in what ``nn.jit`` returns, for a leaf that its body did not write.

    A cached call runs no Python: what the trace found out has to be in the structure.
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

    ``nn.jit`` shares one trace among modules at different paths. What a body writes in
    a selected collection and reads again is rewritten inside the trace, by name.
    """

    names: tuple[tuple[Any, ...], ...]
