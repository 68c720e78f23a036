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
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from flax_sg import errors, filters
from flax_sg.engine.askers import Asker, TreeRef
from flax_sg.filters.paths import Classes, Path
from flax_sg.internals import versions
from flax_sg.trees.variables import Key, inner_names

versions.load_once(globals())


# A tree, a variable in it, the classes around it, its names within the variable.
_Older: TypeAlias = tuple[TreeRef, Key, Classes | None, int]
_Ordered: TypeAlias = collections.OrderedDict[Hashable, Any]


class Number:
    """A number, and the answers under which JAX may have traced something.

    Attributes:
        value: the number in JAX's cache keys.
        paths, answers: the variables of trees that were made inside of a trace, and the
            answers for them, in the order of the questions.
        in_older_trees: the answers for variables of trees that are older than the
            trace, by tree, variable, and the classes of the modules around it.
        existing: the variables of blocks that were judged right under the number.
        brought: which values the rule brings, if a trace has read one of them.
        kind: the rule and the collections of the blocks whose filters gave the answers;
            None while there are none.
        inside: the numbers of blocks that were opened inside of this one, by kind;
            those that were found last come last.
    """

    def __init__(self, value: int) -> None:
        self.value = value
        self.kind: Hashable = None
        self.paths: list[Path] = []
        self.answers: dict[Hashable, Any] = {}
        self.in_older_trees: dict[_Older, Any] = {}
        self.existing: dict[Hashable, Path] = {}
        self.brought: Hashable = None
        self.inside: _Ordered = collections.OrderedDict()
        # Weakly: an exception may come before a number is given back.
        self._holders: weakref.WeakSet[Asker] = weakref.WeakSet()
        # How many questions were asked that need not be asked again, of a filter or an
        # owner that is sure of its answers; -1 if one of them was answered otherwise.
        self._agreed: _Ordered = collections.OrderedDict()
        # The shapes of filters that have used it, and whether they were judged right.
        self._shapes: _Ordered = collections.OrderedDict()
        self.late: _Late | None = None

    # Leases.

    def is_known_to(self, asker: Asker) -> bool:
        """Whether a filter of this shape has used the number."""
        return asker.shape in self._shapes

    def was_right(self, asker: Asker) -> bool:
        """Whether such a filter was judged, and every part of it means something."""
        return self._shapes.get(asker.shape, False)

    def use(self, asker: Asker, is_right: bool) -> None:
        """Notes a filter that uses the number, and whether it was judged right."""
        with _lock:
            _put_last(self._shapes, asker.shape, is_right, _MOST_SHAPES)

    def take(self, asker: Asker) -> bool:
        """Holds the number, if nobody holds it who may give other answers."""
        with _lock:
            for other in self._holders:
                if asker.sure is None or asker.sure != other.sure:
                    return False
            if self.late is not None and asker.sure != self.late.sure:
                return False
            self._holders.add(asker)
        return True

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

    @property
    def takes_any(self) -> bool:
        """Whether the filter takes a variable that was asked about."""
        return any(self.answers.values()) or any(self.in_older_trees.values())

    def agrees(self, asker: Asker, aside: Callable[[], Any]) -> bool:
        """Whether a filter gives the answers in the table.

        Args:
            asker: holds the number, so the table does not grow with other answers.
            aside: gives the context in which functions of the user are asked.
        """
        if self.brought is not None and self.brought != asker.rewrite.rule.values():
            return False
        where = asker.rewrite.where
        try:
            if asker.sure is None:
                with aside():
                    return asker.agrees_with(
                        self.paths, self.answers
                    ) and self._older_agree(asker, 0)
            return self._agree_now(
                where, len(self.answers), functools.partial(self._plain_agree, where)
            ) and self._agree_now(
                asker.sure,
                len(self.in_older_trees),
                functools.partial(self._older_agree, asker),
            )
        except Exception:  # The filter was not made for a variable of this table.
            return False

    def _agree_now(
        self, who: Hashable, count: int, agree_from: Callable[[int], bool]
    ) -> bool:
        """Whether somebody gives ``count`` answers; asks for the new ones alone."""
        known = self._agreed.get(who, 0)
        if known not in (-1, count):
            known = count if agree_from(known) else -1
            with _lock:
                _put_last(self._agreed, who, known, _MOST_AGREED)
        return known == count

    def _plain_agree(self, where: filters.Filter, start: int) -> bool:
        asked = zip(self.paths, self.answers.values(), strict=False)
        return all(where(p) == said for p, said in itertools.islice(asked, start, None))

    def _older_agree(self, asker: Asker, start: int) -> bool:
        older = list(self.in_older_trees.items())[start:]
        for (tree, key, classes, _), answer in older:
            path = asker.path_in(tree, key, classes)
            if path is None or asker.answer_in_older_tree(path) != answer:
                return False
        return True

    def note(self, asker: Asker, path: Path, said: Any, late: bool = False) -> None:
        """Notes an answer for a variable of a tree that was made inside of a trace."""
        if path.key not in self.answers:
            if late:
                self._check_late(asker)
            with _lock:
                self.kind = asker.kind
                self.paths.append(path)
                self.answers[path.key] = said
        elif late and self.answers[path.key] != said:  # Another block was asked.
            self._check_late(asker)

    def note_older(
        self, asker: Asker, key: Key, tree: TreeRef, path: Path, late: bool = False
    ) -> None:
        """Notes an answer for a variable of a tree that is older than the trace."""
        tree = tree if asker.owner_path else None
        question = tree, key, path.classes, inner_names(key)
        if question in self.in_older_trees:
            return
        if late:
            self._check_late(asker)
        answer = asker.answer_in_older_tree(path)
        with _lock:
            self.kind = asker.kind
            self.in_older_trees[question] = answer

    # Rules of ``jax.custom_vjp`` and its kin, which run after their block has closed.

    def expect_late_questions(self, asker: Asker) -> None:
        """Lets those use the number who surely give the same answers."""
        with _lock:
            self.kind = asker.kind
            if self.late is None:
                self.late = _Late(asker.sure)

    def _check_late(self, asker: Asker) -> None:
        """Raises for a new question, if others have used the number since."""
        if self.late is not None and self.late.sure is None and self.late.others:
            raise _late_read(asker.rewrite)


@dataclasses.dataclass
class _Late:
    """Who may use a number under which rules were compiled that run late.

    Attributes:
        sure: equal for those who give the same answers; None if nobody knows.
        others: whether somebody else has used it since.
    """

    sure: Hashable
    others: bool = False


_lock = threading.RLock()  # The garbage collector may close a block at any time.
_values = itertools.count(1)
_MOST_NUMBERS = 64  # For blocks of one rule in one place.
_MOST_RULES = 256
_MOST_OTHERS = 8  # Of other filters, when a filter is first used.
_MOST_SHAPES = 256
_MOST_AGREED = 256

# Where no block is open.
NONE = Number(0)


def lease(around: Number, asker: Asker, aside: Callable[[], Any]) -> Number:
    """The number for a block that opens. Whoever asks gives it back.

    Args:
        around: the number of the blocks that are open already.
        asker: what the block answers with.
        aside: gives the context in which functions of the user are asked.
    """
    for number in _candidates(around, asker):
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
    if not number.is_known_to(asker):
        number.use(asker, is_right=False)
    with _lock:
        if number.late is not None:
            number.late.others = True
        kind = number.kind or asker.blank_kind
        known = around.inside.get(kind, [])
        if known and known[-1] is number:
            return number
        known = [n for n in known if n is not number]
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


def _candidates(around: Number, asker: Asker) -> list[Number]:
    """The numbers that may be found again, in the order in which they are tried.

    First those that filters of the same shape have used, the last one first. A number
    without answers agrees with everything, whatever the rule, so it comes after those
    that have some. A
    function is not asked for variables that other functions were asked for: it may
    print them, or raise.
    """
    with _lock:
        blank = around.inside.get(asker.blank_kind, [])
        known = [*blank, *around.inside.get(asker.kind, [])]
    mine: list[Number] = []
    others: list[Number] = []
    for number in reversed(known):
        if number.kind not in (None, asker.kind):
            continue
        if number.is_known_to(asker):
            mine.append(number)
        elif asker.sure is not None or number.is_blank:
            others.append(number)
    mine.sort(key=lambda number: (number.is_blank, not number.is_held))
    others.sort(key=lambda number: number.is_blank)
    return [*mine, *others[:_MOST_OTHERS]]


def _put_last(mapping: _Ordered, key: Hashable, value: Any, most: int) -> None:
    mapping[key] = value
    mapping.move_to_end(key)
    if len(mapping) > most:
        mapping.popitem(last=False)


def _late_read(rewrite: object) -> errors.BlockError:
    """A rule of ``jax.custom_vjp`` reads a variable that two blocks see differently."""
    return errors.BlockError(
        f'a rule of a function that was compiled in the block of {rewrite!r} reads '
        'a variable after the block has closed, and a block of another function has '
        'used the same compiled function.\n'
        'Read the variable in the function as well, open the block inside of the '
        'function that jax.jit compiles, or select by a glob.'
    )
