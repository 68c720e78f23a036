"""What people write to change gradients, ``scale_gradient(where, factor)``, checked.

Blocks of linen (``forms/blocks.py``) and views of NNX models take their rewrites from
here. The docstrings are those of the blocks, ``help(nn.scale_gradient)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax.core.scope import CollectionFilter

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, shown, wrong_argument
from flax_sg.filters import predicates
from flax_sg.internals import tracing
from flax_sg.internals.types import Array, Scalar
from flax_sg.rules import cotangents
from flax_sg.rules.rules import Rewrite


def map_cotangent(
    where: filters.Where,
    fn: Callable[..., Array],
    *values: Array,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Passes the cotangent of each selected parameter through a function, once.

    Values stay the same to the last bit. In the backward pass JAX sums the cotangents
    of all uses of a parameter in one block and one ``apply``, scans, ``remat`` and
    ``jit`` in the block included. ``fn`` maps this sum, and the result goes to whatever
    differentiates the parameter. Where a scan or ``vmap`` around the block maps over
    the parameters themselves, ``fn`` gets the cotangent of one step or one example.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> model = nn.Sequential([nn.Dense(3), nn.Dense(1)])
    >>> x = jnp.ones((4, 2))
    >>> params = model.init(jax.random.key(0), x)['params']
    >>> def loss(params):
    ...     with nn.map_cotangent('layers_0/*', lambda path, ct: jnp.sign(ct)):
    ...         return jnp.sum(model.apply({'params': params}, x))
    >>> jax.grad(loss)(params)['layers_1']['bias'].tolist()
    [4.0]
    >>> bool(jnp.all(jnp.abs(jax.grad(loss)(params)['layers_0']['kernel']) == 1.0))
    True

    Use the result as that of ``nn.stop_gradient``: in a ``with`` statement, on a Module
    class, a method, a function or a module (each call of the wrapper is a block of its
    own), with ``flax_sg.core.lift`` on scopes and ``flax_sg.rewrite`` on trees. A class
    or a module may come first: ``nn.scale_gradient(nn.Dense, 'kernel', 0.5)``, a class
    with ``methods=``, as for ``nn.stop_gradient``.

    Args:
        where: the parameters whose cotangents are mapped, by any kind of filter, see
            ``nn.stop_gradient``. ``True`` leaves integers out.
        fn: called as ``fn(path, cotangent, *values)``. It returns an array of the
            cotangent's shape and dtype. It may depend on its arguments alone: another
            function is another program, which JAX compiles anew.
        *values: numbers and arrays, traced or not, that ``fn`` needs.
        collections: the collections that ``where`` looks at.
        unused: ``'raise'`` if a part of ``where`` matched no variable by the end of the
            block, ``'ignore'`` to let that pass.

    Returns:
        A value for ``with``, for ``@`` and for calling on a target.

    Raises:
        CotangentError: if a variable that is selected by name is no real or complex
            array; in the backward pass, if ``fn`` changes the shape or the dtype.
        ArgumentTypeError: if ``fn`` is no function, or reads a traced value that is no
            argument of it; if one of ``values`` is no number or array.
        TypeError: JAX's own, in forward mode (``jax.jvp``, ``jax.jacfwd``), which has
            no cotangents. ``jax.jacfwd`` of a gradient works.

    Note:
        The innermost level that differentiates a parameter maps its cotangent. A
        second derivative is that of the mapped gradient. JAX does not call ``fn`` for a
        parameter that no output depends on. Asked for at the end of google/flax issue
        #1857.
    """
    if not callable(fn):
        write = (
            'map_cotangent(where, lambda path, ct: 2.0 * ct); several filters are one '
            'list'
        )
        raise wrong_argument(fn, 'function of a cotangent', write)
    for value in values:
        _check_numeric(value, 'value for a cotangent')
    traced = predicates.tracer_in(fn)
    if traced is not None:
        name, value = traced
        raise errors.ArgumentTypeError(
            f'{predicates.describe(fn)} reads {brief(value)} as {name!r}.\n'
            'Hand it over: nn.map_cotangent(where, fn, value) calls '
            'fn(path, cotangent, value).'
        )
    rule = cotangents.Each('map_cotangent', fn, *values)
    rule.args = f', {predicates.describe(fn)}{rule.args}'
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def scale_gradient(
    where: filters.Where,
    factor: Scalar,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Multiplies the gradient of the selected parameters by a number.

    Forward mode works too: it multiplies the tangents.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> dense = nn.Dense(1)
    >>> slow = nn.scale_gradient('kernel', 0.5)(dense)  # a wrapper, as nn.Frozen
    >>> x = jnp.ones((4, 2))
    >>> params = slow.init(jax.random.key(0), x)['params']
    >>> grads = jax.grad(lambda p: jnp.sum(slow.apply({'params': p}, x)))(params)
    >>> grads['kernel'].tolist(), grads['bias'].tolist()
    ([[2.0], [2.0]], [4.0])

    Args:
        where: the parameters, as for ``map_cotangent``.
        factor: one number, traced or not, such as a schedule returns. It is converted
            to the dtype of the parameter. A factor of 0 computes a backward pass of
            zeros; ``nn.stop_gradient`` computes none. Around a jitted function that was
            made outside of the trace, a traced factor leaks: jit the whole step.
        collections: as for ``map_cotangent``.
        unused: as for ``map_cotangent``.

    Returns:
        As ``map_cotangent``.

    Raises:
        ArgumentTypeError, ArgumentValueError: if ``factor`` is not one number.
    """
    _check_number('factor', factor)
    rule = cotangents.Scale(factor)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def reverse_gradient(
    where: filters.Where,
    factor: Scalar = 1.0,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Reverses the gradient of the selected parameters, which then raise the loss.

    It is ``scale_gradient(where, -factor)``. One loss then trains a discriminator and,
    against it, the features that it sees:

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> class Adversarial(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         with nn.reverse_gradient('features/**', 0.1):
    ...             return nn.Dense(1)(nn.Dense(3, name='features')(x))

    Args:
        where: the parameters, as for ``map_cotangent``.
        factor: how strongly, one number, traced or not.
        collections: as for ``map_cotangent``.
        unused: as for ``map_cotangent``.

    Returns:
        As ``map_cotangent``.

    Note:
        Domain-adversarial training (Ganin and Lempitsky, 2015).
    """
    _check_number('factor', factor)
    return scale_gradient(where, -factor, collections=collections, unused=unused)


def clip_gradient(
    where: filters.Where,
    *,
    value: Scalar | None = None,
    norm: Scalar | None = None,
    global_norm: Scalar | None = None,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Clips the gradient of the selected parameters, summed over the block.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> dense, x = nn.Dense(1), jnp.ones((4, 2))
    >>> params = dense.init(jax.random.key(0), x)['params']
    >>> def loss(params):
    ...     with nn.clip_gradient(True, global_norm=1.0):
    ...         return jnp.sum(dense.apply({'params': params}, x))
    >>> grads = jax.grad(loss)(params)
    >>> [round(float(g), 4) for g in jax.tree.leaves(grads) for g in g.ravel()]
    [0.5774, 0.5774, 0.5774]

    Args:
        where: the parameters, as for ``map_cotangent``.
        value: the largest absolute value of each element of a gradient; of a complex
            one, of its two parts.
        norm: the largest Euclidean norm of the gradient of each leaf.
        global_norm: the largest Euclidean norm of all selected leaves together, as in
            ``optax.clip_by_global_norm``. Selected leaves count whether they are read
            or not, if the tree holds them when the first one is read and something
            differentiates them. Norms are computed with at least 32 bits. Exactly one
            of the three bounds is given: one number from 0 on, traced or not.
        collections: as for ``map_cotangent``.
        unused: as for ``map_cotangent``.

    Returns:
        As ``map_cotangent``.

    Raises:
        ArgumentValueError: for several bounds or none, one that is an array, or one
            below 0.
        ArgumentTypeError: for a bound that is no number.
        BlockError: at a read, for ``global_norm``, if the block was opened in the body
            of a lifted transform, such as ``nn.scan`` or ``nn.remat``.
    """
    bounds = {'value': value, 'norm': norm, 'global_norm': global_norm}
    chosen = {name: bound for name, bound in bounds.items() if bound is not None}
    if len(chosen) != 1:
        raise errors.ArgumentValueError(
            f'clip_gradient() was given {" and ".join(chosen) or "no bound"}: expected '
            'one of value=, norm= and global_norm=.\n'
            'Write nn.clip_gradient(where, global_norm=1.0); for two, nest two blocks.'
        )
    [(name, bound)] = chosen.items()
    _check_number(name, bound)
    if not isinstance(bound, tracing.Tracer) and not bound >= 0:
        raise errors.ArgumentValueError(f'{name}={bound}: expected a number from 0 on.')
    fns = {'value': cotangents.clipped_by_value, 'norm': cotangents.clipped_by_norm}
    rule = (
        cotangents.Each('clip_gradient', fns[name], bound)
        if name in fns
        else cotangents.ClipGlobalNorm(bound)
    )
    rule.args = f', {name}={shown(bound)}'
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def print_cotangent(
    where: filters.Where,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Prints the cotangent of each selected parameter, with its path.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> dense, x = nn.Dense(1), jnp.ones((4, 2))
    >>> params = dense.init(jax.random.key(0), x)['params']
    >>> def loss(params):
    ...     with nn.print_cotangent('bias'):
    ...         return jnp.sum(dense.apply({'params': params}, x))
    >>> grads = jax.grad(loss)(params)
    cotangent of bias: [4.]

    Args:
        where: the parameters, as for ``map_cotangent``.
        collections: as for ``map_cotangent``.
        unused: as for ``map_cotangent``.

    Returns:
        As ``map_cotangent``. ``jax.debug.callback`` prints, in compiled programs too,
        in no fixed order.
    """
    rule = cotangents.Each('print_cotangent', cotangents.printed)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def replace_cotangent(
    where: filters.Where,
    value: Array,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Gives the selected parameters another value as their gradient.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> dense, x = nn.Dense(1), jnp.ones((4, 2))
    >>> params = dense.init(jax.random.key(0), x)['params']
    >>> synthetic = jnp.full((2, 1), 7.0)
    >>> def loss(params):
    ...     with nn.replace_cotangent('kernel', synthetic):
    ...         return jnp.sum(dense.apply({'params': params}, x))
    >>> jax.grad(loss)(params)['kernel'].tolist()
    [[7.0], [7.0]]

    Args:
        where: the parameters, as for ``map_cotangent``.
        value: a number, or an array of the shape and the dtype of the parameters,
            traced or not. In a method it may be the value of another variable.
        collections: as for ``map_cotangent``.
        unused: as for ``map_cotangent``.

    Returns:
        As ``map_cotangent``. A parameter that no output depends on keeps its zeros.

    Raises:
        CotangentError: in the backward pass, if the value has another shape or dtype.
    """
    _check_numeric(value, 'value for a cotangent')
    rule = cotangents.Each('replace_cotangent', cotangents.replaced, value)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def copy_cotangent(
    sources: Mapping[str, str],
    *,
    add: bool = False,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Gives parameters the gradient of another parameter, instead of or with theirs.

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
        sources: ``{target: source}``, paths without patterns: the target gets the
            gradient of the source. A source that is a target itself passes on its
            own gradient: ``{'a': 'b', 'b': 'a'}`` swaps two. The block need not read
            the target. The gradient of a source is that of its reads in the block,
            even if the source is frozen around the block or not differentiated. A
            source that is frozen inside the block has none: the target gets zeros.
        add: whether a target keeps its own gradient as well.
        collections: as for ``map_cotangent``.
        unused: as for ``map_cotangent``, of all these paths.

    Returns:
        As ``map_cotangent``.

    Raises:
        CotangentError: if two parameters differ in shape or dtype.
        BlockError: if the block was opened in the body of a lifted transform.
    """
    argument: Any = sources
    if not isinstance(argument, Mapping):
        write = "nn.copy_cotangent({'target': 'source'})"
        raise wrong_argument(argument, 'dict of paths', write)
    named = dict.fromkeys([*sources, *sources.values()])
    where = [re.sub(r'([*?\[\]\\])', r'\\\1', path) for path in named]
    rule = cotangents.Copy(sources, add)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def _check_numeric(value: object, expected: str) -> None:
    if not isinstance(value, (int, float, complex, np.number, np.ndarray, jax.Array)):
        raise wrong_argument(value, expected, 'a number or an array of numbers')


def _check_number(name: str, value: Scalar) -> None:
    _check_numeric(value, f'number for {name}')
    if np.ndim(value):
        raise errors.ArgumentValueError(
            f'{name} has the shape {np.shape(value)}: expected one number.'
        )
