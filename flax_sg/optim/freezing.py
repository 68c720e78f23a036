"""``freeze``: an optimizer that never sees what is frozen."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from flax_sg import errors, filters
from flax_sg.optim.wrapped import FreezeState, Wrapped


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
        raise _not_frozen(tx)
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
        raise _no_optimizer(tx)
    return optax.with_extra_args_support(tx)


def _not_frozen(tx: object) -> errors.ArgumentTypeError:
    """Something is thawed or frozen that is no optimizer for it."""
    return errors.ArgumentTypeError(
        f'thaw() takes what sg.freeze returned, got {type(tx).__name__}.\n'
        'Put sg.freeze outermost: sg.freeze(optax.chain(...), where).'
    )


def _no_optimizer(tx: object) -> errors.ArgumentTypeError:
    """The error for something that is no optax transformation."""
    return errors.ArgumentTypeError(
        f'freeze() takes an optax transformation, got {type(tx).__name__}.\n'
        "Write sg.freeze(optax.adam(1e-3), 'backbone/**').",
    )
