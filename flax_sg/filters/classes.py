"""``of_type``: a filter of variables by the class of their module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.core import Scope

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters.expressions import Filter
from flax_sg.filters.inputs import inputs_explained
from flax_sg.filters.names import Derived
from flax_sg.filters.paths import names_in
from flax_sg.internals import initializing, modules
from flax_sg.internals.optional import is_of_nnx
from flax_sg.internals.types import Args, Kwargs, Model, PyTree


def of_type(
    cls: type | tuple[type, ...],
    model: Model = None,
    *args: Any,
    **kw: Any,
) -> Filter:
    """Selects variables by the class of their module: all BatchNorm, every Embed.

    Give the model and example inputs. ``model.init`` is traced on shapes, and not run:

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> from flax_sg.filters import of_type
    >>> model = nn.Sequential([nn.Dense(2), nn.LayerNorm(), nn.Dense(1)])
    >>> x = jnp.ones((4, 3))
    >>> norms = of_type(nn.LayerNorm, model, x)
    >>> norms
    <of_type(LayerNorm): 'layers_1/bias', 'layers_1/scale'>
    >>> params = model.init(jax.random.key(0), x)['params']
    >>> sg.mask(params, frozen=norms)['layers_1']
    {'bias': True, 'scale': True}
    >>> frozen = nn.Frozen(model, norms)

    A model of NNX has its Variables, and needs no inputs:

    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
    >>> of_type(nnx.Linear, model)
    <of_type(Linear): 'layers/0/bias', 'layers/0/kernel'>

    A variable is meant if *any* outer module of it is of the class: the module that has
    it, or one further out. Subclasses count, and so do modules in transforms
    (``nn.remat(Block)``, ``nn.scan(Cell)``) and in wrappers such as ``nn.Frozen``.

    Args:
        cls: a Module class, or a tuple of classes, as for ``isinstance``.
        model: an unbound module, or a model of NNX. For a tree of several models, each
            with its inputs by its name in the tree:
            ``{'actor': (actor, x), 'critic': (critic, x, a)}``.
        *args: example inputs of ``model.init``, arrays or their shapes.
        **kw: more of them, such as ``train=False`` or ``method=``.

    Returns:
        A filter, whose paths begin at the root of the model. In a wrapper or block of
        a module they begin at this module: ``nn.Frozen(backbone, of_type(nn.LayerNorm,
        backbone, x))`` is right wherever the backbone is mounted.

    Raises:
        ArgumentTypeError: if ``cls`` is no class, and no tuple of classes.
        FilterTypeError: if no model is given.
        ArgumentTypeError: if the model raises for variables, a random key or a filter
            in the place of its inputs, or has none.
        UnknownNameError: later, if it is asked for a variable that the model lacks.
    """
    classes = cls if isinstance(cls, tuple) else (cls,)
    arguments: tuple[Any, ...] = classes
    for each in arguments:
        if not isinstance(each, type):
            raise errors.ArgumentTypeError(
                f'of_type was given {brief(each)}, where the class of a module is '
                'expected.\n'
                'Write filters.of_type(nn.LayerNorm, model, x); for several classes '
                'give a tuple of them.'
            )
    names = ', '.join(cls.__name__ for cls in classes)
    if model is None:
        raise errors.FilterTypeError(
            f'of_type({names}) was given no model: a variable does not know the class '
            'of its module.\n'
            f'Give the model and example inputs: filters.of_type({names}, model, x).'
        )
    is_one = not isinstance(model, Mapping) or _is_of_nnx(model)
    models: Any = {'': (model,)} if is_one else model
    is_meant_at = {
        (collection, (*filter(None, [name]), *path)): any(
            issubclass(module, classes) for module in outer
        )
        for name, entry in models.items()
        for collection, path, outer in _variables(
            *_model_and_inputs(names, name, entry, args), kw
        )
    }
    selected = frozenset(place for place, is_meant in is_meant_at.items() if is_meant)
    return Derived(selected, frozenset(is_meant_at), f'of_type({names})')


def _model_and_inputs(
    names: str, name: str, entry: Any, args: Args
) -> tuple[Any, tuple[Any, ...]]:
    """A model and its inputs, of what is given for it; raises if it is no model."""
    model, *inputs = entry if isinstance(entry, tuple) and entry else (entry,)
    if _is_of_nnx(model) or isinstance(getattr(model, 'init', None), Callable):
        return model, (*inputs, *args)
    of_name = f' at {name!r}' if name else ''
    raise errors.FilterTypeError(
        f'of_type({names}) was given {brief(model)}{of_name}, which is no model: '
        'variables do not know the classes of their modules.\n'
        f'Give the model and example inputs: filters.of_type({names}, model, x); for '
        "several models a dict: {'actor': (actor, x), 'critic': (critic, x, a)}."
    )


def _variables(
    model: Model, args: Args, kwargs: Kwargs
) -> Iterator[tuple[str, tuple[str, ...], set[type]]]:
    """Yields the variables of a model, with the classes of their outer modules."""
    if _is_of_nnx(model):
        yield from _variables_of_nnx(model)
        return
    at: dict[tuple[str, ...], set[type]] = {}  # The classes of modules at each path.
    declaring: dict[tuple[str, ...], set[type]] = {}  # By the path of a variable.

    def note(
        next_fun: Callable[..., PyTree], args: Args, kwargs: Kwargs, context: Any
    ) -> Any:
        out = next_fun(*args, **kwargs)
        module, path = context.module, context.module.scope.path
        if type(module.scope) is not Scope:  # Flax tries ``setup`` on one of its own.
            return out
        at.setdefault(path, set()).add(type(module))
        for name, child in modules.children_of(module).items():
            if isinstance(child, str):  # A variable, and its collection.
                # ``nn.share_scope`` may give one path to two modules.
                declaring.setdefault((*path, name), set()).add(type(module))
        return out

    rngs = jax.eval_shape(lambda: jax.random.key(0))
    with inputs_explained('filters.of_type(cls, {})', model, args, kwargs):
        variables = initializing.variables_of(model, rngs, args, kwargs, note)
    for collection, tree in variables.items():
        for names, inner, _ in names_in(tree):
            above = (at.get(names[:n], set()) for n in range(len(names) - 1))
            outer = declaring.get(names, at.get(names[:-1], set())).union(*above)
            yield collection, (*names, *inner), outer


def _is_of_nnx(model: Model) -> bool:
    """Whether it is a model of NNX, or a tree with some, and no tuple with inputs."""
    if type(model) is dict and all(type(x) is tuple for x in model.values()):
        return False
    nodes = jax.tree.leaves(model, is_leaf=_is_node)
    return any(is_of_nnx(type(node), 'Pytree') for node in nodes)


def _is_node(value: object) -> bool:
    return is_of_nnx(type(value), 'Pytree', 'Variable')


def _children(node: object) -> list[Any]:
    """The modules, Variables and arrays directly in a module of NNX."""
    is_unknown = jax.tree_util.all_leaves([node])  # Made with ``pytree=False``.
    inside = [*vars(node).values()] if is_unknown else node
    return jax.tree.leaves(inside, is_leaf=lambda x: x is not inside and _is_node(x))


def _variables_of_nnx(model: Model) -> Iterator[tuple[str, tuple[str, ...], set[type]]]:
    """The same of a model of NNX. A tied Variable has the outer modules of each place.

    A child may have an attribute that is its parent. No path leads through the parent
    twice, so the child is no outer module of what else the parent has.
    """
    from flax import nnx  # Models of linen do not wait for it.

    outer = dict[int, set[type]]()
    met = set[tuple[int, frozenset[int]]]()

    def visit(nodes: Sequence[Any], modules: Mapping[int, type]) -> None:
        for node in nodes:
            if not is_of_nnx(type(node), 'Pytree'):
                outer.setdefault(id(node), set()).update(modules.values())
            elif id(node) not in modules:
                inside = {**modules, id(node): type(node)}
                key = id(node), frozenset(inside)
                if key not in met:
                    met.add(key)
                    visit(_children(node), inside)

    visit(jax.tree.leaves(model, is_leaf=_is_node), {})
    for keys, value in nnx.to_flat_state(nnx.state(model)):
        yield 'params', tuple(map(str, keys)), outer.get(id(value), set())
