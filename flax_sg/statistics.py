"""What happens to running statistics, and other state, in a wrapped call."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

from flax import linen
from flax.core.scope import Scope

from flax_sg import _private, errors

if 'UPDATE' in globals():  # It was loaded before.
    raise errors.ReloadError(__name__)

UPDATE = 'update'
HOLD = 'hold'
USE_RUNNING_AVERAGE = 'use_running_average'
CHOICES = {
    UPDATE: 'it is updated, as without the wrapper',
    HOLD: 'a call works on a copy that is dropped when it ends',
    USE_RUNNING_AVERAGE: 'held, and normalization layers use what is stored, not the '
    'batch',
}

# What methods and modules call the choice between the batch and the stored values.
_SWITCHES = {'use_running_average': True, 'update_stats': False}
# What the call gives to its caller is no state: these, and what it sows elsewhere.
_RESULTS = ('intermediates', 'perturbations')
# Collections and names that something was sown under. A body of ``nn.jit`` that was
# traced before sows without Python; it was traced in such a block too, or it would not
# be found in one.
_sown: set[tuple[str, str]] = set()


def sow(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``Module.sow``."""

    def hook(self: Any, col: str, name: str, *args: Any, **kwargs: Any) -> Any:
        _sown.add((col, name))
        return original(self, col, name, *args, **kwargs)

    return hook


def _is_result(collection: str, name: str) -> bool:
    return collection in _RESULTS or (collection, name) in _sown


def check(choice: Any) -> None:
    """Raises for what is no choice."""
    if choice not in CHOICES:
        raise errors.ChoiceError('state', choice, CHOICES)


@contextlib.contextmanager
def handled(module: Any, choice: str) -> Generator[None]:
    """Treats the state of a bound module as the choice says, in the body."""
    with contextlib.ExitStack() as stack:
        if choice != UPDATE:
            stack.enter_context(_held(module))
        # What they begin with is not ours to change.
        begins = module.scope.get_flag('initializing', False)
        if choice == USE_RUNNING_AVERAGE and not begins:
            # Part of JAX's cache keys: what ``nn.jit`` has traced is not found here.
            stack.enter_context(_private.running_averages(True))
            stack.enter_context(linen.intercept_methods(_use_running_average))
        yield


@contextlib.contextmanager
def _held(module: Any) -> Generator[None]:
    scopes = _private.own_scopes(module)
    before = [_private.copied_mutable(scope) for scope in scopes]
    try:
        yield
    finally:
        for scope, variables in zip(scopes, before, strict=True):
            for collection, tree in variables.items():
                if collection != 'params':
                    _put_back(collection, _private.stored(scope)[collection], tree)


def _put_back(collection: str, now: Any, before: Any) -> None:
    """Makes the state in both trees what it was; what was created since stays."""
    for name in before.keys() & now.keys():
        value = before[name]
        if isinstance(value, Mapping) and isinstance(now[name], dict):
            _put_back(collection, now[name], value)
        elif not _is_result(collection, name):
            now[name] = value


@contextlib.contextmanager
def results_handed_over(
    copy: Any, module: Any, given: Collection[str]
) -> Generator[None]:
    """Lets what a module on a copy of a scope sows go on in the scope itself.

    Args:
        copy: the module on the copy.
        module: the module that it was copied from, and may have been called since.
        given: the collections that have other values in the copy.
    """
    of, to = module.scope, copy.scope
    for collection, tree in _private.stored(of).items():
        if collection != 'params' and to.is_mutable_collection(collection):
            # What is sown may be known by then only.
            given_too = collection in given
            found = _results(collection, tree) if given_too else _private.copied(tree)
            _put(to, collection, found)
    yield
    for collection, tree in _private.stored(to).items():
        if of.is_mutable_collection(collection):
            _put(of, collection, _results(collection, tree))


def _put(scope: Scope, collection: str, tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        scope.put_variable(collection, name, value)


def _results(collection: str, tree: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            if inner := _results(collection, value):
                found[name] = inner
        elif _is_result(collection, name):
            found[name] = value
    return found


def _use_running_average(
    next_fun: Any, args: Any, kwargs: Any, context: linen.module.InterceptorContext
) -> Any:
    """Sets the switch of a method, or of its module, for one call."""
    module = context.module
    fields = {field.name for field in dataclasses.fields(module)}
    with contextlib.ExitStack() as stack:
        for name, value in _SWITCHES.items():
            if getattr(module, name, None) is not None and name in fields:
                before = getattr(module, name)
                object.__setattr__(module, name, value)
                stack.callback(object.__setattr__, module, name, before)
                value = None  # Flax takes it from one place only.
            args, kwargs = _with_argument(
                context.orig_method, name, value, args, kwargs
            )
        return next_fun(*args, **kwargs)


def _with_argument(
    method: Any, name: str, value: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    signature = inspect.signature(method)
    if name not in signature.parameters:
        return args, kwargs
    bound = signature.bind_partial(*args, **kwargs)
    bound.arguments[name] = value
    return bound.args, bound.kwargs
