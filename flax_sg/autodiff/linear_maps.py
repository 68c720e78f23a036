"""``vjp``, ``jvp`` and ``linearize``: derivatives as linear maps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flax_sg.autodiff.arguments import Form, Split, fill, pick, splitter
from flax_sg.filters import Where


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """The linear function that ``vjp`` or ``linearize`` returns.

    A pytree as JAX's own are: its residuals may leave a ``jit``.

    Attributes:
        fn: JAX's function of the live leaves.
        forms: what the arguments look like.
        transposed: whether it is the one that ``vjp`` returns.
    """

    fn: Any
    forms: tuple[Form, ...] = dataclasses.field(metadata={'static': True})
    transposed: bool = dataclasses.field(metadata={'static': True})

    def __call__(self, *args: Any) -> Any:
        """Cotangents of the output to those of the arguments, or tangents forward."""
        if self.transposed:
            return fill(self.forms, self.fn(*args)[0])
        return self.fn(pick(self.forms, args, 'the tangents'))


def _of_live(fun: Callable[..., Any], split: Split) -> Callable[[Sequence[Any]], Any]:
    """The function of the leaves that are differentiated, named as ``fun`` is."""

    @functools.wraps(fun, updated=())
    def fun_of_live(live: Sequence[Any]) -> Any:
        return fun(*split.join(live))

    return fun_of_live


def vjp(
    fun: Callable[..., Any],
    *primals: Any,
    wrt: Where | None = None,
    absent: str = 'drop',
    has_aux: bool = False,
    unused: str = 'raise',
) -> Any:
    """``jax.vjp`` with respect to the leaves that a filter selects, and no others.

    What is not selected is a constant: no flops, no residuals, no cotangents. Only the
    leaf is cut, never the way through it: a value computed from an unselected leaf and
    a selected one keeps its part in the chain.

    >>> import flax_sg as sg
    >>> def f(p):
    ...     b = 2.0 * p['a']
    ...     return b * p['c'] + p['steps']
    >>> y, back = sg.vjp(f, {'a': 3.0, 'c': 4.0, 'steps': 7}, wrt='a')
    >>> back(1.0)
    ({'a': Array(8., dtype=float32, weak_type=True), 'c': ABSENT, 'steps': ABSENT},)

    Args:
        fun: a function of pytrees.
        *primals: its arguments. Their leaves may be of any kind.
        wrt: which leaves are differentiated: any kind of filter, on the paths within
            each argument; in a dict of collections they start below the collection,
            which is ``path.collection``, and leaves of ``_overwrite_with_gradient``
            have a gradient in any case. By default every leaf that
            can be differentiated and that no class in the tree declares as not trained,
            see ``sg.trainable``; ``True`` is every one that can be.
        absent: what stands in the result for the others: ``'drop'`` is ``ABSENT``,
            which has no leaves and raises when it is used; ``'none'`` is None;
            ``'zeros'`` are zeros; ``'masked'`` is ``optax.MaskedNode()``.
        has_aux: whether ``fun`` returns a pair, the second not differentiated.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        The output and the function from its cotangent to a tuple with a tree for each
        argument, and what was returned beside the output if ``has_aux``. The function
        may be called any number of times, and may leave a ``jit``.

    Raises:
        UnusedFilterError: if a part of ``wrt`` matches no leaf, or it is False.
        NotDifferentiableError: if all that it matches cannot be differentiated.

    Note:
        The gradient call of google/flax#1857's neighbours: Zygote's and Flux's
        structural gradients, ``equinox.filter_vjp``.
    """
    split = splitter(wrt, absent, unused)(primals)
    y, back, *aux = jax.vjp(_of_live(fun, split), split.live, has_aux=has_aux)
    return (y, Linear(back, split.forms, transposed=True), *aux)


def jvp(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Where | None = None,
    has_aux: bool = False,
    unused: str = 'raise',
) -> Any:
    """``jax.jvp`` with respect to the leaves that a filter selects, and no others.

    >>> import flax_sg as sg
    >>> p = {'a': 3.0, 'steps': 7}
    >>> def f(p):
    ...     return p['a'] ** 2 * p['steps']
    >>> y, dy = sg.jvp(f, (p,), ({'a': 1.0, 'steps': None},))
    >>> float(y), float(dy)
    (63.0, 42.0)

    Args:
        fun: a function of pytrees.
        primals: its arguments.
        tangents: a tree for each of them. What stands at leaves that are not selected
            is not looked at.
        wrt: which leaves are differentiated, as for ``sg.vjp``.
        has_aux: as for ``jax.jvp``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        What ``jax.jvp`` returns.

    Raises:
        StructureError: if a tangent has another structure than its argument.
        StructureError: if there is no tangent for a leaf that is selected.
    """
    split = splitter(wrt, 'drop', unused)(primals)
    given = pick(split.forms, tangents, 'the tangents')
    return jax.jvp(_of_live(fun, split), (split.live,), (given,), has_aux=has_aux)


def linearize(
    fun: Callable[..., Any],
    *primals: Any,
    wrt: Where | None = None,
    has_aux: bool = False,
    unused: str = 'raise',
) -> Any:
    """``jax.linearize`` with respect to the leaves that a filter selects.

    >>> import flax_sg as sg
    >>> p = {'a': 3.0, 'b': 4.0}
    >>> y, f_jvp = sg.linearize(lambda p: p['a'] * p['b'], p, wrt='a')
    >>> float(f_jvp({'a': 1.0, 'b': sg.ABSENT}))
    4.0

    Args:
        fun: a function of pytrees.
        *primals: its arguments.
        wrt: which leaves are differentiated, as for ``sg.vjp``.
        has_aux: as for ``jax.linearize``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        The output and the function from tangents, a tree for each argument, to that
        of the output; it may be called any number of times.
    """
    split = splitter(wrt, 'drop', unused)(primals)
    y, push, *aux = jax.linearize(_of_live(fun, split), split.live, has_aux=has_aux)
    return (y, Linear(push, split.forms, transposed=False), *aux)
