"""The mechanism, broken on purpose: what naive versions of it get wrong.

Each function puts one fault into flax_sg, for as long as the fixture lasts.
``test_broken`` says which tests catch it, and how.
"""

import contextlib
from typing import Any

import jax
import pytest
from jax.interpreters import ad

from flax_sg import (
    _private,
    blocks,
    contexts,
    functions,
    hooks,
    identities,
    paths,
    placing,
    rewrites,
    views,
    writeback,
    writes,
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

    def path(self: Any, root: views.Root, key: views.Key) -> paths.Path:
        return paths.Path.of(*key)

    patch.setattr(blocks.Block, 'path', path)


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


def values_never_told_apart(patch: Patch) -> None:
    """Other values have one number, also where a trace has read them."""
    patch.setattr(blocks.Block, 'note_values', lambda self: None)


def values_in_the_key(patch: Patch) -> None:
    """Other values have another number, also where they are arguments."""

    class All(set[Any]):
        def __contains__(self, rewrites: object) -> bool:
            return True

    patch.setattr(contexts, '_told_apart', All())


def computed_where_the_leaf_is(patch: Patch) -> None:
    """A function of the user runs in the trace of the leaf, wherever it was made."""

    def in_trace_of_leaf(levels: Any, leaf: Any = None) -> Any:
        return _private.in_trace_of(leaf)

    patch.setattr(_private, 'in_innermost_trace', in_trace_of_leaf)


def everything_published_is_a_write(patch: Patch) -> None:
    """What is stored already counts as written, as a transform publishes it."""
    patch.setattr(writes, '_same', lambda old, new: False)


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
    patch.setattr(dependence, '_around', lambda rows, turning: list(rows))


def rules_are_not_read(patch: Patch) -> None:
    """The derivative of a ``custom_vjp`` is taken for that of its function."""

    def backward(eqn: Any) -> Any:
        return analysis.Analysis.dependences()[0].of(eqn.params['call_jaxpr'])

    patch.setattr(derivatives, '_backward', backward)


def programs_taken_for_any_function(patch: Patch) -> None:
    """A filter's program stands for whatever is differentiated with the filter."""
    patch.setattr(programs.Program, 'is_of', lambda self, fun, args: True)


def rules_stand_at_the_leaf(patch: Patch) -> None:
    """Cotangents are mapped where the leaf comes from, not where the extent begins."""
    patch.setattr(
        _private,
        'in_innermost_trace',
        lambda levels, *leaves, **_: _private.in_trace_of(leaves[0]),
    )


def rules_stand_where_they_are_read(patch: Patch) -> None:
    """Cotangents are mapped in whatever trace reads a leaf first."""
    patch.setattr(
        _private, 'in_innermost_trace', lambda *_, **__: contextlib.nullcontext()
    )


def rules_stand_at_each_read(patch: Patch) -> None:
    """Each reader gets an identity of its own: nothing is added up before the rule."""
    view = views._view_variable

    def fresh(root: Any, blocks: Any, key: Any, value: Any) -> Any:
        root.seen.clear()
        root.joint.clear()
        return view(root, blocks, key, value)

    patch.setattr(views, '_view_variable', fresh)


def mapped_again(patch: Patch) -> None:
    """What was read in a block is mapped once more in another ``apply`` there."""
    patch.setattr(placing.Made, '__contains__', lambda self, leaf: False)


def higher_orders_mapped_too(patch: Patch) -> None:
    """A derivative of the gradient goes through the rule another time."""

    def again(x: Any, factor: Any) -> Any:
        return factor * x + jax.lax.stop_gradient(x - factor * x)

    patch.setattr(identities, 'scale', again)


def what_is_not_differentiated_counts(patch: Patch) -> None:
    """The norm of a selection is that of all of it, frozen parts too."""
    transpose = ad.primitive_transposes[identities._mapped_p]

    def all_count(cotangents: Any, *args: Any, fn: Any, **more: Any) -> Any:
        def counts(cotangents: Any, given: Any, *operands: Any) -> Any:
            return fn(cotangents, [True] * len(given), *operands)

        return transpose(cotangents, *args, fn=counts, **more)

    patch.setitem(ad.primitive_transposes, identities._mapped_p, all_count)
