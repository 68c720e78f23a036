"""The mechanism, broken on purpose: what naive versions of it get wrong.

Each function puts one fault into flax_sg, for as long as the fixture lasts.
``test_broken`` says which tests catch it, and how.
"""

import contextlib
from typing import Any

import pytest

from flax_sg import (
    _private,
    blocks,
    contexts,
    functions,
    hooks,
    paths,
    rewrites,
    views,
    writeback,
)
from flax_sg.flow import analysis, dependence, derivatives, programs

Patch = pytest.MonkeyPatch


def no_cache_key(patch: Patch) -> None:
    """JAX's caches know nothing of blocks: the first call decides for all others."""
    patch.setattr(_private, 'user_context', lambda number: contextlib.nullcontext())


def stop_inside_the_body(patch: Patch) -> None:
    """A lifted transform gets the stored values; reads in its body are rewritten."""
    patch.setitem(hooks.HOOKS, 'partial_pack', lambda original: original)


def stops_are_written_back(patch: Patch) -> None:
    """What a transform was merely handed is published as if its body had written it."""

    def judge(self: Any, inner_scopes: Any) -> Any:
        return [{} for _ in inner_scopes]

    patch.setattr(writeback._Lift, '_judge', judge)


def absolute_paths(patch: Patch) -> None:
    """Filters see paths from the root, whoever opened the block."""

    def path(self: Any, inside: bool, key: views.Key) -> paths.Path:
        return paths.Path.of(*key)

    patch.setattr(blocks.Block, '_path', path)


def open_after_an_exception(patch: Patch) -> None:
    """The block is closed where its body ends, not where an exception leaves it."""
    close = rewrites.Rewrite.__exit__

    def close_at_the_end(self: Any, exc_type: Any, *rest: Any) -> None:
        if exc_type is None:
            close(self, exc_type, *rest)

    patch.setattr(rewrites.Rewrite, '__exit__', close_at_the_end)


def kept_values_ignored(patch: Patch) -> None:
    """What ``setup`` has kept on a module is read as it is."""
    for name in ('try_setup', 'getattribute', 'getattr'):
        patch.setitem(hooks.HOOKS, name, lambda original: original)


def functions_by_identity(patch: Patch) -> None:
    """Two functions are equal if they are one object."""
    patch.setattr(functions, 'function_key', lambda fn: fn)


def owners_in_the_key(patch: Patch) -> None:
    """Equal filters have another number for each module that opens a block."""
    number_of = contexts.number_of
    patch.setattr(
        contexts,
        'number_of',
        lambda rewrites, owners: number_of((rewrites, owners), ()),
    )


def owners_never_told_apart(patch: Patch) -> None:
    """Equal filters have one number, also where a trace has read variables."""
    patch.setattr(contexts, 'tell_apart', lambda number: None)


def numbers_in_use_forgotten(patch: Patch) -> None:
    """Two threads use one number for the blocks of two owners."""

    class Forgetful(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            return default

    patch.setattr(contexts, '_in_use', Forgetful())


def decisions_shared(patch: Patch) -> None:
    """What one filter said of a variable is remembered for those of all blocks."""
    selects, shared = blocks.Block.selects, dict[Any, bool]()

    def remembered(self: Any, root: views.Root, key: views.Key) -> bool:
        said = selects(self, root, key)
        return shared.setdefault((self.owner_path, key), said)

    patch.setattr(blocks.Block, 'selects', remembered)


def one_stack_for_all_threads(patch: Patch) -> None:
    """The open blocks of a thread are those of every other thread."""

    class Shared:
        pass

    names = dict(vars(blocks._Thread))
    for name in ('__init__', 'set_blocks', 'only', 'forget'):
        setattr(Shared, name, names[name])
    patch.setattr(blocks, 'thread', Shared())


def loops_turn_once(patch: Patch) -> None:
    """What is carried out of a loop is not followed into its next turn."""
    patch.setattr(dependence, '_around', lambda rows, first, count: list(rows))


def rules_are_not_read(patch: Patch) -> None:
    """The derivative of a ``custom_vjp`` is taken for that of its function."""

    def backward(eqn: Any) -> Any:
        return analysis.Analysis.dependences()[0].of(eqn.params['call_jaxpr'])

    patch.setattr(derivatives, '_backward', backward)


def programs_taken_for_any_function(patch: Patch) -> None:
    """A filter's program stands for whatever is differentiated with the filter."""
    patch.setattr(programs.Program, 'is_of', lambda self, fun, args: True)
