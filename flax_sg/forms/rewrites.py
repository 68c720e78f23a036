"""What ``nn.stop_gradient(where)`` returns: for ``with``, for ``@`` and for calls.

A block around some lines is open from ``with`` to the end of its body. Around a
function, a method or a Module class each call opens a block of its own, since calls
nest and run in several threads. A generator function has returned before its body
runs, so a block around its calls would stop nothing: that raises.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, ParamSpec, Protocol, Self, TypeVar, overload

from flax.core.scope import Scope

from flax_sg import errors, filters
from flax_sg.engine import extents
from flax_sg.forms import wrappers
from flax_sg.internals import modules, places
from flax_sg.rules import rules

T = TypeVar('T')
P = ParamSpec('P')

# What returns before its body has run, and what it returns.
_RUN_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
_NOT_RUN = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockDecorator(extents.Guarded, rules.Rewrite):
    """A rewrite that opens a block, or puts one around the calls of something.

    The value is immutable, hashable and may be used any number of times::

        r = nn.stop_gradient('gln_*/**')
        with r: ...        # around these lines
        @r                 # around each call of the method or function
        r(model.apply)     # around each call of the function
        r(nn.Dense)        # around each call of a method of the class; see ``lift``
        r(nn.Dense(4))     # around all that goes through the wrapper; see ``nn.Frozen``
    """

    _is_used: ClassVar[bool] = False
    _call: ClassVar[tuple[int, int]]

    def __post_init__(self) -> None:
        object.__setattr__(self, '_call', places.call_of_user())
        super().__post_init__()

    def __enter__(self) -> Self:
        self._use()
        extents.open_block(self, running_scope())
        return self

    def _close(self, exc_type: type[BaseException] | None) -> None:
        extents.close_last(self, exc_type)

    def _use(self) -> None:
        object.__setattr__(self, '_is_used', True)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A statement ``nn.stop_gradient('x/**')``: Python drops its value at once.
        if self._is_used or is_finalizing():
            return
        if places.is_dropped_at(self._call):
            place = places.Place.here()
            places.warn_without_effect(
                f'{self!r}, made at {place}, is dropped and has no effect.\n'
                'Write with before it, and below it the code that it is for.',
                place,
            )

    def __call__(self, target: T) -> T:
        """Puts a block around a function, a method, a Module class or a module."""
        return self.lift(target)

    def lift(self, target: T, methods: Any = None) -> T:
        """Puts a block around each call of a function, a method or a Module class.

        Args:
            target: a function or a method. If the first argument of a call is a bound
                module, paths are relative to that module. Otherwise the block is that
                of a ``with`` statement in the first line of the function. A Module
                class (or ``functools.partial`` of one): paths are relative to each
                module of the class. A module is wrapped, see ``nn.Frozen``.
            methods: for a class, the names of the methods to lift. By default
                ``('__call__',)``.

        Returns:
            The same kind of thing. A class keeps its name, so that parameters keep
            their paths.

        Raises:
            ArgumentTypeError: for a generator function or a coroutine: its body runs
                when the call is over. For what has no calls, such as a tree.
            UnknownNameError: for ``methods`` that the class does not have.
        """
        self._use()
        lifted: Any = _lifted(self, target, methods)
        return lifted


def _lifted(rewrite: rules.Rewrite, target: Any, methods: Any = None) -> Any:
    if modules.is_module_class(target):
        return _lifted_class(rewrite, target, methods)
    if methods is not None:
        raise _methods_without_class(methods)
    if isinstance(target, modules.Module):
        stops = isinstance(rewrite.rule, rules.StopGradient)
        return (wrappers.Frozen if stops else wrappers.Rewritten)(
            target,
            rewrite.where,
            collections=rewrite.collections,
            unused=rewrite.unused,
            rule=rewrite.rule,
        )
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(_lifted(rewrite, target.__func__))
    if isinstance(target, type) or not _has_calls(target):
        raise _not_liftable(rewrite.rule.name, target)
    if inspect.ismethod(target) and isinstance(target.__self__, modules.Module):
        lifted = _lifted_function(rewrite, target.__func__)
        return types.MethodType(lifted, target.__self__)
    return _lifted_function(rewrite, target)


def _has_calls(target: Any) -> bool:
    """Whether ``target`` is a class, or there can be a block around its calls."""
    called = callable(target) or isinstance(target, classmethod)
    return called and not isinstance(target, filters.Filter)


def _lifted_class(rewrite: rules.Rewrite, target: Any, methods: Any) -> Any:
    if isinstance(target, functools.partial):
        cls = _lifted_class(rewrite, target.func, methods)
        return functools.partial(cls, *target.args, **target.keywords)
    # The methods are as Flax has wrapped them: the block is around setup and all.
    found = {name: getattr(target, name) for name in _method_names(target, methods)}
    # Flax takes longer to make a class than to run a small module, and ``nn.jit``
    # traces each class. So equal stops of a class, in a loop say, are one class.
    # A function may change, or be equal to another one that does.
    is_plain = filters.Predicate not in rewrite.where.kinds
    stops = is_plain and type(rewrite.rule) is rules.StopGradient
    key = target, rewrite, rewrite.unused, tuple(found.items())
    if stops and (known := _stopped_classes.get(key)):
        return known
    lifted = {name: _lifted_function(rewrite, fn) for name, fn in found.items()}
    # The name is what Flax calls the module by: with another one its parameters
    # would have other paths.
    kept = ('__doc__', '__module__', '__qualname__')
    same = {name: getattr(target, name) for name in kept}
    cls = type(target)(target.__name__, (target,), {**same, **lifted})
    if stops:
        _stopped_classes[key] = cls
    return cls


_stopped_classes = weakref.WeakValueDictionary[Any, Any]()


def _method_names(cls: type, methods: Any) -> tuple[str, ...]:
    methods = '__call__' if methods is None else methods
    several = isinstance(methods, Iterable) and not isinstance(methods, str)
    names: tuple[Any, ...] = tuple(methods) if several else (methods,)
    for name in map(str, names):
        if not callable(getattr(cls, name, None)):
            close = difflib.get_close_matches(name, dir(cls), 3)
            meant = f' Did you mean {" or ".join(map(repr, close))}?' if close else ''
            raise errors.UnknownNameError(
                f'{cls.__name__} has no method {name!r}.{meant}'
            )
    return names


def _lifted_function(rewrite: rules.Rewrite, fn: Callable[..., Any]) -> Any:
    """A function or a method with a block around each call."""
    if any(is_kind(fn) for is_kind in _RUN_LATER):
        raise _runs_later(fn)
    of_module = modules.as_method(fn)  # Called if no method of the module is running.

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
            raise _runs_later(fn)
        return y

    return wrapper


def running_scope() -> Scope | None:
    """The scope of the module whose method is running: of a block that opens now."""
    module = modules.current_module()
    return None if module is None else module.scope


class TakesTarget(Protocol[P]):
    """A function ``make(where)`` that may be called as ``make(target, where)`` too."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> BlockDecorator: ...
    @overload
    def __call__(self, target: T, /, *args: P.args, **kwargs: P.kwargs) -> T: ...


def takes_target(make: Callable[P, BlockDecorator]) -> TakesTarget[P]:
    """Lets a function that makes a rewrite take what to lift as its first argument.

    ``nn.stop_gradient(nn.Dense, 'kernel')`` is then what
    ``nn.stop_gradient('kernel')(nn.Dense)`` is. A single argument is never the target:
    a function is a filter, too.

    Args:
        make: its first parameter says which variables. A parameter ``methods`` is not
            handed to it: it goes to ``BlockDecorator.lift``.
    """
    make_of: Any = make
    name = make.__name__
    first, *_ = inspect.signature(make).parameters

    @functools.wraps(make)
    def with_target(*args: Any, methods: Any = None, **kwargs: Any) -> Any:
        given = len(args) + (first in kwargs)
        if given == 0:
            example = (
                "'encoder/**'" if first == 'where' else "{'encoder': {'bias': value}}"
            )
            raise errors.FilterTypeError(
                f'nn.{name}() lacks its argument {first!r}.\n'
                f'Write nn.{name}({example}).'
            )
        if given == 1:
            if methods is not None:
                raise _methods_without_class(methods)
            return make_of(*args, **kwargs)
        target, *rest = args
        rewrite = make_of(*rest, **kwargs)
        if not _has_calls(target):
            raise _not_liftable(name, target, rest[0] if rest else kwargs[first])
        return rewrite.lift(target, methods)

    out: Any = with_target
    return out


# What cannot be decorated, and what to write in place of it.


def _not_liftable(
    name: str, target: object, argument: object = None
) -> errors.ArgumentTypeError:
    """Something was decorated that has no calls.

    Args:
        name: the name of the rule.
        target: what was given.
        argument: what was given with it, as in ``nn.stop_gradient(target, argument)``.
    """
    fix, for_a_tree = '', f'sg.rewrite(tree, nn.{name}(...))'
    if name in ('stop_gradient', 'substitute'):
        for_a_tree = f'sg.{name}(tree, {"where" if name[:2] == "st" else "values"})'
    if name == 'substitute' and isinstance(argument, str):
        fix = f'To say which variables write where={argument!r}.'
    elif isinstance(target, str) and argument is not None:
        fix = f'For several filters write [{target!r}, {argument!r}].'
    expected = 'expected a function, a method, a Module class or a module'
    text = f'nn.{name} cannot decorate {{}}: {expected}.'
    return wrappers.refused(text, target, fix, for_a_tree)


def _methods_without_class(methods: object) -> errors.UnknownNameError:
    return errors.UnknownNameError(
        f'methods={methods!r} was given, but no Module class to lift.\n'
        'Write nn.stop_gradient(Model, where, methods=[...]).',
    )


def _runs_later(fn: object) -> errors.ArgumentTypeError:
    """A generator or a coroutine was decorated: a block around the call is no help."""
    name = getattr(fn, '__qualname__', type(fn).__name__)
    return errors.ArgumentTypeError(
        f'{name} returns a generator or a coroutine, whose body runs when the call is '
        'over and its block is closed.\n'
        'Open the block in the body: with nn.stop_gradient(where):'
    )
