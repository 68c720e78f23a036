"""Rewrites on the scopes of ``flax.core``, for models that are written without linen.

``lift`` takes any rewrite to a function of a scope; ``stop_gradient`` is a short form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flax.core.scope import CollectionFilter, Scope

from flax_sg import filters
from flax_sg.engine import opening
from flax_sg.rules import rules, value_rewrites

__all__ = ['lift', 'stop_gradient']


def __dir__() -> list[str]:
    return __all__


def lift(fn: Callable[..., Any], rewrite: rules.Rewrite) -> Callable[..., Any]:
    """Lifts a function of a scope so that it reads rewritten variables.

    >>> import jax.numpy as jnp
    >>> from flax.core import apply
    >>> from flax_sg import core
    >>> from flax_sg import linen as nn
    >>> def shift(scope, x):
    ...     return x + scope.get_variable('params', 'bias')
    >>> shifted = core.lift(shift, nn.substitute({'bias': jnp.ones(())}))
    >>> float(apply(shifted)({'params': {'bias': jnp.zeros(())}}, 1.0))
    2.0

    Args:
        fn: a function ``(scope, *args, **kwargs)``.
        rewrite: a rule and the variables it applies to, such as
            ``nn.stop_gradient('kernel')`` or ``nn.read_only(True)``. Paths are
            relative to ``scope``.

    Returns:
        A function with the signature of ``fn``.

    Raises:
        UnusedFilterError: at the end of a call, if a part of the filter took nothing.
    """

    # A scope in which ``fn`` may declare what the caller has declared before.
    @functools.wraps(fn)
    def wrapper(scope: Scope, *args: Any, **kwargs: Any) -> Any:
        with opening.InBlock(rewrite, scope):
            return fn(scope.rewound(), *args, **kwargs)

    return wrapper


def stop_gradient(
    fn: Callable[..., Any],
    where: filters.Where,
    collections: CollectionFilter = 'params',
    *,
    unused: str = 'raise',
) -> Callable[..., Any]:
    """Lifts a function of a scope so that no gradient reaches the chosen variables.

    ``where`` names what is **stopped**.

    Values, random streams and what ``fn`` writes are those of ``fn``. It is
    ``lift(fn, nn.stop_gradient(where))``.

    >>> import jax, jax.numpy as jnp
    >>> from flax.core import apply
    >>> from flax_sg import core
    >>> def dense(scope, x):
    ...     kernel = scope.param('kernel', jax.nn.initializers.ones, (2, 1))
    ...     bias = scope.param('bias', jax.nn.initializers.ones, (1, 1))
    ...     return jnp.sum(x @ kernel + bias)
    >>> frozen = core.stop_gradient(dense, 'kernel')
    >>> params = {'kernel': jnp.ones((2, 1)), 'bias': jnp.ones((1, 1))}
    >>> x = jnp.ones((3, 2))
    >>> grads = jax.grad(lambda p: apply(frozen)({'params': p}, x))(params)
    >>> grads['kernel'].tolist(), grads['bias'].tolist()
    ([[0.0], [0.0]], [[3.0]])

    Args:
        fn: a function ``(scope, *args, **kwargs)``.
        where: the variables to stop, any kind of filter, by paths relative to
            ``scope``.
        collections: the collections that ``where`` looks at.
        unused: what to do if a part of ``where`` matches no variable, ``'raise'`` or
            ``'ignore'``.

    Returns:
        A function with the signature of ``fn``.

    Raises:
        FilterTypeError: if ``where`` is no filter.
        UnusedFilterError: as ``lift``.
    """
    rewrite = value_rewrites.stop_gradient(
        where, collections=collections, unused=unused
    )
    return lift(fn, rewrite)
