"""Checks that the tests catch deliberate faults, each with the right error.

A check is a test of this suite, called by name. It passes without the fault. With the
fault it fails, and its error tells what is wrong.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import broken
import oracle
import test_blocks
import test_caches
import test_cotangents
import test_flow
import test_placing
import test_programs
import test_read_only
import test_setup_values
import test_substitutes
from described import sequences
from described.caches import forget_contexts
from described.language import EVERYTHING, Block, Leave, Where
from described.sequences import ENC, ENC_OF_OWNER, KERNELS, Thread
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.engine import blocks, opening

# They test the tests: nightly, and before a release.
pytestmark = pytest.mark.long

# How checks fail: a gradient differs from the one by hand, in any bit.
GRADIENT = r'(?s)\[.*\]:\n.*\nis not\n'


@dataclasses.dataclass(frozen=True)
class Caught:
    """A fault, a test that catches it, and how.

    Attributes:
        fault: puts the fault in.
        check: a test.
        args: what the test is called with.
        error: what it raises.
        match: what that says.
    """

    fault: Callable[[pytest.MonkeyPatch], None]
    check: Callable[..., None]
    args: tuple[Any, ...] = ()
    error: type[BaseException] = AssertionError
    match: str = GRADIENT

    def __call__(self) -> None:
        """Runs the test."""
        self.check(*self.args)


def called_outside_and_inside() -> None:
    fn, by_hand = (test_caches.cached('jit') for _ in range(2))
    for letter in 'oij':
        selects = test_caches.SELECTS[letter]
        expected = test_caches.pull_back(
            lambda p, x, selects=selects: by_hand(oracle.stopped(p, selects), x)
        )
        where = test_caches.WHERE[letter] or False
        with nn.stop_gradient(where, unused='ignore'):
            actual = test_caches.pull_back(fn)
        oracle.assert_same(actual, expected)


def functions_of_one_code() -> None:
    fn, by_hand = (test_caches.cached('jit') for _ in range(2))
    for selects in test_caches.SELECTS.values():
        expected = test_caches.pull_back(
            lambda p, x, selects=selects: by_hand(oracle.stopped(p, selects), x)
        )
        with nn.stop_gradient(lambda path, s=selects: s(path), unused='ignore'):
            actual = test_caches.pull_back(fn)
        oracle.assert_same(actual, expected)


def run(*items: Any) -> None:
    """Runs a program, as the random ones, whose comparisons must fail too."""
    sequences.Runner().check(items)


def in_pair(*items: Any, mutable: bool = False) -> sequences.Session:
    """What runs in a method of a pair of modules."""
    return sequences.Session((sequences.Pair(items, mutable),))


def at(part: str, where: Where, call: Any) -> sequences.Part:
    """A call in a block of a part of the pair."""
    return sequences.Part(part, (Block(where, (call,)),))


SCAN, JIT = sequences.Call('jit of scan'), sequences.Call('jit')
RAW_JIT, BOTH = sequences.Raw('a', 'jit'), sequences.Child('a', 'both')

CAUGHT = [
    *(
        Caught(fault, called_outside_and_inside)
        for fault in (
            broken.no_cache_key,
            broken.answers_never_noted,
            broken.answers_that_say_no_left_out,
            broken.decisions_shared,
        )
    ),
    Caught(broken.answers_never_asked, functions_of_one_code),
    Caught(
        broken.stop_inside_the_body,
        test_programs.test_a_stop_around_a_scan_costs_no_copy_of_the_stack,
        ('plain',),
        match='different programs',
    ),
    Caught(
        broken.stops_are_written_back,
        test_caches.test_one_module_with_mutable_parameters_in_and_out_of_blocks,
        ('remat of jit',),
        errors.BlockError,
        'writes the variable',
    ),
    Caught(
        broken.absolute_paths,
        test_blocks.test_modules_open_blocks_in_each_other,
        error=errors.UnusedFilterError,
        match='matches none of',
    ),
    Caught(
        broken.absolute_paths,
        test_caches.test_a_variable_written_and_read_in_one_jitted_class_at_different_paths,
        match=r'== \[1.0, 1.0\]',
    ),
    Caught(
        broken.open_after_an_exception,
        test_blocks.test_an_exception_leaves_everything_as_it_was,
        (ValueError, 1),
        match="^assert 'a' == ''",
    ),
    Caught(
        broken.kept_values_ignored,
        test_setup_values.test_before_in_and_after,
        (next(iter(test_setup_values.ROUTES.values())),),
    ),
    *(
        Caught(
            fault, test_caches.test_one_jitted_closure_in_blocks_of_two_modules, ('ab',)
        )
        for fault in (broken.owners_never_told_apart,)
    ),
    Caught(
        broken.owners_in_the_key,
        test_caches.test_equal_filters_of_two_modules_share_what_is_traced,
        match=r'^assert 2 == 1',
    ),
    Caught(
        broken.no_lease,
        test_caches.test_two_threads_share_a_jitted_closure,
        ('a', 'before the trace'),
    ),
    *(
        Caught(broken.values_never_told_apart, check, match=r'(?s)\[\[.*\nis not\n')
        for check in (
            test_substitutes.test_new_values_around_a_jitted_function_are_not_stale,
            test_substitutes.test_a_trace_that_opens_a_block_of_its_own,
        )
    ),
    Caught(
        broken.computed_where_the_leaf_is,
        test_substitutes.test_values_of_an_inner_trace_for_variables_of_an_outer_one,
        error=jax.errors.UnexpectedTracerError,
        match='escape the scope',
    ),
    Caught(
        broken.everything_published_is_a_write,
        test_read_only.test_what_is_handed_through_is_no_write,
        ('jit',),
        errors.BlockError,
        'wrote the variable',
    ),
    Caught(
        broken.one_stack_for_all_threads,
        test_caches.test_a_thread_opens_a_block_while_another_has_none,
        match=r'^assert not True\n.*is_zero',
    ),
    *(
        Caught(fault, run, items, match=match)
        for fault, match, *items in (
            (
                broken.no_cache_key,
                'JAX would find a program of others',
                Block(KERNELS, (Thread((SCAN,)), SCAN)),
            ),
            (
                broken.absolute_paths,
                GRADIENT,
                in_pair(at('a', ENC_OF_OWNER, sequences.Child('a', 'net'))),
            ),
            (
                broken.open_after_an_exception,
                GRADIENT,
                Block(EVERYTHING, (Leave(),)),
                SCAN,
            ),
            (
                broken.kept_values_ignored,
                GRADIENT,
                in_pair(at('a', EVERYTHING, sequences.Child('a', 'use_kept'))),
            ),
            (
                broken.owners_in_the_key,
                '^traced',
                in_pair(at('a', KERNELS, JIT), at('b', KERNELS, JIT)),
            ),
            (
                broken.owners_never_told_apart,
                '^traced',
                in_pair(*(at(part, ENC_OF_OWNER, RAW_JIT) for part in 'ab')),
            ),
            (
                broken.decisions_shared,
                GRADIENT,
                Block(KERNELS, (SCAN,)),
                Block(ENC, (SCAN,)),
            ),
            (
                broken.one_stack_for_all_threads,
                'JAX would find a program of others',
                Block(KERNELS, (Thread((SCAN,)),)),
            ),
        )
    ),
    *(
        Caught(
            fault,
            test_flow.test_a_program_does_what_is_written_beside_it,
            (program,),
            match=match,
        )
        for fault, program, match in (
            (
                broken.loops_turn_once,
                'reached_after_two_turns',
                r"^assert \['stopped', 'stopped'\] == \['flows', 'stopped'\]",
            ),
            (
                broken.sums_are_products,
                'decay_in_a_rule',
                r"^assert \['flows', 'stopped'\] == \['flows', 'flows'\]",
            ),
        )
    ),
    *(
        Caught(fault, check, tuple(args))
        for fault, check, *args in (
            (
                broken.rules_stand_at_the_leaf,
                test_placing.test_an_apply_in_the_body_of_a_scan_maps_each_step,
                *test_placing.RULES['each'],
            ),
            (
                broken.rules_stand_at_each_read,
                test_placing.test_two_blocks_in_one_apply_are_mapped_each_alone,
                *test_placing.RULES['each'],
            ),
            (
                broken.higher_orders_mapped_too,
                test_cotangents.test_second_order_is_the_derivative_of_the_gradient,
                'scale_gradient',
            ),
            (
                broken.what_is_not_differentiated_counts,
                test_placing.test_leaves_that_are_not_differentiated_do_not_count,
            ),
        )
    ),
    Caught(
        broken.rules_stand_where_they_are_read,
        test_placing.test_reads_in_raw_transforms_share_it,
        test_placing.RULES['each'],
        jax.errors.UnexpectedTracerError,
        'leaked',
    ),
]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    test_caches.TRACES.clear()
    yield
    test_caches.TRACES.clear()


@pytest.fixture
def put_in() -> Iterator[Callable[[Any], None]]:
    """Puts a fault in for the test. Then removes the fault and all that it left."""
    forget_contexts()
    with pytest.MonkeyPatch.context() as patch:
        yield lambda fault: fault(patch)
        for block in blocks.thread.blocks[::-1]:
            opening.close_block(block)
        blocks.thread.set_blocks(())
    forget_contexts()


# Checks that are not tests of other files.
OWN = [CAUGHT[0], *(caught for caught in CAUGHT if caught.check is run)]


@pytest.mark.parametrize('check', OWN, ids=lambda c: c.fault.__name__)
def test_the_check_passes_as_the_library_is(check):
    check()


@pytest.mark.parametrize('caught', CAUGHT, ids=lambda c: c.fault.__name__)
def test_the_check_catches_the_fault(caught, put_in):
    put_in(caught.fault)
    with pytest.raises(caught.error, match=caught.match):
        caught()


def test_every_fault_is_caught():
    faults = {
        fn
        for name, fn in vars(broken).items()
        if getattr(fn, '__module__', '') == 'broken' and not name.startswith('_')
    }
    assert faults == {caught.fault for caught in CAUGHT}
