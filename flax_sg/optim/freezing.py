"""``freeze``: an optimizer that never sees what is frozen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

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
    is_whole,
    missing_leaf,
)
from flax_sg.trees.nondifferentiable import NonDifferentiable


@dataclasses.dataclass(frozen=True)
class Freeze:
    """A transformation that is given what is trained alone.

    Attributes:
        tx: the wrapped transformation.
        where: what is frozen; None for what is declared.
        unused: what to do with a filter that matches nothing.
    """

    tx: Any
    where: filters.Filter | None
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
            return live_leaves(leaves, self.where, self.unused if judged else 'ignore')

    def init(self, params: Any) -> Any:
        """The state for what is trained, with ``ABSENT`` in place of the rest."""
        leaves = parameters_of(params)
        return self.tx.init(_pruned(leaves, self.live(leaves)))

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
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
            new, new_state = self.tx.update(shown, state, pruned_params, **extra)
        except (ValueError, TypeError, KeyError) as error:
            expected = jax.eval_shape(self.tx.init, _pruned(leaves, live))
            if jax.tree.structure(expected) == jax.tree.structure(state):
                raise
            raise errors.StructureError(
                'the state does not belong to what sg.freeze trains of these '
                'parameters.\n'
                'Make it with tx.init(params), or keep what it knows: '
                'sg.adopt(tx, params, state).'
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
        return out, new_state

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


def freeze(
    tx: Any,
    where: filters.Where | None = None,
    *,
    unused: str = 'raise',
) -> optax.GradientTransformationExtraArgs:
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
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A transformation, to be used as any other. Its state is that of ``tx`` for what
        is trained, with ``ABSENT`` in place of the rest; ``sg.adopt`` takes it to
        another selection. Updates of what is frozen, where the
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
    frozen = Freeze(_with_extra_args(tx), chosen, unused)
    return optax.GradientTransformationExtraArgs(frozen.init, frozen.update)


def adopt(tx: Any, params: Any, state: Any, *earlier: Any) -> Any:
    """A state of ``tx`` that keeps what states of other selections know.

    Freeze and thaw with it: make ``tx`` of the new selection, and take the old state
    along. What was trained before keeps its moments.

    >>> import jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'body': jnp.ones(2), 'head': jnp.ones(1)}
    >>> sgd = optax.sgd(0.1, momentum=0.9)
    >>> tx = sg.freeze(sgd, 'body')
    >>> updates, state = tx.update({'head': jnp.ones(1)}, tx.init(params), params)
    >>> sg.adopt(sgd, params, state)[0].trace
    {'body': Array([0., 0.], dtype=float32), 'head': Array([1.], dtype=float32)}

    Args:
        tx: a transformation from ``sg.freeze``, or the one that it wraps.
        params: the parameters.
        state: a state of the same transformation, frozen in other places or nowhere.
        *earlier: more of them, for what ``state`` does not know.

    Returns:
        A state of ``tx``. Each value comes from the first state that has it, and from
        ``tx.init`` if none has. What is frozen now is dropped: if it is to go on later
        from where it was, keep the state of today, and give it as ``earlier`` then.

        A jitted step compiles once for each selection. What optimizers share among
        parameters goes on: Adam's count of steps does, so new moments are taken for old
        ones, and begin with larger updates. ``optax.tree_utils.tree_set(state,
        count=0)`` counts anew.

    Raises:
        StructureError: if a state is that of another transformation.
    """
    new, treedef = jax.tree.flatten(tx.init(params), is_leaf=_is_vacant)
    try:
        known = zip(*map(treedef.flatten_up_to, (state, *earlier)), strict=True)
    except (ValueError, TypeError):
        raise errors.StructureError(
            'sg.adopt got a state of another transformation, or of other parameters.\n'
            'Give the state of what sg.freeze wraps: sg.adopt(tx, params, state).'
        ) from None
    merged = [
        mark
        if _is_vacant(mark)
        else next(itertools.filterfalse(_is_vacant, olds), mark)
        for mark, olds in zip(new, known, strict=True)
    ]
    return treedef.unflatten(merged)


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
