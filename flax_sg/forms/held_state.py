"""Running statistics and other state: updated, held, or all in evaluation mode.

``state=`` of ``nn.Frozen`` and ``nn.mirror`` chooses. A call works on a copy of held
state. So a module that reads what it has written computes what it computes without a
wrapper.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import Any

import jax
from flax import linen
from flax.core.scope import DenyList, Scope

from flax_sg import errors, filters
from flax_sg.engine import blocks, roots, selection
from flax_sg.internals import core_scopes, modules, tracing
from flax_sg.internals.types import Args, BoundModule, Kwargs, PyTree
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
# Collections that are not held, because they are results of a call, as all sown values
# are. A model that generates has to write its cache, frozen or not. A mirror holds the
# cache: the module itself may go on to write it.
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
    if choice == EVAL and 'condition' in where.needs:
        raise errors.PartError(
            f"state='eval' was given {where!r}: a layer trains or evaluates while JAX "
            'traces it, and the condition is known when the program runs.\n'
            "Write state='hold', which holds the state while the condition holds. Or "
            'give its value: bool(step < k), outside of jax.jit.'
        )
    rule = _HoldState(choice == EVAL, results)
    return rules.Rewrite(where, rule, DenyList(('params', *results)), 'ignore')


@contextlib.contextmanager
def handle_state(
    module: BoundModule,
    choice: str,
    block: contextlib.AbstractContextManager[blocks.Block],
) -> Generator[None]:
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
        holds = functools.partial(_holds, opened)
        stack.enter_context(_held(module, holds))
        # ``init`` has to make the first state as it does without a wrapper.
        begins = module.scope.get_flag('initializing', False)
        if choice == EVAL and not begins:
            # This is in JAX's cache keys. Otherwise ``nn.jit`` would run what it has
            # traced of the same layer in training.
            stack.enter_context(tracing.running_averages(True))
            names = {'any', *(key[1][-1] for key in _keys_in(module.scope))}
            covers = functools.partial(_covers, opened, names)
            switch = functools.partial(_evaluate, holds, covers)
            stack.enter_context(linen.intercept_methods(switch))
        yield


def _holds(block: blocks.Block, root: roots.Root, key: Key) -> bool | filters.Part:
    """Whether a block of a rewrite from ``state_in`` holds a variable, or a part."""
    rule: Any = block.rewrite.rule
    if key[0] in rule.results:
        return False
    return selection.selects(block, root, key, read=False, noted=True)


def _keys_in(scope: Scope) -> Iterator[Key]:
    """The leaves of all variables of a scope and the scopes below it."""
    for collection, tree in core_scopes.stored(scope).items():
        if collection not in RESULTS:
            yield from iter_leaf_keys((collection, scope.path), tree)


def _keys_below(scope: Scope, below: tuple[str, ...]) -> list[Key]:
    """The leaves in a scope whose paths begin with some names, from the scope on."""
    path = (*scope.path, *below)
    return [key for key in _keys_in(scope) if key[1][: len(path)] == path]


def _covers(
    block: blocks.Block,
    names: Collection[str],
    scope: Scope,
    below: tuple[str, ...] = (),
) -> bool:
    """Whether the filter of a block selects everything under the path of a module.

    Args:
        block: the block.
        names: names to ask about for a module that has no variables.
        scope: the scope of the module.
        below: the path of a module of NNX, in the module of linen that holds it.
    """
    examples = [('params', (*scope.path, *below, name)) for name in names]
    root, keys = blocks.root_of(scope), _keys_below(scope, below) or examples
    return all(_selects_whole(block, root, key) for key in keys)


def _selects_whole(block: blocks.Block, root: roots.Root, key: Key) -> bool:
    try:
        decision = selection.selects(block, root, key, read=False, noted=True)
    except Exception:  # A function may raise for an example, which does not exist.
        block.lease.note([facts_of(key)])
        return False
    return decision is True


def _is_held(
    holds: Callable[..., bool | filters.Part], scope: Scope, below: tuple[str, ...] = ()
) -> bool:
    """Whether a module has state, and all of it is held.

    Variables with the names of the parameters, such as their average, do not count.

    Raises:
        PartError: if a part of a variable is held.
    """
    root, keys = blocks.root_of(scope), _keys_below(scope, below)
    params = {path for collection, path in keys if collection == 'params'}
    state = {key: holds(root, key) for key in keys if key[1] not in params}
    for (_, path), decision in state.items():
        if isinstance(decision, filters.Part):
            raise errors.PartError(
                f"state='eval': the filter selects a part of {'/'.join(path)!r}, and a "
                "layer trains or evaluates as a whole.\nWrite state='hold', which "
                'holds the part.'
            )
    return bool(state) and all(state.values())


@contextlib.contextmanager
def _held(
    module: BoundModule, holds: Callable[..., bool | filters.Part]
) -> Generator[None]:
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
                    holds_key = functools.partial(holds, root)
                    key = collection, scope.path
                    _put_back(holds_key, root.sown, key, now, tree)


def _put_back(
    holds: Callable[[Key], bool | filters.Part],
    sown: Collection[Key],
    key: Key,
    now: PyTree,
    before: PyTree,
) -> None:
    """Puts held state of ``before`` into ``now``; new variables stay."""
    collection, path = key
    for name in before.keys() & now.keys():
        value, below = before[name], (collection, (*path, str(name)))
        if isinstance(value, Mapping) and isinstance(now[name], dict):
            _put_back(holds, sown, below, now[name], value)
        elif below not in sown:
            decision, text = holds(below), '/'.join(below[1])
            if decision is True:
                now[name] = value
            elif isinstance(decision, filters.Part):
                merged = functools.partial(filters.merged, decision, path=text)
                now[name] = jax.tree.map(merged, value, now[name])


def _evaluate(
    holds: Callable[..., bool | filters.Part],
    covers: Callable[..., bool],
    next_fun: Callable[..., PyTree],
    args: Args,
    kwargs: Kwargs,
    context: linen.module.InterceptorContext,
) -> Any:
    """Sets the switches of a method, or of its module, for one call."""
    module, method = context.module, context.orig_method
    switches_of = functools.partial(_switches, holds, covers, module.scope)
    fields = {field.name for field in dataclasses.fields(module)}
    names = {*fields, *inspect.signature(method).parameters}
    switches = switches_of(names)
    of_module = {
        name: value
        for name, value in switches.items()
        if name in fields and getattr(module, name, None) is not None
    }
    # Flax raises if field and argument are both given: then the argument is None.
    arguments = switches | dict.fromkeys(of_module)
    if _OF_TO_LINEN in names:
        nnx_method = kwargs.get(_OF_TO_LINEN, '__call__')
        kwargs = {**kwargs, _OF_TO_LINEN: _evaluated_nnx(nnx_method, switches_of)}
    args, kwargs = _with_arguments(method, arguments, args, kwargs)
    with _fields_set(module, of_module):
        return next_fun(*args, **kwargs)


def _switches(
    holds: Callable[..., bool | filters.Part],
    covers: Callable[..., bool],
    scope: Scope | None,
    names: Collection[str],
    *below: str,
) -> dict[str, bool]:
    """The switches of a module for evaluation, of those that it may have.

    Args:
        holds: whether a variable is held.
        covers: whether everything under a path is frozen.
        scope: the scope of the module of linen.
        names: the names of its fields and arguments.
        *below: the path of a module of NNX in it, whose names these are.
    """
    switches = dict[str, bool]()
    if scope is not None and not _STATISTICS.keys().isdisjoint(names):
        switches |= _STATISTICS if _is_held(holds, scope, below) else {}
    if scope is not None and not _DROPOUT.keys().isdisjoint(names):
        switches |= _DROPOUT if covers(scope, below) else {}
    return switches


@contextlib.contextmanager
def _fields_set(module: BoundModule, fields: Mapping[str, bool]) -> Generator[None]:
    """Sets fields of a module for the body."""
    before = {name: getattr(module, name) for name in fields}
    for name, value in fields.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _with_arguments(
    method: Callable[..., Any],
    values: Mapping[str, bool | None],
    args: Args,
    kwargs: Kwargs,
) -> tuple[Any, Any]:
    """The arguments of a call, with other values for those that a method takes."""
    signature = inspect.signature(method)
    taken = {name: v for name, v in values.items() if name in signature.parameters}
    if not taken:
        return args, kwargs
    bound = signature.bind_partial(*args, **kwargs)
    bound.arguments |= taken
    return bound.args, bound.kwargs


# The argument by which ``nnx.bridge.ToLinen`` is told the method of its NNX model.
_OF_TO_LINEN = 'nnx_method'


def _evaluated_nnx(
    method: Callable[..., Any] | str | None, switches_of: Callable[..., dict[str, bool]]
) -> Any:
    """A method of an NNX model with all switches set, as ``model.eval()`` sets them.

    Args:
        method: the method, or its name; None for ``__call__``.
        switches_of: the switches of a module, by the names that it has and its path.
    """

    def evaluated(model: Any, *args: Any, **kwargs: Any) -> Any:
        from flax import nnx  # Models of linen do not wait for it.

        for path, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Module):
                switches = switches_of(vars(node).keys(), *map(str, path))
                for name in switches.keys() & vars(node).keys():
                    setattr(node, name, switches[name])
        name = method or '__call__'
        fn = getattr(type(model), name) if isinstance(name, str) else name
        switches = switches_of(inspect.signature(fn).parameters)
        args, kwargs = _with_arguments(fn, switches, (model, *args), kwargs)
        return fn(*args, **kwargs)

    return evaluated
