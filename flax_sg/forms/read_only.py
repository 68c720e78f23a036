"""``read_only``: variables that nothing may write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from flax.core.scope import CollectionFilter

from flax_sg import filters
from flax_sg.forms import rewrites
from flax_sg.rules import rules

T = TypeVar('T')


@overload
def read_only(
    where: filters.Where,
    /,
    *,
    collections: CollectionFilter = ...,
    unused: str = ...,
) -> rewrites.BlockDecorator: ...
@overload
def read_only(
    *,
    where: filters.Where,
    collections: CollectionFilter = ...,
    unused: str = ...,
) -> rewrites.BlockDecorator: ...
@overload
def read_only(
    target: T,
    /,
    where: filters.Where,
    *,
    methods: Sequence[str] | None = ...,
    collections: CollectionFilter = ...,
    unused: str = ...,
) -> T: ...
def read_only(
    target: Any = rewrites.LEFT_OUT,
    /,
    where: Any = rewrites.LEFT_OUT,
    *,
    methods: Sequence[str] | None = None,
    collections: CollectionFilter = True,
    unused: str = 'raise',
) -> Any:
    """Raises where a variable that ``where`` selects is written or created.

    Reads are what they are. A write is what changes what is stored: ``put_variable``,
    ``variable.value = ``, ``sow``, and the creation of a variable, also in the body of
    a lifted transform. Parameters that a transform was given and hands back, and a
    value that is written back as it was read, are none. At initialization variables
    may be created.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, train):
    ...         with nn.read_only('norm/**'):
    ...             return nn.BatchNorm(use_running_average=not train, name='norm')(x)
    >>> model, x = Model(), jnp.ones((4, 2))
    >>> variables = model.init(jax.random.key(0), x, train=False)
    >>> model.apply(variables, x, train=False, mutable='batch_stats')[0].shape
    (4, 2)
    >>> model.apply(variables, x, train=True, mutable='batch_stats')
    Traceback (most recent call last):
        ...
    flax_sg.errors.ReadOnlyError: BatchNorm.__call__ (at 'norm') wrote the ...

    Args:
        target: what to lift, as in ``stop_gradient``.
        where: the variables that are read only; filters as in ``stop_gradient``.
        methods: as in ``stop_gradient``.
        collections: the collections that ``where`` looks at. All of them by default,
            since what is written is seldom a parameter.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.

    Raises:
        ReadOnlyError: at a write, with the variable, its module, and the method that
            writes.
        FilterTypeError: if ``where`` is no filter.
        UnusedFilterError: at the end of an extent, if a part of ``where`` took nothing.

    Note:
        The last of the wishes at the end of google/flax issue #1857: parameters that
        are constant within a block.
    """
    chosen = rewrites.filter_of('read_only', target, where)
    rewrite = rewrites.BlockDecorator(chosen, rules.ReadOnly(), collections, unused)
    return rewrites.decorated('read_only', rewrite, target, where, methods)
