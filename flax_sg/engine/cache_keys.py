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
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from flax_sg import errors, filters
from flax_sg.filters import expressions
from flax_sg.filters.paths import Classes, Path
from flax_sg.internals import versions
from flax_sg.rules import rules
from flax_sg.trees.variables import Key

versions.load_once(globals())

# A tree older than the trace that reads it. None stands for any tree, if the answer
# does not depend on the tree.
TreeRef: TypeAlias = 'weakref.ref[Any] | None'


class Older(NamedTuple):
    """A variable of a tree that is older than the trace that reads it.

    Attributes:
        tree: the tree.
        key: the variable.
        classes: the classes of the modules around it, if the filter asks for them.
        inner: how many of its names lie within the variable's value.
    """

    tree: TreeRef
    key: Key
    classes: Classes | None
    inner: int


# What the filter of a block that opens is asked. A variable of a tree that was made
# inside of the trace has the same path for each block.
Question: TypeAlias = Path | Older
_Ordered: TypeAlias = collections.OrderedDict[Hashable, Any]


@dataclasses.dataclass(eq=False)
class Asker:
    """Answers for one block's filter, and tells which blocks answer alike.

    Attributes:
        rewrite: the rewrite of the block.
        owner_path: the path of the module that opened the block; () at top level.
        tree: the tree of this module; None where paths do not depend on a tree.
        has_functions: whether the filter calls a function of the user.
        asks_classes: whether the filter chooses by the class of the module around a
            variable.
        asks_path: whether two variables may be treated differently by their names.
        shape: equal for filters that are spelled alike.
        sure: equal for askers that surely give the same answers, of one kind; None if
            unknown.
        kind: the rule and collections; under another kind the same answers have
            another effect.
        blank_kind: equal for blocks that act alike until a question is asked.
    """

    rewrite: rules.Rewrite
    owner_path: tuple[str, ...]
    tree: TreeRef

    def __post_init__(self) -> None:
        where, rule = self.rewrite.where, self.rewrite.rule
        self.has_functions = 'code' in where.needs
        self.asks_classes = 'classes' in where.needs
        self.asks_path = bool(where.atoms) or rule.asks_path
        self.shape = where.shape
        self.kind = rule.key(), self.rewrite.collections
        self.sure: Hashable = None
        if not self.has_functions:
            self.sure = where, self.kind, rule.token(), self.owner_path, self.tree
        # A write asks a question only where the rule refuses writes. A lifted transform
        # writes back what it was handed, in the collections that the block looks at.
        self.blank_kind = rule.acts_on == 'writes', self.rewrite.collections
        # The answers of the user's functions, by atom and path.
        self._said: dict[Hashable, bool | None] = {}

    def ask(self, path: Path) -> Any:
        """Whether the filter takes a variable: a bool, or a ``Part`` of the variable.

        None if the answer depends on the unknown class of a module.
        """
        return expressions.decide(self.rewrite.where, path, asks=self._takes)

    def _takes(self, atom: expressions.Atom, path: Path) -> bool | None:
        """Whether an elementary filter takes a variable.

        A function is asked once for each variable; its answer holds for the block.
        """
        if 'code' not in atom.own_needs:
            return expressions.takes(atom, path)
        key = atom, path.key
        if key not in self._said:
            self._said[key] = expressions.takes(atom, path)
        return self._said[key]

    def matched_by(self, paths: Iterable[Path]) -> set[filters.Filter]:
        """Returns the atoms that take one of some variables, or may take one.

        An atom may take a variable if the class of a module is unknown. Literal paths
        are looked up, not compared one by one: a filter may have thousands.
        """
        where = self.rewrite.where
        matched: set[filters.Filter] = set()
        for path in paths:
            if len(matched) == len(where.atoms):
                break
            matched |= expressions.asked(where, path, self._takes).keys()
        return matched

    def answer(self, question: Question) -> Any:
        """Returns what decides how a trace sees a variable.

        Where the path of the variable is unknown, it equals no other answer, so that
        blocks that differ there share no trace.
        """
        if isinstance(question, Path):
            return self.ask(question)
        path, rule = self.path_of(question), self.rewrite.rule
        if path is None:
            return object()
        said = self.ask(path)
        if not said:
            return said
        # The rule is applied outside the trace. The result differs by path, which
        # depends on the owner, and by block, if each block makes its own value.
        return (
            said,
            str(path) if rule.asks_path else None,
            self if rule.acts_on == 'cotangents' else None,
        )

    def path_of(self, question: Question) -> Path | None:
        """Returns the path of a variable; None if it cannot be known."""
        if isinstance(question, Path):
            return question
        tree, key, classes, _ = question
        if self.owner_path and (tree is None or tree() is None):
            return None
        return Path.of(*key, self.owner_path if tree == self.tree else (), classes)


class Number:
    """A number in JAX's cache keys, and the answers that its traces depend on.

    Attributes:
        value: the number in JAX's cache keys.
        kind: ``Asker.kind`` of the blocks whose filters gave the answers. Until then,
            ``Asker.blank_kind`` of the blocks that use the number.
        answers: what the filter was asked, and its answers.
        existing: the variables met by blocks that were judged right under the number.
        right: pairs of ``Asker.sure`` and programs in which each part of the filter
            matches a variable.
        token: identifies the values that the rule brings, once a trace has read one.
        inside: the numbers of blocks opened inside this one, by value; the numbers that
            were leased last come last.
    """

    def __init__(self, value: int, kind: Hashable = None) -> None:
        self.value = value
        self.kind = kind
        self.answers: dict[Hashable, tuple[Question, Any]] = {}
        self.existing: set[Hashable] = set()
        self.right: _Ordered = collections.OrderedDict()
        self.token: Hashable = None
        self.inside: _Ordered = collections.OrderedDict()
        # Weak: an exception may come before a block gives the number back.
        self._holders: weakref.WeakSet[Asker] = weakref.WeakSet()
        # By ``Asker.sure``: how many answers there were when all of them agreed; -1 if
        # one differed.
        self._agreed: _Ordered = collections.OrderedDict()
        self._shapes: _Ordered = collections.OrderedDict()  # Of filters that used it.

    # Leases.

    def is_known_to(self, asker: Asker) -> bool:
        """Whether a filter of this shape has used the number."""
        return asker.shape in self._shapes

    def use(self, asker: Asker) -> None:
        """Notes that a filter uses the number."""
        put_last(self._shapes, asker.shape, None)

    def take(self, asker: Asker) -> bool:
        """Leases the number, unless another holder may give other answers."""
        with _lock:
            others = {other.sure for other in self._holders} if self.is_held else ()
            if others and (asker.sure is None or others != {asker.sure}):
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
        return not self.answers

    def agrees(self, asker: Asker, aside: Callable[[], Any]) -> bool:
        """Whether a filter gives all the answers in the table.

        Args:
            asker: holds the number, so no other answers enter the table meanwhile.
            aside: returns a context manager, in which the user's functions are called.
        """
        if self.token is not None and self.token != asker.rewrite.rule.token():
            return False
        try:
            if asker.sure is None:
                with aside():
                    return self._agrees_now(asker)
            count = len(self.answers)
            known = self._agreed.get(asker.sure, 0)
            if known not in (-1, count):
                known = count if self._agrees_now(asker) else -1
                put_last(self._agreed, asker.sure, known)
            return known == count
        except Exception:  # The filter was not written for a variable here.
            return False

    def _agrees_now(self, asker: Asker) -> bool:
        return all(asker.answer(q) == said for q, said in list(self.answers.values()))

    def note(self, asker: Asker, question: Question, late: bool = False) -> None:
        """Notes what a filter answers, if it is asked for the first time.

        Raises:
            BlockError: if the question is new and comes ``late``, after other blocks
                may have used the number.
        """
        key = question.key if isinstance(question, Path) else question
        known = self.answers.get(key)
        if known is not None and not late:
            return
        said = asker.answer(question)
        if late and (known[1] != said if known else not self._knows(asker, question)):
            _refuse_late_question(asker)
        if known is None:
            with _lock:
                self.kind = asker.kind
                self.answers[key] = question, said

    def _knows(self, asker: Asker, question: Question) -> bool:
        """Whether blocks without an owner have asked for a path, in whatever tree."""
        asked = [asker.path_of(q) for q, _ in list(self.answers.values())]
        path = asker.path_of(question)
        keys = {other.key for other in asked if other is not None}
        return not asker.owner_path and path is not None and path.key in keys


_lock = threading.RLock()  # The garbage collector may close a block at any time.
_values = itertools.count(1)
_MOST_KNOWN = 128  # Numbers inside one number, and entries of each other table.
_MOST_OTHERS = 8  # Numbers of other filter shapes that a block tries.

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
        if number.agrees(asker, aside):
            break
        number.give_back(asker)
    else:
        number = fresh(asker.blank_kind)
        number.take(asker)
    number.use(asker)
    put_last(around.inside, number.value, number)
    return number


def fresh(kind: Hashable = None) -> Number:
    """Returns a number that was never used, and that no other block finds."""
    return Number(next(_values), kind)


def _candidates(around: Number, asker: Asker) -> list[Number]:
    """Returns the numbers that a block may take, in the order to try them.

    Numbers that filters of the same shape have used come first, the latest one first.
    A number without answers agrees with every filter and rule, so it comes after those
    with answers. A function is not asked about the variables of other functions: it
    may print them, or raise.
    """
    kinds = asker.kind, asker.blank_kind
    with _lock:
        known = [n for n in reversed(around.inside.values()) if n.kind in kinds]
    mine: list[Number] = []
    others: list[Number] = []
    for number in known:
        if number.is_known_to(asker):
            mine.append(number)
        elif asker.sure is not None or number.is_blank:
            others.append(number)
    if len(known) > 1:
        mine.sort(key=lambda number: (number.is_blank, not number.is_held))
        others.sort(key=lambda number: number.is_blank)
    return [*mine, *others[:_MOST_OTHERS]]


def put_last(table: _Ordered, key: Hashable, value: Any) -> None:
    """Puts an entry last, and forgets the first one of a full table."""
    with _lock:
        table[key] = value
        table.move_to_end(key)
        if len(table) > _MOST_KNOWN:
            free = (k for k, v in table.items() if not getattr(v, 'is_held', False))
            table.pop(next(free, None), None)


def _refuse_late_question(asker: Asker) -> NoReturn:
    """Raises for a new question of a rule that runs after its block."""
    raise errors.BlockError(
        'a rule of a function that was compiled in the block of '
        f'{asker.rewrite!r} reads a variable after the block has closed, and the '
        'function has not read it.\n'
        'Read the variable in the function as well, or open the block inside of the '
        'function that jax.jit compiles.'
    )
