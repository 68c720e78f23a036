"""Variables chosen by the class of the module that they lie in."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from typing import Any, cast

import flax.linen as nn
import jax

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters.expressions import Atom, Filter
from flax_sg.filters.names import Derived
from flax_sg.filters.paths import Classes, Path, names_in
from flax_sg.internals import modules


class OfType(Atom):
    """The variables inside modules of some classes; see ``of_type``."""

    classes: tuple[type, ...]

    # No dataclass: see ``Predicate``.
    def __init__(self, *classes: type) -> None:
        object.__setattr__(self, 'classes', classes)

    def __reduce__(self) -> Any:
        return OfType, self.classes

    @functools.cached_property
    def _value(self) -> Hashable:
        return frozenset(self.classes)

    def _matches(self, path: Path) -> bool | None:
        around = path.classes or Classes((), complete=False)
        if any(issubclass(cls, self.classes) for cls in around.found):
            return True
        return False if around.complete else None

    def __repr__(self) -> str:
        return f'OfType({_names(self.classes)})'


def of_type(
    cls: type | tuple[type, ...], model: nn.Module | None = None, *args: Any, **kw: Any
) -> Filter:
    """Selects variables by the class of their module: all BatchNorm, every Embed.

    Inside a block or ``nn.Frozen`` the class is enough:

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> model = nn.Sequential([nn.Dense(2), nn.LayerNorm(), nn.Dense(1)])
    >>> x = jnp.ones((4, 3))
    >>> params = model.init(jax.random.key(0), x)['params']
    >>> def loss(params):
    ...     with nn.stop_gradient(~of_type(nn.LayerNorm)):
    ...         return jnp.sum(model.apply({'params': params}, x) ** 2)
    >>> grads = jax.grad(loss)(params)
    >>> {name: bool(jnp.any(g['bias'] != 0)) for name, g in grads.items()}
    {'layers_0': False, 'layers_1': True, 'layers_2': False}

    A tree does not know its modules. For ``sg.freeze``, ``wrt=``, masks and other trees
    give the model and example inputs. ``model.init`` is traced on shapes, and not run:

    >>> norms = of_type(nn.LayerNorm, model, x)
    >>> norms
    <of_type(LayerNorm): 'layers_1/bias', 'layers_1/scale'>
    >>> sg.mask(params, frozen=norms)['layers_1']
    {'bias': True, 'scale': True}

    A variable is meant if *any* module around it is of the class: the module that holds
    it, or one further out. Subclasses count, and so do modules in transforms
    (``nn.remat(Block)``, ``nn.scan(Cell)``) and in wrappers such as ``nn.Frozen``.

    Args:
        cls: a Module class, or a tuple of classes, as for ``isinstance``.
        model: an unbound module; without it the filter is for blocks and modules.
        *args: example inputs of ``model.init``, arrays or their shapes.
        **kw: more of them, such as ``train=False`` or ``method=``.

    Returns:
        A filter. With a model its paths begin at the root of the model.

    Raises:
        FilterTypeError: if ``cls`` is no class, or ``model`` no module; later, if a
            filter without a model is used on a tree, or a variable is read before its
            module exists.

    Note:
        A block cannot know what the body of a transform will run, so it stops the
        gradient in the body. In ``nn.scan`` this costs memory for a copy of what is
        stopped; with a model the gradient is stopped outside. Give the model for
        other transforms than remat, jit, scan, vmap, while loops and branches, and, in
        all of them, for other rules than ``stop_gradient`` and ``read_only``.
    """
    given: Any = cls
    classes = given if isinstance(given, tuple) else (given,)
    wrong = [one for one in classes if not isinstance(one, type)]
    if wrong or not classes:
        raise errors.FilterTypeError(
            f'filters.of_type got {brief(wrong[0] if wrong else classes)}, and expects '
            'a Module class or a tuple of them.\n'
            'Write filters.of_type(nn.BatchNorm).'
        )
    where = OfType(*classes)
    if model is None:
        return where
    if not isinstance(cast('Any', model), nn.Module):
        raise errors.FilterTypeError(
            f'filters.of_type got {brief(model)} as the model.\n'
            'Give the module and example inputs: '
            'filters.of_type(nn.BatchNorm, model, x).'
        )
    paths = list(_paths_in(model, args, kw))
    return Derived(
        frozenset((path.collection, path.absolute) for path in paths if where(path)),
        frozenset((path.collection, path.absolute) for path in paths),
        f'of_type({_names(classes)})',
    )


def _paths_in(model: nn.Module, args: Any, kwargs: Any) -> Iterator[Path]:
    """The paths of the variables of a model, with the classes of its modules."""
    found: dict[tuple[str, ...], Classes] = {}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = next_fun(*args, **kwargs)
        module = context.module
        for name, child in modules.children_of(module).items():
            if isinstance(child, str):  # A variable, and its collection.
                path = (*module.scope.path, name)
                found[path] = Classes(*modules.classes_around(path[:-1], name, _any))
        return out

    leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
    is_array = [hasattr(leaf, 'shape') and hasattr(leaf, 'dtype') for leaf in leaves]

    def init(key: Any, arrays: list[Any]) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if a else b for a, b in zip(is_array, leaves, strict=True)]
        args, kwargs = jax.tree_util.tree_unflatten(treedef, filled)
        with nn.intercept_methods(note):
            return model.init(key, *args, **kwargs)

    arrays = [leaf for a, leaf in zip(is_array, leaves, strict=True) if a]
    variables = jax.eval_shape(init, jax.random.key(0), arrays)
    for collection, tree in variables.items():
        for names, _ in names_in(tree):
            ends = (names[:n] for n in range(len(names), 0, -1))
            around = next((found[path] for path in ends if path in found), None)
            yield Path.of(collection, names, (), around)


def _any(scope: Any) -> bool:
    return True


def _names(classes: tuple[type, ...]) -> str:
    return ', '.join(cls.__name__ for cls in classes)
