"""What other libraries ask of a wrapper: answered as the wrapped module would.

Keras reads the signature of ``__call__``. penzai opens ``nn.intercept_methods`` around
``apply``. MaxText overrides ``apply``. Kauldron looks up a method on the class. A
wrapper has one class for all modules, and its ``__call__`` is ``nn.nowrap``: otherwise
``capture_intermediates`` would store each result of the module twice.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

from flax_sg.internals import modules

F = TypeVar('F', bound=Callable[..., Any])


# The methods of Flax with which a program starts a module, and which a class may
# override. ``Module.init`` calls ``init_with_output``.
STARTS = ('apply', 'init', 'init_with_output', 'lazy_init')


class OfModule:
    """A method of a wrapper that is, on each wrapper, made of its module's method.

    Args:
        fn: the method of a wrapper whose module has no such method of its own.
        made: makes a method of a wrapper, from its name and the module's method.
    """

    def __init__(self, fn: Callable[..., Any], made: Callable[..., Any]) -> None:
        self.fn, self.made = fn, made
        self.nowrap = True  # Flax leaves such an attribute of a class as it is.
        self.__doc__ = fn.__doc__

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self.fn
        name = self.fn.__name__
        method = method_of(wrapper.module, name)
        own = method is not None and method is not self.fn
        return types.MethodType(self.made(name, method) if own else self.fn, wrapper)


def shown(fn: F) -> F:
    """Gives a method, on each wrapper, the signature of the wrapped module's method."""
    method: Any = OfModule(fn, forwards)
    return method


def method_of(module: Any, name: str) -> Callable[..., Any] | None:
    """The function of a module's method; None if the module has no such method."""
    # Not getattr(type(module), name): for ``__call__`` a class without one gives the
    # function that makes instances.
    for cls in type(module).__mro__:
        if name in vars(cls):
            found = vars(cls)[name]
            bound = found.__get__(module) if hasattr(found, '__get__') else found
            return bound.__func__ if inspect.ismethod(bound) else None
    return None


def forwards(
    name: str, method: Callable[..., Any], intercept: bool = True
) -> Callable[..., Any]:
    """Makes a method of a wrapper that calls a method of its module.

    Args:
        name: the name of the method.
        method: the function of the module's method; its signature is shown.
        intercept: whether ``nn.intercept_methods`` sees a call.
    """

    @functools.wraps(method)
    def forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper._run(name, args, kwargs, intercept)

    return forward


def intercepted(wrapper: Any, name: str, innermost: Any) -> Callable[..., Any] | None:
    """Returns the method to run through Flax's interceptors; None to run it directly.

    Interceptors see only a wrapper that is the whole model. Anywhere else they see the
    module that holds the wrapper, and the wrapped module: a third call for the same
    variables would make those that change outputs do so twice.

    Args:
        wrapper: a bound wrapper.
        name: the name of the method that is called.
        innermost: the module in all wrappers: of those each forwards the method.
    """
    inside = wrapper.scope.path or isinstance(wrapper.parent, modules.Module)
    if inside or not modules.intercepts():
        return None
    method = method_of(wrapper.module, name) or method_of(innermost, name)
    if method is None or not modules.is_handled(method):
        return None
    return forwards(name, method, intercept=False)


def starts(name: str) -> OfModule:
    """``apply`` or ``init`` of a wrapper: the module's own one, if it overrides it.

    A call of ``Module.apply`` with the wrapper would skip what the module does there.
    """
    return OfModule(getattr(modules.Module, name), _start)


def _start(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def start(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get('method')
        if inspect.ismethod(target) and target.__self__ is wrapper:
            kwargs['method'] = getattr(wrapper.module, target.__name__)
        # A method other than ``__call__`` may create a part of the variables.
        whole = name == 'apply' or target in (None, '__call__')
        with wrapper._around(name, judge=whole):
            return getattr(wrapper.module, name)(*args, **kwargs)

    return start
