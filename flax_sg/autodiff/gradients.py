"""``grad``, ``vjp`` and their relatives: derivatives of what a filter selects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from flax_sg import errors
from flax_sg.autodiff.arguments import Form, Split, splitter
from flax_sg.filters import Where

Argnums: TypeAlias = int | Sequence[int]


def value_and_gradient(
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    holomorphic: bool,
    split: Callable[[Sequence[Any]], Split],
) -> Callable[..., Any]:
    """A function that computes a value and its gradient, with the name of ``fun``.

    >>> split = splitter('sg.grad', 'w', 'none', 'raise')
    >>> product = lambda p: p['w'] * p['b']
    >>> gradient = value_and_gradient(product, 0, False, False, split)
    >>> jax.tree.map(float, gradient({'b': 2.0, 'w': 3.0}))
    (6.0, {'b': None, 'w': 2.0})

    Args:
        fun: the function.
        argnums: the positions of the arguments that are differentiated.
        has_aux: whether ``fun`` returns a pair, the second not differentiated.
        holomorphic: as for ``jax.grad``.
        split: splits these arguments, see ``splitter``.
    """
    several = isinstance(argnums, Sequence)
    numbers: Any = tuple(argnums) if several else (argnums,)
    if isinstance(argnums, str) or not all(map(_is_position, numbers)):
        name = getattr(argnums, '__name__', None) or repr(argnums)
        raise errors.ArgumentTypeError(
            f'argnums={name} names no positions of arguments.\n'
            f'Name leaves with wrt=: sg.grad(fun, wrt={name}).'
        )

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        for number in numbers:
            if not -len(args) <= number < len(args):
                # In the words of JAX.
                least = number + 1 if number >= 0 else -number
                raise TypeError(
                    f'differentiating with respect to {argnums=} requires at least '
                    f'{least} positional arguments to be passed by the caller, but '
                    f'got only {len(args)} positional arguments'
                )
        positions = [number % len(args) for number in numbers]
        parts = split([args[n] for n in positions])

        def fun_of_live(live: Sequence[Any]) -> Any:
            new = dict(zip(positions, parts.join(live), strict=True))
            all_args = (new.get(n, arg) for n, arg in enumerate(args))
            return fun(*all_args, **kwargs)

        value, live_grads = jax.value_and_grad(
            fun_of_live, has_aux=has_aux, holomorphic=holomorphic
        )(parts.live)
        grads = parts.form.fill(live_grads)
        return value, grads if several else grads[0]

    return call


def _is_position(number: object) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | None = None,
    absent: str = 'drop',
    unused: str = 'raise',
) -> Callable[..., Any]:
    """``jax.value_and_grad`` with respect to the leaves that a filter selects.

    The compiled program is that of ``jax.value_and_grad`` on a tree that was split by
    hand: what is not selected has no backward pass and no buffers.

    >>> import jax, flax_sg as sg
    >>> params = {'backbone': {'w': 2.0}, 'head': {'w': 3.0}, 'step': 7}
    >>> def loss(params, x):
    ...     return params['head']['w'] * params['backbone']['w'] * x
    >>> value, grads = sg.value_and_grad(loss, wrt='head/**')(params, 5.0)
    >>> float(value), jax.tree.map(float, grads)
    (30.0, {'backbone': {'w': ABSENT}, 'head': {'w': 10.0}, 'step': ABSENT})
    >>> sg.grad(loss, wrt='head/**', absent='none')(params, 5.0)['backbone']
    {'w': None}

    Args:
        fun: a function of pytrees that returns a scalar.
        argnums: the positions of the differentiated arguments, the first by default.
            The filter looks at the paths within each.
        has_aux: as for ``jax.value_and_grad``.
        holomorphic: as for ``jax.value_and_grad``.
        wrt: the leaves that are **differentiated**, as for ``sg.vjp``.
        absent: what stands for the others in the result, as for ``sg.vjp``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A function with the arguments of ``fun``. Write ``jax.jit`` of it outside of a
        loop, as for ``jax.grad``: each call of ``sg.grad`` makes another function.

    Raises:
        ArgumentTypeError: if ``argnums`` are no positions.
        UnusedFilterError: if ``wrt`` is False; at the call, if a part of ``wrt``
            matches no leaf.
        NotDifferentiableError: at the call, if no leaf that it matches can be
            differentiated.
    """
    split = splitter('sg.value_and_grad', wrt, absent, unused)
    return value_and_gradient(fun, argnums, has_aux, holomorphic, split)


def grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | None = None,
    absent: str = 'drop',
    unused: str = 'raise',
) -> Callable[..., Any]:
    """``jax.grad`` with respect to the leaves that a filter selects.

    >>> import flax_sg as sg
    >>> kernel = {'left': {'variance': 2.0, 'scale': 3.0}, 'right': {'variance': 5.0}}
    >>> def loss(k):
    ...     return k['left']['variance'] * k['left']['scale'] * k['right']['variance']
    >>> sg.grad(loss, wrt='left/variance', absent='zeros')(kernel)['left']['variance']
    Array(15., dtype=float32, weak_type=True)

    Args and errors are those of ``sg.value_and_grad``.
    """
    split = splitter('sg.grad', wrt, absent, unused)
    both = value_and_gradient(fun, argnums, has_aux, holomorphic, split)

    @functools.wraps(fun, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pullback:
    """The linear function that ``vjp`` returns.

    A pytree as JAX's own is: its residuals may leave a ``jit``.

    Attributes:
        fn: JAX's function from a cotangent to those of the live leaves.
        form: what the arguments look like.
    """

    fn: Any
    form: Form = dataclasses.field(metadata={'static': True})

    def __call__(self, cotangent: Any) -> Any:
        """Maps a cotangent of the output to those of the arguments."""
        return self.form.fill(self.fn(cotangent)[0])


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
    return (y, Pullback(back, split.form), *aux)


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
