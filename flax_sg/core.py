"""The lift on the scopes of ``flax.core``.

``flax.core.lift.pack`` takes the variables of a scope out, hands them to a function on
a scope of its own, and puts back what it wrote. Under a block it takes out rewritten
ones: that is the whole lift, whatever the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flax.core import lift
from flax.core.scope import CollectionFilter, Scope

from flax_sg import filters
from flax_sg.engine import extents
from flax_sg.forms import read_only as read_only_
from flax_sg.forms import rewrites
from flax_sg.forms import substitute as substitute_
from flax_sg.rules import rules


def rewrite(fn: Callable[..., Any], rewrite: rules.Rewrite) -> Callable[..., Any]:
    """Lifts a function of a scope so that it reads rewritten variables.

    Args:
        fn: a function ``(scope, *args, **kwargs)``.
        rewrite: a rule and the variables it applies to, such as
            ``nn.stop_gradient('kernel')``. Paths are relative to ``scope``.

    Returns:
        A function with the signature of ``fn``.
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

    lifted = lift.pack(
        inner, (True,), (True,), (True,), name=rewrite.rule.name, enable_kwargs=True
    )

    @functools.wraps(fn)
    def wrapper(scope: Scope, *args: Any, **kwargs: Any) -> Any:
        with extents.Extent(rewrite, scope):
            return lifted(scope, *args, **kwargs)

    return wrapper


def stop_gradient(
    fn: Callable[..., Any],
    where: Any,
    collections: CollectionFilter = 'params',
    *,
    unused: str = 'raise',
) -> Callable[..., Any]:
    """Lifts a function of a scope so that no gradient reaches the chosen variables.

    Values, random streams and what ``fn`` writes are those of ``fn``.

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
        A function with the signature of ``fn``. Built on ``flax.core.lift.pack``.
    """
    value = rewrites.Rewrite(
        filters.as_filter(where), rules.StopGradient(), collections, unused
    )
    return rewrite(fn, value)


def substitute(
    fn: Callable[..., Any],
    values: substitute_.Values,
    where: Any = None,
    collections: CollectionFilter = 'params',
    *,
    unused: str = 'raise',
) -> Callable[..., Any]:
    """Lifts a function of a scope so that it reads other values.

    >>> import jax, jax.numpy as jnp
    >>> from flax.core import apply
    >>> from flax_sg import core
    >>> def shift(scope, x):
    ...     return x + scope.param('bias', jax.nn.initializers.zeros, ())
    >>> shifted = core.substitute(shift, {'bias': jnp.ones(())})
    >>> float(apply(shifted)({'params': {'bias': jnp.zeros(())}}, 1.0))
    2.0

    Args:
        fn: a function ``(scope, *args, **kwargs)``.
        values: what is read, as in ``nn.substitute``, by paths relative to ``scope``.
        where: the variables that are read as other values, any kind of filter.
        collections: the collections that ``where`` looks at.
        unused: what to do if a part of ``where`` took no variable, ``'raise'`` or
            ``'ignore'``.

    Returns:
        A function with the signature of ``fn``.
    """
    value = substitute_.substitute(
        values, where=where, collections=collections, unused=unused
    )
    return rewrite(fn, value)


def read_only(
    fn: Callable[..., Any],
    where: Any,
    collections: CollectionFilter = True,
    *,
    unused: str = 'raise',
) -> Callable[..., Any]:
    """Lifts a function of a scope so that it raises where it writes.

    Args:
        fn: a function ``(scope, *args, **kwargs)``.
        where: the variables that are read only, any kind of filter, by paths relative
            to ``scope``.
        collections: the collections that ``where`` looks at.
        unused: what to do if a part of ``where`` took no variable, ``'raise'`` or
            ``'ignore'``.

    Returns:
        A function with the signature of ``fn``; see ``nn.read_only``.
    """
    value = read_only_.read_only(where, collections=collections, unused=unused)
    return rewrite(fn, value)
