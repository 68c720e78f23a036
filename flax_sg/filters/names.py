"""Variables by name: a tree of bools, given values, the modules that they lie in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters import tokens
from flax_sg.filters.expressions import Atom, Filter, Need
from flax_sg.filters.hints import nearest
from flax_sg.filters.paths import Classes, Owner, Path, names_in
from flax_sg.internals import modules, tracing


class BoolTree(Atom):
    """The variables that a tree of bools, in the shape of the variables, marks True.

    A bool stands for everything below it, so a prefix of the tree will do. Every
    variable has to be in the tree; None may stand where there is none. One outside the
    module that opened the block is not in the tree, and is not meant. Leaves in one box
    (``nn.Partitioned``) share its path, and therefore have to agree.

    >>> from flax_sg import Path
    >>> from flax_sg.filters import BoolTree
    >>> tree = BoolTree({'gln': True, 'dec': {'kernel': False}})
    >>> tree(Path.of('params', ('gln', 'dense', 'kernel')))
    True

    Attributes:
        bools: the bool of each name in the tree, by the names that lead to it.

    Raises:
        FilterTypeError: if a leaf is no bool.
        ArgumentValueError: when called, if the tree has no answer for the path.
    """

    own_needs: ClassVar[frozenset[Need]] = frozenset({'names'})
    names_leaves: ClassVar[bool] = True
    bools: dict[tuple[str, ...], bool]

    # No dataclass: see ``Predicate``.
    def __init__(self, tree: Any) -> None:
        bools: dict[tuple[str, ...], bool] = {}
        for names, node in names_in(plain(tree)):
            leaves = jax.tree.leaves(node)
            are_bools = all(isinstance(leaf, (bool, np.bool_)) for leaf in leaves)
            if not are_bools or len({*map(bool, leaves)}) != 1:
                raise errors.FilterTypeError(
                    f'A tree of bools has {brief(node)} at {"/".join(names)!r}.\n'
                    'Give True or False at every leaf, and one of them for all that is '
                    "in a box: {'gln': True, 'dec': {'bias': False}}.\n"
                    'For a tree of arrays write sg.stop_gradient(tree, where).'
                )
            bools[names] = bool(leaves[0])
        object.__setattr__(self, 'bools', bools)

    @functools.cached_property
    def identity(self) -> Hashable:
        """The bools, in any order."""
        return frozenset(self.bools.items())

    def matches(self, path: Path) -> bool:
        """What the tree says; raises if it says nothing."""
        if path.outside:
            return False
        for depth in range(len(path.parts) + 1):
            if (take := self.bools.get(path.parts[:depth])) is not None:
                return take
        raise errors.ArgumentValueError(
            f'A tree of bools has no answer for the variable {str(path)!r} of the '
            f'collection {path.collection!r}.\n'
            'Give True or False for it. A tree starts below the collection: give '
            'tree[collection].'
        )

    @property
    def may_be_empty(self) -> bool:
        """Whether no leaf of the tree is True."""
        return not any(self.bools.values())

    def unused(
        self, took: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.UnusedFilterError | None:
        """The error if a name in the tree belongs to no variable."""
        variables = {path.parts for path in paths if not path.outside}
        known = {parts[:n] for parts in variables for n in range(len(parts) + 1)}
        missing = [names for names in self.bools if names not in known]
        return no_variables('A tree of bools', missing, paths) if missing else None

    def __repr__(self) -> str:
        return f'BoolTree({traverse_util.unflatten_dict(self.bools)!r})'


def plain(tree: Any) -> Any:
    """A tree with dicts and lists in place of mappings and sequences unknown to JAX."""

    def opened(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return {key: plain(value) for key, value in leaf.items()}
        if isinstance(leaf, Sequence) and not isinstance(leaf, (str, bytes)):
            return [plain(value) for value in leaf]
        return leaf

    return jax.tree.map(opened, tree)


@dataclasses.dataclass(frozen=True, eq=False)
class Collection(Atom):
    """The variables of one collection, in a tree of several.

    Paths begin below the collection, so globs cannot name it.

    >>> from flax_sg import Path
    >>> from flax_sg.filters import Collection
    >>> target = Collection('target_params')
    >>> target(Path.of('target_params', ('head', 'kernel')))
    True
    >>> import flax_sg as sg
    >>> agent = {'params': {'w': 1.0}, 'target_params': {'w': 2.0}}
    >>> sg.partition(agent, target & 'w')[0]
    {'params': {'w': ABSENT}, 'target_params': {'w': 2.0}}

    A block looks at the collection 'params', unless ``collections=`` names others.
    """

    name: str

    def matches(self, path: Path) -> bool:
        """Whether the variable is in the collection."""
        return path.collection == self.name

    def _advice(self, paths: Sequence[Path]) -> str:
        there = sorted({path.collection for path in paths})
        return f'The collections are {", ".join(map(repr, there))}.'

    def __repr__(self) -> str:
        return f'Collection({self.name!r})'


@dataclasses.dataclass(frozen=True, eq=False)
class Names(Atom):
    """The variables that are named, each by its collection and the names of its path.

    Every name has to belong to a variable. A variable outside the module that opened
    the block is not meant.

    >>> names = Names(frozenset({('params', ('dec', 'kernel'))}))
    >>> [names(Path.of('params', ('dec', name))) for name in ('kernel', 'bias')]
    [True, False]
    """

    own_needs: ClassVar[frozenset[Need]] = frozenset({'names'})
    names: frozenset[tuple[str, tuple[str, ...]]]

    @property
    def may_be_empty(self) -> bool:
        """Whether no name is given: at initialization nothing has a value yet."""
        return not self.names

    def matches(self, path: Path) -> bool:
        """Whether the variable is named."""
        return not path.outside and (path.collection, path.parts) in self.names

    def unused(
        self, took: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.UnusedFilterError | None:
        """The error if a name belongs to no variable."""
        variables = [path.variable for path in paths if not path.outside]
        met = {(path.collection, path.parts) for path in variables}
        missing = sorted(parts for _, parts in self.names - met)
        return no_variables('A tree of values', missing, paths) if missing else None

    def __repr__(self) -> str:
        names = sorted('/'.join(parts) for _, parts in self.names)
        more = f', and {len(names) - 3} more' if len(names) > 3 else ''
        return f'<{", ".join(names[:3])}{more}>'


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Derived(Atom):
    """The variables that ``sg.live`` or ``of_type`` found.

    Attributes:
        selected: the variables that are meant, see ``Path.place``.
        known: all variables that were looked at.
        source: what found them.
    """

    names_leaves: ClassVar[bool] = True
    selected: frozenset[tuple[str, tuple[str, ...]]]
    known: frozenset[tuple[str, tuple[str, ...]]]
    source: str = 'live'

    @property
    def may_be_empty(self) -> bool:
        """Whether ``sg.live`` found it: a function may train nothing."""
        return self.source == 'live'

    def matches(self, path: Path) -> bool:
        """Whether the variable is selected; raises if it was not looked at."""
        if path.place not in self.known:
            near = nearest(path.absolute, ('/'.join(names) for _, names in self.known))
            who = self.source if '.' in self.source else f'sg.{self.source}'
            raise errors.UnknownNameError(
                f'There was no {path.absolute!r} in the parameters that '
                f'{who} derived this filter from.\n'
                f'Nearest: {", ".join(map(repr, near)) or "none"}.\n'
                'Derive the filter again, from the tree that it is used for.'
            )
        return path.place in self.selected

    def __repr__(self) -> str:
        names = sorted('/'.join(names) for _, names in self.selected)
        shown = [repr(name) for name in names[:3]] + ['...'] * (len(names) > 3)
        return f'<{self.source}: {", ".join(shown) or "nothing"}>'


def no_variables(
    who: str, missing: Sequence[tuple[str, ...]], paths: Iterable[str]
) -> errors.UnusedFilterError:
    """A tree has names that belong to no variable."""
    path = '/'.join(missing[0])
    near = nearest(path, map(str, paths), 1)
    if path in near and '/' in ''.join(missing[0]):
        return errors.UnusedFilterError(
            f'{who} is flat: it has {path!r} for nested names.\n'
            "Nest it: flax.traverse_util.unflatten_dict(tree, sep='/')."
        )
    more = f' and {len(missing) - 1} more' if len(missing) > 1 else ''
    hint = f' (nearest: {near[0]!r})' if near else ''
    return errors.UnusedFilterError(
        f'{who} has a value for {path!r}{more}, which is no variable{hint}.\n'
        'Spell names as the variables, from below the collection. If some may be '
        "missing, pass unused='ignore'."
    )


class OfType(Atom):
    """The variables inside modules of some classes; see ``of_type``."""

    own_needs: ClassVar[frozenset[Need]] = frozenset({'classes'})
    classes: tuple[type, ...]

    # No dataclass: see ``Predicate``.
    def __init__(self, *classes: type) -> None:
        issubclass(nn.Module, classes)  # Raises if one of them is no class.
        object.__setattr__(self, 'classes', classes)

    @functools.cached_property
    def identity(self) -> Hashable:
        """The classes, in any order."""
        return frozenset(map(tokens.of_object, self.classes))

    def matches(self, path: Path) -> bool | None:
        """Whether a module around the variable is of the class; None if unknown."""
        around = path.classes or Classes((), complete=False)
        if any(issubclass(cls, self.classes) for cls in around.found):
            return True
        return False if around.complete else None

    def __repr__(self) -> str:
        return f'OfType({_names(self.classes)})'


def of_type(
    cls: type | tuple[type, ...],
    model: nn.Module | Mapping[str, Sequence[Any]] | None = None,
    *args: Any,
    **kw: Any,
) -> Filter:
    """Selects variables by the class of their module: all BatchNorm, every Embed.

    Inside a block or ``nn.Frozen`` the class is enough:

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> from flax_sg.filters import of_type
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
        model: an unbound module; without it the filter is for blocks and modules. For a
            tree of several models, each with its inputs by its name in the tree:
            ``{'actor': (actor, x), 'critic': (critic, x, action)}``.
        *args: example inputs of ``model.init``, arrays or their shapes.
        **kw: more of them, such as ``train=False`` or ``method=``.

    Returns:
        A filter. With a model its paths begin at the root of the model.

    Raises:
        TypeError: if ``cls`` is no class.
        FilterTypeError: later, if a filter without a model is used on a tree, or a
            variable is read before its module exists.

    Note:
        A block cannot know what the body of a transform will run, so it stops the
        gradient in the body. In ``nn.scan`` this costs memory for a copy of what is
        stopped; with a model the gradient is stopped outside. Give the model for
        other transforms than remat, jit, scan, vmap, while loops and branches, and, in
        all of them, for other rules than ``stop_gradient`` and ``read_only``.
    """
    where = OfType(*(cls if isinstance(cls, tuple) else (cls,)))
    if model is None:
        return where
    models = model if isinstance(model, Mapping) else {'': (model,)}
    paths = [
        Path.of(path.collection, (*filter(None, [name]), *path.parts), (), path.classes)
        for name, (one, *inputs) in models.items()
        for path in _paths_in(one, (*inputs, *args), kw)
    ]
    return Derived(
        frozenset(path.place for path in paths if where(path)),
        frozenset(path.place for path in paths),
        f'of_type({_names(where.classes)})',
    )


def _paths_in(model: nn.Module, args: Any, kwargs: Any) -> Iterator[Path]:
    """The paths of the variables of a model, with the classes of its modules."""
    found: dict[tuple[str, ...], Classes] = {}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = next_fun(*args, **kwargs)
        module = context.module
        for name, child in modules.children_of(module).items():
            if isinstance(child, str):  # A variable, and its collection.
                path = module.scope.path
                around = modules.classes_around(path, name, lambda scope: True)
                found[*path, name] = Classes(*around)
        return out

    def filled(leaf: Any) -> Any:
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return jnp.zeros(leaf.shape, leaf.dtype) if is_shape else leaf

    def init() -> Any:
        args_, kwargs_ = jax.tree.map(filled, (args, kwargs))
        # On a cache hit, a function of nn.jit would call no modules.
        with tracing.traced_anew(), nn.intercept_methods(note):
            return model.init(jax.random.key(0), *args_, **kwargs_)

    variables = jax.eval_shape(init)
    for collection, tree in variables.items():
        for names, _ in names_in(tree):
            ends = (names[:n] for n in range(len(names), 0, -1))
            around = next((found[path] for path in ends if path in found), None)
            yield Path.of(collection, names, (), around)


def _names(classes: tuple[type, ...]) -> str:
    return ', '.join(cls.__name__ for cls in classes)
