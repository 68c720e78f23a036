"""``grad`` and its relatives: calls that turn a function into its derivative."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flax_sg import errors
from flax_sg.autodiff.forms import Request, Split
from flax_sg.autodiff.scripts import as_function_of, variables_of
from flax_sg.filters import Where

Argnums = int | Sequence[int]
# What ``argnums`` may be for a module in the closure.
_OF_MODULE = {0: 'the variables of the module'}


@dataclasses.dataclass(frozen=True)
class Derivative:
    """A function, and what of it is differentiated with respect to what."""

    kind: Callable[..., Any]
    fun: Callable[..., Any]
    argnums: int | tuple[int, ...]
    request: Request
    has_aux: bool
    holomorphic: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The derivative at these arguments."""
        numbers = _positions(self.argnums, len(args))
        split = self.request.split([args[number] for number in numbers])

        def fun_of_live(live: Sequence[Any]) -> Any:
            all_args = list(args)
            for number, arg in zip(numbers, split.join(live), strict=True):
                all_args[number] = arg
            return self.fun(*all_args, **kwargs)

        return self.kind(self, fun_of_live, split)

    def options(self) -> dict[str, Any]:
        """What JAX is asked beside the function."""
        return {'has_aux': self.has_aux, 'holomorphic': self.holomorphic}

    def shaped(self, trees: Sequence[Any]) -> Any:
        """One tree for ``argnums=0``, a tuple of them for several."""
        return trees[0] if isinstance(self.argnums, int) else tuple(trees)


def _positions(argnums: int | tuple[int, ...], count: int) -> list[int]:
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    for number in numbers:
        if not -count <= number < count:
            raise TypeError(
                f'differentiating with respect to {argnums=} requires at least '
                f'{number + 1 if number >= 0 else -number} positional arguments to be '
                f'passed by the caller, but got only {count} positional arguments'
            )
    return [number % count for number in numbers]


def derivative(
    kind: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: Argnums,
    request: Request,
    has_aux: bool,
    holomorphic: bool,
    of: Any = None,
) -> Callable[..., Any]:
    """A function that computes a derivative."""
    numbers: Any = argnums if isinstance(argnums, int) else tuple(argnums)
    if of is not None:
        if numbers != 0:
            raise errors.unknown_choice('with of=, argnums', argnums, _OF_MODULE)
        variables_of(of)
        lifted = Derivative(
            kind, as_function_of(fun, of), 0, request, has_aux, holomorphic
        )
        return lambda *args, **kwargs: lifted(variables_of(of), *args, **kwargs)
    return _named(Derivative(kind, fun, numbers, request, has_aux, holomorphic))


def _named(derivative: Derivative) -> Callable[..., Any]:
    """A plain function with the name of the one that is differentiated."""

    @functools.wraps(derivative.fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return derivative(*args, **kwargs)

    return call


def _value_and_grad(self: Derivative, fun: Any, split: Split) -> Any:
    value, live = jax.value_and_grad(fun, **self.options())(split.live)
    return value, self.shaped(split.form.fill(live))


def _grad(self: Derivative, fun: Any, split: Split) -> Any:
    value, grads = _value_and_grad(self, fun, split)
    return (grads, value[1]) if self.has_aux else grads


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
        ArgumentTypeError: if ``of`` is no bound module.
        UnusedFilterError: at the call, if a part of ``wrt`` matches no leaf.
        NotDifferentiableError: at the call, if all it matches has no gradient.
    """
    request = Request.of(wrt, absent, unused)
    return derivative(_value_and_grad, fun, argnums, request, has_aux, holomorphic, of)


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
    request = Request.of(wrt, absent, unused)
    return derivative(_grad, fun, argnums, request, has_aux, holomorphic, of)
