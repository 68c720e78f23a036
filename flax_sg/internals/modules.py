"""Wraps private names of ``flax.linen`` modules."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core.scope import Scope
from flax.linen import module as linen_module
from flax.linen import transforms as linen_transforms

from flax_sg import errors
from flax_sg.internals import core_scopes
from flax_sg.internals.types import PyTree

Module = linen_module.Module

Variable = linen_module.Variable


@functools.cache
def told_apart(metaclass: type, token_of: Callable[[type], str]) -> Any:
    """Returns a metaclass of classes that ``nn.jit`` tells apart.

    ``nn.jit`` keeps the hash of a module's class, which is an ``id`` that a later class
    may get. Of a class in a field it keeps the names of the fields alone, unless the
    class has the attribute that Flax reads for configurations of Pax.

    Args:
        metaclass: the metaclass of the class to lift.
        token_of: tells classes apart, by texts.
    """
    names = {
        '__hash__': lambda cls: hash(token_of(cls)),
        '__fn_or_cls__': property(token_of),
    }
    is_made = '__fn_or_cls__' in vars(metaclass)
    return metaclass if is_made else type(metaclass.__name__, (metaclass,), names)


class ToldByHash:
    """A value of which ``nn.jit`` keeps the hash, where it is a field of a module.

    Of a dataclass ``nn.jit`` would keep the hashes of the fields, and -1 and -2 have
    the same hash. Flax reads this attribute of configurations of Pax first.
    """

    @property
    def __fn_or_cls__(self) -> tuple[type, int]:
        """What ``nn.jit`` keeps: the class and the hash."""
        return type(self), hash(self)


def current_module() -> Module | None:
    """The bound module whose method is running: the owner of a block opened now.

    For a method under ``nn.compact_name_scope``, Flax runs a helper module. This
    returns the module that is ``self`` in the method.
    """
    module = linen_module._context.module_stack[-1]
    while isinstance(module, linen_module.CompactNameScope):
        module = module.module_fn()
    return module if module is not None and module.scope is not None else None


def module_of(frame: types.FrameType) -> Module | None:
    """The bound module that is ``self`` in a frame, if the frame runs a method of it.

    Flax's stack of modules does not have the methods that it does not wrap: those under
    ``nn.nowrap``, generators, and what ``contextlib.contextmanager`` makes.
    """
    code = frame.f_code
    if not code.co_argcount:
        return None
    module = frame.f_locals.get(code.co_varnames[0])
    if not isinstance(module, Module) or module.scope is None:
        return None
    methods = (vars(cls).get(code.co_name) for cls in type(module).__mro__)
    is_method = any(code is _code_of(method) for method in methods)
    return module if is_method else None


def _code_of(method: Any) -> types.CodeType | None:
    """The code that runs for what a class has under a name."""
    method = getattr(method, 'wrapped', method)  # Flax wraps a property in an object.
    if isinstance(method, property):
        method = method.fget
    elif isinstance(method, functools.cached_property):
        method = method.func
    return getattr(inspect.unwrap(method), '__code__', None) if method else None


def running_method() -> tuple[Module, str] | None:
    """The module whose method is running, and the name of the method.

    Flax's own stack holds modules only, so this searches the Python stack.
    """
    user_frame: types.FrameType | None = sys._getframe(1)
    while user_frame is not None:
        if user_frame.f_code is Module._call_wrapped_method.__code__:
            return user_frame.f_locals['self'], user_frame.f_locals['fun'].__name__
        user_frame = user_frame.f_back
    return None


def is_sowing() -> bool:
    """Whether ``Module.sow`` called the caller of this function."""
    return sys._getframe(2).f_code is Module.sow.__code__


def is_set_up(module: Module) -> bool:
    """Whether ``setup`` has run to its end; the module may be half made."""
    state = vars(module).get('_state')
    if state is None:
        return False
    return state.setup_called == linen_module.SetupState.DONE and not state.in_setup


def starts_setup(module: Module) -> bool:
    """Whether the next call of ``_try_setup`` runs a ``setup`` of the user."""
    state = module._state
    return (
        type(module).setup is not Module.setup
        and module.scope is not None
        and not state.in_setup
        and state.setup_called != linen_module.SetupState.DONE
    )


def run_setup(module: Module) -> None:
    """Runs ``setup`` of a bound module, if it has not run yet."""
    module._try_setup()


def as_method(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of a module as Flax wraps a method: setup, naming, state."""
    return linen_module.wrap_method_once(fn)


def is_module_class(target: Any) -> bool:
    """Whether ``target`` is a Module class or a ``functools.partial`` of one."""
    return linen_transforms._is_module_class(target)


def scopes_of(module: Module) -> list[Scope]:
    """The scopes of a module and of the modules in its fields, in Flax's order."""
    return linen_transforms.get_module_scopes(module)[0]


def in_setup() -> list[Module]:
    """The modules whose ``setup`` runs."""
    stack = linen_module._context.module_stack
    return [m for m in stack if m is not None and m._state.in_setup]


def clone_on(module: Module, scopes: list[Scope]) -> Module:
    """Clones a bound module onto other scopes.

    Its ``setup`` does not run, unless ``__post_init__`` reads what ``setup`` makes.
    """
    clone, _, _ = linen_transforms.set_module_scopes(module, (), {}, scopes)
    has_run = is_set_up(clone)
    if not has_run:
        state = module._state.export()
        state.in_setup = False
        object.__setattr__(clone, '_state', state)
    if isinstance(module.parent, Module):
        object.__setattr__(clone, 'parent', module.parent)
    for field in dataclasses.fields(module):
        if field.init and field.name != 'parent':
            original, copied = getattr(module, field.name), getattr(clone, field.name)
            if has_run and _names(original) != _names(copied):
                raise _in_another_order(module, field.name)
            object.__setattr__(clone, field.name, _in_order_of(original, copied))
    return clone


def _in_order_of(value: PyTree, copy: PyTree) -> PyTree:
    """Restores the order of dicts in a copied field: Flax sorts them."""
    if isinstance(value, Mapping) and isinstance(copy, Mapping):
        items = {key: _in_order_of(item, copy[key]) for key, item in value.items()}
        make: Any = type(copy)
        return make(items)
    if isinstance(value, (list, tuple)) and type(copy) is type(value) in (list, tuple):
        return type(value)(map(_in_order_of, value, copy))
    return copy


def _names(value: PyTree) -> list[Any] | None:
    """The keys of the dicts in a field, in their order."""
    if isinstance(value, Mapping):
        return [(key, _names(item)) for key, item in value.items()]
    return [*map(_names, value)] if isinstance(value, (list, tuple)) else None


def _in_another_order(module: Module, field: str) -> errors.BlockError:
    """The error for a ``setup`` that has run with a field in another order."""
    name = type(module).__name__
    return errors.BlockError(
        f'{name}.__post_init__ reads what setup makes, in an open block.\n'
        f'A block runs setup again, in a copy of the module, and Flax sorts the dict '
        f'{name}.{field} in a copy: setup may give other names to its layers.\n'
        f'Sort {field}, or read in a method what setup makes.'
    )


def children_of(module: Module) -> dict[str, Any]:
    """The children of a module by name: submodules, and also names of variables."""
    return module._state.children


def attributes() -> frozenset[str]:
    """The attributes that every module has: methods, and Flax's private state."""
    private = {'_state', '_id', '_parent_ref', '_compact_name_scope_modules'}
    return frozenset({*dir(Module)} - {'setup'} | private)


def start(module: Module) -> None:
    """Gives a module its id and state, as ``__post_init__`` does first."""
    object.__setattr__(module, '_id', linen_module.uuid())
    object.__setattr__(module, '_state', linen_module._ModuleInternalState())


def is_started(module: Module) -> bool:
    """Whether a module has its id already."""
    return '_id' in vars(module)


def stand_in(wrapper: Module, module: Module) -> None:
    """Gives a wrapper the parent, name and children of a bound module."""
    object.__setattr__(wrapper, 'parent', module.parent)
    object.__setattr__(wrapper, 'name', module.name)
    wrapper._state.children = module._state.children
    wrapper._state.is_initialized = True


def bind_at(module: Module, scope: Scope, name: str | None) -> Module:
    """Binds a module to an existing scope.

    Flax may have queued the module for attachment, and then attaches it a second time.
    Since its parent is a scope, the module ends up in the same place.
    """
    if module.parent is None:  # Flax clones a module from outside once in each tree.
        outside, module = module, module.clone(name=None)
        _adopted(scope)[outside._id] = module
    object.__setattr__(module, 'name', name)
    object.__setattr__(module, 'parent', scope)
    module.__post_init__()
    return module


def attached(module: Module, scope: Scope) -> Module | None:
    """A module that was made outside, as it is attached in the tree of a scope."""
    return _adopted(scope).get(module._id)


def _adopted(scope: Scope) -> weakref.WeakValueDictionary[Any, Module]:
    cache: weakref.WeakValueDictionary[Any, Module] = weakref.WeakValueDictionary()
    root: Any = scope.root
    if hasattr(linen_module, '_caches'):
        return linen_module._caches.setdefault(root, cache)
    # From flax 0.12.9 on.
    return vars(root).setdefault('_submodule_adoption_cache', cache)  # pragma: no cover


def place_of(module: Module) -> Any:
    """The parent of a module under construction: a module, a scope or None."""
    if module.parent is linen_module._unspecified_parent:
        return linen_module._context.module_stack[-1]
    return module.parent


def names_at_once(place: object) -> bool:
    """Whether Flax names a new module in ``place`` now, not when setup assigns it."""
    return isinstance(place, Module) and not place._state.in_setup


def autoname(parent: Module, cls: type) -> str:
    """Takes the name that Flax would give to the next unnamed module of a class."""
    cursor = parent._state.autoname_cursor.get(cls.__name__, 0)
    parent._state.autoname_cursor[cls.__name__] = cursor + 1
    return f'{cls.__name__}_{cursor}'


def is_method_of(fn: Callable[..., Any], cls: type) -> bool:
    """Whether ``fn`` is a method of a Module class, with or without Flax's wrapper."""
    for base in cls.__mro__:
        method = vars(base).get(getattr(fn, '__name__', ''))
        if method is not None and fn in (method, getattr(method, '__wrapped__', None)):
            return True
    return False


def own_scopes(module: Module) -> tuple[Scope, ...]:
    """The outermost scopes of a bound module and the modules in its fields."""
    modules = [module, *(m for m in field_leaves(module) if isinstance(m, Module))]
    return core_scopes.minimal_scopes([m.scope for m in modules if m.scope is not None])


def field_leaves(module: Module) -> list[Any]:
    """The leaves in the fields of a module, and in fields of modules found there."""
    leaves: list[Any] = []
    waiting = [module]
    while waiting:
        part = waiting.pop()
        fields = [f.name for f in dataclasses.fields(part) if f.init]
        values = [getattr(part, name) for name in fields if name != 'parent']
        for leaf in jax.tree_util.tree_leaves(values):
            if not any(leaf is other for other in leaves):
                leaves.append(leaf)
                waiting += [leaf] if isinstance(leaf, Module) else []
    return leaves
