"""The lift on the scopes of ``flax.core``.

``flax.core.lift.pack`` takes the variables of a scope out, hands them to a function on
a scope of its own, and puts back what it wrote. Under a block it takes out rewritten
ones: that is the whole lift, whatever the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.core
from flax.core.scope import CollectionFilter, Scope

from flax_sg import filters
from flax_sg.engine import extents
from flax_sg.forms import stops
from flax_sg.rules import rules


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
        A function with the signature of ``fn``. Built on ``flax.core.lift.pack``.

    Raises:
        UnusedFilterError: at the end of a call, if a part of the filter took nothing.
    """

    def inner(
        scope_fn: Callable[..., Scope],
        repack_fn: Callable[..., Any],
        variable_groups: Any,
        rng_groups: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        scope = scope_fn(variable_groups, rng_groups)
        y = fn(scope, *args, **kwargs)
        return y, repack_fn(scope)

    lifted = flax.core.lift.pack(
        inner, (True,), (True,), (True,), name=rewrite.rule.name, enable_kwargs=True
    )

    @functools.wraps(fn)
    def wrapper(scope: Scope, *args: Any, **kwargs: Any) -> Any:
        with extents.Extent(rewrite, scope):
            return lifted(scope, *args, **kwargs)

    return wrapper


def stop_gradient(
    fn: Callable[..., Any],
    where: filters.Where,
    collections: CollectionFilter = 'params',
    *,
    unused: str = 'raise',
) -> Callable[..., Any]:
    """Lifts a function of a scope so that no gradient reaches the chosen variables.

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
        unused: what to do if a part of ``where`` took no variable, ``'raise'`` or
            ``'ignore'``.

    Returns:
        A function with the signature of ``fn``.

    Raises:
        FilterTypeError: if ``where`` is no filter.
        UnusedFilterError: as ``lift``.
    """
    rewrite = stops.stop_gradient(where, collections=collections, unused=unused)
    return lift(fn, rewrite)
