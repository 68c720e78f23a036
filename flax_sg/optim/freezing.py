"""``freeze``: an optimizer that never sees what is frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_sg import errors, filters
from flax_sg.absent import ABSENT, is_absent
from flax_sg.leaves import Keys, Leaves, is_differentiable, is_whole
from flax_sg.nondifferentiable import NonDifferentiable
from flax_sg.optim.masks import live_leaves, parameters_of


class FreezeState(NamedTuple):
    """The state of ``freeze``.

    Attributes:
        inner_state: the state of the wrapped transformation for what is trained, with
            ``ABSENT`` in place of everything that is frozen.
        kept_state: the rest of the state if ``keep_state``, ``ABSENT`` otherwise.
    """

    inner_state: Any
    kept_state: Any


class Freeze(optax.GradientTransformationExtraArgs):
    """What ``freeze`` returns: an optax transformation that can be thawed.

    Attributes:
        plan: what it was made of.
    """

    plan: Plan

    def adopt(self, state: Any, params: Any) -> FreezeState:
        """The state of this transformation, taken from that of another selection.

        Args:
            state: a state of the wrapped transformation, frozen in other places or
                nowhere.
            params: the parameters.

        Returns:
            A state in which everything that ``state`` knows is kept, and what it does
            not know is as ``init`` makes it. What is frozen now is dropped, unless
            ``keep_state``.
        """
        return self.plan.adopt(state, params)


def freeze(
    tx: Any,
    where: filters.Where | None = None,
    *,
    keep_state: bool = False,
    unused: str = 'raise',
) -> Freeze:
    """Freezes parameters in an optimizer: it never sees them.

    No state, no update, no decay, no momentum for what is frozen, no share in the norm
    that a clip *inside* ``tx`` looks at. A zero gradient is no such thing: AdamW
    decays, momentum moves, clipping counts.

    >>> import jax, jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'body': jnp.array([3.0, 4.0]), 'head': jnp.array([0.0])}
    >>> grads = {'body': jnp.array([3.0, 4.0]), 'head': jnp.array([2.0])}
    >>> clip, sgd = optax.clip_by_global_norm(1.0), optax.sgd(1.0)
    >>> tx = sg.freeze(optax.chain(clip, sgd), 'body')
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> updates['head'].tolist(), updates['body'].tolist()
    ([-1.0], [-0.0, -0.0])

    It goes **outermost**. In a chain, what stands before it has seen the frozen
    gradients already: here the clip divides by a norm in which 'body' counts.

    >>> wrong = optax.chain(clip, sg.freeze(sgd, 'body'))
    >>> updates, _ = wrong.update(grads, wrong.init(params), params)
    >>> round(float(updates['head'][0]), 3)
    -0.371

    ``optax.freeze(mask)`` only zeroes updates, so the optimizer before it keeps a state
    for all of them and counts them; ``optax.masked(tx, mask)`` hands the raw gradient
    on where the mask is False, which ``apply_updates`` then adds.

    Gradients may be full or pruned: ``ABSENT``, None, ``optax.MaskedNode`` or nothing
    at all may stand for what is frozen. Updates have the structure of the gradients:

    >>> pruned = {'head': jnp.array([2.0])}
    >>> tx.update(pruned, tx.init(params), params)[0]
    {'head': Array([-1.], dtype=float32)}

    Args:
        tx: an optax transformation, or ``optax.MultiSteps``, whose accumulators shrink
            too.
        where: what is **frozen**: any kind of filter. By default what the classes in
            the tree declare as not trained, see ``sg.trainable``. Integers, keys and
            ``NonDifferentiable`` are frozen in any case.
        keep_state: keeps the state of what is frozen, as it is, so that ``thaw`` can
            go on with it.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A transformation, to be used as any other. Updates of what is frozen, where the
        gradients are full, are constants of negative zero: adding one changes no bit,
        and ``sg.apply_updates`` does not even add it.

    Raises:
        NotFrozenError: if ``tx`` is no optax transformation.
        FilterTypeError: if ``where`` is no filter.
        UnusedFilterError: at ``init``, if a part of ``where`` matches no parameter.
        MissingLeafError: at ``update``, if a gradient lacks something that is trained.
        StructureError: at ``update``, if trees do not belong together.
        OverwriteWithGradientError: if it is given fp8 values that no optimizer may see.
    """
    chosen = None if where is None else filters.as_filter(where)
    return _made(Plan(_with_extra_args(tx), chosen, (), keep_state, unused))


def thaw(
    tx: Any,
    state: Any,
    params: Any,
    where: filters.Where,
    *,
    unused: str = 'raise',
) -> tuple[Freeze, FreezeState]:
    """Trains some of what is frozen from now on, and forgets nothing.

    >>> import jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'body': jnp.ones(2), 'head': jnp.ones(1)}
    >>> tx = sg.freeze(optax.sgd(0.1, momentum=0.9), 'body')
    >>> state = tx.init(params)
    >>> updates, state = tx.update({'head': jnp.ones(1)}, state, params)
    >>> tx, state = sg.thaw(tx, state, params, 'body')
    >>> state.inner_state[0].trace
    {'body': Array([0., 0.], dtype=float32), 'head': Array([1.], dtype=float32)}

    Args:
        tx: what ``freeze`` returned.
        state: its state.
        params: the parameters.
        where: which of the frozen ones are trained from now on.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        The transformation that updates these too, and its state: what was trained
        keeps its moments; what is thawed has those of before it was frozen if they
        were kept (``keep_state=True``), and new ones otherwise. A jitted step compiles
        once for each change.

    Raises:
        NotFrozenError: if ``tx`` is not from ``freeze``.
        UnusedFilterError: if a part of ``where`` matches no parameter.
    """
    if not isinstance(tx, Freeze):
        raise errors.NotFrozenError(tx)
    plan = tx.plan
    added = (*plan.thawed, filters.as_filter(where))
    thawed = _made(dataclasses.replace(plan, thawed=added, unused=unused))
    return thawed, thawed.adopt(state, params)


def _made(plan: Plan) -> Freeze:
    update: Any = plan.update
    tx = Freeze(plan.init, update)
    tx.plan = plan
    return tx


def _with_extra_args(tx: Any) -> Any:
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not (hasattr(tx, 'init') and hasattr(tx, 'update')):
        raise errors.NotFrozenError.no_optimizer(tx)
    return optax.with_extra_args_support(tx)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transformation, and what of it is frozen.

    Attributes:
        tx: the wrapped transformation.
        where: what is frozen; None for what is declared.
        thawed: what was thawed since.
        keep_state: whether the state of what is frozen is kept.
        unused: what to do with a filter that matches nothing.
    """

    tx: Any
    where: filters.Filter | None
    thawed: tuple[filters.Filter, ...]
    keep_state: bool
    unused: str

    def live(self, leaves: Leaves) -> list[bool]:
        """For each parameter whether it is trained."""
        live = live_leaves(leaves, self.where, self.unused)
        for where in self.thawed:
            frozen = live_leaves(leaves, where, self.unused)
            able = map(is_differentiable, leaves.values)
            parts = zip(live, frozen, able, strict=True)
            live = [was or (able and not still) for was, still, able in parts]
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
        marks, treedef = jax.tree.flatten(template, is_leaf=is_absent)
        parts = list(zip(marks, treedef.flatten_up_to(full), strict=True))
        return FreezeState(
            treedef.unflatten([ABSENT if is_absent(m) else part for m, part in parts]),
            treedef.unflatten([part if is_absent(m) else ABSENT for m, part in parts]),
        )

    def adopt(self, state: Any, params: Any) -> FreezeState:
        """See ``Freeze.adopt``."""
        leaves = parameters_of(params)
        live = self.live(leaves)
        able = list(map(is_differentiable, leaves.values))
        fresh = self.tx.init(_pruned(leaves, able if self.keep_state else live))
        marks, treedef = jax.tree.flatten(fresh, is_leaf=is_absent)
        known = _known(state, treedef)
        merged = treedef.unflatten(
            [
                mark if is_absent(mark) or is_absent(leaf) else leaf
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
        leaves = given if params is None else parameters_of(params)
        live = self.live(leaves)
        found = _by_keys(given)
        _check_belong(leaves, given, params is None)
        grads: list[Any] = []
        for keys, path, takes in zip(leaves.keys, leaves.paths, live, strict=True):
            leaf = found.get(keys, ABSENT) if takes else ABSENT
            if takes and is_absent(leaf):
                raise errors.MissingLeafError('the gradient', path, 'is not frozen')
            grads.append(leaf)
        live_keys = {k for k, takes in zip(leaves.keys, live, strict=True) if takes}
        pruned_params = None if params is None else _pruned(leaves, live)
        rest = _Rest(leaves, live, params is not None)
        try:
            new, inner_state = self.tx.update(
                leaves.restore(grads),
                state.inner_state,
                pruned_params,
                **{name: rest.prune(name, value) for name, value in extra.items()},
            )
        except (ValueError, TypeError, KeyError):
            self._check_state(state, leaves, live)
            raise
        made = dict(zip(leaves.keys, leaves.treedef.flatten_up_to(new), strict=True))
        out = given.restore(
            made[keys] if keys in live_keys else _nothing(leaf)
            for keys, leaf in zip(given.keys, given.values, strict=True)
        )
        return out, FreezeState(inner_state, state.kept_state)

    def _check_state(
        self, state: FreezeState, leaves: Leaves, live: Sequence[bool]
    ) -> None:
        """Raises if the state is that of other parameters, or of another selection."""
        expected = jax.eval_shape(self.tx.init, _pruned(leaves, live))
        if jax.tree.structure(expected) == jax.tree.structure(state.inner_state):
            return
        raise errors.StructureError(
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


def _pruned(leaves: Leaves, live: Sequence[bool]) -> Any:
    pairs = zip(leaves.values, live, strict=True)
    return leaves.restore(leaf if takes else ABSENT for leaf, takes in pairs)


def _by_keys(leaves: Leaves) -> dict[Keys, Any]:
    return dict(zip(leaves.keys, leaves.values, strict=True))


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
    return np.broadcast_to(-zero if dtype.kind in 'fcV' else zero, shape)


def _known(state: Any, treedef: Any) -> list[Any]:
    """All leaves of a state, whatever is frozen in it, ``ABSENT`` for unknown ones."""
    if not isinstance(state, FreezeState):
        return treedef.flatten_up_to(state)
    used = treedef.flatten_up_to(state.inner_state)
    if is_absent(state.kept_state):
        return used
    kept = treedef.flatten_up_to(state.kept_state)
    return [k if is_absent(u) else u for u, k in zip(used, kept, strict=True)]


def _check_belong(leaves: Leaves, given: Leaves, same: bool) -> None:
    if same:
        return
    known = set(leaves.keys)
    if all(keys in known for keys in given.keys):
        return
    raise errors.StructureError(
        'the parameters', 'the gradient', dict(leaves), dict(given)
    )


def _named(state: Any) -> Mapping[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(keys): leaf for keys, leaf in pairs}
