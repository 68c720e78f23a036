"""``vjp``, ``jvp`` and ``linearize``: derivatives as linear maps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flax_sg.autodiff.arguments import Form, Split, splitter
from flax_sg.filters import Where


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """The linear function that ``vjp`` or ``linearize`` returns.

    A pytree as JAX's own are: its residuals may leave a ``jit``.

    Attributes:
        fn: JAX's function of the live leaves.
        form: what the arguments look like.
        transposed: whether it is the one that ``vjp`` returns.
    """

    fn: Any
    form: Form = dataclasses.field(metadata={'static': True})
    transposed: bool = dataclasses.field(metadata={'static': True})

    def __call__(self, *args: Any) -> Any:
        """Maps cotangents of the output to the arguments', or tangents forward."""
        if self.transposed:
            return self.form.fill(self.fn(*args)[0])
        return self.fn(self.form.pick(args, 'the tangents'))


def _of_live(fun: Callable[..., Any], split: Split) -> Callable[[Sequence[Any]], Any]:
    """``fun`` as a function of the leaves that are differentiated; keeps its name."""

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

    A leaf that is not selected is a constant: it costs no flops, no residuals and no
    cotangents. Values that are computed from it and a selected leaf stay in the chain:
    here ``b`` depends on ``a``.

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
        wrt: the leaves that are **differentiated**: any kind of filter on the paths
            within each argument. By default every real or complex leaf, unless a class
            in the tree declares it as not trained (``sg.trainable``); ``True`` takes
            these too. In a dict of collections paths start below the collection,
            which is ``path.collection``; leaves of ``_overwrite_with_gradient`` always
            have a gradient.
        absent: what stands in the result for the other leaves: ``'drop'`` for
            ``ABSENT``, which has no leaves and raises when it is used; ``'none'`` for
            None; ``'zeros'`` for zeros; ``'masked'`` for ``optax.MaskedNode()``.
        has_aux: whether ``fun`` returns a pair, the second not differentiated.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        The output; the function from its cotangent to a tuple with a tree for each
        argument; and the auxiliary output if ``has_aux``. The function may be called
        any number of times, and a jitted function may return it.

    Raises:
        UnusedFilterError: if a part of ``wrt`` matches no leaf, or ``wrt`` is False.
        NotDifferentiableError: if no leaf that it matches can be differentiated.

    Note:
        Zygote's and Flux's structural gradients, and ``equinox.filter_vjp``, are the
        same idea.
    """
    split = splitter('sg.vjp', wrt, absent, unused)(primals)
    y, back, *aux = jax.vjp(_of_live(fun, split), split.live, has_aux=has_aux)
    return (y, Linear(back, split.form, transposed=True), *aux)


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
        tangents: a tree for each of them. Anything may stand at leaves that are not
            selected.
        wrt: which leaves are differentiated, as for ``sg.vjp``.
        has_aux: as for ``jax.jvp``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        What ``jax.jvp`` returns.

    Raises:
        StructureError: if a tangent has another structure than its argument, or
            nothing at a leaf that is selected.
    """
    split = splitter('sg.jvp', wrt, 'drop', unused)(primals)
    given = split.form.pick(tangents, 'the tangents')
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
    split = splitter('sg.linearize', wrt, 'drop', unused)(primals)
    y, push, *aux = jax.linearize(_of_live(fun, split), split.live, has_aux=has_aux)
    return (y, Linear(push, split.form, transposed=False), *aux)
