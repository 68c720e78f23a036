"""Runs a module's ``setup`` again, to get the values that it makes in other blocks.

Running ``setup`` on the current scope would be wrong in three cases: it reads a state
that was written since, draws random numbers, or makes a module elsewhere write or draw
again. So the hooks on Flax's scopes watch the run. If a value may differ from the first
run, an error is raised.
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
    """Runs a module's ``setup`` on scratch scopes, and returns its attributes.

    Args:
        module: a bound module whose ``setup`` has run.
        name: the attribute to report in an error.
        open_blocks: the blocks to run under; empty for the values without blocks.

    Returns:
        The attributes that ``setup`` makes; empty if the blocks change nothing.

    Raises:
        SetupValueError: if this run may differ from the first one.
    """
    made, doubts = _run(module, open_blocks)
    if doubts and module.scope.get_flag('initializing', False):
        # Under ``init``, all variables can be created again from nothing.
        made, doubts = _run(module, open_blocks, from_nothing=True)
    if doubts:
        reason = f'setup would have to run again, and {doubts[0]}'
        raise cannot_see(module, name, reason)
    return made


def _run(
    module: Any, open_blocks: tuple[blocks.Block, ...], from_nothing: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Returns the attributes, and reasons why they may differ from the first run."""

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
        # A second run makes new array objects: use them only if a rule was applied.
        if open_blocks and thread.rewritten == before:
            return {}, []
    for scope, copied in tops.items():
        doubts += _differences(copied.rng_counters, scope.rng_counters)
        copied.invalidate()
    return dict(vars(clone)), doubts


def _differences(used: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[str]:
    """Yields a reason per random stream also used before the first run, or since."""
    for stream, count in used.items():
        if isinstance(count, Mapping):
            yield from _differences(count, now.get(stream, {}))
        elif count and count != now.get(stream):
            yield f'it draws from the random stream {stream!r}, which others use too'


# The hooks call these. During a second run they note why its values may differ.


def reads(scope: Scope, collection: str) -> None:
    """Notes a doubt if a second run reads a variable that may have changed."""
    # Methods do not write parameters, and do not compute with sown values.
    if collection not in ('params', 'intermediates'):
        _asks(scope, collection)


def has_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the hook for ``Scope.has_variable``."""

    def hook(self: Scope, col: str, name: str) -> bool:
        # Flax itself calls this for each parameter: count the user's calls only.
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
    """Whether a second run writes outside its scratch scopes; notes a doubt if so."""
    doubts = blocks.thread.doubts
    if doubts is None or blocks.root_of(scope).scratch:
        return False
    doubts.append(f'it lets a module elsewhere write {collection!r}')
    return True


def make_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the hook for ``Scope.make_rng``."""

    def hook(self: Scope, name: str = 'params') -> Any:
        key, doubts = original(self, name), blocks.thread.doubts
        if doubts is not None and not blocks.root_of(self).scratch:
            self.rng_counters[name if self.has_rng(name) else 'params'] -= 1
            doubts.append('it lets a module elsewhere draw random numbers')
        return key

    return hook


def cannot_see(module: Any, name: str, reason: str) -> errors.SetupValueError:
    """Makes the error for a ``setup`` value that cannot be recomputed in a block."""
    path = '/'.join(module.scope.path)
    return errors.SetupValueError(
        f'self.{name}, which setup of {type(module).__name__} (at {path!r}) makes, '
        f'cannot be computed again for the open block: {reason}.\n'
        f'Keep parameters and modules in setup (self.w = self.param(...)), and compute '
        f'self.{name} in the method that uses it.'
    )
