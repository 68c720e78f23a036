"""Deliberate faults in flax_sg: the mistakes that naive versions make.

Each function puts one fault into flax_sg while the fixture is active.
``test_broken`` says which tests catch the fault, and how.
"""

import contextlib
import weakref
from typing import Any

import jax
import pytest
from flax.core import lift

from flax_sg.engine import (
    blocks,
    judgement,
    numbers,
    opening,
    selection,
    setup_values,
    views,
    writeback,
    writes,
)
from flax_sg.filters import paths
from flax_sg.flow import zeros
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.internals import patching, tracing
from flax_sg.rules import primitives, substitutes

Patch = pytest.MonkeyPatch


def no_cache_key(patch: Patch) -> None:
    """JAX's caches know nothing of blocks: the first call decides for all others."""

    class Ignored:
        value = 0

        def __call__(self, number: int) -> Any:
            return contextlib.nullcontext()

    patch.setattr(tracing, 'user_context', Ignored())


def stop_inside_the_body(patch: Patch) -> None:
    """A lifted transform gets the stored values; reads in its body are rewritten."""
    patch.setattr(lift, '_partial_pack', patching.originals['partial_pack'])


def stops_are_written_back(patch: Patch) -> None:
    """What a transform was merely handed is published as if its body had written it."""
    patch.setattr(writeback._Lift, '_as_stored', lambda self, index, group: group)


def absolute_paths(patch: Patch) -> None:
    """Filters see paths from the root, whoever opened the block."""

    def absolute(self: Any, facts: Any) -> paths.Path:
        collection, names, inner, array = facts
        return paths.Path.of(collection, names, (), inner, array)

    patch.setattr(numbers.Asker, 'path_of', absolute)


def open_after_an_exception(patch: Patch) -> None:
    """The block is closed where its body ends, not where an exception leaves it."""
    close = BlockDecorator.__exit__

    def close_at_the_end(self: Any, exc_type: Any, *rest: Any) -> None:
        if exc_type is None:
            close(self, exc_type, *rest)

    patch.setattr(BlockDecorator, '__exit__', close_at_the_end)


def kept_values_ignored(patch: Patch) -> None:
    """What ``setup`` has kept on a module is read as it is."""
    patch.setattr(setup_values, '_seen', lambda module, name, value: value)


def answers_never_noted(patch: Patch) -> None:
    """Nobody knows what a trace depends on: each block finds those of all others."""
    patch.setattr(numbers.Lease, 'note', lambda *args, **is_own: None)


def answers_never_asked(patch: Patch) -> None:
    """A block takes the first number of its kind."""

    def ends(self: Any, asker: Any) -> Any:
        for first in self:
            number = first
            while number.answers:
                number = next(iter(number.answers.values()))
            yield first, number, []

    patch.setattr(numbers._Kind, 'ends_for', ends)


def answers_that_say_no_left_out(patch: Patch) -> None:
    """Only what a filter takes is noted."""
    note = selection._note

    def note_what_is_taken(block: Any, root: Any, answered: Any, read: bool) -> None:
        taken = [facts for facts in answered if block.decisions[facts][1]]
        if taken:
            note(block, root, taken, read)

    patch.setattr(selection, '_note', note_what_is_taken)


def no_lease(patch: Patch) -> None:
    """Two threads use one number for blocks that may give other answers."""
    patch.setattr(numbers.Number, 'take', lambda self, asker: True)


def owners_in_the_key(patch: Patch) -> None:
    """Each module that opens a block has numbers of its own."""
    begin = numbers.Asker.__post_init__

    def with_owner(self: Any) -> None:
        begin(self)
        self.kind = self.blank = self.kind, self.owner_path

    patch.setattr(numbers.Asker, '__post_init__', with_owner)


def owners_never_told_apart(patch: Patch) -> None:
    """All owners give one answer for what lies outside of a trace."""
    answer = numbers.Asker.answer

    def of_any_owner(self: Any, number: Any) -> Any:
        is_of_owner = isinstance(number.question, weakref.ref)
        return () if is_of_owner else answer(self, number)

    patch.setattr(numbers.Asker, 'answer', of_any_owner)


def values_never_told_apart(patch: Patch) -> None:
    """Other values have one number, also where a trace has read them."""
    patch.setattr(substitutes.Substitute, 'token', lambda self: None)


def computed_where_the_leaf_is(patch: Patch) -> None:
    """A function of the user runs in the trace of the leaf, wherever it was made."""

    def in_trace_of_leaf(levels: Any, leaf: Any = None) -> Any:
        return tracing.in_trace_of(leaf)

    patch.setattr(tracing, 'in_innermost_trace', in_trace_of_leaf)


def everything_published_is_a_write(patch: Patch) -> None:
    """What is stored already counts as written, as a transform publishes it."""
    changed = writes._changed
    patch.setattr(writes, '_changed', lambda key, old, new: changed(key, None, new))


def decisions_shared(patch: Patch) -> None:
    """What one filter said of a variable is remembered for those of all blocks."""
    answer, shared = views.answer, dict[Any, Any]()

    def remembered(block: Any, root: Any, key: Any) -> Any:
        said = answer(block, root, key)
        return shared.setdefault((block.owner_path, key), said)

    patch.setattr(views, 'answer', remembered)


def one_stack_for_all_threads(patch: Patch) -> None:
    """The open blocks of a thread are those of every other thread."""

    class Shared:
        pass

    names = dict(vars(blocks._Thread))
    for name in ('__init__', 'set_blocks', 'only', 'number', 'applies_changed'):
        setattr(Shared, name, names[name])
    shared = Shared()
    for module in (blocks, opening, judgement, selection, views):
        patch.setattr(module, 'thread', shared)


def loops_turn_once(patch: Patch) -> None:
    """What is zero before a loop counts as zero after it."""
    patch.setattr(
        zeros.Zeros,
        '_turns',
        lambda self, turn, carry: [zeros.Value(one.zero) for one in carry],
    )


def sums_are_products(patch: Patch) -> None:
    """A sum counts as zero if one of its parts is."""
    product = zeros._MEET['mul']
    patch.setattr(zeros, '_MEET', zeros._MEET | {'add': product, 'add_any': product})


def rules_stand_at_the_leaf(patch: Patch) -> None:
    """Cotangents are mapped where the leaf comes from, not where the extent begins."""
    patch.setattr(
        tracing,
        'in_innermost_trace',
        lambda levels, *leaves, **_: tracing.in_trace_of(leaves[0]),
    )


def rules_stand_where_they_are_read(patch: Patch) -> None:
    """Cotangents are mapped in whatever trace reads a leaf first."""
    patch.setattr(
        tracing, 'in_innermost_trace', lambda *_, **__: contextlib.nullcontext()
    )


def rules_stand_at_each_read(patch: Patch) -> None:
    """Each reader gets an identity of its own: nothing is added up before the rule."""
    view = views._view_variable

    def fresh(root: Any, blocks: Any, key: Any, value: Any) -> Any:
        root.views.clear()
        return view(root, blocks, key, value)

    patch.setattr(views, '_view_variable', fresh)


def higher_orders_mapped_too(patch: Patch) -> None:
    """A derivative of the gradient goes through the rule another time."""

    def again(x: Any, factor: Any) -> Any:
        return factor * x + jax.lax.stop_gradient(x - factor * x)

    patch.setattr(primitives, 'scale', again)


def what_is_not_differentiated_counts(patch: Patch) -> None:
    """The norm of a selection is that of all of it, frozen parts too."""
    known = primitives._Differentiated
    patch.setattr(
        primitives, '_Differentiated', lambda flags: known((True,) * len(flags))
    )
