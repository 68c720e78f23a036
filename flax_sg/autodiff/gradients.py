"""``grad``, ``vjp`` and their relatives: derivatives of what a filter selects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from flax_sg import errors
from flax_sg.autodiff import unfed
from flax_sg.autodiff.arguments import Form, Split, splitter
from flax_sg.autodiff.bound_modules import as_function_of, variables_of
from flax_sg.engine import blocks
from flax_sg.errors.texts import brief, unknown_choice, wrong_argument
from flax_sg.filters import Where
from flax_sg.filters.predicates import describe
from flax_sg.trees.leaves import Leaves, arguments_of, leaves_of
from flax_sg.trees.trainable import DECLARED, Declared

Argnums: TypeAlias = int | Sequence[int]


def derivative(
    transform: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    holomorphic: bool,
    split: Callable[[Iterable[Leaves]], Split],
    *,
    of: Any = None,
    with_value: bool = False,
) -> Callable[..., Any]:
    """A function that computes a derivative, with the name of the one it is of.

    >>> product = lambda p: p['w'] * p['b']
    >>> split = splitter('sg.grad', product, 'w', 'none', 'raise')
    >>> gradient = derivative(jax.grad, product, 0, False, False, split)
    >>> jax.tree.map(float, gradient({'b': 2.0, 'w': 3.0}))
    {'b': None, 'w': 2.0}

    Args:
        transform: ``jax.grad``, ``jax.jacrev`` or ``jax.jacfwd``.
        fun: the function.
        argnums: the positions of the arguments that are differentiated.
        has_aux: whether ``fun`` returns a pair, the second not differentiated.
        holomorphic: as for ``jax.grad``.
        split: splits these arguments, see ``splitter``.
        of: a bound module whose variables are the argument in their place.
        with_value: whether to return what ``fun`` returns, and the derivative.
    """
    if of is not None:
        if argnums != 0:
            raise unknown_choice('with of=, argnums', argnums, (0,))
        variables_of(of)
    fun_of_args = fun if of is None else as_function_of(fun, of)
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
        if of is not None:
            args = (variables_of(of), *args)
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
        if len(set(positions)) < len(positions):
            raise errors.ArgumentValueError(
                f'argnums={argnums} names an argument twice, and each has one gradient.'
                '\nName each position once.'
            )
        parts = split(arguments_of(args, argnums).values())

        fed: set[int] = set()

        def fun_of_live(live: Sequence[Any]) -> Any:
            if transform is jax.grad and parts.where is not None:
                live = unfed.watched(live, fed)
            new = dict(zip(positions, parts.join(live), strict=True))
            all_args = (new.get(n, arg) for n, arg in enumerate(args))
            out = fun_of_args(*all_args, **kwargs)
            y, aux = _pair(out, fun) if has_aux else (out, None)
            return y, (y, aux)

        def shaped(y: Any, row: Any) -> Any:
            trees = parts.form.fill(row, jnp.shape(y))
            return trees if several else trees[0]

        differentiated = transform(fun_of_live, has_aux=True, holomorphic=holomorphic)
        with blocks.thread.closing() as closed:
            rows, (y, aux) = differentiated(parts.live)
        if transform is jax.grad:
            unfed.warn(describe(fun), parts, fed, closed)
        # At each leaf of the output, which for a gradient is one, stands a tree.
        out = jax.tree.map(shaped, y, rows)
        if with_value:
            return ((y, aux) if has_aux else y), out
        return (out, aux) if has_aux else out

    return call


def _pair(out: Any, fun: Any) -> Any:
    """What a function with ``has_aux=True`` returned, if that is a pair."""
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out
    several = isinstance(out, (tuple, list))
    found = f'{brief(out)} of {len(out)} values' if several else brief(out)
    raise errors.ArgumentTypeError(
        f'With has_aux=True, {describe(fun)} has to return a pair (value, aux), and '
        f'returned {found}.\n'
        'Return (value, aux), with everything else in aux, or leave has_aux out.'
    )


def _is_position(number: object) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | Declared = DECLARED,
    absent: str = 'drop',
    of: Any = None,
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

    A bound module in the closure, without threading its variables through:

    >>> import jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> model = nn.Dense(1)
    >>> m = model.bind(model.init(jax.random.key(0), jnp.ones((1, 2))))
    >>> sg.grad(lambda: jnp.sum(m(jnp.ones((4, 2)))), of=m, wrt='bias')()
    {'params': {'bias': Array([4.], dtype=float32), 'kernel': ABSENT}}

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
        of: a bound module that ``fun`` reads from its closure. The result is then
            for its variables, and ``argnums`` is left out. The replaced values hold
            where a block ``with nn.stop_gradient`` would hold. What ``fun`` writes to a
            mutable collection of the module is traced, as in any function that is
            differentiated: return it, or use ``model.apply``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A function with the arguments of ``fun``. Write ``jax.jit`` of it outside of a
        loop, as for ``jax.grad``: each call of ``sg.grad`` makes another function.

    Raises:
        ArgumentTypeError: if ``of`` is no bound module, ``argnums`` no positions; at
            the call, if ``fun`` returns no pair with ``has_aux=True``.
        ArgumentValueError: at the call, if ``argnums`` names an argument twice.
        UnusedFilterError: if ``wrt`` is False or empty; at the call, if a part of
            ``wrt`` matches no leaf.
        NotDifferentiableError: at the call, if no leaf that it matches can be
            differentiated.
    """
    split = splitter('sg.value_and_grad', fun, wrt, absent, unused)
    return derivative(
        jax.grad, fun, argnums, has_aux, holomorphic, split, of=of, with_value=True
    )


def grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | Declared = DECLARED,
    absent: str = 'drop',
    of: Any = None,
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
    split = splitter('sg.grad', fun, wrt, absent, unused)
    return derivative(jax.grad, fun, argnums, has_aux, holomorphic, split, of=of)


def jacrev(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | Declared = DECLARED,
    absent: str = 'drop',
    unused: str = 'raise',
) -> Callable[..., Any]:
    """``jax.jacrev`` with respect to the leaves that a filter selects.

    >>> import jax.numpy as jnp, flax_sg as sg
    >>> p = {'a': jnp.array([1.0, 2.0]), 'b': 3.0}
    >>> sg.jacrev(lambda p: p['a'] * p['b'], wrt='b')(p)
    {'a': ABSENT, 'b': Array([1., 2.], dtype=float32, weak_type=True)}

    Args and errors are those of ``sg.value_and_grad``; ``fun`` returns a pytree. At
    each leaf of the output stands a tree of the form of the argument.
    """
    split = splitter('sg.jacrev', fun, wrt, absent, unused)
    return derivative(jax.jacrev, fun, argnums, has_aux, holomorphic, split)


def jacfwd(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | Declared = DECLARED,
    absent: str = 'drop',
    unused: str = 'raise',
) -> Callable[..., Any]:
    """``jax.jacfwd`` with respect to the leaves that a filter selects.

    >>> import jax.numpy as jnp, flax_sg as sg
    >>> p = {'a': jnp.array([1.0, 2.0]), 'b': 3.0}
    >>> sg.jacfwd(lambda p: p['a'] * p['b'], wrt='b', absent='none')(p)
    {'a': None, 'b': Array([1., 2.], dtype=float32)}

    Args, result and errors are those of ``sg.jacrev``.
    """
    split = splitter('sg.jacfwd', fun, wrt, absent, unused)
    return derivative(jax.jacfwd, fun, argnums, has_aux, holomorphic, split)


def hessian(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | Declared = DECLARED,
    absent: str = 'drop',
    unused: str = 'raise',
) -> Callable[..., Any]:
    """``jax.hessian`` with respect to the leaves that a filter selects.

    >>> import flax_sg as sg
    >>> p = {'a': 2.0, 'b': 3.0}
    >>> h = sg.hessian(lambda p: p['a'] ** 3 * p['b'], wrt='a')(p)
    >>> float(h['a']['a']), h['b']
    (36.0, ABSENT)

    Args and errors are those of ``sg.jacrev``. It is ``jacfwd`` of ``jacrev``: at each
    leaf of the output stands a tree, at each leaf of that another one.
    """
    split = splitter('sg.hessian', fun, wrt, absent, unused)
    inner = derivative(jax.jacrev, fun, argnums, has_aux, holomorphic, split)
    return derivative(jax.jacfwd, inner, argnums, has_aux, holomorphic, split)


# As ``jax.tree_util.Partial``, with the first two arguments given, these are pytrees as
# JAX's own linear functions are: their residuals may leave a ``jit``.


def _pull_back(form: Form, back: Any, *cotangents: Any) -> Any:
    """Maps cotangents of the output to the arguments'."""
    return form.fill(back(*cotangents)[0])


def _push_forward(form: Form, push: Any, *tangents: Any) -> Any:
    """Maps tangents of the arguments to the output's."""
    return push(form.pick(tangents, 'the tangents'))


def _of_live(
    fun: Callable[..., Any], split: Split, has_aux: bool
) -> Callable[[Sequence[Any]], Any]:
    """``fun`` as a function of the leaves that are differentiated; keeps its name."""

    @functools.wraps(fun, updated=())
    def fun_of_live(live: Sequence[Any]) -> Any:
        out = fun(*split.join(live))
        return tuple(_pair(out, fun)) if has_aux else out

    return fun_of_live


def vjp(
    fun: Callable[..., Any],
    *primals: Any,
    wrt: Where | Declared = DECLARED,
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
            within each argument. To tell arguments apart, make them one:
            ``sg.vjp(lambda both: fun(*both), (a, b), wrt='1/**')``. By default every
            real or complex leaf, unless a class in the tree declares it as not trained
            (``sg.trainable``); ``True`` takes these too. In a dict of collections paths
            start below the collection, which is ``path.collection``; leaves of
            ``_overwrite_with_gradient`` always have a gradient.
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
    split = splitter('sg.vjp', fun, wrt, absent, unused)(map(leaves_of, primals))
    y, back, *aux = jax.vjp(_of_live(fun, split, has_aux), split.live, has_aux=has_aux)
    return (y, Partial(_pull_back, split.form, back), *aux)


def jvp(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Where | Declared = DECLARED,
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
    for given in (primals, tangents):
        if not isinstance(given, (tuple, list)):
            what, write = 'tuple of arguments or tangents', 'sg.jvp(fun, (x,), (dx,))'
            raise wrong_argument(given, what, write)
    split = splitter('sg.jvp', fun, wrt, 'drop', unused)(map(leaves_of, primals))
    given = split.form.pick(tangents, 'the tangents')
    return jax.jvp(
        _of_live(fun, split, has_aux), (split.live,), (given,), has_aux=has_aux
    )


def linearize(
    fun: Callable[..., Any],
    *primals: Any,
    wrt: Where | Declared = DECLARED,
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
    split = splitter('sg.linearize', fun, wrt, 'drop', unused)(map(leaves_of, primals))
    y, push, *aux = jax.linearize(
        _of_live(fun, split, has_aux), split.live, has_aux=has_aux
    )
    return (y, Partial(_push_forward, split.form, push), *aux)
