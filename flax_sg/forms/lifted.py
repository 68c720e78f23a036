"""Rewrites around the calls of modules, their classes, methods and functions."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, cast

from flax_sg import errors, filters
from flax_sg.engine import extents
from flax_sg.errors.texts import shown
from flax_sg.forms import frozen
from flax_sg.internals import modules
from flax_sg.rules import rules


def lift(rewrite: rules.Rewrite, target: Any, methods: Any = None) -> Any:
    """Returns ``target`` with a block of ``rewrite`` around each of its calls."""
    if modules.is_module_class(target):
        return _lift_class(rewrite, target, methods)
    if methods is not None:
        raise methods_without_class(methods)
    if isinstance(target, modules.Module):
        stops = isinstance(rewrite.rule, rules.StopGradient)
        return (frozen.Frozen if stops else frozen.Rewritten)(
            target,
            rewrite.where,
            collections=rewrite.collections,
            unused=rewrite.unused,
            rule=rewrite.rule,
        )
    no_targets = (type, filters.Filter)
    if isinstance(target, no_targets) or not callable(target):
        is_array = hasattr(target, 'shape')
        fix = 'To stop the gradient of a value write jax.lax.stop_gradient(x).'
        raise not_liftable(target, fix if is_array else '')
    if inspect.ismethod(target) and isinstance(target.__self__, modules.Module):
        lifted = _lift_function(rewrite, target.__func__)
        return types.MethodType(lifted, target.__self__)
    return _lift_function(rewrite, cast('Callable[..., Any]', target))


def _lift_class(rewrite: rules.Rewrite, target: Any, methods: Any) -> Any:
    if isinstance(target, functools.partial):
        cls = _lift_class(rewrite, target.func, methods)
        return functools.partial(cls, *target.args, **target.keywords)
    methods = ('__call__',) if methods is None else methods
    several = isinstance(methods, Iterable) and not isinstance(methods, str)
    names: tuple[Any, ...] = tuple(methods) if several else (methods,)
    if not all(isinstance(name, str) for name in names):
        raise _methods_without_names(methods)
    for name in names:
        if not callable(getattr(target, name, None)):
            raise _unknown_method(name, target)
    lifted = {name: _lift_method(rewrite, getattr(target, name)) for name in names}
    # The name is what Flax calls the module by: with another one its parameters
    # would have other paths.
    kept = ('__doc__', '__module__', '__qualname__')
    same = {name: getattr(target, name) for name in kept}
    return type(target)(target.__name__, (target,), {**same, **lifted})


def _lift_method(rewrite: rules.Rewrite, method: Callable[..., Any]) -> Any:
    """A method that Flax has wrapped: the block is around setup and all."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with extents.Extent(rewrite, self.scope):
            return method(self, *args, **kwargs)

    return wrapper


def _lift_function(rewrite: rules.Rewrite, fn: Callable[..., Any]) -> Any:
    """A method in the body of its class, or a function of a module."""
    as_method = modules.as_method(fn)

    @functools.wraps(fn)
    def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, modules.Module):
            raise _called_with(fn, module)
        running = modules.current_module() is module
        with extents.Extent(rewrite, module.scope):
            return (fn if running else as_method)(module, *args, **kwargs)

    return wrapper


def _unknown_method(name: str, cls: type) -> errors.UnknownNameError:
    """``methods=`` names a method that the class does not have."""
    known = [
        name
        for name in dir(cls)
        if callable(getattr(cls, name))
        and (not name.startswith('__') or name == '__call__')
    ]
    close = difflib.get_close_matches(name, known, 3)
    meant = f' Did you mean {" or ".join(map(repr, close))}?' if close else ''
    return errors.UnknownNameError(f'{cls.__name__} has no method {name!r}.{meant}')


def methods_without_class(methods: object) -> errors.UnknownNameError:
    """The error for ``methods=`` where no class is lifted."""
    return errors.UnknownNameError(
        f'methods={methods!r} was given, but no Module class to lift.\n'
        'Write nn.stop_gradient(Model, where, methods=[...]).',
    )


def _methods_without_names(methods: object) -> errors.UnknownNameError:
    """The error for ``methods=`` that is no sequence of names."""
    return errors.UnknownNameError(
        f'methods={methods!r} names no methods: expected their names, such as '
        "methods=['encode'].",
    )


def not_liftable(target: object, fix: str = '') -> errors.ArgumentTypeError:
    """Something was lifted that is no Module class, method or function of a module."""
    hint = f'\n{fix}' if fix else ''
    cls = type(target).__name__
    what = shown(target)
    what = f'a {cls}' if what == f'{cls} object' else f'{what} of type {cls}'
    return errors.ArgumentTypeError(
        f'cannot lift {what}: expected a Module class, a method, a function whose '
        f'first argument is a bound module, or a module.{hint}'
    )


def _called_with(fn: object, first: object) -> errors.ArgumentTypeError:
    """The error for a lifted function called without a module."""
    name = getattr(fn, '__qualname__', repr(fn))
    return errors.ArgumentTypeError(
        f'the lifted function {name} was called with '
        f'{type(first).__name__} as its first argument, which has to be a bound '
        f'module: write {name}(module, ...).',
    )
