"""Values that ``setup`` keeps on a module, as seen under a block.

``self.w = self.param(...)`` and ``self.w2 = jnp.tanh(self.w)`` are plain attributes:
no read of a scope happens when a method uses them. What a module keeps is therefore
always the value of a program without blocks, and a reader in a block is given what
``setup`` would have kept under the block: it is run again on scratch scopes. Modules in
what it makes there are replaced by those that they stand for, since they would draw
from other random streams and lose what is written.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from flax_sg.engine import blocks, contents, selection, setup_runs
from flax_sg.internals import core_scopes, modules, tracing
from flax_sg.rules import rules

_Values = dict[str, Any]


def getattribute(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``Module.__getattribute__``: attributes that are there."""

    # Every attribute of every module passes here: the first test is the common case.
    def hook(self: Any, name: str) -> Any:
        if name in _STATE:
            return original(self, name)
        names = _names_of(type(self))
        if name in names.cached and blocks.thread.blocks:
            return _computed_anew(original, self, name)
        value = original(self, name)
        if name in names.others:
            return value
        if not blocks.thread.blocks or name not in original(self, '__dict__'):
            return value
        return _seen(self, name, value)

    return hook


def getattr_(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``Module.__getattr__``: attributes that ``setup`` is yet to make."""

    def hook(self: Any, name: str) -> Any:
        value = original(self, name)
        return _seen(self, name, value) if blocks.thread.blocks else value

    return hook


def try_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``Module._try_setup``: a module that is set up inside a block."""

    def hook(self: Any, shallow: bool = False) -> None:
        open_blocks = blocks.active()
        watched = open_blocks or blocks.thread.replay is not None
        if not watched or not modules.starts_setup(self):
            return original(self, shallow)
        if shallow:  # Flax runs setup for its checks, on a scope that is none.
            with blocks.thread.only(()):
                return original(self, shallow)
        root = blocks.root_of(self.scope)
        setup = _Setup(weakref.ref(self), open_blocks, setup_runs.Start.of(self.scope))
        root.setups[id(self)] = setup
        before = blocks.thread.rewritten
        try:
            original(self, shallow)
            if root.scratch:
                return None
            if blocks.thread.rewritten != before:
                viewed = _kept_arrays(self, open_blocks)
                plain = setup_runs.derive(self, (), viewed, setup.start)
                for name, value in plain.items():
                    object.__setattr__(self, name, value)
                _known(root, open_blocks[-1], self).viewed = viewed
        except BaseException:
            # Flax takes the module for set up all the same.
            for name in () if root.scratch else _kept_arrays(self, open_blocks):
                object.__delattr__(self, name)
            raise
        root.setups[id(self)] = setup._replace(made_in=())
        return None

    return hook


class _Setup(NamedTuple):
    """A run of ``setup``.

    Attributes:
        module: whose.
        made_in: the blocks under which the module's attributes were made.
        start: what it began with; None if nobody was there to see.
    """

    module: weakref.ref[Any]
    made_in: tuple[blocks.Block, ...] = ()
    start: setup_runs.Start | None = None


_STATE = frozenset({'scope', 'name', 'parent'} | modules.private_attributes())


class _Names(NamedTuple):
    """Names of a class's attributes.

    Attributes:
        others: those that ``setup`` does not make.
        cached: those that are computed when first read, and kept.
    """

    others: frozenset[str]
    cached: frozenset[str]


@functools.lru_cache(4096)  # Bounded: ``nn.remat(Dense)`` makes a class at each call.
def _names_of(cls: type) -> _Names:
    fields = dataclasses.fields(cls)
    properties = {
        name
        for base in cls.__mro__
        for name, attribute in vars(base).items()
        if hasattr(type(attribute), '__set__')
    }
    made = {field.name for field in fields if not field.init}
    cached = modules.cached_properties(cls)
    others = _STATE | {field.name for field in fields} | properties | cached
    return _Names(others - made, cached)


def _computed_anew(original: Callable[..., Any], module: Any, name: str) -> Any:
    """A cached property, neither taken from the cache nor left there."""
    attributes = original(module, '__dict__')
    cached = {key: attributes.pop(key) for key in (name,) if key in attributes}
    try:
        return original(module, name)
    finally:
        attributes.pop(name, None)
        attributes.update(cached)


def _is_derived(module: Any, value: Any, open_blocks: tuple[blocks.Block, ...]) -> bool:
    """Whether a kept value is another one under blocks, or may come to be."""
    if contents.holds_arrays(value) or contents.keeps_what_it_reads(value):
        return True
    # A stop changes nothing that is not traced; other values are other numbers. The
    # factor of a rewrite is none that was made of variables.
    brings = any(block.rewrite.rule.brings for block in open_blocks)
    if not brings or isinstance(value, rules.Rewrite):
        return False
    return contents.holds_arrays(value, numbers=True) and _has_numbers(module)


def _has_numbers(module: Any) -> bool:
    """Whether a variable that ``setup`` may have read, of any module, is not traced."""
    scope = object.__getattribute__(module, 'scope')
    leaves = jax.tree_util.tree_leaves(core_scopes.stored(scope.root))
    return not all(isinstance(leaf, tracing.Tracer) for leaf in leaves)


def _kept_arrays(module: Any, open_blocks: tuple[blocks.Block, ...]) -> _Values:
    """What ``setup`` has kept on a module and arrays are, or may be, reached from."""
    others = _names_of(type(module)).others
    attributes = object.__getattribute__(module, '__dict__')
    return {
        name: value
        for name, value in attributes.items()
        if name not in others and _is_derived(module, value, open_blocks)
    }


@dataclasses.dataclass
class _Known:
    """What is known of the values that one module keeps, under one block."""

    module: weakref.ref[Any]
    viewed: Mapping[str, Any] | None = None
    without_arrays: _Values = dataclasses.field(default_factory=dict)


def _known(root: blocks.Root, block: blocks.Block, module: Any) -> _Known:
    of_block = root.setup_values.setdefault(block, {})
    known = of_block.get(id(module))
    if known is None or known.module() is not module:
        known = of_block[id(module)] = _Known(weakref.ref(module))
    return known


def _seen(module: Any, name: str, value: Any) -> Any:
    """What a reader in the open blocks sees of one kept value."""
    if isinstance(value, contents.CLOSED):
        return value
    scope = object.__getattribute__(module, 'scope')
    open_blocks = blocks.active()
    if scope is None or not open_blocks:
        return value
    root = blocks.root_of(scope)
    setup = root.setups.get(id(module))
    if setup is None or setup.module() is not module:
        setup = _Setup(weakref.ref(module))
    if setup.made_in == open_blocks:
        return value
    known = _known(root, open_blocks[-1], module)
    if known.without_arrays.get(name, known) is value:
        return value
    if not _is_derived(module, value, open_blocks):
        known.without_arrays[name] = value
        return value
    if not modules.is_set_up(module):  # In a block in ``setup`` itself.
        kept, until = {name: value}, open_blocks[-1]
        derived = setup_runs.derive(module, open_blocks, kept, setup.start, until)
        _note_all(open_blocks, root)
        return derived[name]
    viewed = known.viewed
    if viewed is None:
        kept = _kept_arrays(module, open_blocks)
        viewed = known.viewed = setup_runs.derive(
            module, open_blocks, kept, setup.start
        )
    _note_all(open_blocks, root)
    return viewed.get(name, value)


def _note_all(open_blocks: tuple[blocks.Block, ...], root: blocks.Root) -> None:
    """Notes what a kept value depends on, where it was derived before."""
    for block in open_blocks:
        selection.note_all(block, root)
