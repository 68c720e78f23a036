"""``freeze``: an optimizer that never sees what is frozen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by, wrong_argument
from flax_sg.optim.masks import parameters_of, trained_leaves
from flax_sg.trees.beside import beside, is_vacant, missing_leaf, other_shape
from flax_sg.trees.leaves import ABSENT, Leaves, check_unused, is_absent, is_whole
from flax_sg.trees.nondifferentiable import NonDifferentiable
from flax_sg.trees.rows import Choice, Rows, choice_of
from flax_sg.trees.trainable import DECLARED, Declared

# Arguments of ``update`` that are functions of the parameters.
_FUNCTIONS = ('value_fn', 'grad_fn', 'obj_fn')


@dataclasses.dataclass(frozen=True)
class Freeze:
    """A transformation that is given what is trained alone.

    Attributes:
        tx: the wrapped transformation.
        where: what is frozen.
        unused: what to do with a filter that matches nothing.
    """

    tx: Any
    where: filters.Filter | Declared
    unused: str

    def trained(self, leaves: Leaves, judge: bool = True) -> list[Any]:
        """For each parameter whether it is trained, or which rows or part of it.

        Args:
            leaves: the parameters, or gradients in their place.
            judge: whether a filter has to match something.
        """
        # optax asks for the state of parameters without leaves, to see what is where.
        unused = self.unused if judge and leaves.values else 'ignore'
        with raised_by('sg.freeze'):
            trained = trained_leaves(leaves, self.where, unused)
        return [
            choice_of(takes, leaf, path) or takes
            for takes, (path, leaf) in zip(trained, leaves, strict=True)
        ]

    def parameters(self, params: Any) -> tuple[Leaves, list[Any]]:
        """The parameters, and for each what ``trained`` says."""
        leaves = _leaves_of(params)
        trained = self.trained(leaves)
        for (path, leaf), takes in zip(leaves, trained, strict=True):
            if isinstance(takes, filters.Part):
                takes.mask(np.shape(leaf), path)  # Raises if there is no such part.
        return leaves, trained

    def init(self, params: Any) -> Any:
        """The state for what is trained, with ``ABSENT`` in place of the rest."""
        return self.tx.init(pruned(*self.parameters(params)))

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        """Updates of what is trained, in the structure of the gradients."""
        leaves = _leaves_of(_unmasked(updates) if params is None else params)
        trained = self.trained(leaves, judge=False)
        grads = beside(leaves, updates, 'the gradient', needed=trained)
        self._check_gradients(leaves, trained, grads.values)
        seen = _gradients(leaves, trained, grads.values)
        pruned_params = None if params is None else pruned(leaves, trained)
        for name, value in extra.items():
            extra[name] = _fitting(name, value, leaves, trained, params)
        try:
            new, new_state = self.tx.update(seen, state, pruned_params, **extra)
        except (ValueError, TypeError, KeyError) as error:
            expected = jax.eval_shape(self.tx.init, pruned(leaves, trained))
            if jax.tree.structure(expected) == jax.tree.structure(state):
                raise
            raise errors.StructureError(
                'the state does not belong to what sg.freeze trains of these '
                'parameters.\n'
                'Make it with tx.init(params), or keep what it knows: '
                'sg.adopt(tx, params, state).'
            ) from error
        made = leaves.treedef.flatten_up_to(new)
        like = grads.values if params is None else leaves.values
        out = [
            _only(takes, made[number], -0.0, leaves, number)
            if takes
            else _nothing(grads.values[number], like[number])
            for number, takes in enumerate(trained)
        ]
        return grads.restore(out), new_state

    def _check_gradients(
        self, leaves: Leaves, trained: Sequence[Any], grads: Sequence[Any]
    ) -> None:
        """Raises if a trained parameter has no gradient."""
        rows = list(zip(leaves.paths, trained, map(is_absent, grads), strict=True))
        lacking = [path for path, takes, absent in rows if takes and absent]
        if not lacking:
            return
        given = [(path, takes) for path, takes, absent in rows if not absent]
        if given and not any(takes for _, takes in given):
            tx = 'tx' if isinstance(self.where, Declared) else f'tx, {self.where!r}'
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
    where: filters.Where | Declared = DECLARED,
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

    It goes **outermost**. In a chain, what stands before it sees the frozen
    gradients already: here the clip divides by a norm in which 'body' counts.

    >>> wrong = optax.chain(clip, sg.freeze(sgd, 'body'))
    >>> updates, _ = wrong.update(grads, wrong.init(params), params)
    >>> round(float(updates['head'][0]), 3)
    -0.371

    ``optax.freeze(mask)`` only zeroes updates, so the optimizer before it keeps a state
    for all of them and counts them; ``optax.masked(tx, mask)`` passes the raw
    gradient on where the mask is False, which ``apply_updates`` then adds.

    Gradients may be full or pruned: ``ABSENT``, ``optax.MaskedNode``, None or nothing
    at all may stand for what is frozen (the last two only if ``update`` is given the
    parameters). Updates have the structure of the gradients:

    >>> pruned = {'head': jnp.array([2.0])}
    >>> tx.update(pruned, tx.init(params), params)[0]
    {'head': Array([-1.], dtype=float32)}

    If rows of an array are frozen (``sg.at`` with an index of the first axes: layers of
    a stack), the optimizer sees the other rows, as an array of their own. If another
    part of an array is frozen, it sees the whole array with a zero gradient in that
    part, and its updates there are dropped.

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
    transformation = _with_extra_args(tx)
    check_unused(unused)
    chosen = where if isinstance(where, Declared) else filters.as_filter(where)
    frozen = Freeze(transformation, chosen, unused)
    return optax.GradientTransformationExtraArgs(frozen.init, frozen.update)


def _with_extra_args(tx: Any) -> Any:
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not (hasattr(tx, 'init') and hasattr(tx, 'update')):
        write = "sg.freeze(optax.adam(1e-3), 'backbone/**')"
        raise wrong_argument(tx, 'optax transformation', write)
    return optax.with_extra_args_support(tx)


def _leaves_of(params: Any) -> Leaves:
    if isinstance(params, optax.LookaheadParams):
        raise errors.ArgumentTypeError(
            'sg.freeze got LookaheadParams: optax.lookahead has each parameter twice, '
            'and gradients of one.\n'
            'Freeze inside: optax.lookahead(sg.freeze(tx, where), ...), with '
            "absent='zeros' in the gradient call."
        )
    return parameters_of(params)


def _fitting(
    name: str, value: Any, leaves: Leaves, trained: Sequence[Any], params: Any
) -> Any:
    """An extra argument of ``update``, made to fit the trained part.

    Gradients, and other trees like the parameters, lose what is frozen. A function of
    the parameters gets the frozen ones back.
    """
    if name in _FUNCTIONS and callable(value):
        return value if params is None else _of_trained(name, value, leaves, trained)
    if name == 'grad' and value is not None:
        grads = beside(leaves, value, 'the gradient', needed=trained)
        return _gradients(leaves, trained, grads.values)
    found, treedef = jax.tree.flatten(value, is_leaf=is_whole)
    return pruned(leaves, trained, found) if treedef == leaves.treedef else value


def _of_trained(
    name: str, fn: Callable[..., Any], leaves: Leaves, trained: Sequence[Any]
) -> Callable[..., Any]:
    """A function of the parameters as one of the trained part."""

    @functools.wraps(fn)
    def of_trained(part: Any, *args: Any, **kwargs: Any) -> Any:
        rows = zip(leaves.treedef.flatten_up_to(part), leaves, trained, strict=True)
        out = fn(
            leaves.restore(
                _merged(takes, new, old, path) for new, (path, old), takes in rows
            ),
            *args,
            **kwargs,
        )
        if name != 'grad_fn':
            return out
        grads = beside(leaves, out, 'the result of grad_fn', needed=trained)
        return _gradients(leaves, trained, grads.values)

    return of_trained


def _unmasked(updates: Any) -> Any:
    """Gradients with one thing only in place of what is not there."""
    return jax.tree.map(
        lambda leaf: ABSENT if is_vacant(leaf) else leaf, updates, is_leaf=is_vacant
    )


def pruned(
    leaves: Leaves, trained: Sequence[Any], values: Sequence[Any] | None = None
) -> Any:
    """The tree with ``ABSENT`` in place of what is frozen, and rows cut out.

    Args:
        leaves: the parameters.
        trained: which of them are trained.
        values: other values; by default the parameters.
    """
    given = leaves.values if values is None else values
    return leaves.restore(
        takes.cut(leaf, np.ndim(leaves.values[number]))
        if isinstance(takes, Choice)
        else leaf
        if takes
        else ABSENT
        for number, (takes, leaf) in enumerate(zip(trained, given, strict=True))
    )


def _gradients(leaves: Leaves, trained: Sequence[Any], grads: Sequence[Any]) -> Any:
    """The gradients that the wrapped transformation sees."""
    return pruned(
        leaves,
        trained,
        [
            _only(takes, grad, 0.0, leaves, number)
            for number, (takes, grad) in enumerate(zip(trained, grads, strict=True))
        ],
    )


def _only(takes: Any, leaf: Any, rest: float, leaves: Leaves, number: int) -> Any:
    """A leaf, with a number in place of the elements that are frozen.

    Args:
        takes: what is trained.
        leaf: a gradient or an update; gradients for each example have axes in front.
        rest: the number.
        leaves: the parameters.
        number: which of them it belongs to.
    """
    if isinstance(leaf, Rows):
        return leaf.among(rest)
    if not isinstance(takes, (filters.Part, Choice)):
        return leaf
    path, own = leaves.paths[number], np.shape(leaves.values[number])
    shape = np.shape(leaf)
    if shape[len(shape) - len(own) :] != own:
        raise other_shape('the gradient', path, leaves.values[number], leaf)
    if isinstance(takes, Choice):
        return leaf
    mask = np.broadcast_to(takes.mask(own, path), shape)
    return jnp.where(mask, leaf, jnp.full_like(leaf, rest))


def _merged(takes: Any, new: Any, old: Any, path: str) -> Any:
    """A parameter with new values in what is trained."""
    if isinstance(new, Rows):
        return new.choice.put(new.rows, old)
    return filters.merged(takes, new, old, path) if takes else old


def _nothing(grad: Any, like: Any) -> Any:
    """The update of a frozen leaf: nothing, or a constant that adds nothing.

    Args:
        grad: the gradient.
        like: what has the shape of the parameter.
    """
    if is_absent(grad):
        return grad
    if isinstance(grad, NonDifferentiable):
        return jax.tree.map(lambda one: _nothing(one, one), grad)
    dtype = jnp.result_type(grad)
    if dtype == jax.dtypes.float0:
        return grad
    return _constant(np.shape(like), dtype)


@functools.lru_cache(1024)  # A model has few shapes and many leaves.
def _constant(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    zero = np.zeros((), dtype)
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return np.broadcast_to(-zero if inexact else zero, shape)
