"""Which traces a block may find again: numbers in the keys of JAX's trace caches.

A cached trace depends on nothing but the answers that the filters of the open blocks
gave for the variables read in it. So each number has a table of these answers. A block
that opens asks its own filter the same questions. Where all answers agree it takes the
number, and finds the traces; where none agrees it takes a new number. Filters
themselves are never compared: two lambdas are equal if they give the same answers.

A number stands for a block *inside the blocks around it*: each number has numbers of
its own for the blocks that are opened inside of it.

A table grows while its block is open. So a number is held by one open block at a time,
or by several that surely give the same answers: equal globs of one module, for example.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from flax_sg import errors, filters
from flax_sg.engine.askers import Answers, Asker, TreeRef
from flax_sg.engine.variables import Key
from flax_sg.filters.asking import shape_of
from flax_sg.filters.paths import Classes, Path
from flax_sg.internals.versions import reloaded

if 'Number' in globals():  # It was loaded before.
    raise reloaded(__name__)


class Number:
    """A number, and the answers under which JAX may have traced something.

    Attributes:
        value: the number in JAX's cache keys.
        answers: those for variables of trees that were made inside of a trace.
        in_older_trees: the answers for variables of trees that are older than the
            trace, by tree, variable, and the classes of the modules around it.
        brought: which values the rule brings, if a trace has read one of them.
        existing: the paths of other variables that exist there.
        read, took: whether a variable was read there, and one that the filter takes.
        passed: filters of which every part matches a variable there.
        inside: the numbers of blocks that were opened inside of this one, by rule and
            collections; those that were found last come last.
    """

    def __init__(self, value: int) -> None:
        self.value = value
        self.answers = Answers()
        self.in_older_trees: dict[tuple[TreeRef, Key, Classes | None], Any] = {}
        self.brought: Hashable = None
        self.existing: dict[Hashable, Path] = {}
        self.read = self.took = False
        self.passed: set[filters.Filter] = set()
        self.inside: collections.OrderedDict[Hashable, list[Number]] = (
            collections.OrderedDict()
        )
        # Weakly: an exception may come before a number is given back.
        self._holders: weakref.WeakSet[Asker] = weakref.WeakSet()
        # How many questions were asked that need not be asked again, of a filter or an
        # owner that is sure of its answers; None if one of them was answered otherwise.
        self._agreed: dict[Hashable, int | None] = {}
        # The shapes of filters that have used the number.
        self._shapes: collections.OrderedDict[Hashable, None] = (
            collections.OrderedDict()
        )
        # Who has used it since a rule of ``jax.custom_vjp`` may run late.
        self._past: list[Asker] | None = None

    # Leases.

    def is_for(self, shape: Hashable) -> bool:
        """Whether a filter of this shape has used the number."""
        return shape in self._shapes

    def take(self, asker: Asker) -> bool:
        """Holds the number, if nobody holds it who may give other answers."""
        with _lock:
            for other in self._holders:
                if asker.sure is None or asker.sure != other.sure:
                    return False
            self._holders.add(asker)
        return True

    def use(self, asker: Asker) -> None:
        """Notes that a holder goes on to use the number."""
        with _lock:
            _put_last(self._shapes, shape_of(asker.rewrite.where), None, _MOST_SHAPES)
            if self._past is not None:
                _remember(self._past, asker)

    def give_back(self, asker: Asker) -> None:
        """Lets go of the number, if it was held."""
        with _lock:
            self._holders.discard(asker)

    @property
    def is_held(self) -> bool:
        """Whether an open block has the number."""
        return bool(self._holders)

    # Answers.

    @property
    def is_blank(self) -> bool:
        """Whether nothing was asked yet."""
        return not (self.answers or self.in_older_trees)

    def agrees(self, asker: Asker, aside: Callable[[], Any]) -> bool:
        """Whether a filter gives the answers in the table.

        Args:
            asker: holds the number, so the table does not grow with other answers.
            aside: gives the context in which functions of the user are asked.
        """
        if self.brought is not None and self.brought != asker.rewrite.rule.values():
            return False
        if self.is_blank:
            return True
        try:
            if asker.sure is not None:
                return self._values_agree(asker)
            with aside():
                return asker.agrees_with(self.answers) and self._older_agree(asker, 0)
        except Exception:  # The filter was not made for a variable of this table.
            return False

    def _values_agree(self, asker: Asker) -> bool:
        where, answers = asker.rewrite.where, self.answers

        def agree_from(start: int) -> bool:
            asked = zip(answers.paths[start:], answers.said[start:], strict=False)
            return all(where(path) == said for path, said in asked)

        older = functools.partial(self._older_agree, asker)
        return self._agree_now(where, len(answers), agree_from) and self._agree_now(
            asker.sure, len(self.in_older_trees), older
        )

    def _agree_now(
        self, who: Hashable, count: int, agree_from: Callable[[int], bool]
    ) -> bool:
        """Whether somebody gives ``count`` answers; asks for the new ones alone."""
        known = self._agreed.get(who, 0)
        if known is None or known == count:
            return known is not None
        same = False
        try:
            same = agree_from(known)
        finally:
            with _lock:
                if len(self._agreed) >= _MOST_AGREED:
                    self._agreed.clear()
                self._agreed[who] = count if same else None
        return same

    def _older_agree(self, asker: Asker, start: int) -> bool:
        for (tree, key, classes), answer in list(self.in_older_trees.items())[start:]:
            path = asker.path_in(tree, key, classes)
            if path is None or asker.answer_in_older_tree(path) != answer:
                return False
        return True

    def note(self, asker: Asker, path: Path, said: Any, late: bool = False) -> None:
        """Notes an answer for a variable of a tree that was made inside of a trace."""
        if path not in self.answers:
            if late:
                self._check_late(asker, lambda other: other.ask(path), said)
            with _lock:
                self.answers.add(path, said)
        elif late and self.answers.known(path) != said:  # Another block was asked.
            self._check_late(asker, lambda _: self.answers.known(path), said)

    def note_older(
        self, asker: Asker, key: Key, tree: TreeRef, path: Path, late: bool = False
    ) -> None:
        """Notes an answer for a variable of a tree that is older than the trace."""
        tree = tree if asker.owner_path else None
        if (tree, key, path.classes) in self.in_older_trees:
            return
        answer = asker.answer_in_older_tree(path)

        def other_answer(other: Asker) -> Any:
            path_there = other.path_in(tree, key, path.classes)
            if path_there is None:
                return None
            return other.answer_in_older_tree(path_there)

        if late:
            self._check_late(asker, other_answer, answer)
        with _lock:
            self.in_older_trees[tree, key, path.classes] = answer

    # Rules of ``jax.custom_vjp`` and its kin, which run after their block has closed.

    def expect_late_questions(self) -> None:
        """Remembers from now on who uses the number."""
        with _lock:
            if self._past is None:
                self._past = []
                for asker in self._holders:
                    _remember(self._past, asker)

    def _check_late(
        self, asker: Asker, ask: Callable[[Asker], Any], answer: Any
    ) -> None:
        if self._past is None:
            return
        others = [other for other in self._past if other is not asker]
        too_many = len(self._past) > _MOST_PAST
        if too_many or any(ask(other) != answer for other in others):
            raise _late_read(asker.rewrite)


def _remember(past: list[Asker], asker: Asker) -> None:
    known = asker.sure is not None and any(a.sure == asker.sure for a in past)
    if not known and len(past) <= _MOST_PAST:
        past.append(asker)


_lock = threading.RLock()  # The garbage collector may close a block at any time.
_values = itertools.count(1)
_MOST_NUMBERS = 64  # For blocks of one rule in one place.
_MOST_RULES = 256
_MOST_OTHERS = 8  # Of other filters, when a filter is first used.
_MOST_SHAPES = 16
_MOST_AGREED = 256
_MOST_PAST = 64

# Where no block is open.
NONE = Number(0)


def lease(around: Number, asker: Asker, aside: Callable[[], Any]) -> Number:
    """The number for a block that opens. Whoever asks gives it back.

    Args:
        around: the number of the blocks that are open already.
        asker: what the block answers with.
        aside: gives the context in which functions of the user are asked.
    """
    kind = asker.rewrite.rule.key(), asker.rewrite.collections
    for number in _candidates(around, kind, asker):
        if not number.take(asker):
            continue
        agrees = False
        try:
            agrees = number.agrees(asker, aside)
        finally:
            if not agrees:
                number.give_back(asker)
        if agrees:
            break
    else:
        number = fresh()
        number.take(asker)
    asker.is_new = not number.is_for(shape_of(asker.rewrite.where))
    number.use(asker)
    with _lock:
        known = around.inside.get(kind, [])
        known = [other for other in known if other is not number]
        for other in list(known):
            if len(known) < _MOST_NUMBERS:
                break
            if not other.is_held:
                known.remove(other)
        _put_last(around.inside, kind, [*known, number], _MOST_RULES)
    return number


def fresh() -> Number:
    """A number that was never used, and that nobody finds."""
    return Number(next(_values))


def _candidates(around: Number, kind: Hashable, asker: Asker) -> Iterator[Number]:
    """The numbers that may be found again, in the order in which they are tried.

    First those that filters of the same shape have used, the last one first. A number
    without answers agrees with everything, so it comes after those that have some. A
    function is not asked for variables that other functions were asked for: it may
    print them, or raise.
    """
    with _lock:
        known = around.inside.get(kind, [])[::-1]
    shape = shape_of(asker.rewrite.where)
    mine = [number for number in known if number.is_for(shape)]
    others = [number for number in known if not number.is_for(shape)]
    if asker.sure is None:
        others = [number for number in others if number.is_blank]
    mine.sort(key=lambda number: (number.is_blank, not number.is_held))
    others.sort(key=lambda number: number.is_blank)
    return itertools.chain(mine, others[:_MOST_OTHERS])


def _put_last(
    mapping: collections.OrderedDict[Any, Any], key: Any, value: Any, most: int
) -> None:
    mapping[key] = value
    mapping.move_to_end(key)
    if len(mapping) > most:
        mapping.popitem(last=False)


def _late_read(rewrite: object) -> errors.BlockError:
    """A rule of ``jax.custom_vjp`` reads a variable that two blocks see differently."""
    return errors.BlockError(
        f'a rule of a function that was compiled in the block of {rewrite!r} reads '
        'a variable after the block has closed, and another block that has used '
        'the same compiled function answers differently.\n'
        'Read the variable in the function as well, or open the block inside of '
        'the function that jax.jit compiles.'
    )
