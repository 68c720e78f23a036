"""``stop_gradient`` and ``train_only``: the names that people write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from flax.core.scope import CollectionFilter

from flax_sg import errors, filters
from flax_sg.forms import rewrites
from flax_sg.rules import rules

T = TypeVar('T')
_LEVELS: dict[Any, str] = {None: 'all of them', 1: 'the innermost one'}


@overload
def stop_gradient(
    where: filters.Where,
    /,
    *,
    collections: CollectionFilter = ...,
    unused: str = ...,
    levels: int | None = ...,
) -> rewrites.BlockDecorator: ...
@overload
def stop_gradient(
    *,
    where: filters.Where,
    collections: CollectionFilter = ...,
    unused: str = ...,
    levels: int | None = ...,
) -> rewrites.BlockDecorator: ...
@overload
def stop_gradient(
    target: T,
    /,
    where: filters.Where,
    *,
    methods: Sequence[str] | None = ...,
    collections: CollectionFilter = ...,
    unused: str = ...,
    levels: int | None = ...,
) -> T: ...
def stop_gradient(
    target: Any = rewrites.LEFT_OUT,
    /,
    where: Any = rewrites.LEFT_OUT,
    *,
    methods: Sequence[str] | None = None,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
    levels: int | None = None,
) -> Any:
    """Stops the gradient of the parameters that ``where`` selects.

    Inside the extent these parameters are read through ``jax.lax.stop_gradient``.
    Nothing else changes: outputs, random streams, mutable collections, every other
    gradient, and reads before and after the extent are those of the program without
    it. Gradients flow *through* a stopped module to its input.

    ``where`` names what is **stopped**. To name what is trained instead, and stop
    everything else, write ``train_only``.

    As a block, around some lines of a method or around ``model.apply``:

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         with nn.stop_gradient('backbone/**'):
    ...             x = nn.Dense(3, name='backbone')(x)
    ...         return nn.Dense(1, name='head')(x)
    >>> model = Model()
    >>> x = jnp.ones((4, 2))
    >>> variables = model.init(jax.random.key(0), x)
    >>> grads = jax.grad(lambda v: jnp.sum(model.apply(v, x)))(variables)['params']
    >>> jax.tree.map(lambda g: bool(jnp.any(g != 0)), grads)['backbone']
    {'bias': False, 'kernel': False}
    >>> jax.tree.map(lambda g: bool(jnp.any(g != 0)), grads)['head']
    {'bias': True, 'kernel': True}

    As a decorator, or with the target first, around each call of a function, a method
    or a Module class:

    >>> @nn.train_only('head/**')
    ... def head_loss(params):
    ...     return jnp.sum(model.apply({'params': params}, x))
    >>> grads = jax.grad(head_loss)(variables['params'])
    >>> jax.tree.map(lambda g: bool(jnp.any(g != 0)), grads)['backbone']
    {'bias': False, 'kernel': False}
    >>> frozen_apply = nn.stop_gradient(model.apply, 'backbone/**')

    >>> FrozenKernel = nn.stop_gradient(nn.Dense, 'kernel')
    >>> FrozenKernel.__name__  # parameters keep their paths
    'Dense'
    >>> class Head(nn.Module):
    ...     @nn.stop_gradient('dense/**')
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(1, name='dense')(x)

    Args:
        target: what to decorate: any function or method, a Module class (or
            ``functools.partial`` of one), or a module, see ``nn.Frozen``. Each call
            opens a block of its own. Left out for a block or a decorator; a single
            argument is always the filter, a function as well.
        where: the variables to stop, by paths relative to the module that opens the
            block, to the bound module that is the first argument of a decorated
            function, or to the instance of a decorated class; elsewhere relative to
            the root of the tree. A glob on whole path components (``'gln_*/**'``: ``*``
            within one, ``**`` any depth), ``re.Pattern`` (``fullmatch``), a predicate
            ``(path) -> bool``, ``True`` or ``False``, a tree of bools, a sequence of
            these (any of), and ``~ & |`` on ``flax_sg.filters`` values.
        methods: for a Module class, the names of the methods to lift, ``__call__`` by
            default.
        collections: the collections that ``where`` looks at, as in other parts of
            Flax; ``'params'`` by default. ``True`` leaves out
            ``'_overwrite_with_gradient'``, whose new value *is* its gradient.
        unused: ``'raise'`` if a part of ``where`` took no variable by the end of the
            extent, ``'ignore'`` to let that pass.
        levels: how many levels of differentiation are stopped: None for all, 1 for the
            innermost one that differentiates the variable. Derivatives of higher orders
            flow then, as MAML needs it: what does not adapt is trained all the same.

    Returns:
        Without a target, a value for ``with``, for ``@`` and for calling on a target.
        With one, the lifted target.

    Raises:
        FilterTypeError: if ``where`` is no filter.
        ArgumentTypeError: if ``target`` has no calls, such as a tree of parameters
            (``sg.stop_gradient(tree, where)``), or is a generator function.
        UnusedFilterError: at the end of an extent, if a part of ``where`` took nothing.
        ArgumentValueError: for other ``levels``.

    Note:
        A block belongs to its thread. It is part of JAX's trace cache keys, so jitted
        functions may be called inside and outside of it; a fresh but equal filter
        does not retrace. See google/flax issue #1857, where the idea comes from.
    """
    chosen = rewrites.filter_of('stop_gradient', target, where)
    rewrite = rewrites.BlockDecorator(chosen, _rule_of(levels), collections, unused)
    return rewrites.decorated('stop_gradient', rewrite, target, where, methods)


def _rule_of(levels: int | None) -> rules.Rule:
    if levels is None:
        return rules.StopGradient()
    if isinstance(levels, bool) or levels != 1:
        raise errors.unknown_choice('levels', levels, _LEVELS)
    return rules.StopOneLevel()


@overload
def train_only(
    where: filters.Where,
    /,
    *,
    collections: CollectionFilter = ...,
    unused: str = ...,
) -> rewrites.BlockDecorator: ...
@overload
def train_only(
    *,
    where: filters.Where,
    collections: CollectionFilter = ...,
    unused: str = ...,
) -> rewrites.BlockDecorator: ...
@overload
def train_only(
    target: T,
    /,
    where: filters.Where,
    *,
    methods: Sequence[str] | None = ...,
    collections: CollectionFilter = ...,
    unused: str = ...,
) -> T: ...
def train_only(
    target: Any = rewrites.LEFT_OUT,
    /,
    where: Any = rewrites.LEFT_OUT,
    *,
    methods: Sequence[str] | None = None,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Any:
    """Stops the gradient of all parameters except those that ``where`` selects.

    The complement of ``stop_gradient``, said positively: ``where`` names what is
    **trained**. ``train_only(where)`` is ``stop_gradient(~as_filter(where))``.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> model = nn.Sequential([nn.Dense(3), nn.Dense(1)])
    >>> x = jnp.ones((4, 2))
    >>> params = model.init(jax.random.key(0), x)['params']
    >>> def loss(params):
    ...     with nn.train_only('layers_1/**'):
    ...         return jnp.sum(model.apply({'params': params}, x))
    >>> grads = jax.grad(loss)(params)
    >>> {name: bool(jnp.any(g['kernel'] != 0)) for name, g in grads.items()}
    {'layers_0': False, 'layers_1': True}

    Args:
        target: as in ``stop_gradient``.
        where: the variables to train; filters as in ``stop_gradient``. Everything
            else in ``collections`` that is read in the extent is stopped.
        methods: as in ``stop_gradient``.
        collections: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.
    """
    stopped = ~rewrites.filter_of('train_only', target, where)
    rewrite = rewrites.BlockDecorator(
        stopped, rules.StopGradient(), collections, unused
    )
    return rewrites.decorated('train_only', rewrite, target, where, methods)
