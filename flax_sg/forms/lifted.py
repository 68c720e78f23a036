"""Blocks around the calls of functions, methods, modules and their classes.

The naive attempt for functions: open one block when the function is decorated. Calls
nest and run in several threads, so each call opens a block of its own. A generator
function has returned before its body runs: a block around the call stops nothing.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from flax.core.scope import Scope

from flax_sg import filters
from flax_sg.engine import extents
from flax_sg.forms import frozen, targets
from flax_sg.internals import modules
from flax_sg.rules import rules

# What returns before its body has run, and what it returns.
_RUN_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
_NOT_RUN = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def lift(rewrite: rules.Rewrite, target: Any, methods: Any = None) -> Any:
    """Returns ``target`` with a block of ``rewrite`` around each of its calls."""
    if modules.is_module_class(target):
        return _lift_class(rewrite, target, methods)
    if methods is not None:
        raise targets.methods_without_class(methods)
    if isinstance(target, modules.Module):
        stops = isinstance(rewrite.rule, rules.StopGradient)
        return (frozen.Frozen if stops else frozen.Rewritten)(
            target,
            rewrite.where,
            collections=rewrite.collections,
            unused=rewrite.unused,
            rule=rewrite.rule,
        )
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(lift(rewrite, target.__func__))
    if isinstance(target, (type, filters.Filter)) or not callable(target):
        raise targets.not_liftable(rewrite.rule.name, target)
    if inspect.ismethod(target) and isinstance(target.__self__, modules.Module):
        method = target.__func__
        lifted = _lift_function(rewrite, method, method)
        return types.MethodType(lifted, target.__self__)
    fn: Callable[..., Any] = target
    return _lift_function(rewrite, fn, modules.as_method(fn))


def _lift_class(rewrite: rules.Rewrite, target: Any, methods: Any) -> Any:
    if isinstance(target, functools.partial):
        cls = _lift_class(rewrite, target.func, methods)
        return functools.partial(cls, *target.args, **target.keywords)
    methods = ('__call__',) if methods is None else methods
    several = isinstance(methods, Iterable) and not isinstance(methods, str)
    names: tuple[Any, ...] = tuple(methods) if several else (methods,)
    if not all(isinstance(name, str) for name in names):
        raise targets.methods_without_names(methods)
    for name in names:
        if not callable(getattr(target, name, None)):
            raise targets.unknown_method(name, target)
    # The methods are as Flax has wrapped them: the block is around setup and all.
    methods = {name: getattr(target, name) for name in names}
    lifted = {name: _lift_function(rewrite, fn, fn) for name, fn in methods.items()}
    # The name is what Flax calls the module by: with another one its parameters
    # would have other paths.
    kept = ('__doc__', '__module__', '__qualname__')
    same = {name: getattr(target, name) for name in kept}
    return type(target)(target.__name__, (target,), {**same, **lifted})


def _lift_function(
    rewrite: rules.Rewrite, fn: Callable[..., Any], of_module: Callable[..., Any]
) -> Any:
    """A function with a block around each call.

    Args:
        rewrite: what holds in the blocks.
        fn: a method in the body of its class, or any function.
        of_module: what is called for a module whose methods are not running.
    """
    if any(is_kind(fn) for is_kind in _RUN_LATER):
        raise targets.runs_later(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        module: Any = args[0] if args else None
        called = fn
        if isinstance(module, modules.Module) and module.scope is not None:
            owner, judged = module.scope, extents.EXISTENCE
            if modules.current_module() is not module:
                called = of_module
        else:
            owner, judged = running_scope(), extents.READS
        with extents.Extent(rewrite, owner, judged):
            y = called(*args, **kwargs)
        if isinstance(y, _NOT_RUN):
            raise targets.runs_later(fn)
        return y

    return wrapper


def running_scope() -> Scope | None:
    """The scope of the module whose method is running: of a block that opens now."""
    module = modules.current_module()
    return None if module is None else module.scope
