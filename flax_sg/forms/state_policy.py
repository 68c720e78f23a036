"""What happens to running statistics, and other state, in a wrapped call."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Collection, Generator, Mapping
from typing import Any

from flax import linen

from flax_sg import errors
from flax_sg.engine import blocks
from flax_sg.internals import core_scopes, modules, tracing
from flax_sg.trees.variables import Key

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


def check(choice: Any) -> None:
    """Raises for what is no choice."""
    if choice not in CHOICES:
        raise errors.unknown_choice('state', choice, CHOICES)


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
            stack.enter_context(tracing.running_averages(True))
            stack.enter_context(linen.intercept_methods(_use_running_average))
        yield


@contextlib.contextmanager
def _held(module: Any) -> Generator[None]:
    scopes = modules.own_scopes(module)
    before = [core_scopes.copied_mutable(scope) for scope in scopes]
    roots: list[blocks.Root] = []
    try:
        roots += [blocks.root_of(scope) for scope in scopes]
        yield
    finally:
        blocks.thread.forget()
        for scope, root, variables in zip(scopes, roots, before, strict=False):
            for collection, tree in variables.items():
                if collection != 'params':
                    now = core_scopes.stored(scope)[collection]
                    _put_back(root.sown, (collection, scope.path), now, tree)


def _is_result(sown: Collection[Key], key: Key) -> bool:
    return key[0] in _RESULTS or key in sown


def _put_back(sown: Collection[Key], key: Key, now: Any, before: Any) -> None:
    """Makes the state in both trees what it was; what was created since stays."""
    collection, path = key
    for name in before.keys() & now.keys():
        value, below = before[name], (collection, (*path, name))
        if isinstance(value, Mapping) and isinstance(now[name], dict):
            _put_back(sown, below, now[name], value)
        elif not _is_result(sown, below):
            now[name] = value


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
