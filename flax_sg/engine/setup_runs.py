"""Running ``setup`` of a module once more, to see what it makes under other blocks.

The naive attempt runs it again on what the scope holds now. That gives other values as
soon as ``setup`` reads a state that was written since, draws random numbers, or lets a
module that lies elsewhere do so once more. So the hooks on Flax's scopes watch the run,
and what may not be as it was the first time is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax.core.scope import Scope

from flax_sg import errors
from flax_sg.engine import blocks
from flax_sg.internals import core_scopes, modules, tracing


def run_again(
    module: Any, name: str, open_blocks: tuple[blocks.Block, ...]
) -> dict[str, Any]:
    """Runs ``setup`` of a module on scratch scopes.

    Args:
        module: a bound module whose ``setup`` has run.
        name: the attribute that is wanted.
        open_blocks: the blocks that hold; none of them for the plain values.

    Returns:
        The attributes that it makes. None of them if the blocks change nothing.

    Raises:
        SetupValueError: if this run may differ from the first one.
    """
    made, doubts = _run(module, open_blocks)
    if doubts and module.scope.get_flag('initializing', False):
        # Everything is being made: it can be made again from nothing.
        made, doubts = _run(module, open_blocks, from_nothing=True)
    if doubts:
        reason = f'setup would have to run again, and {doubts[0]}'
        raise cannot_see(module, name, reason)
    return made


def _run(
    module: Any, open_blocks: tuple[blocks.Block, ...], from_nothing: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Returns the attributes, and why they may differ from those of the first run."""

    def scratch_of(scope: Scope) -> Scope:
        root = blocks.root_of(scope).as_scratch(from_nothing)
        mutable = {} if from_nothing else None
        return core_scopes.scratch_scope(
            scope, {blocks.ROOT_FLAG: root}, mutable=mutable
        )

    outer, thread = blocks.thread.doubts, blocks.thread
    levels = [block.level for block in open_blocks if block.rewrite.rule.brings]
    trace = tracing.in_innermost_trace([*levels, module.scope.trace_level])
    with trace, thread.only(open_blocks):
        scopes = modules.scopes_of(module)
        tops, copies = core_scopes.copy_scopes(scopes, scratch_of)
        clone = modules.clone_on(module, copies)
        before = thread.rewritten
        doubts = thread.doubts = []
        try:
            modules.run_setup(clone)
        except Exception as error:
            error.add_note('Raised when setup ran again, for values in an open block.')
            raise
        finally:
            thread.doubts = outer
        # Arrays that are made again are other arrays: take them only if they differ.
        if open_blocks and thread.rewritten == before:
            return {}, []
    for scope, copied in tops.items():
        doubts += _differences(copied.rng_counters, scope.rng_counters)
        copied.invalidate()
    return dict(vars(clone)), doubts


def _differences(used: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[str]:
    """Random streams that were used before the first run, or since."""
    for stream, count in used.items():
        if isinstance(count, Mapping):
            yield from _differences(count, now.get(stream, {}))
        elif count and count != now.get(stream):
            yield f'it draws from the random stream {stream!r}, which others use too'


# What the hooks see of such a run, which notes its doubts.


def reads(scope: Scope, collection: str) -> None:
    """Doubts a run that reads a variable which may have been written since."""
    # Parameters are not written by methods, and what is sown is not computed with.
    if collection not in ('params', 'intermediates'):
        _asks(scope, collection)


def has_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``Scope.has_variable``."""

    def hook(self: Scope, col: str, name: str) -> bool:
        # Flax asks too, for each parameter.
        if blocks.thread.doubts is not None and modules.asks_for_variable():
            _asks(self, col)
        return original(self, col, name)

    return hook


def _asks(scope: Scope, collection: str) -> None:
    doubts = blocks.thread.doubts
    if doubts is None or not scope.is_mutable_collection(collection):
        return
    if not blocks.root_of(scope).from_nothing:
        doubts.append(f'it asks for {collection!r}, which may have been written since')


def writes_elsewhere(scope: Scope, collection: str) -> bool:
    """Whether this is a run that writes to a scope that is no copy; doubts it then."""
    doubts = blocks.thread.doubts
    if doubts is None or blocks.root_of(scope).scratch:
        return False
    doubts.append(f'it lets a module elsewhere write {collection!r}')
    return True


def make_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``Scope.make_rng``."""

    def hook(self: Scope, name: str = 'params') -> Any:
        key, doubts = original(self, name), blocks.thread.doubts
        if doubts is not None and not blocks.root_of(self).scratch:
            self.rng_counters[name if self.has_rng(name) else 'params'] -= 1
            doubts.append('it lets a module elsewhere draw random numbers')
        return key

    return hook


def cannot_see(module: Any, name: str, reason: str) -> errors.SetupValueError:
    """A value that ``setup`` keeps cannot be computed again under a block."""
    path = '/'.join(module.scope.path)
    return errors.SetupValueError(
        f'self.{name}, which setup of {type(module).__name__} (at {path!r}) makes, '
        f'cannot be computed again for the open block: {reason}.\n'
        f'Keep parameters and modules in setup (self.w = self.param(...)), and compute '
        f'self.{name} in the method that uses it.'
    )
