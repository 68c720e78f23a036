"""Random steps in several threads: a cached trace never has the wrong stops.

After each step the gradient is what the open blocks say, compared exactly with weights
that were stopped by hand. A function is traced where it never was for these answers,
and not traced again in the same blocks, nor in equal ones while one thread opens any.
In the end each loop over the same blocks settles: it traces nothing more.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import pytest
from flax.core.scope import Scope
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import oracle
import sequences
from flax_sg import errors
from sequences import CHILDREN, DEEPEST, KINDS, RAW, WHATS, Frame, Open, Stack

WORKERS = 3
BY_HAND = sequences.ByHand()

# Those that mean other variables for each owner count twice.
CHOICE = [*WHATS, *(name for name, what in WHATS.items() if not what.anywhere)]

workers = st.integers(0, WORKERS - 1)
# How many levels an exception leaves, if the Python of a function runs and raises one.
failing = st.sampled_from([None] * 7 + [0, 1, 2])


def some(allowed: Callable[[Stack], bool]) -> Any:
    """A step for one of the workers that are where ``allowed`` says."""
    return precondition(lambda self: any(map(allowed, self.stacks)))


class Machine(RuleBasedStateMachine):
    """Workers in blocks, modules and compiled functions, which call what they share."""

    started = 0

    def __init__(self) -> None:
        super().__init__()
        sequences.SWITCH.names = ('enc',)
        Machine.started += 1
        if Machine.started % 50 == 0:  # A long run would fill the memory.
            jax.clear_caches()
        self.flax = dict(vars(Scope))
        self.functions = sequences.Functions()
        self.workers = [sequences.Worker(self.functions) for _ in range(WORKERS)]
        self.stacks = [Stack() for _ in range(WORKERS)]
        self.caches = sequences.Caches()
        self.runs: Counter[Any] = Counter()
        self.loops: dict[Any, list[Open]] = {}
        self.palette, self.kinds = list(WHATS), list(KINDS)
        self.names = 0
        self.traced_in: set[Any] = set()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.leave_all()
        finally:
            self.end()
        assert dict(vars(Scope)) == self.flax, 'hooks are left'

    def leave_all(self) -> None:
        for who, stack in enumerate(self.stacks):
            while stack:
                self.leave(who, 0)
        loops = list(self.loops.values())[:4]
        for _ in range(3):
            self._run_loops(loops)
        before = self.functions.runs['step']
        self._run_loops(loops)
        assert self.functions.runs['step'] == before, 'traced: the loop did not settle'

    def _run_loops(self, loops: list[list[Open]]) -> None:
        """Calls the compiled step once more in blocks in which it was called before."""
        worker = self.workers[0]
        for blocks in loops:
            for block in blocks:
                sequences.SWITCH.names = block.switched
                what = WHATS[block.what]
                make = what.spellings[block.spelling]
                assert worker.tell('open', make(unused='ignore')) is None
            stopped = Stack(blocks).stopped(in_pair=False)
            oracle.assert_same(worker.tell('step', None), BY_HAND.step(stopped))
            for _ in blocks:
                assert worker.tell('leave') is None

    def end(self) -> None:
        for worker in self.workers:
            worker.end()

    def _choose(self, who: int, allowed: Callable[[Stack], bool]) -> tuple[Any, Stack]:
        able = [i for i, stack in enumerate(self.stacks) if allowed(stack)]
        who = who if who in able else able[who % len(able)]
        return self.workers[who], self.stacks[who]

    @initialize(
        palette=st.lists(st.sampled_from(CHOICE), min_size=2, max_size=4),
        kinds=st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=4),
    )
    def choose(self, palette: list[str], kinds: list[str]) -> None:
        """Few filters and functions in one sequence, so that the same come again."""
        self.palette, self.kinds = palette, kinds

    # Blocks, and what they are in.

    @some(Stack.has_room)
    @rule(
        who=workers,
        steps=st.lists(
            st.one_of(st.integers(0, 11), st.sampled_from('ppmabj')),
            min_size=1,
            max_size=6,
        ),
        spelling=st.integers(0, 2),
        judged=st.booleans(),
        held=st.sampled_from([False, False, True]),
        again=st.booleans(),
    )
    def go(
        self,
        who: int,
        steps: list[int | str],
        spelling: int,
        judged: bool,
        held: bool = False,
        again: bool = False,
    ) -> None:
        """Opens blocks (numbers), goes into modules and jitted functions (letters).

        Some blocks are held by generators, some are of a value that is open already.
        """
        worker, stack = self._choose(who, Stack.has_room)
        for step in steps:
            if len(stack) >= DEEPEST:
                return
            if isinstance(step, int):
                what = self.palette[step % len(self.palette)]
                self._open(worker, stack, what, spelling, judged, held, again)
            elif step in 'ab':
                if stack.is_in('pair'):
                    self._enter(worker, stack, 'part', (step,))
            elif not stack.is_in('pair'):
                if not stack.frames:
                    self._enter(worker, stack, 'session', None)
                if step == 'j':
                    self._enter(worker, stack, 'jit', None)
                else:
                    self._enter(worker, stack, 'pair', (), mutable=step == 'm')

    def _open(
        self,
        worker: Any,
        stack: Stack,
        name: str,
        spelling: int,
        judged: bool,
        held: bool,
        again: bool,
    ) -> None:
        what = WHATS[name]
        entry = Open(name, stack.module, judged and what.anywhere)
        entry.spelling = spelling % len(what.spellings)
        make = what.spellings[entry.spelling]
        entry.block = make(unused='raise' if entry.judged else 'ignore')
        for other in stack.blocks if again else ():
            if other.what == name:
                entry.block, entry.spelling = other.block, other.spelling
                entry.judged = other.judged
        assert worker.tell('open', entry.block, held) is None
        stack.append(entry)
        self.caches.opened(stack)

    @precondition(
        lambda self: (
            not any(
                WHATS[block.what].changing
                for stack in self.stacks
                for block in stack.blocks
            )
        )
    )
    @rule()
    def switch(self) -> None:
        """Changes what a filter reads, while no block of it is open."""
        names = sequences.SWITCH.names
        sequences.SWITCH.names = ('head',) if names == ('enc',) else ('enc',)

    def _enter(
        self, worker: Any, stack: Stack, kind: str, path: Any, mutable: bool = False
    ) -> None:
        self.names += 1
        args = {'pair': (self.names, mutable), 'part': path}.get(kind, ())
        assert worker.tell(kind, *args) is None
        stack.append(Frame(kind, path, self.names, mutable))

    @some(Stack.__len__)
    @rule(who=workers, levels=st.sampled_from([0, 0, 0, 0, 1, 2]))
    def leave(self, who: int, levels: int) -> None:
        """Leaves the innermost block, module or program, or several by an exception."""
        worker, stack = self._choose(who, Stack.__len__)

        if levels:
            levels = min(levels, len(stack))
            self._thrown(stack, worker.tell('raise', levels), levels)
            return
        answer = worker.tell('leave')
        if isinstance(stack[-1], Open):
            assert isinstance(answer, self._close(stack)), f'closed with {answer!r}'
        else:
            self._left(stack, answer)

    # Calls.

    @rule(
        who=workers,
        calls=st.lists(
            st.tuples(st.integers(0, 15), st.sampled_from('ab')),
            min_size=1,
            max_size=4,
        ),
        failing=failing,
    )
    def call(self, who: int, calls: list[tuple[int, str]], failing: int | None) -> None:
        """Calls what there is to call where the worker is; the last call may fail."""
        worker, stack = self.workers[who], self.stacks[who]
        for left, (number, part) in enumerate(calls, 1 - len(calls)):
            levels = None if failing is None or left else min(failing, len(stack))
            if not stack.is_in('pair'):
                if number < 2 and not stack.frames:
                    self._call_step(worker, stack, levels)
                else:
                    kind = self.kinds[number % len(self.kinds)]
                    self._call(worker, stack, kind, levels)
            elif number < 4:
                self._call_raw(worker, stack, list(RAW)[number % 3], part, levels)
            elif number < 8:
                self._call_child(
                    worker, stack, list(CHILDREN)[number - 4], part, levels
                )
            elif number == 8:
                self._use_kept(worker, stack, part)
            else:
                kind = self.kinds[(number - 9) % len(self.kinds)]
                self._call(worker, stack, kind, levels)

    def _use_kept(self, worker: Any, stack: Stack, part: str) -> None:
        """Uses what ``setup`` of a part has kept."""
        name = self._name()
        worker.tell('kept', part, name)
        self._note(stack, name, BY_HAND.kept(part))

    def _call(self, worker: Any, stack: Stack, kind: str, failing: Any) -> None:
        """Calls one of the functions that all workers share."""
        name = self._name()
        stopped = stack.stopped(in_pair=False)
        answer = worker.tell('call', kind, name, failing)
        if self._ran(stack, kind, KINDS[kind], answer, stopped):
            if not KINDS[kind].recovers:
                self.functions.renew(kind)
                self.caches.renewed[kind] += 1
            self._thrown(stack, answer, failing)
        elif stack.frames:
            fn = BY_HAND.in_session(kind)
            stack.frames[-1].calls.append(sequences.Call(name, fn, stopped))
        else:
            oracle.assert_same(answer(), BY_HAND.call(kind, stopped))

    def _call_step(self, worker: Any, stack: Stack, failing: Any) -> None:
        """Calls a compiled step of training: where it is cached, C++ alone runs."""
        stopped = stack.stopped(in_pair=False)
        answer = worker.tell('step', failing)
        if self._ran(stack, 'step', KINDS['jit'], answer, stopped):
            self._thrown(stack, answer, failing)
        else:
            oracle.assert_same(answer, BY_HAND.step(stopped))
            self.loops[tuple(block.label for block in stack.blocks)] = stack.blocks

    def _call_child(
        self, worker: Any, stack: Stack, child: str, part: str, failing: Any
    ) -> None:
        """Calls a child of a part, from the methods of either part or of the pair."""
        name = self._name()
        answer = worker.tell('child', part, child, name, failing)
        here = (stack.pair.number, part, child)
        # Flax traces a module again after the apply in which it was traced first. What
        # a jitted body may write is rewritten in its trace, by the names it has there.
        named = (part, stack.owners) if stack.pair.mutable and stack.blocks else None
        key = (child, here in self.traced_in, stack.pair.mutable, named)
        kind = dataclasses.replace(CHILDREN[child], eager=True)
        if self._ran(stack, child, kind, answer, None, key):
            return self._thrown(stack, answer, failing)
        self.traced_in.add(here)
        self._note(stack, name, BY_HAND.child(part, child))

    def _call_raw(
        self, worker: Any, stack: Stack, wrap: str, part: str, failing: Any
    ) -> None:
        """Calls a jitted or scanned function that reads a bound module."""
        name = self._name()
        answer = worker.tell('raw', wrap, part, name, failing)
        key = (wrap, part, stack.pair.number)
        stopped = frozenset(
            path
            for path in stack.stopped(in_pair=True)
            if path.startswith(f'{part}/net/')
        )
        self.caches.note_raw()
        if self._ran(stack, wrap, KINDS['jit'], answer, stopped, key):
            self.caches.renewed[key] += 1
            return self._thrown(stack, answer, failing)
        self._note(stack, name, BY_HAND.raw(wrap, part))

    # What has to be.

    def _name(self) -> str:
        self.names += 1
        return f'call {self.names}'

    def _note(self, stack: Stack, name: str, fn: Any) -> None:
        call = sequences.Call(name, fn, stack.stopped(in_pair=True))
        stack.frames[-1].calls.append(call)

    def _ran(
        self,
        stack: Stack,
        name: str,
        kind: sequences.Kind,
        answer: Any,
        stopped: Any,
        key: Any = None,
    ) -> bool:
        """Checks how often Python ran; returns whether it raised, as it was told to.

        Args:
            stack: where the function was called.
            name: what it is counted under.
            kind: how it is cached.
            answer: what the worker has answered.
            stopped: which of the parameters that it reads are stopped.
            key: tells it apart from others that are counted together.
        """
        key = key or name
        key = (key, self.caches.renewed[key])
        count = self.functions.runs[name] - self.runs[name]
        self.runs[name] += count
        others = self.functions.runs.keys() - self.runs.keys() - {None}
        assert not others, f'traced: {others} beside {name}'
        raised = isinstance(answer, sequences.LeaveError)
        if not kind.cached:
            assert count == 1, f'traced: {name} ran {count} times'
        elif not kind.late:
            assert count <= 1, f'traced: {name} ran {count} times'
            if self.caches.must_find(key, stack):
                assert not count, f'traced: {name} again in {stack.blocks}'
            if not kind.eager and self.caches.must_trace(key, stopped):
                assert count, f'traced: {name} not at all in {stack.blocks}'
        assert count or not raised
        if not raised:
            self.caches.note(key, stack, stopped)
            for block in stack.blocks:
                block.called = True
        return raised

    def _close(self, stack: Stack, raised: bool = False) -> Any:
        """Closes the innermost block; returns the types that its answer may have."""
        block = stack.pop()
        fine = raised or not block.judged or WHATS[block.what].constant or block.called
        if fine:
            return type(None)
        # Nothing was called in it that reads what it selects; something may have read a
        # variable all the same.
        return type(None), errors.UnusedFilterError, UserWarning

    def _left(self, stack: Stack, answer: Any) -> None:
        """The innermost frame has come to its end."""
        frame = stack.pop()
        if frame.mutable:
            name = f'written in {frame.number}'
            frame.calls.append(sequences.Call(name, sequences.in_one, frozenset()))
        if frame.kind == 'session':
            oracle.assert_same(answer(), BY_HAND.session(frame.calls))
        else:
            assert answer is None
            stack.frames[-1].calls.extend(frame.calls)

    def _thrown(self, stack: Stack, answer: Any, levels: int) -> None:
        """An exception has left so many blocks and frames: what they made is lost."""
        assert isinstance(answer, sequences.LeaveError)
        for _ in range(levels):
            if isinstance(stack[-1], Open):
                self._close(stack, raised=True)
            else:
                stack.pop()


def settings(**changes: Any) -> hypothesis.settings:
    """A sequence is worth five examples of other tests, in time too."""
    return hypothesis.settings(
        max_examples=hypothesis.settings().max_examples // 5,
        stateful_step_count=30,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        **changes,
    )


TestSequences = Machine.TestCase
TestSequences.settings = settings()
TestSequences.pytestmark = [pytest.mark.slow]
