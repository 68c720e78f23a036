"""Running the ``setup`` of a module a second time, under other blocks.

The naive attempt runs it again on what the scope holds now. That gives other values as
soon as ``setup`` reads a state that was written since, draws random numbers, or lets a
module that lies elsewhere do so once more. So the second run is watched: what cannot be
told to be what the first one did is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax.core.scope import Scope

from flax_sg import errors
from flax_sg.engine import blocks, contents
from flax_sg.internals import core_scopes, modules, tracing
from flax_sg.rules import rules


class _UnfaithfulError(Exception):
    """The second run does, or may do, something else than the first one did."""


class _Reached(BaseException):
    """The second run has come to the point up to which it is wanted."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What ``setup`` of a module began with.

    Attributes:
        scope: the scope of the module; ``nn.share_scope`` gives it another one.
        rngs: the random streams of the scope, which ``nn.jit`` replaces for a while.
        counters: how often each of them had been used.
        variables: the mutable collections of the scope.
    """

    scope: Scope
    rngs: Mapping[str, Any]
    counters: Mapping[Any, Any]
    variables: Mapping[str, Any]

    @classmethod
    def of(cls, scope: Scope) -> Start:
        """What a ``setup`` that runs now begins with."""
        counters = core_scopes.copied(scope.rng_counters)
        return cls(scope, dict(scope.rngs), counters, core_scopes.copied_mutable(scope))

    @classmethod
    def of_nothing(cls, scope: Scope) -> Start:
        """What the first ``setup`` of a module that is being made began with."""
        return cls(scope, dict(scope.rngs), dict.fromkeys(scope.rngs, 0), {})

    def is_of(self, scope: Scope) -> bool:
        """Whether ``scope`` is the one that it tells of, or a rewound copy of that."""
        return core_scopes.variables_of(scope) is core_scopes.variables_of(self.scope)


class _Replay:
    """A second run, as the hooks on Flax's scopes and the opening of blocks see it.

    Attributes:
        doubts: why it may not do what the first one did.
        of_filter: what a filter has raised.
    """

    def __init__(self, until: blocks.Block | None) -> None:
        self.doubts: list[str] = []
        self.of_filter: Exception | None = None
        self._until = until

    def opens(self, rewrite: rules.Rewrite, owner: Scope | None) -> None:
        """A block is about to be opened."""
        path = () if owner is None else owner.path
        block = self._until
        if block is None:
            return
        # Values that are computed anew are other values of the same kind.
        mine, wanted = rewrite.rule.key(), block.rewrite.rule.key()
        same = (rewrite.where, mine) == (block.rewrite.where, wanted)
        if same and path == block.owner_path:
            raise _Reached

    def reads(self, scope: Scope, collection: str) -> None:
        """A variable that exists is read."""
        # Parameters are not written by methods, whether or not they may be; what is
        # sown is not read to compute with.
        if collection in ('params', 'intermediates'):
            return
        known = blocks.root_of(scope).start_is_known
        if not known and scope.is_mutable_collection(collection):
            self.doubts.append(f'it reads {collection!r}, which may be written since')

    def asks(self, scope: Scope, collection: str) -> None:
        """The user's code asks whether a variable is there."""
        known = blocks.root_of(scope).start_is_known
        # Parameters are there from the start, but where they are being made.
        fixed = collection == 'params' and not scope.get_flag('initializing', False)
        if not (known or fixed) and scope.is_mutable_collection(collection):
            self.doubts.append(f'it asks what is in {collection!r}')

    def writes(self, scope: Scope, collection: str) -> bool:
        """A variable is about to be written; returns whether it should be."""
        mine = blocks.root_of(scope).scratch
        if not mine:
            self.doubts.append(f'it lets a module elsewhere write {collection!r}')
        return mine

    def draws(self, scope: Scope, stream: str) -> None:
        """A random number was drawn."""
        if not blocks.root_of(scope).scratch:
            scope.rng_counters[stream] -= 1  # Nothing has happened.
            self.doubts.append('it lets a module elsewhere draw random numbers')


def make_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``Scope.make_rng``."""

    def hook(self: Scope, name: str = 'params') -> Any:
        key = original(self, name)
        if blocks.thread.replay is not None:
            blocks.thread.replay.draws(self, name if self.has_rng(name) else 'params')
        return key

    return hook


def has_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``Module.has_variable``."""

    def hook(self: Any, col: str, name: str) -> bool:
        if blocks.thread.replay is not None and self.scope is not None:
            blocks.thread.replay.asks(self.scope, col)
        return original(self, col, name)

    return hook


def derive(
    module: Any,
    open_blocks: tuple[blocks.Block, ...],
    kept: Mapping[str, Any],
    start: Start | None,
    until: blocks.Block | None = None,
) -> Mapping[str, Any]:
    """Returns kept values as ``setup`` makes them under ``open_blocks``.

    Args:
        module: a bound module whose ``setup`` has run, or is running.
        open_blocks: the blocks that hold; none of them for the plain values.
        kept: the kept values that hold arrays.
        start: what ``setup`` began with; None if nobody was there to see.
        until: the block in ``setup`` up to whose opening it is run.

    Raises:
        SetupValueError: if the second run may not be like the first one.
    """
    try:
        return _derive(module, open_blocks, kept, start, until)
    except _UnfaithfulError as error:
        fault = error
    if start is None and module.scope.get_flag('initializing', False):
        # Everything is being made: it can be made again from nothing.
        nothing = Start.of_nothing(module.scope)
        try:
            return _derive(module, open_blocks, kept, nothing, until, guessed=True)
        except _UnfaithfulError as error:
            fault = error
    reason = f'setup would have to run again, and {fault}'
    raise _cannot_copy(module, None, reason) from fault


def _derive(
    module: Any,
    open_blocks: tuple[blocks.Block, ...],
    kept: Mapping[str, Any],
    start: Start | None,
    until: blocks.Block | None,
    guessed: bool = False,
) -> Mapping[str, Any]:
    scope: Scope = module.scope

    def scratch_of(copied: Scope) -> Scope:
        known = start is not None and start.is_of(copied)
        root = blocks.root_of(copied).as_scratch(start_is_known=known)
        flags = {blocks.ROOT_FLAG: root}
        if start is None or not known:
            return core_scopes.scratch_scope(copied, flags)
        return core_scopes.scratch_scope(
            copied, flags, start.rngs, start.counters, start.variables
        )

    home = _home_of(scope, open_blocks)
    with home, blocks.thread.only(open_blocks):
        tops, scopes = core_scopes.copy_scopes(modules.scopes_of(module), scratch_of)
        before = blocks.thread.rewritten
        scratch = modules.clone_on(module, scopes)
        doubts = _run_setup(scratch, until)
        derived = dict(vars(scratch))
        # Arrays made again are other arrays: take only what a rule has reached.
        if open_blocks and blocks.thread.rewritten == before:
            return kept
    for doubt in doubts:
        raise _UnfaithfulError(doubt)
    if until is None:
        seen = None if guessed else start
        unseen = [s for s in tops if seen is None or not seen.is_of(s)]
        _check_streams((tops[s], s) for s in unseen)
    for copied in tops.values():
        copied.invalidate()
    back = contents.Back(_pairs(scratch, module))
    return {name: _put_back(back, module, name, derived) for name in kept}


def _home_of(scope: Scope, open_blocks: tuple[blocks.Block, ...]) -> Any:
    """The trace to which belongs what ``setup`` derives under these blocks."""
    levels = [block.level for block in open_blocks if block.rewrite.rule.brings]
    if not levels:
        return tracing.in_trace_of_scope(scope)
    return tracing.in_innermost_trace([*levels, scope.trace_level])


def _run_setup(scratch: Any, until: blocks.Block | None) -> list[str]:
    before = blocks.thread.replay
    replay = _Replay(until)
    try:
        blocks.thread.replay = replay
        modules.run_setup(scratch)
    except _Reached:
        return replay.doubts
    except errors.FlaxSGError:
        raise
    except Exception as error:
        if error is replay.of_filter:
            raise
        raise _UnfaithfulError(f'that raises {error!r}') from error
    finally:
        blocks.thread.replay = before
    if until is not None:
        raise _UnfaithfulError('it does not come to the block again')
    return replay.doubts


def _check_streams(scopes: Iterable[tuple[Scope, Scope]]) -> None:
    for copied, scope in scopes:
        _check_counters(copied.rng_counters, scope.rng_counters)


def _check_counters(used: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    """Raises if a random stream was used that has been used before or since."""
    for stream, count in used.items():
        if isinstance(count, Mapping):
            _check_counters(count, now.get(stream, {}))
        elif count and count != now.get(stream):
            raise _UnfaithfulError(
                f'it draws from the random stream {stream!r}, which has been used '
                'since, and the block was opened later'
            )


def _put_back(
    back: contents.Back, module: Any, name: str, derived: Mapping[str, Any]
) -> Any:
    if name not in derived:
        raise _cannot_copy(module, name, 'setup did not make it again')
    value = back(derived[name])
    if back.is_reached_from(value):
        reason = 'it hides a module where it cannot be replaced'
        raise _cannot_copy(module, name, reason)
    return value


def _pairs(scratch: Any, module: Any) -> dict[int, tuple[Any, Any]]:
    """The modules of the scratch scopes, each with the one that it stands for."""
    pairs: dict[int, tuple[Any, Any]] = {}

    def pair(a: Any, b: Any) -> None:
        if not (isinstance(a, modules.Module) and isinstance(b, modules.Module)):
            return
        if a is b or id(a) in pairs:
            return
        pairs[id(a)] = (a, b)
        for field in dataclasses.fields(a):
            if field.init and field.name != 'parent':
                of_a, of_b = getattr(a, field.name), getattr(b, field.name)
                for one, other in zip(
                    jax.tree.leaves(of_a), jax.tree.leaves(of_b), strict=False
                ):
                    pair(one, other)
        children = modules.children_of(b)
        for name, child in modules.children_of(a).items():
            pair(child, children.get(name))

    pair(scratch, module)
    return pairs


def _cannot_copy(
    module: object, name: str | None, reason: str
) -> errors.SetupValueError:
    """A value that ``setup`` keeps cannot be derived again under a block."""
    what = 'the values' if name is None else f'the value self.{name}'
    path = '/'.join(getattr(getattr(module, 'scope', None), 'path', ()))
    return errors.SetupValueError(
        f'{what} that setup of {type(module).__name__} (at {path!r}) keeps cannot '
        f'be seen under the open block: {reason}.\n'
        'Compute it in the method that uses it, or open the block before the '
        'module is first used.'
    )
