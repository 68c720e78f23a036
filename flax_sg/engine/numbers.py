"""Decides which cached JAX traces a block may reuse, by a number in the cache keys.

A number stands for a block *inside its outer blocks*. A block that opens takes a
*blank* number, which says nothing, so that helpers such as ``relu`` are traced once for
all blocks. When a trace that JAX may keep depends on the block, the number becomes one
of the block's *kind*: its rule, its collections and its filter, all by value. Of a
function the code is the value. All else that a trace may depend on is a *question*:
what a function says of a variable, where the owner of the block is, which values a rule
brings. A number that was asked a question leads to one number for each answer. So a
block that opens follows its own answers to the number that it takes.

While a block is open, questions are added to its number. So a number is *leased*: it
belongs to one open block at a time, or to several that surely answer alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeAlias

from flax_sg import filters
from flax_sg.filters import expressions
from flax_sg.filters.paths import Path
from flax_sg.internals import versions
from flax_sg.internals.types import Decision
from flax_sg.rules import rules
from flax_sg.trees.variables import Facts

versions.load_once(globals())

# What a trace may depend on, apart from the kind of the block: which values a rule
# brings; where the owner is, in a tree that is older than the trace; how a function
# decides about a variable.
VALUES = 'values'
Question: TypeAlias = 'str | weakref.ref[Any] | Facts'

MOST = 4096  # Kinds in a number, and ends of a kind. JAX keeps as many traces.
_values = itertools.count(1)
_GONE = object()  # The answer to a question about a tree that is gone.
_lock = threading.RLock()  # The garbage collector may close a block at any time.


@dataclasses.dataclass(eq=False)
class Asker:
    """Answers the questions of one block.

    Attributes:
        rewrite: the rewrite of the block.
        owner_path: the path of the module that opened the block; () at top level.
        tree: the tree of this module; None at top level.
        has_functions: whether the filter calls a function of the user.
        asks_path: whether two variables may be treated differently by their names.
        is_complement: whether the filter names what it does not select.
        is_list: whether the filter is any of several.
        kind: equal for blocks that differ in answers alone.
        blank: equal for blocks that act alike until a trace depends on them.
        sure: equal for blocks of one kind that surely give the same answers.
    """

    rewrite: rules.Rewrite
    owner_path: tuple[str, ...]
    tree: weakref.ref[Any] | None

    def __post_init__(self) -> None:
        where, rule = self.rewrite.where, self.rewrite.rule
        self.has_functions = 'code' in where.needs
        self.asks_path = bool(where.atoms) or rule.asks_path
        self.is_complement = isinstance(where, filters.Not)
        self.is_list = isinstance(where, filters.Or)
        # Blank numbers are told apart by what no question asks for: how a block treats
        # writes, which collections it looks at, and whether it covers new trees.
        looks_at = self.rewrite.collections, self.tree is None
        self.blank: Hashable = rule.acts_on == 'writes', looks_at
        unused = self.rewrite.unused
        self.kind: Hashable = rule.key(), self.blank, where.shape, unused
        self.sure: Hashable = self
        if not self.has_functions and rule.acts_on != 'cotangents':
            self.sure = self.kind, rule.token(), self.owner_path, self.tree
        self._decisions: dict[Hashable, Any] = {}
        # Decisions made when the block opened. They go into the table at the first
        # read. A block that finds its programs reads nothing, and has to open fast.
        self._early: list[tuple[Path, bool]] = []
        self._is_function = type(where) is filters.Predicate

    def path_of(self, facts: Facts) -> Path:
        """Returns the path of a variable, as the filter and the rule see it."""
        collection, names, inner, array = facts
        return Path.of(collection, names, self.owner_path, inner, array)

    def ask(self, path: Path, matched: set[filters.Filter] | None = None) -> Decision:
        """Whether the filter selects a variable: a bool, or a ``Part`` of it.

        Args:
            path: the variable.
            matched: gets the atoms that mean the variable.
        """
        ask = self._ask_once if self.has_functions else expressions.takes
        return expressions.decide(self.rewrite.where, path, matched, ask)

    @functools.cached_property
    def listed(self) -> frozenset[Hashable]:
        """The shapes of the atoms of a list."""
        return frozenset(atom.shape for atom in self.rewrite.where.atoms)

    def listed_for(self, path: Path) -> set[Hashable]:
        """The shapes of those that mean a variable."""
        matched: set[filters.Filter] = set()
        self.ask(path, matched)
        return {atom.shape for atom in matched}

    def _ask_once(self, atom: expressions.Atom, path: Path) -> Decision:
        """Asks an elementary filter; a function once for each variable and block."""
        if 'code' not in atom.own_needs:
            return expressions.takes(atom, path)
        while self._early:
            early_path, decision = self._early.pop()
            self._decisions[atom, early_path.key] = decision
        key = atom, path.key
        if key not in self._decisions:
            self._decisions[key] = expressions.takes(atom, path)
        return self._decisions[key]

    def first_answer(self, number: TraceNumber) -> Hashable:
        """Returns the answer of a block that opens, if no question comes twice.

        An opening block is asked about each variable that was traced under the code of
        its function, so each step between costs: here the function is called directly.
        A leaf within a variable is left to ``answer``, since the function is asked for
        the variable, too.
        """
        if not (self._is_function and number.asks_of_variable):
            return self.answer(number)
        where: Any = self.rewrite.where
        path = number.path_for(self.owner_path)
        try:
            decision = where.fn(path)
        except Exception as error:  # The variable may be that of another model.
            return type(error)
        if decision.__class__ is not bool:
            return self.answer(number)
        self._early.append((path, decision))
        return decision

    def answer(self, number: TraceNumber) -> Hashable:
        """Returns the answer of the block to the question of a number."""
        question = number.question
        if isinstance(question, str):
            return self.rewrite.rule.token()
        if isinstance(question, weakref.ref):
            if question() is None:
                return _GONE
            return self.owner_path if question == self.tree else None
        path = number.path_for(self.owner_path)
        try:
            decision = self.ask(path)
            is_part = isinstance(decision, filters.Part)
            return decision.elements.shape if is_part else decision
        except Exception as error:  # The variable may be that of another model.
            return type(error)


@dataclasses.dataclass
class History:
    """What is known of the blocks that had a number.

    Attributes:
        has_traces: whether a trace that JAX keeps depends on one of them. If that block
            is wrong, no other finds the number any more.
        effective: the parts of its filter that have selected a variable that was read,
            by their shapes.
        untraced: the variables that these met outside of programs that JAX keeps.
    """

    has_traces: bool = False
    effective: set[Hashable] = dataclasses.field(default_factory=set[Hashable])
    untraced: set[Facts] = dataclasses.field(default_factory=set)


class TraceNumber:
    """A number in JAX's cache keys, and what its traces depend on.

    Attributes:
        value: the number in JAX's cache keys.
        question: what a block that follows the numbers is asked; None at an end.
        asks_of_variable: whether it is asked about a variable that is one array.
        answers: the next number for each answer. For the answer of the block that was
            asked first, this has the same value.
        inside: the numbers of blocks opened inside, by kind.
        history: what is known of the blocks that had the number.
    """

    def __init__(self, value: int | None = None) -> None:
        self.value = next(_values) if value is None else value
        self.question: Question | None = None
        self.asks_of_variable = False
        self.answers: dict[Hashable, TraceNumber] = {}
        self.inside: dict[Hashable, _Kind] = {}
        self.history = History()
        self.paths: dict[tuple[str, ...], Path] = {}
        # Weak: an exception may come before a block gives the number back.
        self._holders: weakref.WeakSet[Asker] = weakref.WeakSet()

    @property
    def deeper(self) -> TraceNumber:
        """The number while more applies run than when the block opened."""
        with _lock:
            if 'deeper' not in self.inside:
                self.inside['deeper'] = _Kind([TraceNumber()])
            return self.inside['deeper'][0]

    def path_for(self, owner: tuple[str, ...]) -> Path:
        """Returns the path of the variable that the question is about."""
        if owner not in self.paths:
            facts: Any = self.question
            collection, names, inner, array = facts
            self.paths[owner] = Path.of(collection, names, owner, inner, array)
        return self.paths[owner]

    def take(self, asker: Asker) -> bool:
        """Leases the number, unless a block that has leased it may answer otherwise."""
        with _lock:
            # Another thread may have asked a question since the number was found.
            if self.question is not None:
                return False
            # A walk through a weak set takes long, and most numbers are free.
            holders = self._holders if len(self._holders) else ()
            if any(other.sure != asker.sure for other in holders):
                return False
            self._holders.add(asker)
        return True

    def hold(self, asker: Asker) -> None:
        """Leases the number to a block that has the same number already."""
        self._holders.add(asker)

    def give_back(self, asker: Asker) -> None:
        """Gives the number back, if the asker has leased it."""
        with _lock:
            self._holders.discard(asker)

    def note_answer(self, answer: Hashable) -> None:
        """Notes the first answer to a new question: it leads to the same value."""
        self.answers[answer] = same = TraceNumber(self.value)
        same.inside, same.history = self.inside, self.history


class End(NamedTuple):
    """Where the answers of a block lead to.

    Attributes:
        first: the first number of the kind, where they begin.
        number: the number at the end, which asks nothing.
        asked: the numbers between, with their questions.
    """

    first: TraceNumber
    number: TraceNumber
    asked: list[TraceNumber]


class _Kind(list[TraceNumber]):
    """The first numbers of the blocks of one kind: one, or more for several threads.

    Attributes:
        ends: how many ends have come behind them.
    """

    ends = 0

    def ends_for(self, asker: Asker) -> list[End]:
        """The ends that a block comes to by its answers."""
        firsts = tuple(self)
        # Under several first numbers a question comes again: ``answer`` remembers.
        answer = asker.first_answer if len(firsts) == 1 else asker.answer
        ends: list[End] = []
        for first in firsts:
            number: TraceNumber | None = first
            asked: list[TraceNumber] = []
            while number is not None and number.question is not None:
                asked.append(number)
                number = self._next(number, answer(number))
            if number is None:  # Its tree is gone, so nobody finds its traces again.
                self.drop(first)
            else:
                ends.append(End(first, number, asked))
        if self.ends > MOST:
            self.clear()
            self.ends = 0
        return ends

    def _next(self, number: TraceNumber, answer: Hashable) -> TraceNumber | None:
        """The number that an answer leads to, a new one if nobody has answered so.

        None if the question is about a tree that is gone: nobody can answer so again.
        """
        if answer not in number.answers:
            if answer is _GONE:
                return None
            self.ends += 1
            number.answers[answer] = TraceNumber()
        return number.answers[answer]

    def drop(self, first: TraceNumber) -> None:
        """Lets no block find a first number, and what comes after it."""
        with _lock:
            if first in self:
                self.remove(first)


class Lease:
    """The number that an open block has leased.

    Attributes:
        asker: answers for the block.
        number: the number.
        is_blank: whether no trace that JAX keeps depends on the block so far.
        is_new: whether no block had such a trace when this block opened.

    Args:
        outer: the number of the blocks that are open already.
        asker: answers for the block.
        number: the number until ``find`` is called.
    """

    def __init__(self, outer: TraceNumber, asker: Asker, number: TraceNumber) -> None:
        self._outer, self.asker = outer, asker
        self.number = number
        self._end = End(number, number, [])
        self.is_blank = self.is_new = True
        self._questions: set[Question | None] | None = None

    def find(self, outside: Callable[[], Any]) -> None:
        """Leases the number whose traces the block may reuse, or a blank one.

        Args:
            outside: returns a context manager, in which the user's functions are
                called.
        """
        kind = self._kind(self.asker.kind)
        with outside() if self.asker.has_functions else contextlib.nullcontext():
            ends = kind.ends_for(self.asker)
        # A number that has traces is tried first: its programs need not be compiled.
        ends.sort(key=lambda end: not end.number.history.has_traces)
        # The number is noted first, so that it is given back whatever is raised.
        for end in ends:
            self._end, self.number = end, end.number
            if end.number.take(self.asker):
                self.is_blank, self.is_new = False, not end.number.history.has_traces
                return
        with _lock:
            blanks, new = self._kind(self.asker.blank), TraceNumber()
            for number in (*blanks, new):
                self._end, self.number = End(number, number, []), number
                if number.take(self.asker):
                    break
            if self.number is new:
                blanks.append(new)

    def _kind(self, kind: Hashable) -> _Kind:
        with _lock:
            kinds = self._outer.inside
            if kind not in kinds:
                kinds[kind] = _Kind()
                if len(kinds) > MOST:
                    del kinds[next(iter(kinds))]
            return kinds[kind]

    def note(self, questions: Iterable[Question], is_own: bool = False) -> None:
        """Notes that a trace which JAX may keep depends on the block.

        Args:
            questions: what it depends on, apart from the kind of the block.
            is_own: whether it depends on the block itself.
        """
        with _lock:
            if self.is_blank:
                self._leave_blank()
            self.number.history.has_traces = True
            if is_own or not self._ask_all(questions):
                self.discard()

    def _ask_all(self, questions: Iterable[Question]) -> bool:
        """Adds questions to the number, and goes on by the answers.

        Another block that has leased the number may have added a question first. Then
        this block answers that question, too.

        Returns:
            Whether all are answered. A question of another block may have no answer.
        """
        if self._questions is None:
            self._questions = {number.question for number in self._end.asked}
        missing = {q: None for q in questions if q not in self._questions}
        while missing:
            question = self.number.question or next(iter(missing))
            if not self._go_on(question):
                return False
            self._questions.add(question)
            missing.pop(question, None)
        return True

    def _leave_blank(self) -> None:
        """Makes the blank number one of the block's kind."""
        self.is_blank = False
        blanks = self._kind(self.asker.blank)
        # If several blocks have leased the number, the first of them has moved it.
        if self.number in blanks:
            blanks.remove(self.number)
            self._kind(self.asker.kind).append(self.number)

    def _go_on(self, question: Question) -> bool:
        """Goes on by a question; False if another block's question has no answer."""
        number = self.number
        is_end = number.question is None
        number.question = question
        number.asks_of_variable = isinstance(question, tuple) and not question[2]
        answer = self.asker.answer(number)
        if is_end:
            number.note_answer(answer)
        elif answer not in number.answers:
            return False
        number.give_back(self.asker)
        self.number = number.answers[answer]
        self.number.hold(self.asker)
        return True

    def discard(self) -> None:
        """Lets no other block find the number: its traces have to be made anew."""
        self._kind(self.asker.kind).drop(self._end.first)

    def give_back(self) -> None:
        """Gives the number back."""
        self.number.give_back(self.asker)


# The number while no block is open.
NONE = TraceNumber(0)


def unknown(asker: Asker, so_far: Lease | None = None) -> Lease:
    """Returns a lease of a number that no other block finds.

    Args:
        asker: answers for the block.
        so_far: the lease of the block so far; what is known of its number still holds.
    """
    lease = Lease(NONE, asker, TraceNumber())
    if so_far is not None:
        lease.is_new, lease.number.history = so_far.is_new, so_far.number.history
    return lease
