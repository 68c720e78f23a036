"""Patches the methods by which Flax reads and writes, while a block is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope

from flax_sg.engine import (
    blocks,
    judgement,
    late_rules,
    setup_values,
    views,
    writeback,
    writes,
)
from flax_sg.internals import core_scopes, modules, patching

_MISSING = object()


# What Flax and JAX do without hooks.
_original = patching.originals


def _get_variable(self: Scope, col: str, name: str, default: Any = None) -> Any:
    open_blocks = blocks.active()
    if not open_blocks:
        return _original['get_variable'](self, col, name, default)
    value = _original['get_variable'](self, col, name, _MISSING)
    if value is _MISSING:
        return default
    key = (col, (*self.path, name))
    return views.view(blocks.root_of(self), open_blocks, key, value)


def _variables(self: Scope) -> Any:
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
    self: Scope, name: str, init_fn: Any, *args: Any, unbox: bool = True, **kw: Any
) -> Any:
    open_blocks = blocks.thread.blocks
    if not open_blocks:
        return _original['param'](self, name, init_fn, *args, unbox=unbox, **kw)
    # Of a parameter that exists Flax traces the initializer, for the shape alone.
    # Outside of the blocks, JAX finds the traces that ``init`` has made.
    around = () if self.has_variable('params', name) else open_blocks
    with blocks.thread.only(around):
        _original['param'](self, name, init_fn, *args, unbox=False, **kw)
    # Read it in the blocks. Flax returns a new parameter without reading it.
    value = self.get_variable('params', name)
    return core_scopes.unbox(value) if unbox else value


def _put_variable(self: Scope, col: str, name: str, value: Any) -> None:
    open_blocks = blocks.active()
    if open_blocks:
        key = (col, (*self.path, name))
        root = blocks.root_of(self)
        if modules.is_sowing():
            root.sown.add(key)
        value = views.stored(root, open_blocks, key, value)
        writes.check(self, open_blocks, key, value)
    _original['put_variable'](self, col, name, value)


def _invalidate(self: Scope) -> None:
    # An ``apply`` may end here. If it raised, this is the only sign of its end.
    with patching.released(self):
        _original['invalidate'](self)
        if blocks.thread.roots:
            judgement.settle(self)


def _temporary(self: Scope) -> Any:
    return blocks.thread.applying(_original['temporary'](self))


def _bind(key: str) -> Callable[..., Scope]:
    def hook(*args: Any, **kwargs: Any) -> Scope:
        scope = _original[key](*args, **kwargs)
        if blocks.thread.blocks:
            blocks.root_of(scope, len(blocks.thread.applies))
        return scope

    return hook


def _post_init(self: Any) -> None:
    setup_values.watch(self)
    _original['post_init'](self)


HOOKS: dict[str, Callable[..., Any]] = {
    'get_variable': _get_variable,
    'variables': _variables,
    'param': _param,
    'put_variable': _put_variable,
    'make_rng': setup_values.make_rng,
    'invalidate': _invalidate,
    'temporary': _temporary,
    'bind': _bind('bind'),
    'bind_to_apply': _bind('bind_to_apply'),
    'partial_pack': writeback.partial_pack,
    'post_init': _post_init,
    'try_setup': setup_values.try_setup,
    'getattribute': setup_values.getattribute,
    **{name: late_rules.hook_for(name) for name in patching.RULES},
}
