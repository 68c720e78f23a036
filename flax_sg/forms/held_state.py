"""Running statistics and other state: updated, held, or all in evaluation mode.

``state=`` of ``nn.Frozen`` and ``nn.mirror`` chooses. A call works on a copy: a module
that reads what it wrote computes what it computes without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import Any

from flax import linen
from flax.core.scope import DenyList, Scope

from flax_sg import filters
from flax_sg.engine import blocks, copies, roots, selection
from flax_sg.internals import core_scopes, modules, tracing
from flax_sg.rules import rules
from flax_sg.trees.variables import Key, facts_of, iter_leaf_keys

# 'update': state changes as without the wrapper. 'hold': a call works on a copy that is
# dropped when it ends. 'eval': held, normalization layers use what is stored, not the
# batch, and dropout is off.
STATE = UPDATE, HOLD, EVAL = 'update', 'hold', 'eval'

# What methods and modules call the choice between the batch and the stored values, and
# whether they draw random numbers.
_STATISTICS = {'use_running_average': True, 'update_stats': False}
_DROPOUT = {'deterministic': True}
# What a call gives to its caller is no state: these, and what it sows elsewhere. A
# model that generates has to write its cache, frozen or not. A mirror only reads it.
OF_MIRRORS = ('intermediates', 'perturbations')
RESULTS = (*OF_MIRRORS, 'cache')


@dataclasses.dataclass(frozen=True)
class _HoldState(rules.Rule):
    """Reads see the stored value; the block tells which state is held.

    Attributes:
        asks_place: whether the block tells, too, which modules evaluate.
        results: the collections that are never held.
    """

    name = 'hold_state'
    asks_path = False
    acts_on = 'nothing'
    asks_place: bool = False
    results: tuple[str, ...] = RESULTS


def state_in(
    where: filters.Filter, choice: str, results: tuple[str, ...]
) -> rules.Rewrite:
    """The rewrite whose filter tells which state is held.

    Args:
        where: the filter.
        choice: one of ``STATE``.
        results: the collections that are never held.
    """
    rule = _HoldState(choice == EVAL, results)
    return rules.Rewrite(where, rule, DenyList(('params', *results)), 'ignore')


@contextlib.contextmanager
def handle_state(module: Any, choice: str, block: Any) -> Generator[None]:
    """Treats the state of a bound module as the choice says, in the body.

    Args:
        module: the module.
        choice: one of ``STATE``.
        block: the block of a rewrite from ``state_in``.
    """
    with contextlib.ExitStack() as stack:
        if choice == UPDATE:
            yield
            return
        opened = stack.enter_context(block)
        stack.callback(copies.drop, opened)
        takes = functools.partial(_takes, opened)
        stack.enter_context(_held(module, takes))
        # At initialization the first state is made as without a wrapper.
        begins = module.scope.get_flag('initializing', False)
        if choice == EVAL and not begins:
            # Part of JAX's cache keys: a trace of ``nn.jit`` is not found here.
            stack.enter_context(tracing.running_averages(True))
            names = {'any', *(key[1][-1] for key in _keys_in(module.scope))}
            covers = functools.partial(_covers, opened, names)
            switch = functools.partial(_evaluate, takes, covers)
            stack.enter_context(linen.intercept_methods(switch))
        yield


def _takes(block: blocks.Block, root: roots.Root, key: Key) -> bool:
    rule: Any = block.rewrite.rule
    if key[0] in rule.results:
        return False
    return bool(selection.selects(block, root, key, read=False, noted=True))


def _keys_in(scope: Scope) -> Iterator[Key]:
    """The leaves of all variables of a scope and the scopes below it."""
    for collection, tree in core_scopes.stored(scope).items():
        if collection not in RESULTS:
            yield from iter_leaf_keys((collection, scope.path), tree)


def _covers(block: blocks.Block, names: Collection[str], scope: Scope) -> bool:
    """Whether the filter of a block selects everything under the path of a module.

    Args:
        block: the block.
        names: without variables there, the names of those that there might be.
        scope: the scope of the module.
    """
    might_be = [('params', (*scope.path, name)) for name in names]
    root = blocks.root_of(scope)
    return all(_takes_all(block, root, key) for key in [*_keys_in(scope)] or might_be)


def _takes_all(block: blocks.Block, root: roots.Root, key: Key) -> bool:
    try:
        said = selection.selects(block, root, key, read=False, noted=True)
    except Exception:  # The filter was not written for a variable that there is not.
        block.lease.note([facts_of(key)])
        return False
    return said is True


def _is_held(takes: Callable[..., bool], scope: Scope) -> bool:
    """Whether all state of a module is held; there has to be some.

    What has the names of the parameters, such as their average, is no state.
    """
    root, keys = blocks.root_of(scope), list(_keys_in(scope))
    params = {path for collection, path in keys if collection == 'params'}
    state = [key for key in keys if key[1] not in params]
    return bool(state) and all(takes(root, key) for key in state)


@contextlib.contextmanager
def _held(module: Any, takes: Callable[..., bool]) -> Generator[None]:
    scopes = modules.own_scopes(module)
    before = [core_scopes.copied_mutable(scope) for scope in scopes]
    try:
        yield
    finally:
        for scope, variables in zip(scopes, before, strict=True):
            root = blocks.root_of(scope)
            for collection, tree in variables.items():
                if collection != 'params':
                    now = core_scopes.stored(scope)[collection]
                    of_root = functools.partial(takes, root)
                    _put_back(of_root, root.sown, (collection, scope.path), now, tree)


def _put_back(
    takes: Callable[[Key], bool],
    sown: Collection[Key],
    key: Key,
    now: Any,
    before: Any,
) -> None:
    """Makes held state in both trees what it was; what was created since stays."""
    collection, path = key
    for name in before.keys() & now.keys():
        value, below = before[name], (collection, (*path, name))
        if isinstance(value, Mapping) and isinstance(now[name], dict):
            _put_back(takes, sown, below, now[name], value)
        elif below not in sown and takes(below):
            now[name] = value


def _evaluate(
    takes: Callable[..., bool],
    covers: Callable[[Scope], bool],
    next_fun: Any,
    args: Any,
    kwargs: Any,
    context: linen.module.InterceptorContext,
) -> Any:
    """Sets the switches of a method, or of its module, for one call."""
    module, switches = context.module, dict[str, bool]()
    fields = {field.name for field in dataclasses.fields(module)}
    known = {*fields, *inspect.signature(context.orig_method).parameters}
    if module.scope is not None and known & _STATISTICS.keys():
        switches |= _STATISTICS if _is_held(takes, module.scope) else {}
    if module.scope is not None and known & _DROPOUT.keys():
        switches |= _DROPOUT if covers(module.scope) else {}
    with contextlib.ExitStack() as stack:
        for name, value in switches.items():
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
