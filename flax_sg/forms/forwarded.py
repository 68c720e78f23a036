"""Methods of a wrapper that are made of the methods of its module.

Other libraries look at a wrapper as at its module: Keras reads the signature of
``__call__``. But a wrapper has one class for all modules, and Flax does not wrap its
``__call__``: otherwise ``capture_intermediates`` would store each result twice, and
``nn.intercept_methods`` would change each output twice. Both see the wrapped module.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from flax_sg import errors
from flax_sg.internals.modules import Module


class OfModule:
    """A method that each wrapper makes from the method of its own module.

    Args:
        fn: the method of a wrapper whose module has no such method of its own.
        make: makes a method of a wrapper, from its name and the module's method.
    """

    nowrap = True  # Flax leaves such an attribute of a class as it is.

    def __init__(self, fn: Callable[..., Any], make: Callable[..., Any]) -> None:
        self.fn, self.make = fn, make
        self.__doc__ = fn.__doc__

    def __get__(self, wrapper: Module | None, owner: type | None = None) -> Any:
        if wrapper is None:
            return self.fn
        name = self.fn.__name__
        method = _method_of(wrapper.module, name)
        own = method is not None and method is not self.fn
        return types.MethodType(self.make(name, method) if own else self.fn, wrapper)


def _method_of(module: Module, name: str) -> Callable[..., Any] | None:
    """The function of a module's method; None if the module has no such method."""
    # Not getattr(type(module), name): for ``__call__`` a class without one gives the
    # function that makes instances.
    classes = type(module).__mro__
    own = [vars(cls)[name] for cls in classes if name in vars(cls)]
    attribute: Any = own[0] if own else None
    is_descriptor = hasattr(attribute, '__get__')
    bound = attribute.__get__(module) if is_descriptor else attribute
    return bound.__func__ if inspect.ismethod(bound) else None


def forwards(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of a wrapper that calls a method of its module.

    Args:
        name: the name of the method.
        method: the function of the module's method; its signature is shown.
    """

    @functools.wraps(method)
    def forward(wrapper: Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper._run(name, args, kwargs)

    return forward


def carries(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of a wrapper that calls a function as a method of its module.

    Not by a name: ``self.heads = [self.one, self.two]`` holds methods under another.

    Args:
        method: the function of a method that the module holds or returns.
    """

    @functools.wraps(method)
    def forward(wrapper: Module, *args: Any, **kwargs: Any) -> Any:
        name = getattr(method, '__name__', '')
        return wrapper._run(name, args, kwargs, method)

    return forward


def refuses(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``apply`` or ``init`` of a wrapper whose module overrides it: it raises.

    A call of ``Module.apply`` with the wrapper would skip what the module does there.
    """

    @functools.wraps(method)
    def start(wrapper: Module, *args: Any, **kwargs: Any) -> Any:
        cls = type(wrapper.module).__name__
        raise errors.ArgumentTypeError(
            f'{cls} defines its own {name}, which a wrapper cannot call.\n'
            f'Open a block: with nn.stop_gradient(where): {cls}(...).{name}(...).'
        )

    return start
