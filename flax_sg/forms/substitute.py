"""``substitute``: other values are read in the place of variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from flax.core.scope import CollectionFilter

from flax_sg import filters
from flax_sg.errors.texts import brief
from flax_sg.filters.paths import Path
from flax_sg.forms import rewrites
from flax_sg.internals import modules
from flax_sg.rules import substitutes
from flax_sg.rules.substitutes import no_values

# What stands for other values; ``substitute`` explains the members.
Values: TypeAlias = (
    Mapping[str, Any] | str | modules.Module | Callable[[Path, Any], Any]
)


@rewrites.takes_target
def substitute(
    values: Values,
    *,
    where: filters.Where | None = None,
    methods: Sequence[str] | None = None,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> rewrites.BlockDecorator:
    """Reads other values in the place of variables.

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
              block; all of them or some. Each value has the structure, boxes, shape and
              dtype of its variable;
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
        UnusedFilterError: at the end of an extent, if a value belongs to no
            variable.

    Note:
        At initialization nothing is substituted. A write in the block stores what is
        written, but a value that is written back as it was read leaves the stored one;
        the variable reads as its other value all the time. With a block around a call
        of a ``jax.jit`` function, other values compile another program: open the block
        in the function, or pass the values as its arguments. See google/flax issue
        #1857; dm-haiku has ``custom_getter`` for this.
    """
    rule = _rule_of(values, collections)
    if where is None:
        is_tree = isinstance(rule, substitutes.FromTree)
        where = filters.Names(frozenset(rule.entries)) if is_tree else True
    return rewrites.BlockDecorator(filters.as_filter(where), rule, collections, unused)


def _rule_of(values: Any, collections: CollectionFilter) -> substitutes.Substitute:
    if isinstance(values, str):
        if not isinstance(collections, str):
            raise no_values(
                f'the collection {values!r} for collections={collections!r}',
                "Fix: name one collection, such as collections='params'.",
            )
        return substitutes.FromCollection(values)
    if isinstance(values, (Mapping, modules.Module)):
        entries = substitutes.entries_of(values, collections)
        if not entries and not substitutes.is_initializing(values):
            raise no_values('a tree without a value')
        return substitutes.FromTree(entries)
    if callable(values) and not isinstance(values, type):
        return substitutes.FromFunction(values)
    fix = ''
    if isinstance(values, type):
        fix = f'Fix: to lift a class write nn.substitute({values.__name__}, values).'
    elif hasattr(values, 'shape'):
        fix = "Fix: say of which variable: nn.substitute({'encoder': {'bias': value}})."
    raise no_values(brief(values), fix)
