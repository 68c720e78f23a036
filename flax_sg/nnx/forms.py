"""``nnx.stop_gradient`` and the other rules: functions from a model to a view of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from flax import nnx

from flax_sg import filters
from flax_sg.errors.texts import wrong_argument
from flax_sg.filters import Where
from flax_sg.internals.types import Kind, PyTree
from flax_sg.nnx.asking import parameters
from flax_sg.nnx.values import other_values
from flax_sg.nnx.views import view
from flax_sg.rules import cotangent_rewrites, rules, value_rewrites
from flax_sg.trees.leaves import ABSENT, Absent
from flax_sg.trees.nnx_walks import Walk

M = TypeVar('M')
P = ParamSpec('P')


class _TakesModel(Protocol[P]):
    """A function ``make(where)`` that is called as ``make(model, where)``."""

    @overload
    def __call__(self, model: M, *args: P.args, **kwargs: P.kwargs) -> M: ...
    @overload  # A keyword of ours beside those of ``make`` leaves these unchecked.
    def __call__(self, model: M, *args: Any, kind: Kind, **kwargs: Any) -> M: ...


def _takes_model(
    make: Callable[P, rules.Rewrite], side: str = ''
) -> Callable[[Callable[[], None]], _TakesModel[P]]:
    """Makes views of rewrites: the model comes first, and ``kind`` is a keyword.

    Args:
        make: a function that returns a rewrite. Models have no ``collections``.
        side: what a filter has to name, if it is known to name one side.
    """
    name = getattr(make, '__name__', '')
    signature = inspect.signature(make)
    model = inspect.Parameter('model', inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kind = inspect.Parameter('kind', inspect.Parameter.KEYWORD_ONLY, default=parameters)
    own = [
        kind if keyword == 'collections' else parameter
        for keyword, parameter in signature.parameters.items()
    ]
    signature = signature.replace(parameters=[model, *own], return_annotation='M')

    def decorate(documented: Callable[[], None]) -> Any:
        @functools.wraps(documented)
        def view_of(
            model: Any, *args: Any, kind: Kind = parameters, **kwargs: Any
        ) -> Any:
            given = signature.bind(model, *args, kind=kind, **kwargs)
            if side:
                where = filters.as_filter(given.arguments['where'])
                filters.named(where, side, f'nnx.{name}(model, {{}})')
            return view(Walk(model), make(*args, **kwargs), kind, name)

        vars(view_of)['__signature__'] = signature
        return view_of

    return decorate


@_takes_model(value_rewrites.stop_gradient, 'frozen')
def stop_gradient() -> None:
    """Returns a view of an NNX model in which the selected Variables get no gradient.

    ``where`` names what is **stopped**.

    The view is a model of the same class. It reads ``jax.lax.stop_gradient`` of the
    selected Variables, and *is* the model everywhere else: what is written through the
    view, such as batch statistics, reaches the model. The model itself stays trained.
    Make the view in the function that is differentiated:

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> class Model(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.backbone = nnx.Linear(2, 3, rngs=rngs)
    ...         self.head = nnx.Linear(3, 1, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.head(self.backbone(x))
    >>> model, x = Model(nnx.Rngs(0)), jnp.ones((4, 2))
    >>> def loss(model):
    ...     return jnp.sum(nnx.stop_gradient(model, 'backbone/**')(x))
    >>> grads = nnx.grad(loss)(model)
    >>> {name: bool(grads[name]['kernel'][...].any()) for name in ('backbone', 'head')}
    {'backbone': False, 'head': True}

    In a method, a view of ``self`` or of a part, which may be in evaluation mode while
    the model is not:

    >>> class Detached(Model):
    ...     def __call__(self, x):
    ...         frozen = nnx.stop_gradient(self.backbone, True)
    ...         frozen.eval()
    ...         return self.head(frozen(x))

    Args:
        model: an NNX module, or a container of modules. Paths begin in it:
            ``'layers/0/kernel'``.
        where: the Variables to stop: a glob on whole path components (``'gln_*/**'``:
            ``*`` within one, ``**`` any depth), ``re.Pattern``, a function
            ``(path) -> bool``, ``True``, a tree of bools, a sequence of these (any of),
            and ``~ & |`` on ``flax_sg.filters`` values. Tied weights are selected by
            any of their paths.
        kind: the Variables that may be selected, as an NNX filter: a type, a tag, or
            several. By default ``nnx.Param``, and real and complex arrays that are in
            no Variable.
        unused: ``'raise'`` if a part of ``where`` matches nothing, or ``'ignore'`` to
            let that pass.
        levels: how many levels of differentiation are stopped: None for all, 1 for the
            innermost one, as MAML needs it.

    Returns:
        The view. Modules, lists and dicts in it are copies, so what is *assigned* there
        (``frozen.eval()``, ``view.layer = ...``) stays in the view. A selected Variable
        is a new one of the same type and metadata.

    Raises:
        UnusedFilterError: if a part of ``where`` matches no Variable.
        ArgumentTypeError: if ``model`` is no NNX module, or a selected Variable is a
            mutable array of JAX.
        FilterTypeError: if ``where`` is no filter.

    Note:
        A view that is made *outside* of ``nnx.grad`` holds constants, and the gradient
        with respect to a view is that of its own values: nothing is stopped there. So
        is a view that a module keeps in an attribute. The idea is that of google/flax
        issue #1857; ``nnx.DiffState`` chooses for a whole call.
    """


@_takes_model(value_rewrites.train_only, 'trained')
def train_only() -> None:
    """Returns a view of an NNX model in which only the selected Variables are trained.

    ``where`` names what is **trained**.

    The complement of ``stop_gradient``.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    >>> def loss(model):
    ...     return jnp.sum(nnx.train_only(model, 'bias')(x))
    >>> grads = nnx.grad(loss)(model)
    >>> bool(grads['kernel'][...].any()), bool(grads['bias'][...].any())
    (False, True)

    Args:
        model: as in ``stop_gradient``.
        where: the Variables to train. All others of the ``kind`` are stopped.
        kind: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.
    """


def substitute(
    model: M,
    values: PyTree,
    *,
    where: Where | Absent = ABSENT,
    kind: Kind = parameters,
    unused: str = 'raise',
) -> M:
    """Returns a view of an NNX model that reads other values in its Variables.

    Gradients flow to these values, and not to the model.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> target = nnx.Linear(2, 1, rngs=nnx.Rngs(1))
    >>> x = jnp.ones((4, 2))
    >>> bool(jnp.all(nnx.substitute(model, target)(x) == target(x)))
    True

    Args:
        model: as in ``stop_gradient``.
        values: another model or a state with Variables at the same paths, a tree of
            arrays or models, nested as the Variables are, or a function
            ``(path, value) -> value``, which keeps the shape.
        where: the Variables that are read as other values: by default those in
            ``values``; all, if it is a function.
        kind: as in ``stop_gradient``; of the Variables in ``values``, too.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.

    Raises:
        ArgumentTypeError: for other ``values``.
        StructureError: if a value does not fit or is missing.
        UnusedFilterError: if a value belongs to no Variable, or a part of ``where``
            matches none.
    """
    if isinstance(values, str):
        raise wrong_argument(values, 'model or tree', 'nnx.substitute(model, target)')
    walk = Walk(model)
    if isinstance(values, (nnx.Pytree, Mapping, list, tuple)):
        return view(walk, other_values(walk, values, kind, where, unused), kind)
    rewrite = value_rewrites.substitute(values, where=where, unused=unused)
    return view(walk, rewrite, kind)


@_takes_model(cotangent_rewrites.map_cotangent)
def map_cotangent() -> None:
    """Returns a view whose gradients go through a function, for each Variable once.

    The cotangents of all reads through one view are summed before the function.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    >>> def loss(model):
    ...     view = nnx.map_cotangent(model, 'bias', lambda path, ct: jnp.sign(ct))
    ...     return jnp.sum(view(x))
    >>> nnx.grad(loss)(model)['bias'][...].tolist()
    [1.0]

    Args:
        model: as in ``stop_gradient``.
        where: the Variables whose gradients are mapped.
        fn: called as ``fn(path, cotangent, *values)``; returns the new cotangent.
        *values: numbers and arrays, traced or not, that ``fn`` needs.
        kind: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.

    Raises:
        CotangentError: in the backward pass, if ``fn`` changes the shape or the dtype.
    """


@_takes_model(cotangent_rewrites.scale_gradient)
def scale_gradient() -> None:
    """Returns a view whose gradients are multiplied by a number.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    >>> def loss(model):
    ...     return jnp.sum(nnx.scale_gradient(model, 'bias', 0.5)(x))
    >>> nnx.grad(loss)(model)['bias'][...].tolist()
    [2.0]

    Args:
        model: as in ``stop_gradient``.
        where: the Variables whose gradients are scaled.
        factor: a number, traced or not.
        kind: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.
    """


@_takes_model(cotangent_rewrites.reverse_gradient)
def reverse_gradient() -> None:
    """Returns a view whose gradients have the opposite sign.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    >>> def loss(model):
    ...     return jnp.sum(nnx.reverse_gradient(model, 'bias')(x))
    >>> nnx.grad(loss)(model)['bias'][...].tolist()
    [-4.0]

    Args:
        model: as in ``stop_gradient``.
        where: the Variables whose gradients are reversed.
        factor: a positive number that multiplies them too, as in
            ``flax_sg.linen.reverse_gradient``.
        kind: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.
    """


@_takes_model(cotangent_rewrites.clip_gradient)
def clip_gradient() -> None:
    """Returns a view whose gradients are clipped.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    >>> def loss(model):
    ...     return jnp.sum(nnx.clip_gradient(model, True, value=3.0)(x))
    >>> nnx.grad(loss)(model)['bias'][...].tolist()
    [3.0]

    Args:
        model: as in ``stop_gradient``.
        where: the Variables whose gradients are clipped.
        value: the largest absolute value of each element.
        norm: the largest norm of the gradient of each Variable.
        global_norm: the largest norm of all of them together. Give one of the three, a
            number from 0 on, traced or not.
        kind: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.

    Raises:
        ArgumentValueError: for several bounds or none, one that is an array, or one
            below 0.
        ArgumentTypeError: for a bound that is no number.
    """


@_takes_model(cotangent_rewrites.replace_cotangent)
def replace_cotangent() -> None:
    """Returns a view whose gradients are a given value.

    >>> import jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    >>> def loss(model):
    ...     return jnp.sum(nnx.replace_cotangent(model, 'bias', 7.0)(x))
    >>> nnx.grad(loss)(model)['bias'][...].tolist()
    [7.0]

    Args:
        model: as in ``stop_gradient``.
        where: the Variables whose gradients are replaced.
        value: the gradient: a number, or an array of the Variable's shape and dtype.
        kind: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.
    """


@_takes_model(cotangent_rewrites.print_cotangent)
def print_cotangent() -> None:
    """Returns a view that prints gradients in each backward pass.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    >>> def loss(model):
    ...     return jnp.sum(nnx.print_cotangent(model, 'bias')(x))
    >>> grads = nnx.grad(loss)(model)
    cotangent of bias: [4.]

    Args:
        model: as in ``stop_gradient``.
        where: the Variables whose gradients are printed.
        kind: as in ``stop_gradient``.
        unused: as in ``stop_gradient``.

    Returns:
        As ``stop_gradient``.
    """
