"""Cotangents that come from elsewhere: public names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flax.core.scope import CollectionFilter

from flax_sg import errors, filters
from flax_sg.forms import rewrites
from flax_sg.rules import constants, cotangents, joint, rules


def replace_cotangent(
    where: filters.Where,
    value: Any = None,
    *,
    variable: str | None = None,
    collection: str | None = None,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> rewrites.Rewrite:
    """Another value takes the place of the gradient of the selected parameters.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> dense, x = nn.Dense(1), jnp.ones((4, 2))
    >>> params = dense.init(jax.random.key(0), x)['params']
    >>> synthetic = {'kernel': jnp.full((2, 1), 7.0)}
    >>> def loss(params):
    ...     variables = {'params': params, 'synthetic': synthetic}
    ...     with nn.replace_cotangent('kernel', collection='synthetic'):
    ...         return jnp.sum(dense.apply(variables, x))
    >>> jax.grad(loss)(params)['kernel'].tolist()
    [[7.0], [7.0]]

    Args:
        where: the parameters, as for ``map_cotangent``.
        value: a number, or an array of the shape and the dtype of the parameters,
            traced or not.
        variable: in its place, the path of a variable whose stored value it is, by the
            same rules as paths in ``where``.
        collection: the collection of that variable, ``'params'`` by default. Alone: the
            variable of the same path in this collection.
        collections: as for ``map_cotangent``.
        unused: as for ``map_cotangent``.

    Returns:
        As ``map_cotangent``. A parameter that no output depends on keeps its zeros.

    Raises:
        CotangentError: if the value has another shape or dtype.
        UnknownNameError: on the way back, if there is no such variable.
        ArgumentValueError: unless there is either a value or a variable.
    """
    named = variable is not None or collection is not None
    if named == (value is not None):
        raise errors.ArgumentValueError(
            'replace_cotangent() takes either a value or a variable.\n'
            "Write nn.replace_cotangent(where, value), or variable='path', or "
            "collection='name'."
        )
    rule: rules.Rule = (
        joint.Replace(variable, collection or 'params')
        if named
        else cotangents.Fill(constants.array('value', value))
    )
    return rewrites.Rewrite(filters.as_filter(where), rule, collections, unused)


def copy_cotangent(
    sources: Mapping[str, str],
    *,
    add: bool = False,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> rewrites.Rewrite:
    """Parameters get the gradient of another parameter, or that one too.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> model, x = nn.Sequential([nn.Dense(2), nn.Dense(2)]), jnp.ones((4, 2))
    >>> params = model.init(jax.random.key(0), x)['params']
    >>> def loss(params):
    ...     with nn.copy_cotangent({'layers_0/bias': 'layers_1/bias'}):
    ...         return jnp.sum(model.apply({'params': params}, x))
    >>> jax.grad(loss)(params)['layers_0']['bias'].tolist()
    [4.0, 4.0]

    Args:
        sources: for each parameter that gets a gradient the one whose it is, by their
            paths: ``{target: source}``, no patterns. A source that is a target itself
            hands on what it was given. The target need not be read in the extent.
        add: whether a target keeps its own gradient as well.
        collections: as for ``map_cotangent``.
        unused: as for ``map_cotangent``, of all these paths.

    Returns:
        As ``map_cotangent``.

    Raises:
        ArgumentValueError: if a parameter gets its own gradient in a roundabout way.
        CotangentError: if two parameters differ in shape or dtype.
    """
    given: Any = sources
    if not isinstance(given, Mapping) or not all(
        isinstance(path, str) for path in (*given, *given.values())
    ):
        raise errors.ArgumentValueError(
            f'copy_cotangent({sources!r}): expected the paths of parameters, each with '
            "the one that it gets its cotangent from, such as {'a/kernel': 'b/kernel'}."
        )
    named = dict.fromkeys([*sources, *sources.values()])
    where = [re.sub(r'([*?\[\]\\])', r'\\\1', path) for path in named]
    return rewrites.Rewrite(
        filters.as_filter(where), joint.Copy(sources, add), collections, unused
    )
