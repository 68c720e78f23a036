"""What people write to change what is read, ``stop_gradient(where)``, as a rewrite.

Blocks of linen (``forms/blocks.py``) and views of NNX models take their rewrites from
here. The docstrings are those of the blocks, ``help(nn.stop_gradient)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from flax.core.scope import CollectionFilter

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, unknown_choice
from flax_sg.filters.paths import Path
from flax_sg.internals import modules
from flax_sg.internals.places import Place, warn_once
from flax_sg.internals.types import PyTree
from flax_sg.rules import rules, substitutes
from flax_sg.rules.rules import Rewrite
from flax_sg.trees.leaves import ABSENT, Absent, collections_of


def stop_gradient(
    where: filters.Where,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
    levels: int | None = None,
) -> Rewrite:
    """Stops the gradient of the parameters that ``where`` selects.

    ``where`` names what is **stopped**. To name what is trained instead, and stop
    everything else, write ``train_only``.

    In the block these parameters are read through ``jax.lax.stop_gradient``. Nothing
    else changes: outputs, random streams, mutable collections, all other gradients, and
    reads before and after the block. Gradients flow *through* a stopped module to its
    input.

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
        target: what to decorate, given before ``where``: any function or method, a
            Module class (or ``functools.partial`` of one), or a module, see
            ``nn.Frozen``. Each call opens a block of its own. Left out for a block or a
            decorator: a single argument is always the filter, even if it is a function.
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
            ``'_overwrite_with_gradient'``, whose new value *is* its gradient. A lifted
            transform in the block returns the stored value of a selected variable, and
            its body must not write one: leave such a collection out.
        unused: ``'raise'`` if a part of ``where`` matches no variable at the end of the
            block, ``'ignore'`` to let that pass.
        levels: how many levels of differentiation are stopped: None for all, 1 for the
            innermost one that differentiates the variable. With 1 derivatives of higher
            order flow, as MAML needs it: a parameter that is fixed in the inner loop is
            trained by the outer one.

    Returns:
        Without a target, a value for ``with``, for ``@`` and for calling on a target.
        With one, the lifted target.

    Raises:
        FilterTypeError: if ``where`` is no filter.
        ArgumentTypeError: if ``target`` has no calls, such as a tree of parameters
            (``sg.stop_gradient(tree, where)``), or is a generator function.
        UnusedFilterError: at the end of a block, if a part of ``where`` matches no
            variable. A note says which call opened the block, and where.
        ArgumentValueError: for other ``levels``.

    Note:
        A block belongs to its thread. JAX's trace cache keys tell it from others, so
        jitted functions may be called inside and outside of it; a fresh but equal
        filter does not retrace. See google/flax issue #1857, where the idea comes from.
    """
    if levels not in (None, 1):
        raise unknown_choice('levels', levels, (None, 1))
    rule = rules.StopGradient(levels)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def train_only(
    where: filters.Where,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Stops the gradient of all parameters except those that ``where`` selects.

    ``where`` names what is **trained**. ``train_only(where)`` is
    ``stop_gradient(~sg.where(where))``.

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
            else in ``collections`` that is read in the block is stopped. An empty list
            warns.
        methods: as in ``stop_gradient``.
        collections: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.
    """
    trained = filters.named(filters.as_filter(where), 'trained', 'nn.train_only({})')
    stopped, rule = ~trained, rules.StopGradient()
    is_empty = isinstance(where, (Sequence, Set)) and not where
    if is_empty and unused != 'ignore':
        warn_once(
            f'nn.train_only({where!r}) trains nothing: it names no parameter.\n'
            'Name what is trained, or write nn.stop_gradient(True) if that is meant.',
            Place.here(),
        )
    return Rewrite(stopped, rule, collections, unused)


def read_only(
    where: filters.Where,
    *,
    collections: CollectionFilter = True,
    unused: str = 'raise',
) -> Rewrite:
    """Raises where a variable that ``where`` selects is written or created.

    Reads stay the same. Writes are ``put_variable``, ``variable.value = ``, ``sow`` and
    the creation of a variable, also in the body of a lifted transform. Writing back the
    value that was read is allowed, and so are parameters that a transform returns
    unchanged. At initialization variables may be created.

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
    flax_sg.errors.BlockError: BatchNorm.__call__ (at 'norm') wrote the ...

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
        BlockError: at a write, with the variable, its module, and the method that
            writes.
        FilterTypeError: if ``where`` is no filter.
        UnusedFilterError: at the end of a block, if a part of ``where`` matches no
            variable.

    Note:
        The last of the wishes at the end of google/flax issue #1857: parameters that
        are constant within a block.
    """
    chosen = filters.as_filter(where)
    if 'condition' in chosen.needs:
        raise errors.FilterTypeError(
            f'nn.read_only was given {chosen!r}, whose condition is traced.\n'
            'A write raises while JAX traces, and the condition is known when the '
            'program runs.\n'
            'Leave the condition out, or give its value: bool(step < k), outside of '
            'jax.jit.'
        )
    return Rewrite(chosen, rules.ReadOnly(), collections, unused)


# What stands for other values; ``substitute`` explains the members.
Values: TypeAlias = (
    Mapping[str, Any] | str | modules.Module | Callable[[Path, Any], Any]
)


def substitute(
    values: Values,
    *,
    where: filters.Where | Absent = ABSENT,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Lets modules read other values in place of their variables.

    In the block the selected variables read as other values, and gradients flow to
    these values, unless a ``stop_gradient`` inside stops them. Stored values, random
    numbers and everything else stay the same.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> model, x = nn.Dense(2), jnp.ones((1, 3))
    >>> params = model.init(jax.random.key(0), x)['params']
    >>> def loss(params, ema):
    ...     with nn.substitute({'kernel': ema}):
    ...         return jnp.sum(model.apply({'params': params}, x))
    >>> of_params, of_ema = jax.grad(loss, (0, 1))(params, jnp.zeros((3, 2)))
    >>> of_params['kernel'].any().item(), of_params['bias'].any().item()
    (False, True)
    >>> of_ema.any().item()
    True

    A function computes the values from the stored ones, once for each leaf:

    >>> import zlib
    >>> def noise(path, value):
    ...     key = jax.random.fold_in(jax.random.key(7), zlib.crc32(path.encode()))
    ...     return value + 0.1 * jax.random.normal(key, value.shape)
    >>> with nn.substitute(noise, where='kernel'):
    ...     y = model.apply({'params': params}, x)
    >>> with nn.substitute(lambda path, value: value.astype(jnp.bfloat16)):
    ...     model.apply({'params': params}, x.astype(jnp.bfloat16)).dtype
    dtype(bfloat16)

    Args:
        target: what to lift, as in ``stop_gradient``. Left out for a block or a
            decorator; a single argument is always ``values``.
        values: what is read, one of

            * a tree of values, nested as the variables of the module that opens the
              block; all of them or some: parameters, or a dict of collections,
              ``{'params': tree}``. Each value has the structure, boxes, shape and dtype
              of its variable;
            * the name of another collection, ``'ema_params'``, which has variables of
              the same names as the selected ones;
            * a bound module, for its variables; modules may stand in a tree, too;
            * a function ``(path, value) -> value``, called in the trace where the block
              was opened. Its result has the shape of ``value`` and any dtype.
        where: the variables that are read as other values; filters as in
            ``stop_gradient``. By default those in a tree of values, else all.
        methods: as in ``stop_gradient``.
        collections: the collections that ``where`` looks at. If this is more than one
            name, a tree has the collections on top.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.

    Raises:
        ArgumentTypeError: for other ``values``.
        StructureError: at a read, if a value does not fit or is missing.
        UnusedFilterError: at the end of a block, if a value belongs to no
            variable.

    Note:
        At initialization nothing is substituted. A write in the block stores what is
        written, but a value that is written back as it was read leaves the stored one;
        the variable reads as its other value all the time. With a block around a call
        of a ``jax.jit`` function, other values compile another program: open the block
        in the function, or pass the values as its arguments. See google/flax issue
        #1857; dm-haiku has ``custom_getter`` for this.
    """
    if isinstance(values, Mapping) and collections == 'params':
        # With the collections on top, as ``init`` returns variables, or without.
        collections = [*collections_of(values)] or collections
    rule = _rule_of(values, collections)
    if isinstance(where, Absent):
        is_tree = isinstance(rule, substitutes.FromTree)
        where = filters.Names(frozenset(rule.entries)) if is_tree else True
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def _rule_of(values: PyTree, collections: CollectionFilter) -> substitutes.Substitute:
    if isinstance(values, str) and isinstance(collections, str):
        return substitutes.FromCollection(values)
    if isinstance(values, (Mapping, modules.Module)):
        entries = substitutes.entries_of(values, collections)
        if not entries and not substitutes.is_initializing(values):
            raise substitutes.no_values('a tree without a value')
        return substitutes.FromTree(entries)
    if callable(values) and not isinstance(values, type):
        return substitutes.FromFunction(values)
    raise substitutes.no_values(brief(values))
