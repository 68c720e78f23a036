"""What ``freeze`` does: the trained part of everything goes to another optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.optim.masks import live_leaves, parameters_of
from flax_sg.trees.absent import ABSENT, is_absent, missing_leaf
from flax_sg.trees.leaves import (
    Keys,
    Leaves,
    different_structures,
    is_differentiable,
    is_whole,
)
from flax_sg.trees.nondifferentiable import NonDifferentiable


class FreezeState(NamedTuple):
    """The state of ``freeze``.

    Attributes:
        inner_state: the state of the wrapped transformation for what is trained, with
            ``ABSENT`` in place of everything that is frozen.
        kept_state: the rest of the state if ``keep_state``, ``ABSENT`` otherwise.
    """

    inner_state: Any
    kept_state: Any


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A transformation that is given what is trained alone.

    Attributes:
        tx: the wrapped transformation.
        where: what is frozen; None for what is declared.
        thawed: what was thawed since, each filter with its own ``unused``.
        keep_state: whether the state of what is frozen is kept.
        unused: what to do with a filter that matches nothing.
    """

    tx: Any
    where: filters.Filter | None
    thawed: tuple[tuple[filters.Filter, str], ...]
    keep_state: bool
    unused: str

    def live(self, leaves: Leaves, judge: bool = True) -> list[Any]:
        """For each parameter whether it is trained, or which part of it.

        Args:
            leaves: the parameters, or gradients in their place.
            judge: whether a filter has to match something.
        """
        # optax asks for the state of parameters without leaves, to see what is where.
        judged = judge and leaves.values
        live = live_leaves(leaves, self.where, self.unused if judged else 'ignore')
        for where, unused in self.thawed:
            frozen = live_leaves(leaves, where, unused if judged else 'ignore')
            able = map(is_differentiable, leaves.values)
            parts = zip(live, frozen, able, strict=True)
            live = [
                was | (able and filters.negated(still)) for was, still, able in parts
            ]
        return live

    def init(self, params: Any) -> FreezeState:
        """The state for what is trained."""
        leaves = parameters_of(params)
        live = self.live(leaves)
        if not self.keep_state:
            return FreezeState(self.tx.init(_pruned(leaves, live)), ABSENT)
        able = list(map(is_differentiable, leaves.values))
        return self._split(self.tx.init(_pruned(leaves, able)), leaves, live)

    def _split(self, full: Any, leaves: Leaves, live: Sequence[bool]) -> FreezeState:
        """A full state, in what is in use and what is kept."""
        template = jax.eval_shape(self.tx.init, _pruned(leaves, live))
        marks, treedef = jax.tree.flatten(template, is_leaf=_is_vacant)
        parts = list(zip(marks, treedef.flatten_up_to(full), strict=True))
        return FreezeState(
            treedef.unflatten([m if _is_vacant(m) else part for m, part in parts]),
            treedef.unflatten([part if _is_vacant(m) else ABSENT for m, part in parts]),
        )

    def adopt(self, state: Any, params: Any) -> FreezeState:
        """See ``Freeze.adopt``."""
        leaves = parameters_of(params)
        live = self.live(leaves)
        able = list(map(is_differentiable, leaves.values))
        fresh = self.tx.init(_pruned(leaves, able if self.keep_state else live))
        marks, treedef = jax.tree.flatten(fresh, is_leaf=_is_vacant)
        known = _known(state, treedef)
        merged = treedef.unflatten(
            [
                mark if _is_vacant(mark) or _is_vacant(leaf) else leaf
                for mark, leaf in zip(marks, known, strict=True)
            ]
        )
        if self.keep_state:
            return self._split(merged, leaves, live)
        return FreezeState(merged, ABSENT)

    def update(
        self, updates: Any, state: FreezeState, params: Any = None, **extra: Any
    ) -> tuple[Any, FreezeState]:
        """Updates of what is trained, in the structure of the gradients."""
        given = parameters_of(updates)
        leaves = parameters_of(_unmasked(updates) if params is None else params)
        live = self.live(leaves, judge=False)
        _check_belong(leaves, given)
        grads_of = dict(zip(given.key_paths, given.values, strict=True))
        rows = list(zip(leaves.key_paths, leaves.paths, live, strict=True))
        self._check_gradients(rows, grads_of)
        pruned_params = None if params is None else _pruned(leaves, live)
        rest = _Rest(leaves, live, params is not None)
        try:
            new, inner_state = self.tx.update(
                leaves.restore(
                    _only(takes, grads_of[keys], 0.0, path) if takes else ABSENT
                    for keys, path, takes in rows
                ),
                state.inner_state,
                pruned_params,
                **{name: rest.prune(name, value) for name, value in extra.items()},
            )
        except (ValueError, TypeError, KeyError):
            self._check_state(state, leaves, live)
            raise
        new_leaves = leaves.treedef.flatten_up_to(new)
        made = {
            keys: _only(takes, leaf, -0.0, path)
            for (keys, path, takes), leaf in zip(rows, new_leaves, strict=True)
            if takes
        }
        out = given.restore(
            made[keys] if keys in made else _nothing(leaf)
            for keys, leaf in zip(given.key_paths, given.values, strict=True)
        )
        return out, FreezeState(inner_state, state.kept_state)

    def _check_gradients(
        self, rows: Sequence[tuple[Keys, Path, Any]], grads_of: Mapping[Keys, Any]
    ) -> None:
        """Raises if what is trained has no gradient."""
        is_there = {
            keys: not is_absent(grads_of.get(keys, ABSENT)) for keys, *_ in rows
        }
        lacking = [path for keys, path, takes in rows if takes and not is_there[keys]]
        if not lacking:
            return
        trained = [path for keys, path, takes in rows if takes and is_there[keys]]
        frozen = [path for keys, path, takes in rows if not takes and is_there[keys]]
        if frozen and not trained:
            raise _opposite(self.where, frozen[0], lacking[0])
        raise missing_leaf(
            'the gradient',
            lacking[0],
            'is not frozen',
            'Differentiate what is not frozen: sg.grad(loss, wrt=~where) beside '
            'sg.freeze(tx, where).',
        )

    def _check_state(
        self, state: FreezeState, leaves: Leaves, live: Sequence[bool]
    ) -> None:
        """Raises if the state is that of other parameters, or of another selection."""
        expected = jax.eval_shape(self.tx.init, _pruned(leaves, live))
        if jax.tree.structure(expected) == jax.tree.structure(state.inner_state):
            return
        raise different_structures(
            'the state for what is trained',
            'the state that was given',
            _named(expected),
            _named(state.inner_state),
            str(jax.tree.structure(expected)),
            str(jax.tree.structure(state.inner_state)),
        )


@dataclasses.dataclass(frozen=True)
class _Rest:
    """What a transformation is given beside the gradients, made to fit these."""

    leaves: Leaves
    live: Sequence[bool]
    with_params: bool

    def prune(self, name: str, value: Any) -> Any:
        """A tree like the parameters loses what is frozen, a function gets it back."""
        if name == 'value_fn' and callable(value) and self.with_params:
            return lambda pruned: value(self._whole(pruned))
        treedef = jax.tree.structure(value, is_leaf=is_whole)
        if treedef != self.leaves.treedef:
            return value
        like = dataclasses.replace(
            self.leaves, values=jax.tree.leaves(value, is_leaf=is_whole)
        )
        return _pruned(like, self.live)

    def _whole(self, pruned: Any) -> Any:
        given = self.leaves.treedef.flatten_up_to(pruned)
        pairs = zip(given, self.leaves.values, self.live, strict=True)
        return self.leaves.restore(new if live else old for new, old, live in pairs)


def _is_vacant(node: Any) -> bool:
    """Whether a state has nothing there: frozen, or of another group of optax's."""
    return is_absent(node) or isinstance(node, optax.MaskedNode)


def _unmasked(updates: Any) -> Any:
    """Gradients with one thing only in place of what is not there."""
    return jax.tree.map(
        lambda leaf: ABSENT if _is_vacant(leaf) else leaf,
        updates,
        is_leaf=_is_vacant,
    )


def _pruned(leaves: Leaves, live: Sequence[bool]) -> Any:
    pairs = zip(leaves.values, live, strict=True)
    return leaves.restore(leaf if takes else ABSENT for leaf, takes in pairs)


def _only(takes: Any, leaf: Any, rest: float, path: Path) -> Any:
    """A leaf, with a number in place of the elements that are frozen."""
    if isinstance(takes, filters.Part):
        return takes.merge(leaf, jnp.full_like(leaf, rest), path)
    return leaf


def _nothing(leaf: Any) -> Any:
    """The update of a leaf that is frozen: nothing, or a constant that adds nothing."""
    if is_absent(leaf):
        return leaf
    if isinstance(leaf, NonDifferentiable):
        return jax.tree.map(_nothing, leaf)
    shape, dtype = np.shape(leaf), jnp.result_type(leaf)
    if dtype == jax.dtypes.float0:
        return leaf
    zero = np.zeros((), dtype)
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return np.broadcast_to(-zero if inexact else zero, shape)


def _known(state: Any, treedef: Any) -> list[Any]:
    """All leaves of a state, whatever is frozen in it, vacant for unknown ones."""
    if not isinstance(state, FreezeState):
        return treedef.flatten_up_to(state)
    used = treedef.flatten_up_to(state.inner_state)
    if is_absent(state.kept_state):
        return used
    kept = treedef.flatten_up_to(state.kept_state)
    return [k if _is_vacant(u) else u for u, k in zip(used, kept, strict=True)]


def _check_belong(leaves: Leaves, given: Leaves) -> None:
    known = set(leaves.key_paths)
    if all(keys in known for keys in given.key_paths):
        return
    raise different_structures(
        'the parameters',
        'the gradient',
        leaves.by_path(),
        given.by_path(),
        pruned=True,
    )


def _opposite(where: object, frozen: str, trained: str) -> errors.StructureError:
    """One filter says what is differentiated, and what is frozen."""
    of = 'tx' if where is None else f'tx, {where!r}'
    return errors.StructureError(
        f'there is a gradient for what sg.freeze({of}) freezes, {str(frozen)!r}, and '
        f'none for what it trains, {str(trained)!r}.\n'
        'wrt= names what has a gradient, sg.freeze what is frozen: one filter means '
        'opposite things there.\n'
        'Write sg.freeze(tx, ~where), with where = sg.filters.as_filter(...) of the '
        'filter that wrt= has.'
    )


def _named(state: Any) -> Mapping[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(keys): leaf for keys, leaf in pairs}
