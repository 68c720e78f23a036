"""What ``nn.stop_gradient(where)`` returns: for ``with``, for ``@`` and for calls.

A block around some lines is open from ``with`` to the end of its body. Around a
function, a method or a Module class each call opens a block of its own, since calls
nest and run in several threads. A generator function has returned before its body
runs, so a block around its calls would stop nothing: that raises.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, Self, TypeVar, overload

from flax.core.scope import Scope
from flax.linen import nowrap

from flax_sg import errors, filters
from flax_sg.engine import contents, opening
from flax_sg.errors.texts import brief, wrong_argument
from flax_sg.filters import tokens
from flax_sg.forms import mistakes, wrappers
from flax_sg.internals import frames, modules
from flax_sg.internals.modules import Module
from flax_sg.internals.optional import is_nnx_model
from flax_sg.internals.types import Args, BoundModule, Kwargs
from flax_sg.rules import rules
from flax_sg.scans import residuals

T = TypeVar('T')
P = ParamSpec('P')

# What a function returns whose body has not run yet.
_NOT_RUN = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockDecorator(opening.Guarded, rules.Rewrite):
    """A rewrite that opens a block, or puts one around the calls of something.

    The value is immutable, hashable and may be used any number of times::

        r = nn.stop_gradient('gln_*/**')
        with r: ...        # around these lines
        @r                 # around each call of the method or function
        r(model.apply)     # around each call of the function
        r(nn.Dense)        # around each call of a method of the class
        r(nn.Dense(4))     # around all that goes through the wrapper; see ``nn.Frozen``
    """

    @classmethod
    def of(cls, rewrite: rules.Rewrite) -> Self:
        """The rewrite, whose fields are checked, as a block and a decorator."""
        self = object.__new__(cls)
        vars(self).update(vars(rewrite))
        return self

    def __enter__(self) -> Self:
        opening.open_block(self, running_scope(frames.frame_of_user(1)))
        return self

    def _close(self, exc_type: type[BaseException] | None) -> None:
        opening.close_last(self, exc_type)

    def __call__(self, target: T, methods: Sequence[str] | None = None) -> T:
        """Puts a block around each call of a function, a method or a Module class.

        Args:
            target: a function or a method. If the first argument of a call is a bound
                module, paths are relative to that module. Otherwise the block is that
                of a ``with`` statement in the first line of the function. A Module
                class (or ``functools.partial`` of one): paths are relative to each
                module of the class. A module is wrapped, see ``nn.Frozen``.
            methods: for a class, the names of the methods to lift, or of properties.
                By default ``'__call__'``.

        Returns:
            The same kind of thing. A class keeps its name, so that parameters keep
            their paths.

        Raises:
            ArgumentTypeError: for what has no calls, such as a tree, and for
                ``methods`` of what is no class. When a call returns a generator or a
                coroutine, whose body runs later.
            AttributeError: for ``methods`` that the class does not have.
        """
        lifted: Any = _lifted(self, target, methods)
        return lifted


def _lifted(
    rewrite: rules.Rewrite,
    target: Any,
    methods: Sequence[str] | None = None,
    name: str = '',
) -> Any:
    """The target with a block around each call.

    Args:
        rewrite: the block.
        target: see ``BlockDecorator.__call__``.
        methods: as there.
        name: what the user has called, for errors; by default the name of the rule.
    """
    if modules.is_module_class(target):
        return _lifted_class(rewrite, target, methods)
    if methods is not None:
        raise _methods_without_class(methods)
    if isinstance(target, modules.Module):
        stops = isinstance(rewrite.rule, rules.StopGradient)
        return (wrappers.Frozen if stops else wrappers.Wrapper)(
            target,
            rewrite.where,
            collections=rewrite.collections,
            unused=rewrite.unused,
            rule=rewrite.rule,
        )
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(_lifted(rewrite, target.__func__))
    name = name or f'nn.{rewrite.rule.name}'
    if isinstance(target, str) and rewrite.rule.brings:
        write = f'{name}(values, where={target!r})'
        raise wrong_argument(target, 'module, class or function', write)
    is_wrong = isinstance(target, (type, filters.Filter)) or is_nnx_model(target)
    if is_wrong or not callable(target):
        raise mistakes.refused(
            f'{name} decorates a function, a method, a Module class or a module',
            target,
        )
    if inspect.ismethod(target) and isinstance(target.__self__, modules.Module):
        lifted = _lifted_function(rewrite, target.__func__)
        return types.MethodType(lifted, target.__self__)
    return _lifted_function(rewrite, target)


def _lifted_class(
    rewrite: rules.Rewrite, target: Any, methods: Sequence[str] | None
) -> Any:
    if isinstance(target, functools.partial):
        cls = _lifted_class(rewrite, target.func, methods)
        return functools.partial(cls, *target.args, **target.keywords)
    methods = '__call__' if methods is None else methods
    names = (methods,) if isinstance(methods, str) else methods
    attributes = {name: _attribute(target, name) for name in names}
    # Flax takes longer to make a class than to run a small module, and ``nn.jit``
    # traces each class. So equal stops of a class, in a loop say, are one class.
    # Not with a function, whose decisions may change, nor with a mask, which may be
    # traced: the table of classes would keep the tracer.
    is_plain = rewrite.where.needs.isdisjoint(('code', 'mask'))
    stops = is_plain and type(rewrite.rule) is rules.StopGradient
    key = target, rewrite, rewrite.unused, tuple(attributes.items())
    if stops and (made_before := _stopped_classes.get(key)):
        return made_before
    lifted = {
        name: _lifted_attribute(rewrite, target, name, attribute)
        for name, attribute in attributes.items()
    }
    # The name is what Flax calls the module by: with another one its parameters
    # would have other paths.
    copied = ('__doc__', '__module__', '__qualname__')
    same = {name: getattr(target, name) for name in copied}
    make = modules.told_apart(type(target), tokens.of_object)
    cls = make(target.__name__, (target,), {**same, **lifted})
    if stops:
        _stopped_classes[key] = cls
    return cls


_stopped_classes = weakref.WeakValueDictionary[Any, Any]()


def _attribute(cls: type, name: str) -> Any:
    """What a class or a base of it has under a name: a method, a property, ..."""
    # Not getattr(cls, name): for ``__call__`` a class without one gives the function
    # that makes instances, and a static method looks like a method.
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    raise AttributeError(
        f'{cls.__name__} has no method {name!r}.\n'
        f'Name those to lift: nn.stop_gradient({cls.__name__}, where, '
        "methods=['encode', ...])."
    )


def _lifted_attribute(
    rewrite: rules.Rewrite, cls: type, name: str, attribute: Any
) -> Any:
    """A method with a block around each call, or a property around each read."""
    if isinstance(attribute, (staticmethod, classmethod)):
        return _lifted(rewrite, attribute)
    # The method as Flax has wrapped it: ``setup`` has to run in the block, too.
    method = getattr(cls, name)
    if callable(method):
        return _lifted_function(rewrite, method)
    if not hasattr(attribute, '__get__'):
        raise errors.ArgumentTypeError(
            f'methods=[{name!r}] was given, and {cls.__name__}.{name} is '
            f'{brief(attribute)}, no method and no property.\n'
            f'Write nn.stop_gradient({cls.__name__}, where, methods=[...]).'
        )

    @nowrap
    def get(module: Module) -> Any:
        return attribute.__get__(module, type(module))

    get.__name__, get.__qualname__ = name, f'{cls.__qualname__}.{name}'
    setter = getattr(attribute, '__set__', None)
    return property(_lifted_function(rewrite, get), setter, doc=method.__doc__)


def _lifted_function(rewrite: rules.Rewrite, fn: Callable[..., Any]) -> Any:
    """A function or a method with a block around each call."""
    # A module that runs no method of its own needs what Flax wraps around a method: it
    # may have to run ``setup``. A method under ``nn.nowrap`` does without.
    of_module = fn if getattr(fn, 'nowrap', False) else modules.as_method(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        def run(called: Any, owner: Scope | None, judged: str, *args: Any) -> Any:
            with opening.InBlock(rewrite, owner, judged):
                y = called(*args, **kwargs)
            if isinstance(y, _NOT_RUN) or contents.gives_reads_away(y):
                raise errors.ArgumentTypeError(
                    f'{getattr(fn, "__qualname__", fn)} returns a generator, a '
                    'coroutine or another lazy iterator, which runs when the call is '
                    'over and its block is closed.\n'
                    'Return a list, or open the block in the body of a generator: with '
                    'nn.stop_gradient(where):'
                )
            return y

        module: Any = args[0] if args else None
        if not isinstance(module, modules.Module) or module.scope is None:
            return run(fn, running_scope(), opening.READS, *args)
        if modules.current_module() is module:
            return run(fn, module.scope, opening.EXISTENCE, *args)

        def use(module: BoundModule) -> Any:
            return run(of_module, module.scope, opening.EXISTENCE, module, *args[1:])

        operands = args[1:], kwargs, fn
        return residuals.call(rewrite.rule.name, module, module, use, operands)

    return wrapper


def running_scope(frame: types.FrameType | None = None) -> Scope | None:
    """The scope of the module whose method is running: of a block that opens now.

    Args:
        frame: that of the line which opens the block. It tells whose method the line
            is in. Where it is in no method, as in a function that a method has called,
            Flax knows which method runs.
    """
    module_of_line = None if frame is None else modules.module_of(frame)
    module = module_of_line or modules.current_module()
    return None if module is None else module.scope


class TakesTarget(Protocol[P]):
    """A function ``make(where)`` that may be called as ``make(target, where)`` too."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> BlockDecorator: ...
    @overload
    def __call__(self, target: T, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload  # A keyword of ours beside those of ``make`` leaves these unchecked.
    def __call__(
        self, target: T, /, *args: Any, methods: Sequence[str], **kwargs: Any
    ) -> T: ...


def takes_target(make: Callable[P, rules.Rewrite]) -> TakesTarget[P]:
    """Makes blocks of rewrites, and lets the target be the first argument.

    ``nn.stop_gradient(nn.Dense, 'kernel')`` is then what
    ``nn.stop_gradient('kernel')(nn.Dense)`` is. A Module class or a module in front of
    other arguments is the target. So is any other thing in front of the filter, if
    ``make`` takes one argument alone. A single argument is never the target: a function
    is a filter, too.

    Args:
        make: its first parameter says which variables. The result has a parameter
            ``methods``, too, which goes to ``BlockDecorator.__call__``.
    """
    make_rewrite: Any = make
    name = f'nn.{make_rewrite.__name__}'
    signature = inspect.signature(make)
    parameters = signature.parameters.values()
    first, *more = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]

    def has_target(args: Args, kwargs: Kwargs) -> bool:
        if len(args) + (first in kwargs) < 2:
            return False
        # If ``make`` takes more than one argument, the first of two may be the filter.
        is_model = modules.is_module_class(args[0]) or isinstance(
            args[0], modules.Module
        )
        return is_model or not more

    @functools.wraps(make)
    def with_target(
        *args: Any, methods: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        if not has_target(args, kwargs):
            if methods is not None:
                raise _methods_without_class(methods)
            return BlockDecorator.of(make_rewrite(*args, **kwargs))
        target, *arguments = args
        rewrite = BlockDecorator.of(make_rewrite(*arguments, **kwargs))
        return _lifted(rewrite, target, methods, name)

    out: Any = with_target
    methods = inspect.Parameter(
        'methods',
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation='Sequence[str] | None',
    )
    out.__signature__ = signature.replace(parameters=[*parameters, methods])
    return out


def _methods_without_class(methods: object) -> errors.ArgumentTypeError:
    return errors.ArgumentTypeError(
        f'methods={methods!r} was given, but no Module class to lift.\n'
        'Write nn.stop_gradient(Model, where, methods=[...]).',
    )
