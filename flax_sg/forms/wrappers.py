"""A module around a module that takes no place of its own.

The naive attempts: a wrapper with a submodule puts its own name into every path, and
``nn.share_scope``, which takes the name away again, leaves the submodule with the
random streams and the path that it had before. A wrapper that makes its own class look
like that of the module loses what Flax does to methods of either.

Here the wrapped module is bound to the scope that Flax makes for the wrapper, or the
wrapper takes the scope of a module that has one. Everything that is asked of the
wrapper is asked of the module, in the wrapper's extent.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope
from flax.linen import nowrap

from flax_sg import errors
from flax_sg.engine import contents
from flax_sg.forms import protocols, targets
from flax_sg.internals import lifting, modules
from flax_sg.scans import residuals

Extent = contextlib.AbstractContextManager[Any]


class _ScopeOfModule:
    """The scope of a wrapper: that of its module, as soon as there is one.

    ``nn.share_scope`` and methods under ``nn.compact`` replace scopes, of the one or
    of the other.
    """

    def __get__(self, wrapper: Any, owner: type | None = None) -> Scope | None:
        if wrapper is None:
            return None
        attributes = vars(wrapper)
        scope = getattr(attributes.get('module'), 'scope', None)
        return attributes.get('scope') if scope is None else scope

    def __set__(self, wrapper: Any, scope: Scope | None) -> None:
        attributes = vars(wrapper)
        if getattr(attributes.get('module'), 'scope', None) is None:
            attributes['scope'] = scope
        else:
            object.__setattr__(attributes['module'], 'scope', scope)


class Wrapper(modules.Module):
    """Stands for ``module``, at its place in the tree, and forwards to it.

    Attributes:
        module: the wrapped module.
    """

    module: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Flax gives every class a ``scope`` of None.
        setattr(cls, 'scope', _ScopeOfModule())  # noqa: B010

    @nowrap
    def _extent(self, judge: bool) -> Extent:
        """What holds while the module is used; gives the module to use.

        Args:
            judge: whether to raise if a filter took no variable.
        """
        raise NotImplementedError

    @nowrap
    def _around(self, name: str, judge: bool) -> Extent:
        """What holds while ``apply`` or another method of the unbound module runs.

        Args:
            name: the name of the method.
            judge: as in ``_extent``.
        """
        raise NotImplementedError

    @nowrap
    def _part(self, part: Any, module: Any) -> Any:
        """What stands for a module that was found in the one in use."""
        raise NotImplementedError

    # Where it stands.

    def __post_init__(self) -> None:
        if not isinstance(self.module, modules.Module):
            raise targets.not_wrappable(type(self).__name__, self.module)
        place = modules.place_of(self)
        scope = place if isinstance(place, Scope) else getattr(place, 'scope', None)
        module = self.module if scope is None else _attached(self.module, scope)
        if module.scope is not None:
            self._stand_for(module)
            return
        object.__setattr__(self, 'module', module)
        if self.name is None and modules.names_at_once(place):
            name = modules.autoname(place, type(innermost(module)))
            object.__setattr__(self, 'name', name)
        super().__post_init__()

    @nowrap
    def _stand_for(self, module: Any) -> None:
        new = not modules.is_started(self)
        names = {self.name, module.name} - {None}
        if new and len(names) > 1:
            raise _named(type(self).__name__, str(self.name), module)
        modules.start(self)
        object.__setattr__(self, 'module', module)
        modules.stand_in(self, module)

    @nowrap
    def _register_submodules(self, name: str, val: Any) -> None:
        if name not in ('module', 'within', 'origin'):
            super()._register_submodules(name, val)
        elif name == 'module' and val.scope is None and self.scope is not None:
            module = modules.bind_at(val, self.scope, self.name)
            object.__setattr__(self, 'module', module)
            modules.stand_in(self, module)

    # What is asked of it.

    @protocols.shown
    @nowrap
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module."""
        return self._run('__call__', args, kwargs)

    @nowrap
    def _run(self, name: str, args: Any, kwargs: Any, intercept: bool = True) -> Any:
        scope = self.scope
        if scope is None:
            return getattr(self.module, name)(*args, **kwargs)
        if intercept:
            method = protocols.intercepted(self, name, innermost(self.module))
            if method is not None:
                return modules.run_interceptors(method, self, args, kwargs)
        # A part of the model may be all that there is yet.
        judge = name == '__call__' or not scope.get_flag('initializing', False)
        use = functools.partial(_use, name=name, judge=judge, args=args, kwargs=kwargs)
        if lifting.is_in_scan(scope):
            if not self._borrows(args, kwargs):
                return residuals.stop_again(self, use)
            residuals.warn(type(self).__name__, innermost(self.module))
        return use(self)

    @nowrap
    def _borrows(self, *args: Any) -> bool:
        """Whether a call may use modules that belong to another trace."""
        functions = [
            leaf for leaf in modules.field_leaves(self) if isinstance(leaf, _FUNCTIONS)
        ]
        return contents.holds_modules((args, functions))

    @nowrap
    def _try_setup(self, shallow: bool = False) -> None:
        # A lifted function sets up what it is handed, outside of transforms of its
        # class: that decides from which random streams ``setup`` draws.
        begins = not shallow and modules.starts_setup(self)
        super()._try_setup(shallow)
        if begins:
            with self._extent(judge=False) as module:
                if module is self.module:
                    modules.run_setup(module)

    @nowrap
    def _validate_setup(self) -> None:
        """Nothing of its own to check, and the module is bound already."""

    @nowrap
    def _call_wrapped_method(self, fun: Any, args: Any, kwargs: Any) -> Any:
        # ``apply(variables, x, method=nn.Embed.attend)`` calls it with the wrapper.
        of_module = modules.is_method_of(fun, type(innermost(self.module)))
        if of_module and not modules.is_method_of(fun, type(self)):
            return self._run(fun.__name__, args, kwargs)
        return super()._call_wrapped_method(fun, args, kwargs)

    @nowrap
    def __getattr__(self, name: str) -> Any:
        """What the wrapped module has under this name, as seen in the extent."""
        special = name.startswith('__') and name.endswith('__')
        if special or 'module' not in vars(self) or name in self.__dataclass_fields__:
            raise AttributeError(
                f'{type(self).__name__!r} object has no attribute {name!r}'
            )
        if self.scope is None:
            return self._seen(name, getattr(self.module, name), self.module)
        with self._extent(judge=False) as module:
            return self._seen(name, getattr(module, name), module)

    @nowrap
    def __kontext_keys__(self) -> dict[str, str]:
        """The keys of the wrapped module, for Kauldron, which asks the class."""
        return protocols.key_paths(self.module)

    @property
    def variables(self) -> Mapping[str, Mapping[str, Any]]:
        """The variables of the wrapped module, as seen in the extent."""
        return self.__getattr__('variables')

    @nowrap
    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        """A variable of the wrapped module, as seen in the extent."""
        return self._run('get_variable', (col, name, default), {})

    @nowrap
    def put_variable(self, col: str, name: str, value: Any) -> None:
        """Writes a variable of the wrapped module, in the extent."""
        self._run('put_variable', (col, name, value), {})

    @nowrap
    def _seen(self, name: str, value: Any, module: Any) -> Any:
        """A value that belongs to the module, for somebody outside of the extent."""
        if inspect.ismethod(value) and value.__self__ is module:
            return types.MethodType(protocols.forwards(name, value.__func__), self)
        if self.scope is None:
            return value
        if isinstance(value, modules.Module):
            return self._part(value, module)
        if isinstance(value, modules.Variable):
            return _Variable(self._part(module, module)._in_extent, value)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._seen(name, item, module) for item in value)
        if isinstance(value, (dict, FrozenDict)):
            items = {k: self._seen(name, v, module) for k, v in value.items()}
            return type(value)(items)
        if isinstance(value, _FUNCTIONS) and contents.holds_modules(value):
            return self._part(module, module)._in_extent(value)
        return value

    @nowrap
    def _in_extent(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def in_extent(*args: Any, **kwargs: Any) -> Any:
            with self._extent(judge=False):
                return fn(*args, **kwargs)

        return functools.update_wrapper(in_extent, fn, updated=())


for _name in protocols.STARTS:
    setattr(Wrapper, _name, protocols.starts(_name))

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def innermost(module: Any) -> Any:
    """The module in all its wrappers."""
    while isinstance(module, Wrapper):
        module = module.module
    return module


def _attached(module: Any, scope: Scope) -> Any:
    """The module; as it is in the tree of a scope, if it has been attached there."""
    if module.scope is not None:
        return module
    if module.parent is not None:
        return module
    there = modules.adopted(scope).get(modules.id_of(module))
    if there is not None:
        return there
    if isinstance(module, Wrapper):
        inner = _attached(module.module, scope)
        if inner is not module.module:
            return module.clone(module=inner)
    return module


def _use(wrapper: Any, name: str, judge: bool, args: Any, kwargs: Any) -> Any:
    with wrapper._extent(judge) as module:
        return getattr(module, name)(*args, **kwargs)


_variable_value: Any = modules.Variable.value


class _Variable(modules.Variable[Any]):
    """A variable that setup keeps on a module, read in the extent of a wrapper."""

    def __init__(self, in_extent: Callable[[Any], Any], variable: Any) -> None:
        super().__init__(
            variable.scope, variable.collection, variable.name, variable.unbox
        )
        self._in_extent = in_extent

    def _value(self) -> Any:
        return self._in_extent(_variable_value.fget)(self)

    def _set_value(self, value: Any) -> None:
        self._in_extent(_variable_value.fset)(self, value)

    value: Any = property(_value, _set_value)


def _named(wrapper: str, name: str, module: Any) -> errors.ArgumentValueError:
    """A wrapper was given another name than the module that it stands for."""
    cls = type(module).__name__
    return errors.ArgumentValueError(
        f'nn.{wrapper}({cls}(...), name={name!r}): the module is at '
        f'{"/".join(module.scope.path)!r} already, and the wrapper has no place of '
        'its own.\n'
        f'Name the module: nn.{wrapper}({cls}(..., name={name!r})).'
    )
