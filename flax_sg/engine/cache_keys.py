"""Decides which cached JAX traces a block may reuse, by a number in the cache keys.

A cached trace depends only on the answers that the filters of the open blocks gave
for the variables read in it. So each number has a table of these answers. A block that
opens asks its own filter the same questions. If all answers agree, the block takes the
number, and finds its traces. If no number agrees, the block takes a new number.
Filters are never compared: two lambdas with the same answers count as equal.

A number stands for a block *inside the blocks around it*: each number has its own
numbers for the blocks that are opened inside it.

A table grows while its block is open. So a number is leased to one open block at a
time, or to several that surely give the same answers: equal globs of one module, say.
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


# A tree, a variable, the classes of the modules around the variable, and how many of
# the key's names lie within the variable's value.
_Older: TypeAlias = tuple[TreeRef, Key, Classes | None, int]
_Ordered: TypeAlias = collections.OrderedDict[Hashable, Any]


class Number:
    """A number in JAX's cache keys, and the answers that its traces depend on.

    Attributes:
        value: the number in JAX's cache keys.
        paths, answers: the variables of trees made inside a trace, and the filter's
            answers for them, in the order of the questions.
        in_older_trees: the answers for variables of trees older than the trace, by
            tree, variable, and the classes of the modules around the variable.
        existing: the variables met by blocks that were judged right under the number.
        brought: identifies the values that the rule brings, once a trace has read one.
        kind: the rule and the collections of the blocks whose filters gave the answers;
            None before the first answer is noted or expected.
        inside: the numbers of blocks opened inside this one, by kind; the numbers that
            were leased last come last.
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
        # Weak: an exception may come before a block gives the number back.
        self._holders: weakref.WeakSet[Asker] = weakref.WeakSet()
        # By filter or ``Asker.sure``: how many answers of the table agreed, and need
        # not be asked again; -1 if one answer differed.
        self._agreed: _Ordered = collections.OrderedDict()
        # The shapes of filters that used the number, and whether one was judged right.
        self._shapes: _Ordered = collections.OrderedDict()
        self.late: _Late | None = None

    # Leases.

    def is_known_to(self, asker: Asker) -> bool:
        """Whether a filter of this shape has used the number."""
        return asker.shape in self._shapes

    def was_right(self, asker: Asker) -> bool:
        """Whether a filter of this shape was judged, and all its parts matched."""
        return self._shapes.get(asker.shape, False)

    def use(self, asker: Asker, is_right: bool) -> None:
        """Notes that a filter uses the number, and whether it was judged right."""
        with _lock:
            _put_last(self._shapes, asker.shape, is_right, _MOST_SHAPES)

    def take(self, asker: Asker) -> bool:
        """Leases the number, unless another holder may give other answers."""
        with _lock:
            for other in self._holders:
                if asker.sure is None or asker.sure != other.sure:
                    return False
            if self.late is not None and asker.sure != self.late.sure:
                return False
            self._holders.add(asker)
        return True

    def give_back(self, asker: Asker) -> None:
        """Gives the number back, if the asker holds it."""
        with _lock:
            self._holders.discard(asker)

    @property
    def is_held(self) -> bool:
        """Whether an open block holds the number."""
        return bool(self._holders)

    # Answers.

    @property
    def is_blank(self) -> bool:
        """Whether the table of answers is empty."""
        return not (self.answers or self.in_older_trees)

    @property
    def takes_any(self) -> bool:
        """Whether the filter takes a variable of the table."""
        return any(self.answers.values()) or any(self.in_older_trees.values())

    def agrees(self, asker: Asker, aside: Callable[[], Any]) -> bool:
        """Whether a filter gives all the answers in the table.

        Args:
            asker: holds the number, so no other answers enter the table meanwhile.
            aside: returns a context manager, in which the user's functions are called.
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
        except Exception:  # The filter was not written for a variable here.
            return False

    def _agree_now(
        self, who: Hashable, count: int, agree_from: Callable[[int], bool]
    ) -> bool:
        """Whether ``who`` gives the first ``count`` answers; asks only for new ones."""
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
        """Notes an answer for a variable of a tree made inside a trace."""
        if path.key not in self.answers:
            if late:
                self._check_late(asker)
            with _lock:
                self.kind = asker.kind
                self.paths.append(path)
                self.answers[path.key] = said
        elif late and self.answers[path.key] != said:  # Another block answered.
            self._check_late(asker)

    def note_older(
        self, asker: Asker, key: Key, tree: TreeRef, path: Path, late: bool = False
    ) -> None:
        """Notes an answer for a variable of a tree older than the trace."""
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

    # Rules of ``jax.custom_vjp`` and the like, which run after their block has closed.

    def expect_late_questions(self, asker: Asker) -> None:
        """From now on, lets only askers with an equal ``sure`` take the number."""
        with _lock:
            self.kind = asker.kind
            if self.late is None:
                self.late = _Late(asker.sure)

    def _check_late(self, asker: Asker) -> None:
        """Raises for a new question if blocks with unknown answers used the number."""
        if self.late is not None and self.late.sure is None and self.late.others:
            raise _late_read(asker.rewrite)


@dataclasses.dataclass
class _Late:
    """Who may use a number after rules that run late were compiled under it.

    Attributes:
        sure: equal for askers that surely give the same answers; None if unknown.
        others: whether another block has used the number since.
    """

    sure: Hashable
    others: bool = False


_lock = threading.RLock()  # The garbage collector may close a block at any time.
_values = itertools.count(1)
_MOST_NUMBERS = 64  # Of one kind, inside one number.
_MOST_RULES = 256
_MOST_OTHERS = 8  # Numbers of other filter shapes that a block tries.
_MOST_SHAPES = 256
_MOST_AGREED = 256

# The number while no block is open.
NONE = Number(0)


def lease(around: Number, asker: Asker, aside: Callable[[], Any]) -> Number:
    """Finds or makes the number for a block that opens; the caller gives it back.

    Args:
        around: the number of the blocks that are already open.
        asker: answers for the block.
        aside: returns a context manager, in which the user's functions are called.
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
    number.use(asker, is_right=number.was_right(asker))
    with _lock:
        if number.late is not None:
            number.late.others = True
        kind = number.kind or asker.blank_kind
        known = around.inside.get(kind, [])
        if known and known[-1] is number:  # Nearly always.
            around.inside.move_to_end(kind)
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
    """Returns a number that was never used, and that no other block finds."""
    return Number(next(_values))


def _candidates(around: Number, asker: Asker) -> list[Number]:
    """Returns the numbers that a block may take, in the order to try them.

    Numbers that filters of the same shape have used come first, the latest one first.
    A number without answers agrees with every filter and rule, so it comes after those
    with answers. A function is not asked about the variables of other functions: it
    may print them, or raise.
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
    """The error if a ``jax.custom_vjp`` rule reads what two blocks see differently."""
    return errors.BlockError(
        f'a rule of a function that was compiled in the block of {rewrite!r} reads '
        'a variable after the block has closed, and a block of another function has '
        'used the same compiled function.\n'
        'Read the variable in the function as well, open the block inside of the '
        'function that jax.jit compiles, or select by a glob.'
    )
