"""``nnx.stop_gradient`` and the other rules, as blocks on NNX models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from flax_sg.errors.texts import wrong_argument
from flax_sg.filters import Where
from flax_sg.forms import cotangent_blocks, value_blocks
from flax_sg.graphs.blocks import Block


def stop_gradient(
    model: Any, where: Where, *, kind: Any = nnx.Param, **how: Any
) -> Block:
    """Stops the gradient of the Variables of an NNX model that ``where`` selects.

    In the block these Variables are read through ``jax.lax.stop_gradient``, in each
    function that gets the model or a part of it. What is stored stays the same, and so
    do outputs and all other gradients. ``where`` names what is **stopped**.

    Around ``nnx.grad``, a train step or an evaluation, compiled or not:

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> class Model(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.backbone = nnx.Linear(2, 3, rngs=rngs)
    ...         self.head = nnx.Linear(3, 1, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.head(self.backbone(x))
    >>> model, x = Model(nnx.Rngs(0)), jnp.ones((4, 2))
    >>> with nnx.stop_gradient(model, 'backbone/**'):
    ...     grads = nnx.grad(lambda model: jnp.sum(model(x)))(model)
    >>> {name: bool(grads[name]['kernel'][...].any()) for name in ('backbone', 'head')}
    {'backbone': False, 'head': True}

    Around some lines of the model, with ``self``:

    >>> class Detached(Model):
    ...     def __call__(self, x):
    ...         with nnx.stop_gradient(self, 'backbone/**'):
    ...             x = self.backbone(x)
    ...         return self.head(x)

    Args:
        model: an NNX module, or a container of modules. Paths begin in it:
            ``'layers/0/kernel'``.
        where: the Variables to stop: a glob on whole path components (``'gln_*/**'``:
            ``*`` within one, ``**`` any depth), ``re.Pattern``, a function
            ``(path) -> bool``, ``True``, a tree of bools, a sequence of these (any of),
            and ``~ & |`` on ``flax_sg.filters`` values. Tied weights are selected by
            any of their paths.
        kind: the Variables that may be selected, as an NNX filter: a type, a tag, or
            several. Default ``nnx.Param``.
        **how: ``unused=`` and ``levels=``. ``unused`` is ``'raise'`` if a part of
            ``where`` matches nothing, or ``'ignore'`` to let that pass. ``levels`` says
            how many levels of differentiation are stopped: None for all, 1 for the
            innermost one, as MAML needs it.

    Returns:
        A value for ``with``, which may be used any number of times.

    Raises:
        UnusedFilterError: at the ``with`` line, if a part of ``where`` matches nothing.
        ArgumentTypeError: at the ``with`` line, if ``model`` is no NNX module.
        FilterTypeError: if ``where`` is no filter.

    Note:
        A block belongs to its thread. A function that is compiled outside of it is
        compiled again in it, once for each model. The idea is that of google/flax
        issue #1857; ``nnx.DiffState`` chooses for a whole call.
    """
    return _block(value_blocks.stop_gradient, model, kind, where, **how)


def train_only(model: Any, where: Where, *, kind: Any = nnx.Param, **how: Any) -> Block:
    """Stops the gradient of all Variables of a model but those that ``where`` selects.

    The complement of ``stop_gradient``: ``where`` names what is **trained**.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> with nnx.train_only(model, 'bias'):
    ...     grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((4, 2)))))(model)
    >>> bool(grads['kernel'][...].any()), bool(grads['bias'][...].any())
    (False, True)

    Args:
        model: as in ``stop_gradient``.
        where: the Variables to train. All others of the ``kind`` are stopped.
        kind: as in ``stop_gradient``.
        **how: ``unused=``, as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.
    """
    return _block(value_blocks.train_only, model, kind, where, **how)


def substitute(model: Any, values: Any, *, kind: Any = nnx.Param, **how: Any) -> Block:
    """Lets an NNX model read other values in place of its Variables.

    Gradients flow to these values, and not to what is stored.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> target = nnx.Linear(2, 1, rngs=nnx.Rngs(1))
    >>> x = jnp.ones((4, 2))
    >>> with nnx.substitute(model, target):
    ...     y = model(x)
    >>> bool(jnp.all(y == target(x)))
    True

    Args:
        model: as in ``stop_gradient``.
        values: another model or a state with Variables at the same paths, a tree of
            arrays, nested as the Variables are, or a function
            ``(path, value) -> value``.
        kind: as in ``stop_gradient``; of a model in ``values``, too.
        **how: ``where=``, the Variables that are read as other values: by default those
            in ``values``; all, if it is a function. ``unused=``, as in
            ``stop_gradient``.

    Returns:
        As ``stop_gradient``.

    Raises:
        ArgumentTypeError: for other ``values``.
        StructureError: at a read, if a value does not fit or is missing.
    """
    if isinstance(values, str):
        write = 'nnx.substitute(model, target_model)'
        raise wrong_argument(values, 'model, state, tree or function', write)
    if isinstance(values, nnx.Module):
        values = nnx.state(values, kind)
    if isinstance(values, nnx.State):
        values = nnx.to_pure_dict(values)
    return _block(value_blocks.substitute, model, kind, values, **how)


def read_only(model: Any, where: Where, *, kind: Any = ..., **how: Any) -> Block:
    """Raises where a Variable that ``where`` selects is assigned.

    That is ``variable[...] = value`` and ``variable.set_value(value)``, in transforms
    too. ``nnx.update`` and what an optimizer does pass.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    >>> with nnx.read_only(norm, 'mean'):
    ...     y = norm(jnp.ones((4, 2)))
    Traceback (most recent call last):
        ...
    flax_sg.errors.BlockError: The Variable 'mean' is written, which is read only ...

    Args:
        model: as in ``stop_gradient``.
        where: the Variables that are read only.
        kind: as in ``stop_gradient``, but all of them by default: what is written is
            seldom a parameter.
        **how: ``unused=``, as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.

    Raises:
        BlockError: at the assignment.
    """
    return _block(value_blocks.read_only, model, kind, where, **how)


def _block(
    make: Callable[..., Any], model: Any, kind: Any, *args: Any, **how: Any
) -> Block:
    """A rule of ``flax_sg.linen`` as a block on an NNX model."""
    for name in {'collections', 'methods'} & how.keys():
        raise TypeError(f'nnx.{make.__name__}: {name}= is for linen; see kind=')
    return Block(model, make(*args, **how), kind)


def _of_cotangents(make: Callable[..., Any]) -> Callable[..., Block]:
    def of_model(model: Any, *args: Any, kind: Any = nnx.Param, **how: Any) -> Block:
        return _block(make, model, kind, *args, **how)

    of_model.__name__ = of_model.__qualname__ = make.__name__
    model, _, kind, _ = inspect.signature(of_model).parameters.values()
    of_make = inspect.signature(make).parameters.values()
    shown = [model, *(kind if p.name == 'collections' else p for p in of_make)]
    vars(of_model)['__signature__'] = inspect.Signature(
        shown, return_annotation='Block'
    )
    of_model.__doc__ = f"""``flax_sg.linen.{make.__name__}`` for an NNX model.

    Args:
        model: as in ``nnx.stop_gradient``.
        *args: as in ``flax_sg.linen.{make.__name__}``, the filter first.
        kind: as in ``nnx.stop_gradient``.
        **how: as in ``flax_sg.linen.{make.__name__}``, without ``collections=``.

    Returns:
        As ``nnx.stop_gradient``.

    Note:
        The cotangents of all reads of a Variable in the block are summed before the
        rule. A transform that is given the model hands new Variables to its body: there
        they are summed for each call of the body.
    """
    return of_model


map_cotangent = _of_cotangents(cotangent_blocks.map_cotangent)
scale_gradient = _of_cotangents(cotangent_blocks.scale_gradient)
reverse_gradient = _of_cotangents(cotangent_blocks.reverse_gradient)
clip_gradient = _of_cotangents(cotangent_blocks.clip_gradient)
print_cotangent = _of_cotangents(cotangent_blocks.print_cotangent)
replace_cotangent = _of_cotangents(cotangent_blocks.replace_cotangent)
