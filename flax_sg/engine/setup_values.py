"""Applies the open blocks to values that ``setup`` keeps on a module.

``self.w = self.param(...)`` and ``self.w2 = jnp.tanh(self.w)`` are plain attributes:
a method that uses them reads no scope. The module keeps the values of a program without
blocks. A reader in a block gets the values that ``setup`` would make under the block:

1. A parameter is recognized by identity, and read again.
2. If a value was computed from variables, ``setup`` runs once more, under the block.
3. Modules in such a value stay those of the first run: new modules would draw other
   random numbers. An object or a function that holds arrays *and* modules cannot be
   rebuilt, so it raises an error.

Running ``setup`` on the current scope would be wrong in three cases: it reads a state
that was written since, draws random numbers, or makes a module elsewhere write or draw
again. So it runs on scratch scopes, and the hooks on Flax's scopes watch the run. If a
value may differ from the first run, an error is raised.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope

from flax_sg import errors
from flax_sg.engine import blocks, contents, selection, views
from flax_sg.engine.roots import Blocks, Root, carry
from flax_sg.internals import core_scopes, modules, patching, tracing
from flax_sg.internals.modules import Module
from flax_sg.internals.types import Array, BoundModule, PyTree
from flax_sg.trees.variables import Key


class Kept:
    """Stands on a class for an attribute in which its modules may keep arrays.

    Modules have their values where they would have them without it: copies, and all
    that looks into ``vars(module)``, know nothing of it.
    """

    def __init__(self, cls: type, name: str) -> None:
        self._cls, self._name = cls, name
        self._before = vars(cls).get(name, _Nothing)

    def __get__(self, module: Module | None, cls: type) -> Any:
        value = _Nothing if module is None else vars(module).get(self._name, _Nothing)
        if value is not _Nothing:
            return _seen(module, self._name, value) if blocks.active() else value
        if self._before is _Nothing:
            target = cls if module is None else module
            return getattr(super(self._cls, target), self._name)
        get = getattr(type(self._before), '__get__', None)
        return get(self._before, module, cls) if get else self._before

    def __set__(self, module: Module, value: object) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Module) -> None:
        if self._name not in vars(module):
            raise AttributeError(self._name)
        del vars(module)[self._name]


class _Nothing:
    """Stands for an attribute that is missing.

    Pickle finds a class by its name. So it is the same object in a ``Kept`` that was
    pickled with the class of a module.
    """


def _keep(module: Module) -> None:
    """Puts a ``Kept`` on the class for each attribute that may hold arrays of setup."""
    cls = type(module)
    for name, value in _made_in_setup(module):
        if isinstance(value, contents.CLOSED):  # Most attributes are modules.
            continue
        descriptor = inspect.getattr_static(cls, name, None)
        # The class has a ``Kept`` already, or a descriptor of the user, which stays.
        if not hasattr(type(descriptor), '__set__'):
            # Past a metaclass of the user, which may refuse attributes, or count them.
            type.__setattr__(cls, name, Kept(cls, name))


def _made_in_setup(module: Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes that are neither arguments of a module nor of Flax."""
    for name in vars(module).keys() - _OF_FLAX:
        if not _is_argument(module, name):
            yield name, vars(module)[name]


def _is_argument(module: Module, name: str) -> bool:
    field = module.__dataclass_fields__.get(name)
    return field is not None and field.init


_OF_FLAX = frozenset({'scope', 'name', 'parent'} | modules.attributes())


def look_at_what_is_older() -> None:
    """Does the work of the hooks for scopes and modules that were bound before them."""
    by_variables: dict[int, Root] = {}  # Rewound copies of a scope share a tree.
    # Only processes of their own have tests of this: see tests/forms/test_linen.py.
    for thing in gc.get_objects():  # pragma: no cover
        cls = type(thing)
        if cls is Scope and thing.root is thing:
            variables = id(core_scopes.variables_of(thing))
            if variables in by_variables:
                carry(thing, by_variables[variables])
            else:
                by_variables[variables] = blocks.begin(thing, depth=0)
        elif issubclass(cls, modules.Module) and modules.is_set_up(thing):
            _keep(thing)


def keep_in_setup() -> None:
    """Keeps attributes of modules whose ``setup`` runs, since a block opens in it."""
    for module in modules.in_setup():
        _keep(module)


def getattr_(self: Any, name: str) -> Any:
    """The hook for ``Module.__getattr__``, which runs ``setup`` if it has to."""
    value = patching.originals['getattr'](self, name)
    return object.__getattribute__(self, name) if blocks.thread.blocks else value


def try_setup(self: Any, shallow: bool = False) -> None:
    """The hook for ``Module._try_setup``: what ``setup`` keeps depends on no block."""
    original = patching.originals['try_setup']
    if not modules.starts_setup(self):
        return original(self, shallow)
    if shallow:  # Flax only checks setup, on a scope made for the check.
        with blocks.thread.only(()):
            return original(self, shallow)
    try:
        return _set_up(self, original) if blocks.active() else original(self)
    finally:
        _keep(self)


def _set_up(self: Any, original: Callable[[Any], None]) -> None:
    (root, open_blocks), before = _covering(self.scope), blocks.thread.rewritten
    root.setups.running[id(self)] = open_blocks
    # A second run is for the values that it makes in its blocks, so they stay.
    if root.setups.made_in is not None:
        return original(self)
    try:
        original(self)
    finally:
        del root.setups.running[id(self)]
    # ``init`` differentiates nothing, so a stopped value may stay.
    if blocks.thread.rewritten != before and not root.initializing:
        _make_plain(_SetupValues.of(self, root, open_blocks))


def _covering(scope: Scope) -> tuple[Root, Blocks]:
    """Returns the root of a scope's tree, and the open blocks that cover it."""
    root = blocks.root_of(scope)
    return root, tuple(block for block in blocks.active() if block.covers(root))


def _make_plain(viewed: _SetupValues) -> None:
    """Replaces values made in blocks by those that ``setup`` makes without blocks."""
    module, plain = viewed.module, _SetupValues(viewed.module, viewed.root, ())
    for name, value in _made_in_setup(module):
        if contents.may_hold(value, contents.NUMERIC):
            new = plain.convert(name, value, viewed.blocks)
            viewed.shown[name] = new, value, True
            object.__setattr__(module, name, new)


def _seen(module: BoundModule, name: str, value: object) -> Any:
    """Returns the value of an attribute that a reader in the open blocks sees."""
    scope = object.__getattribute__(module, 'scope')
    # The ``Kept`` may be that of a base class, whose ``setup`` makes this attribute.
    if scope is None or _is_argument(module, name):
        return value
    root, open_blocks = _covering(scope)
    if not open_blocks:
        return value
    made_in = root.setups.running.get(id(module), root.setups.made_in or ())
    if root.initializing or made_in == open_blocks:
        return value
    values = _SetupValues.of(module, root, open_blocks)
    shown = values.shown.get(name)
    if shown is None or shown[0] is not value:
        viewed = values.convert(name, value, made_in)
        depends = viewed is not value or contents.may_hold(value, contents.ARRAYS)
        shown = values.shown[name] = value, viewed, depends
    _, viewed, depends = shown
    # The value may have been made in another trace. So this trace has not noted the
    # decisions that the value depends on.
    if depends:
        for block in open_blocks:
            selection.note_all(block, root)
    return viewed


@dataclasses.dataclass
class _SetupValues:
    """The values that ``setup`` keeps on one module, under some open blocks.

    Attributes:
        module: the module.
        root: the state of its variable tree.
        blocks: the open blocks.
        shown: for each attribute name, the stored value, the value that a reader sees,
            and whether that value depends on what the blocks select.
    """

    module: BoundModule
    root: Root
    blocks: Blocks
    shown: dict[str, tuple[Any, Any, bool]] = dataclasses.field(default_factory=dict)
    _again: dict[str, Any] | None = None

    @classmethod
    def of(cls, module: BoundModule, root: Root, open_blocks: Blocks) -> _SetupValues:
        """Returns the values of a module, cached until the innermost block closes."""
        of_block = root.setups.values.setdefault(open_blocks[-1], {})
        if id(module) not in of_block:
            of_block[id(module)] = cls(module, root, open_blocks)
        return of_block[id(module)]

    def convert(self, name: str, value: PyTree, made_in: Blocks) -> Any:
        """Converts a value made in blocks ``made_in`` to its value in these blocks."""
        classes = self._may_change(made_in)
        if not contents.may_hold(value, classes):
            return value
        if variable := self._variable_of(value, made_in, classes):
            return views.view(self.root, self.blocks, *variable)
        made_again = self._made_again(name, made_in)
        if not made_again:  # No block changes what setup reads.
            return value
        if name not in made_again:
            raise _cannot_see(self.module, name, 'setup did not make it again')
        try:
            return _joined(value, made_again[name], classes)
        except ValueError as error:
            raise _cannot_see(self.module, name, str(error)) from None

    def _may_change(self, made_in: Blocks) -> tuple[type, ...]:
        """The classes of values that may differ in these blocks.

        A stop changes tracers only. A rule that brings values changes numpy arrays and
        floats, too, which ``setup`` may have computed from untraced variables.
        """
        brings = any(block.rewrite.rule.brings for block in (*made_in, *self.blocks))
        is_all = brings and _has_untraced(self.module)
        return contents.NUMERIC if is_all else contents.ARRAYS

    def _variable_of(
        self, value: PyTree, made_in: Blocks, classes: tuple[type, ...]
    ) -> tuple[Key, Any] | None:
        """The key and the stored leaf, if a value surely is one variable.

        A tracer is one variable. An untraced array may be a variable, and also the
        stopped form of another one: a stop treats both alike, but without blocks they
        differ.
        """
        stops = bool(self.blocks) and classes is contents.ARRAYS
        if not isinstance(value, contents.ARRAYS if stops else tracing.Tracer):
            return None
        pairs = self._candidates(value, made_in) or self._candidates(value, self.blocks)
        if len(pairs) != 1:
            return None
        # If variables of other modules share the array, nothing tells which was read.
        # A write may make them share it, so they are counted each time.
        every = jax.tree.leaves(core_scopes.stored(self.module.scope.root))
        same = map(operator.is_, every, itertools.repeat(pairs[0][1]))
        return pairs[0] if sum(same) == 1 else None

    def _candidates(self, value: PyTree, made_in: Blocks) -> list[tuple[Key, Any]]:
        """The keys and stored leaves that a value may be, if these blocks were open.

        Another collection may hold the array that a block shows for a parameter. Then
        there are two, and nothing tells which was read.
        """
        scope = self.module.scope
        stored = core_scopes.stored(scope)
        pairs: list[tuple[Key, Any]] = []
        for collection, tree in stored.items():
            for name, variable in tree.items():
                key = collection, (*scope.path, name)
                leaf = views.stored(self.root, made_in, key, value)
                if not isinstance(variable, Mapping):
                    leaves = jax.tree.leaves(variable)
                    count = sum(other is leaf for other in leaves)
                    pairs += [(key, leaf)] * count
        return pairs

    def _made_again(self, name: str, made_in: Blocks) -> dict[str, Any]:
        """What ``setup`` makes in these blocks; empty if they change nothing."""
        if self._again is None:
            if not modules.is_set_up(self.module):
                reason = 'setup has not ended, and would have to run again'
                raise _cannot_see(self.module, name, reason)
            self._again = _run_again(self.module, name, self.blocks, made_in)
        return self._again


def _joined(old: PyTree, new: PyTree, classes: tuple[type, ...]) -> Any:
    """Combines new arrays of a second ``setup`` run with the first run's modules."""
    if not contents.may_hold(old, classes):
        return old
    if not contents.may_hold(new, contents.MODULES):
        return new
    if type(old) is not type(new):
        raise ValueError('setup made another type of value when it ran again')
    if isinstance(old, (dict, FrozenDict)) and old.keys() == new.keys():
        return type(old)({key: _joined(old[key], new[key], classes) for key in old})
    if isinstance(old, (tuple, list)) and len(old) == len(new):
        items = [_joined(*pair, classes) for pair in zip(old, new, strict=True)]
        return type(old)(*items) if hasattr(old, '_fields') else type(old)(items)
    raise ValueError('it holds a module as well as an array')


def _has_untraced(module: BoundModule) -> bool:
    """Whether any variable that ``setup`` may have read, in any module, is untraced."""
    leaves = jax.tree_util.tree_leaves(core_scopes.stored(module.scope.root))
    return not all(isinstance(leaf, tracing.Tracer) for leaf in leaves)


# The second run of ``setup``.


def _run_again(
    module: BoundModule, name: str, open_blocks: Blocks, made_in: Blocks
) -> dict[str, Any]:
    """Runs a module's ``setup`` on scratch scopes, and returns its attributes.

    Args:
        module: a bound module whose ``setup`` has run.
        name: the attribute to report in an error.
        open_blocks: the blocks to run under; empty for the values without blocks.
        made_in: the blocks that the first run was in.

    Returns:
        The attributes that ``setup`` makes; empty if the blocks change nothing.

    Raises:
        BlockError: if this run may differ from the first one.
    """

    def scratch_of(scope: Scope) -> Scope:
        scratch = core_scopes.scratch_scope(scope)
        carry(scratch, blocks.used(blocks.root_of(scope).as_scratch(open_blocks)))
        return scratch

    outer, thread = blocks.thread.doubts, blocks.thread
    levels = [block.level for block in open_blocks if block.rewrite.rule.brings]
    trace = tracing.in_innermost_trace([*levels, module.scope.trace_level])
    with trace, thread.only(open_blocks):
        tops, copies = core_scopes.copy_scopes(modules.scopes_of(module), scratch_of)
        before = thread.rewritten
        doubts = thread.doubts = []
        try:
            clone = modules.clone_on(module, copies)
            modules.run_setup(clone)
        except Exception as error:
            error.add_note('Raised when setup ran again, for values in an open block.')
            raise
        finally:
            thread.doubts = outer
        # A second run makes new array objects: use them only if a rule was applied.
        if not made_in and thread.rewritten == before:
            return {}
    if doubts:
        reason = f'setup would have to run again, and {doubts[0]}'
        raise _cannot_see(module, name, reason)
    for copied in tops.values():
        copied.invalidate()
    return dict(vars(clone))


def make_rng(self: Scope, name: str = 'params') -> Array:
    """The hook for ``Scope.make_rng``: notes why a second run may differ."""
    key, doubts = patching.originals['make_rng'](self, name), blocks.thread.doubts
    if doubts is not None and not blocks.root_of(self).setups.is_new:
        # The scope is that of another module, whose later draws must stay the same.
        self.rng_counters[name if self.has_rng(name) else 'params'] -= 1
        doubts.append('it draws random numbers')
    return key


def _cannot_see(module: BoundModule, name: str, reason: str) -> errors.BlockError:
    """Makes the error for a ``setup`` value that cannot be recomputed in a block."""
    path = '/'.join(module.scope.path)
    return errors.BlockError(
        f'self.{name}, which setup of {type(module).__name__} (at {path!r}) makes, '
        f'cannot be computed again for the open block: {reason}.\n'
        f'Keep parameters and modules in setup (self.w = self.param(...)), and compute '
        f'self.{name} in the method that uses it.'
    )
