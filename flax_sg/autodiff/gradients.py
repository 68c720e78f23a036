"""``grad`` and its relatives: calls that turn a function into its derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from flax_sg import errors
from flax_sg.autodiff.arguments import Split, fill, splitter
from flax_sg.autodiff.bound_modules import as_function_of, variables_of
from flax_sg.filters import Where

Argnums = int | Sequence[int]
# What ``argnums`` may be for a module in the closure.
_OF_MODULE = {0: 'the variables of the module'}


# Given a function of the live leaves, these, and what makes a result of their values.
Take: TypeAlias = Callable[[Callable[..., Any], list[Any], Callable[..., Any]], Any]


def derivative(
    take: Take,
    fun: Callable[..., Any],
    argnums: Argnums,
    split: Callable[[Sequence[Any]], Split],
    of: Any = None,
) -> Callable[..., Any]:
    """A function that computes a derivative, with the name of the one it is of.

    Args:
        take: computes it, given a function of the live leaves alone.
        fun: the function.
        argnums: with respect to which arguments.
        split: takes these apart, see ``splitter``.
        of: a bound module in whose place its variables are the argument.
    """
    if of is not None:
        if argnums != 0:
            raise errors.unknown_choice('with of=, argnums', argnums, _OF_MODULE)
        variables_of(of)
        lifted = derivative(take, as_function_of(fun, of), 0, split)
        return lambda *args, **kwargs: lifted(variables_of(of), *args, **kwargs)
    numbers = _numbers(argnums)

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        positions = _positions(argnums, numbers, len(args))
        parts = split([args[n] for n in positions])

        def fun_of_live(live: Sequence[Any]) -> Any:
            new = dict(zip(positions, parts.join(live), strict=True))
            return fun(*(new.get(n, arg) for n, arg in enumerate(args)), **kwargs)

        def shaped(values: Sequence[Any], prefix: tuple[int, ...] = ()) -> Any:
            trees = fill(parts.forms, values, prefix)
            return trees[0] if isinstance(argnums, int) else trees

        return take(fun_of_live, parts.live, shaped)

    return call


def _numbers(argnums: Any) -> tuple[int, ...]:
    if isinstance(argnums, int):
        return (argnums,)
    is_sequence = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    if is_sequence and all(hasattr(number, '__index__') for number in argnums):
        return tuple(argnums)
    raise _no_positions(argnums)


def _positions(argnums: Argnums, numbers: tuple[int, ...], count: int) -> list[int]:
    for number in numbers:
        if not -count <= number < count:
            raise TypeError(
                f'differentiating with respect to {argnums=} requires at least '
                f'{number + 1 if number >= 0 else -number} positional arguments to be '
                f'passed by the caller, but got only {count} positional arguments'
            )
    return [number % count for number in numbers]


def _no_positions(argnums: object) -> errors.ArgumentTypeError:
    """Something else was given as ``argnums``: a filter, most likely."""
    name = getattr(argnums, '__name__', None) or repr(argnums)
    return errors.ArgumentTypeError(
        f'argnums={name} names no positions of arguments.\n'
        f'Name leaves with wrt=: sg.grad(fun, wrt={name}).'
    )


def _taking_value_and_grad(**options: Any) -> Take:
    def take(fun: Any, live: Any, shaped: Callable[..., Any]) -> Any:
        value, grads = jax.value_and_grad(fun, **options)(live)
        return value, shaped(grads)

    return take


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | None = None,
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
        argnums: which positional arguments; the filter looks at the paths within each.
        has_aux: as for ``jax.value_and_grad``.
        holomorphic: as for ``jax.value_and_grad``.
        wrt: which leaves of them are differentiated, as for ``sg.vjp``.
        absent: what stands for the others in the result, as for ``sg.vjp``.
        of: a bound module that ``fun`` reads from its closure. The result is then
            for its variables, and ``argnums`` is left out. The replaced values hold
            where a block ``with nn.stop_gradient`` would hold. What ``fun`` writes to a
            mutable collection of it is traced, as in any function that is
            differentiated: return it, or use ``model.apply``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A function with the arguments of ``fun``. Write ``jax.jit`` of it outside of a
        loop, as for ``jax.grad``: each call of ``sg.grad`` makes another function.

    Raises:
        ArgumentTypeError: if ``of`` is no bound module, ``argnums`` no positions.
        UnusedFilterError: if ``wrt`` is False; at the call, if a part of ``wrt``
            matches no leaf.
        NotDifferentiableError: at the call, if all it matches has no gradient.
    """
    take = _taking_value_and_grad(has_aux=has_aux, holomorphic=holomorphic)
    return derivative(take, fun, argnums, splitter(wrt, absent, unused), of)


def grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | None = None,
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
    both = _taking_value_and_grad(has_aux=has_aux, holomorphic=holomorphic)

    def take(fun: Any, live: Any, shaped: Callable[..., Any]) -> Any:
        value, grads = both(fun, live, shaped)
        return (grads, value[1]) if has_aux else grads

    return derivative(take, fun, argnums, splitter(wrt, absent, unused), of)
