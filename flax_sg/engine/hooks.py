"""The hooks on the methods by which Flax reads and writes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

from flax.core import meta
from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope

from flax_sg.engine import (
    blocks,
    judgement,
    late_rules,
    roots,
    setup_values,
    views,
    writeback,
    writes,
)
from flax_sg.internals import modules, patching
from flax_sg.internals.types import PyTree
from flax_sg.trees.variables import MISSING

# The functions of Flax and JAX that the hooks stand on, by their names.
_original = patching.originals


def _get_variable(self: Scope, col: str, name: str, default: PyTree = None) -> PyTree:
    open_blocks = blocks.active()
    if not open_blocks:
        return _original['get_variable'](self, col, name, default)
    value = _original['get_variable'](self, col, name, MISSING)
    if value is MISSING:
        return default
    key = (col, (*self.path, name))
    return views.view(blocks.root_of(self), open_blocks, key, value)


def _variables(self: Scope) -> Mapping[str, PyTree]:
    variables = _original['variables'](self)
    open_blocks = blocks.active()
    if not open_blocks:
        return variables
    root = blocks.root_of(self)
    viewed = {
        col: views.view(root, open_blocks, (col, self.path), tree)
        for col, tree in variables.items()
    }
    return FrozenDict(viewed) if isinstance(variables, FrozenDict) else viewed


def _param(
    self: Scope,
    name: str,
    init_fn: Callable[..., PyTree],
    *args: Any,
    unbox: bool = True,
    **kw: Any,
) -> PyTree:
    open_blocks = blocks.thread.blocks
    if not open_blocks:
        return _original['param'](self, name, init_fn, *args, unbox=unbox, **kw)
    # If the parameter exists, Flax still traces the initializer, for the shape alone.
    # With blocks open, all that it calls (``jax.random``, ...) would be traced for each
    # number. Without blocks, JAX finds the traces that ``init`` has made.
    initializing_in = () if self.has_variable('params', name) else open_blocks
    with blocks.thread.only(initializing_in):
        _original['param'](self, name, init_fn, *args, unbox=False, **kw)
    # Flax returns a new parameter without a read, so no block would have seen it.
    value = self.get_variable('params', name)
    return meta.unbox(value) if unbox else value


def _put_variable(self: Scope, col: str, name: str, value: PyTree) -> None:
    open_blocks = blocks.active()
    if open_blocks:
        key = (col, (*self.path, name))
        root = blocks.root_of(self)
        if modules.is_sowing():
            root.sown.add(key)
        value = views.stored(root, open_blocks, key, value)
        writes.check(self, open_blocks, key, value)
    _original['put_variable'](self, col, name, value)


@contextlib.contextmanager
def _temporary(self: Scope) -> Generator[Scope]:
    """Counts the applies that run, and judges blocks when one ends."""
    thread, mark, handled = blocks.thread, object(), sys.exception()
    try:
        thread.applies.append(mark)
        thread.applies_changed()
        with _original['temporary'](self) as scope:
            yield scope
    finally:
        if mark in thread.applies:
            thread.applies.remove(mark)
        thread.applies_changed()
        judgement.settle(blocks.root_of(self), handled)


def _make_scope(self: Scope, *args: Any, **kwargs: Any) -> None:
    """Begins a tree: in an apply, an init or a bind, or in the user's own code."""
    _original['make_scope'](self, *args, **kwargs)
    # Children and rewound copies belong to a tree that has begun. A scope that the user
    # makes with the flags of another scope has other variables, so it begins a tree.
    if self.parent is None and not roots.is_carried_by(self):
        blocks.begin(self, len(blocks.thread.applies))


def _bind(*args: Any, **kwargs: Any) -> Scope:
    scope = _original['bind'](*args, **kwargs)
    # A block has to be judged by a bound module too, and nothing tells when it is gone.
    for block in blocks.thread.blocks:
        judgement.meet(block, blocks.root_of(scope))
    return scope


HOOKS: dict[str, Callable[..., Any]] = {
    'get_variable': _get_variable,
    'variables': _variables,
    'param': _param,
    'put_variable': _put_variable,
    'make_rng': setup_values.make_rng,
    'temporary': _temporary,
    'make_scope': _make_scope,
    'bind': _bind,
    'partial_pack': writeback.partial_pack,
    'try_setup': setup_values.try_setup,
    'getattr': setup_values.getattr_,
    **{name: late_rules.hook_for(name) for name in patching.RULES},
}
