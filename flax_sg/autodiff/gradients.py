"""``grad``, ``value_and_grad`` and ``vjp`` of what a filter selects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Never, ParamSpec, TypeVar

import jax
from jax.tree_util import Partial

from flax_sg.autodiff import unfed, writes
from flax_sg.autodiff.arguments import Split, Where, check, no_others
from flax_sg.filters.predicates import describe
from flax_sg.internals.types import PyTree
from flax_sg.trees.leaves import arguments_of, leaves_of
from flax_sg.trees.trainable import DECLARED, Declared

P = ParamSpec('P')
R = TypeVar('R')


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where = DECLARED,
    absent: str = 'drop',
    unused: str = 'raise',
    **others: Never,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` with respect to the leaves that a filter selects.

    ``wrt`` names what is **differentiated**.

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
            With a tuple of them each path begins with the position: ``'1/kernel'``, as
            in ``sg.gradient_flow`` and ``sg.live``.
        has_aux: as for ``jax.value_and_grad``.
        holomorphic: as for ``jax.value_and_grad``.
        wrt: the leaves that are **differentiated**, as for ``sg.vjp``. A part of the
            filter that gets no gradient at all, because the model stops it, warns.
        absent: what stands for the others in the result, as for ``sg.vjp``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.
        **others: raise. The error for ``allow_int=`` says what to write instead, and
            that for ``of=``, which other libraries take for a model in the closure.

    Returns:
        A function with the arguments of ``fun``. Write ``jax.jit`` of it outside of a
        loop, as for ``jax.grad``: each call of ``sg.grad`` makes another function.

    Raises:
        ArgumentTypeError: for other keywords; at the call, if ``argnums`` names no
            positions, or one twice.
        UnusedFilterError: if ``wrt`` is False or empty; at the call, if a part of
            ``wrt`` matches no leaf.
        ArgumentTypeError: at the call, if no leaf that it matches can be
            differentiated.
    """
    no_others(others)
    write = "sg.grad(loss, wrt='head/**')(params); the same for sg.value_and_grad"
    where = check(write, fun, wrt, absent, unused)
    judged = None if isinstance(where, Declared) or unused == 'ignore' else where

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        trees = arguments_of(args, argnums)
        split = Split.of(trees.values(), where, unused)
        fed: set[int] = set()
        is_off = False

        watched = fun if has_aux else writes.watched(fun)

        @functools.wraps(fun, updated=())
        def fun_of_live(live: Sequence[Any]) -> PyTree:
            nonlocal is_off
            live = live if judged is None else unfed.watched(live, fed)
            new = dict(zip(trees, split.join(live), strict=True))
            out = watched(*(new.get(n, arg) for n, arg in enumerate(args)), **kwargs)
            is_off = unfed.is_switched_off(out)
            return out

        both = jax.value_and_grad(fun_of_live, has_aux=has_aux, holomorphic=holomorphic)
        live = [leaf for _, leaf in split.live]
        value, gradients = both(live)
        if judged is not None and not is_off:
            unfed.warn(describe(fun), judged, [path for path, _ in split.live], fed)
        grads = split.form(absent)(gradients)
        return value, grads if isinstance(argnums, Sequence) else grads[0]

    return call


def _called_as(fn: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a function the arguments of another one, for ``help`` and type checkers."""

    def decorate(other: Any) -> Any:
        other.__signature__ = inspect.signature(fn)
        return other

    return decorate


@_called_as(value_and_grad)
def grad(
    fun: Any, argnums: Any = 0, has_aux: bool = False, *args: Any, **options: Any
) -> Callable[..., Any]:
    """``jax.grad`` with respect to the leaves that a filter selects.

    ``wrt`` names what is **differentiated**.

    >>> import flax_sg as sg
    >>> kernel = {'left': {'variance': 2.0, 'scale': 3.0}, 'right': {'variance': 5.0}}
    >>> def loss(k):
    ...     return k['left']['variance'] * k['left']['scale'] * k['right']['variance']
    >>> sg.grad(loss, wrt='left/variance', absent='zeros')(kernel)['left']['variance']
    Array(15., dtype=float32, weak_type=True)

    Args and errors are those of ``sg.value_and_grad``.
    """
    both = value_and_grad(fun, argnums, has_aux, *args, **options)

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return call


def vjp(
    fun: Callable[..., Any],
    *primals: PyTree,
    wrt: Where = DECLARED,
    absent: str = 'drop',
    has_aux: bool = False,
    unused: str = 'raise',
) -> Any:
    """``jax.vjp`` with respect to the leaves that a filter selects, and no others.

    ``wrt`` names what is **differentiated**.

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

    JAX's own ``back`` has more in some releases: ``with_refs`` and ``with_logs``. For
    these, give JAX a function of the part:

    >>> import jax
    >>> part, rest = sg.partition({'a': 3.0, 'c': 4.0, 'steps': 7}, 'a')
    >>> y, back = jax.vjp(lambda part: f(sg.combine(part, rest)), part)
    >>> back(1.0)
    ({'a': Array(8., dtype=float32, weak_type=True), 'c': ABSENT, 'steps': ABSENT},)

    Args:
        fun: a function of pytrees.
        *primals: its arguments. Their leaves may be of any kind.
        wrt: the leaves that are **differentiated**: any kind of filter on the paths
            within each argument. To tell arguments apart, make them one:
            ``sg.vjp(lambda both: fun(*both), (a, b), wrt='1/**')``. By default every
            real or complex leaf, unless a class in the tree declares it as not trained
            (``sg.trainable``); ``True`` takes these too. In a dict of collections paths
            start below the collection, which is ``path.collection``; leaves of
            ``_overwrite_with_gradient`` always have a gradient.
        absent: what stands in the result for the other leaves: ``'drop'`` for
            ``ABSENT``, which has no leaves and raises when it is used; ``'none'`` for
            None; ``'zeros'`` for zeros.
        has_aux: whether ``fun`` returns a pair, the second not differentiated.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        ``(y, back)``, or ``(y, back, aux)`` if ``has_aux``. ``y`` is the output.
        ``back`` takes a cotangent, a tree of the structure, shapes and dtypes of ``y``,
        and returns a tuple with a tree for each argument, whose gradients have the
        shapes and dtypes of the leaves. It may be called any number of times, and a
        jitted function may return it.

    Raises:
        UnusedFilterError: if a part of ``wrt`` matches no leaf, or ``wrt`` is False.
        ArgumentTypeError: if ``fun`` is no function, or no leaf that ``wrt`` matches
            can be differentiated.
        FilterTypeError: if ``wrt`` is no filter, or one of what is frozen.
        ArgumentValueError: for another ``absent`` or ``unused``.

    Note:
        Zygote's and Flux's structural gradients, and ``equinox.filter_vjp``, are the
        same idea.
    """
    write = "sg.vjp(loss, params, wrt='head/**')"
    where = check(write, fun, wrt, absent, unused)
    split = Split.of(map(leaves_of, primals), where, unused)

    watched = fun if has_aux else writes.watched(fun)

    @functools.wraps(fun, updated=())
    def fun_of_live(live: Sequence[Any]) -> PyTree:
        return watched(*split.join(live))

    live = [leaf for _, leaf in split.live]
    y, back, *aux = jax.vjp(fun_of_live, live, has_aux=has_aux)
    # A pytree, as JAX's own linear functions are: its residuals may leave a ``jit``.
    return (y, Partial(functools.partial(_pulled, split.form(absent)), back), *aux)


def _pulled(
    form: Callable[..., Any], back: Callable[..., PyTree], *cotangents: PyTree
) -> Any:
    return form(back(*cotangents)[0])
