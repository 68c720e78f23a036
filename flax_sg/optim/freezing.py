"""``freeze``: an optimizer that never sees what is frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by
from flax_sg.filters.paths import Path
from flax_sg.optim.masks import live_leaves, parameters_of, values_at
from flax_sg.trees.leaves import (
    ABSENT,
    Leaves,
    is_absent,
    is_differentiable,
    is_whole,
    missing_leaf,
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
        with raised_by('sg.freeze'):
            live = live_leaves(leaves, self.where, self.unused if judged else 'ignore')
        able = list(map(is_differentiable, leaves.values))
        for where, unused in self.thawed:
            with raised_by('sg.thaw'):
                rest = live_leaves(leaves, where, unused if judged else 'ignore')
            parts = zip(live, rest, able, strict=True)
            live = [was | (can and filters.negated(other)) for was, other, can in parts]
        return live

    def init(self, params: Any) -> FreezeState:
        """The state for what is trained."""
        leaves = parameters_of(params)
        live = self.live(leaves)
        return self._split(self._full(leaves, live), leaves, live)

    def adopt(self, state: Any, params: Any) -> FreezeState:
        """See ``Freeze.adopt``."""
        leaves = parameters_of(params)
        live = self.live(leaves)
        marks, treedef = jax.tree.flatten(self._full(leaves, live), is_leaf=_is_vacant)
        used, kept = state if isinstance(state, FreezeState) else (state, ABSENT)
        known = treedef.flatten_up_to(used)
        if not is_absent(kept):
            known = _first(known, treedef.flatten_up_to(kept))
        merged = (
            mark if _is_vacant(mark) else leaf
            for mark, leaf in zip(marks, _first(known, marks), strict=True)
        )
        return self._split(treedef.unflatten(merged), leaves, live)

    def _full(self, leaves: Leaves, live: Sequence[Any]) -> Any:
        """A new state for what is trained, and for all if the rest is kept."""
        if self.keep_state:
            live = list(map(is_differentiable, leaves.values))
        return self.tx.init(_pruned(leaves, live))

    def _split(self, full: Any, leaves: Leaves, live: Sequence[Any]) -> FreezeState:
        """A full state, split into what the optimizer uses and what is only kept."""
        if not self.keep_state:
            return FreezeState(full, ABSENT)
        template = jax.eval_shape(self.tx.init, _pruned(leaves, live))
        marks, treedef = jax.tree.flatten(template, is_leaf=_is_vacant)
        parts = list(zip(marks, treedef.flatten_up_to(full), strict=True))
        return FreezeState(
            treedef.unflatten([m if _is_vacant(m) else part for m, part in parts]),
            treedef.unflatten([part if _is_vacant(m) else ABSENT for m, part in parts]),
        )

    def update(
        self, updates: Any, state: FreezeState, params: Any = None, **extra: Any
    ) -> tuple[Any, FreezeState]:
        """Updates of what is trained, in the structure of the gradients."""
        given = parameters_of(updates)
        leaves = parameters_of(_unmasked(updates) if params is None else params)
        live = self.live(leaves, judge=False)
        grads = values_at(leaves, given, 'the gradient')
        self._check_gradients(leaves, live, grads)
        shown = leaves.restore(
            _only(takes, grad, 0.0, path) if takes else ABSENT
            for takes, grad, path in zip(live, grads, leaves.paths, strict=True)
        )
        pruned_params = None if params is None else _pruned(leaves, live)
        for name, value in extra.items():
            extra[name] = _fitting(name, value, leaves, live, params)
        try:
            new, inner_state = self.tx.update(
                shown, state.inner_state, pruned_params, **extra
            )
        except (ValueError, TypeError, KeyError) as error:
            expected = jax.eval_shape(self.tx.init, _pruned(leaves, live))
            if jax.tree.structure(expected) == jax.tree.structure(state.inner_state):
                raise
            raise errors.StructureError(
                'the state does not belong to what sg.freeze trains of these '
                'parameters.\n'
                'Make it with tx.init(params), or keep what it knows: '
                'tx.adopt(state, params).'
            ) from error
        new_leaves = leaves.treedef.flatten_up_to(new)
        rows = zip(leaves.key_paths, leaves.paths, live, new_leaves, strict=True)
        made = {
            keys: _only(takes, leaf, -0.0, path)
            for keys, path, takes, leaf in rows
            if takes
        }
        out = given.restore(
            made[keys] if keys in made else _nothing(leaf)
            for keys, leaf in zip(given.key_paths, given.values, strict=True)
        )
        return out, FreezeState(inner_state, state.kept_state)

    def _check_gradients(
        self, leaves: Leaves, live: Sequence[Any], grads: Sequence[Any]
    ) -> None:
        """Raises if a trained parameter has no gradient."""
        rows = list(zip(leaves.paths, live, map(is_absent, grads), strict=True))
        lacking = [path for path, takes, absent in rows if takes and absent]
        if not lacking:
            return
        given = [(path, takes) for path, takes, absent in rows if not absent]
        if given and not any(takes for _, takes in given):
            tx = 'tx' if self.where is None else f'tx, {self.where!r}'
            raise errors.StructureError(
                f'sg.freeze({tx}) freezes {str(given[0][0])!r}, which has a gradient, '
                f'and trains {str(lacking[0])!r}, which has none.\n'
                'wrt= selects what has a gradient, sg.freeze what is frozen: one '
                'filter means opposite things there.\n'
                'Write where = sg.filters.as_filter(...): sg.freeze(tx, ~where) goes '
                'with sg.grad(loss, wrt=where).'
            )
        raise missing_leaf(
            'the gradient',
            lacking[0],
            'is not frozen',
            'Differentiate what is not frozen: sg.grad(loss, wrt=~where) beside '
            'sg.freeze(tx, where).',
        )


class Freeze(optax.GradientTransformationExtraArgs):
    """What ``freeze`` returns: an optax transformation that can be thawed.

    Attributes:
        wrapped: the transformation that it was made of, and what of it is frozen.
    """

    wrapped: Wrapped

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
        return self.wrapped.adopt(state, params)


def freeze(
    tx: Any,
    where: filters.Where | None = None,
    *,
    keep_state: bool = False,
    unused: str = 'raise',
) -> Freeze:
    """Freezes parameters in an optimizer: it never sees them.

    No state, no update, no decay, no momentum for what is frozen, no share in the norm
    that a clip *inside* ``tx`` looks at. A gradient that is stopped in the model alone
    is zero, and AdamW still decays the weight, momentum still moves it. If nothing
    stops the gradient, it is not zero, and a clip before ``freeze`` counts it.

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

    Gradients may be full or pruned: ``ABSENT``, ``optax.MaskedNode``, None or nothing
    at all may stand for what is frozen (the last two only if ``update`` is given the
    parameters). Updates have the structure of the gradients:

    >>> pruned = {'head': jnp.array([2.0])}
    >>> tx.update(pruned, tx.init(params), params)[0]
    {'head': Array([-1.], dtype=float32)}

    Of an array of which a part is frozen (``sg.at``) the optimizer sees all, with a
    zero gradient in that part, and what it does there is taken back.

    Args:
        tx: an optax transformation, or ``optax.MultiSteps``, whose accumulators shrink
            too.
        where: what is **frozen**: any kind of filter. By default what the classes in
            the tree declare as not trained, see ``sg.trainable``. Integers, keys and
            ``NonDifferentiable`` are frozen in any case.
        keep_state: keeps the state of what is frozen, as it is, so that ``thaw`` can
            go on with it. The state has to be made of trees like the parameters, which
            that of ``optax.flatten`` is not.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A transformation, to be used as any other. Updates of what is frozen, where the
        gradients are full, are constants of negative zero: adding one changes no sign
        and no number (XLA may flush denormals); ``sg.apply_updates`` does not add it.

    Raises:
        ArgumentTypeError: if ``tx`` is no optax transformation.
        FilterTypeError: if ``where`` is no filter.
        UnusedFilterError: at ``init``, if a part of ``where`` matches no parameter.
        StructureError: at ``update``, if a gradient lacks something that is trained.
        StructureError: at ``update``, if trees do not belong together.
        ArgumentValueError: if it is given fp8 values that no optimizer may see.
    """
    chosen = None if where is None else filters.as_filter(where)
    return _made(Wrapped(_with_extra_args(tx), chosen, (), keep_state, unused))


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
        once for each change. What optimizers share among parameters goes on: Adam's
        count of steps does, so new moments are taken for old ones, and begin with
        larger updates. ``optax.tree_utils.tree_set(state, count=0)`` counts anew.

    Raises:
        ArgumentTypeError: if ``tx`` is not from ``freeze``.
        UnusedFilterError: if a part of ``where`` matches no parameter.
    """
    if not isinstance(tx, Freeze):
        raise errors.ArgumentTypeError(
            f'thaw() takes what sg.freeze returned, got {type(tx).__name__}.\n'
            'Put sg.freeze outermost: sg.freeze(optax.chain(...), where).'
        )
    added = (*tx.wrapped.thawed, (filters.as_filter(where), unused))
    thawed = _made(dataclasses.replace(tx.wrapped, thawed=added))
    return thawed, thawed.adopt(state, params)


def _made(wrapped: Wrapped) -> Freeze:
    update: Any = wrapped.update
    tx = Freeze(wrapped.init, update)
    tx.wrapped = wrapped
    return tx


def _with_extra_args(tx: Any) -> Any:
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not (hasattr(tx, 'init') and hasattr(tx, 'update')):
        raise errors.ArgumentTypeError(
            f'freeze() takes an optax transformation, got {type(tx).__name__}.\n'
            "Write sg.freeze(optax.adam(1e-3), 'backbone/**').",
        )
    return optax.with_extra_args_support(tx)


def _fitting(
    name: str, value: Any, leaves: Leaves, live: Sequence[Any], params: Any
) -> Any:
    """An extra argument of ``update``, made to fit the trained part.

    A tree like the parameters loses what is frozen. A function of the parameters, the
    ``value_fn`` of a line search, gets the frozen ones back.
    """
    if name == 'value_fn' and callable(value) and params is not None:

        def of_pruned(pruned: Any) -> Any:
            new = leaves.treedef.flatten_up_to(pruned)
            pairs = zip(new, leaves.values, live, strict=True)
            return value(leaves.restore(n if takes else old for n, old, takes in pairs))

        return of_pruned
    found, treedef = jax.tree.flatten(value, is_leaf=is_whole)
    if treedef != leaves.treedef:
        return value
    return _pruned(dataclasses.replace(leaves, values=found), live)


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
        return filters.merged(takes, leaf, jnp.full_like(leaf, rest), path)
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


def _first(states: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The leaves of a state, and those of another one where the first is vacant."""
    pairs = zip(states, others, strict=True)
    return [other if _is_vacant(leaf) else leaf for leaf, other in pairs]
