"""Rewrites around the calls of modules, their classes, methods and functions."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, cast

from flax_sg import errors, filters
from flax_sg.engine import extents
from flax_sg.forms import frozen
from flax_sg.internals import _private
from flax_sg.rules import rules


def lift(rewrite: rules.Rewrite, target: Any, methods: Any = None) -> Any:
    """Returns ``target`` with a block of ``rewrite`` around each of its calls."""
    if _private.is_module_class(target):
        return _lift_class(rewrite, target, methods)
    if methods is not None:
        raise errors.UnknownMethodError.without_class(methods)
    if isinstance(target, _private.Module):
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
        raise errors.LiftTargetError(target, fix if is_array else '')
    if inspect.ismethod(target) and isinstance(target.__self__, _private.Module):
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
        raise errors.UnknownMethodError.without_names(methods)
    for name in names:
        if not callable(getattr(target, name, None)):
            raise errors.UnknownMethodError(name, target)
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
    as_method = _private.as_method(fn)

    @functools.wraps(fn)
    def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, _private.Module):
            raise errors.LiftTargetError.called_with(fn, module)
        running = _private.current_module() is module
        with extents.Extent(rewrite, module.scope):
            return (fn if running else as_method)(module, *args, **kwargs)

    return wrapper
