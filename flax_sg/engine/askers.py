"""What a block answers with, when it is asked which variables it means."""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias, cast

import numpy as np

from flax_sg import filters
from flax_sg.engine.variables import Key
from flax_sg.filters.asking import as_function, decide, kinds_of
from flax_sg.filters.paths import Classes, Path
from flax_sg.rules import rules

# A tree that is older than the trace that reads it. None stands for any tree, where
# the answer does not depend on it.
TreeRef: TypeAlias = 'weakref.ref[Any] | None'


class Answers:
    """The answers of a filter, in the order in which it was asked.

    Attributes:
        paths: the variables, as the filter saw them.
        said: the answers.
    """

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.said: list[Any] = []
        self._positions: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __contains__(self, path: Path) -> bool:
        return path.key in self._positions

    def known(self, path: Path, among: int | None = None) -> Any:
        """The answer for a path, among the first ones; None if there is none."""
        position = self._positions.get(path.key)
        if position is None or (among is not None and position >= among):
            return None
        return self.said[position]

    def add(self, path: Path, said: Any) -> None:
        """Adds an answer; the order is that in which readers may find it."""
        if path not in self:
            self.said.append(said)
            self.paths.append(path)
            self._positions[path.key] = len(self.paths) - 1


@dataclasses.dataclass(eq=False)
class Asker:
    """What a block answers questions with.

    Attributes:
        rewrite: the rewrite of the block.
        owner_path: the path of the module that opened it, () at top level.
        tree: the tree of this module; None where paths do not depend on it.
        matched: the elementary filters in ``where`` that took a variable so far.
        is_new: whether no filter of this shape has used the number before.
        matched_in_table: whether the one function of the filter takes a variable in
            the table of the number.
    """

    rewrite: rules.Rewrite
    owner_path: tuple[str, ...]
    tree: TreeRef
    matched: set[filters.Filter] = dataclasses.field(default_factory=set)
    is_new: bool = True
    matched_in_table: bool = False
    # What functions have said, and the table in which it stands.
    _said: dict[Hashable, tuple[Any, set[filters.Filter]]] = dataclasses.field(
        default_factory=dict
    )
    _agreed_with: tuple[Answers, int] | None = None

    @functools.cached_property
    def sure(self) -> Hashable:
        """Equal for askers that surely give the same answers; None if nobody knows."""
        where = self.rewrite.where
        if filters.Predicate in kinds_of(where):
            return None
        return where, self.rewrite.rule.values(), self.owner_path, self.tree

    def ask(self, path: Path) -> Any:
        """Whether the filter takes a variable: a bool, or a part of it.

        A function is asked once for each variable; what it says holds for the block.
        """
        if self.sure is not None:
            return self.rewrite.where(path)
        return self._said_of(path)[0]

    def meet(self, path: Path) -> Any:
        """The same for a variable that exists in the block."""
        if self.sure is not None:
            return decide(self.rewrite.where, path, self.matched)
        said, matched = self._said_of(path)
        self.matched |= matched
        return said

    def matched_among(self, paths: Iterable[Path]) -> set[filters.Filter]:
        """The elementary filters that take one of some variables."""
        matched: set[filters.Filter] = set()
        for path in paths:
            if self.sure is None:
                matched |= self._said_of(path)[1]
            else:
                decide(self.rewrite.where, path, matched)
        return matched

    def _said_of(self, path: Path) -> tuple[Any, set[filters.Filter]]:
        found = self._said.get(path.key)
        if found is None and self._agreed_with is not None:
            table, count = self._agreed_with  # Others may have gone on with it.
            found = self._of_function(table.known(path, count))
        if found is None:
            matched: set[filters.Filter] = set()
            said = decide(self.rewrite.where, path, matched)
            found = self._said[path.key] = said, matched
        return found

    def _of_function(self, said: Any) -> tuple[Any, set[filters.Filter]] | None:
        """What the filter says, and which part of it takes the variable."""
        where = self.rewrite.where
        function = as_function(where)
        if said is None or function is None:
            return None
        return said, set(where.atoms) if said != function[1] else set()

    def agrees_with(self, table: Answers) -> bool:
        """Whether the functions of the filter give the answers of a table."""
        function = as_function(self.rewrite.where)
        if function is None or self._said:
            pairs = zip(table.paths, table.said, strict=False)
            return all(self.ask(path) == said for path, said in pairs)
        # Nothing of ours is between one question and the next.
        fn, opposite = function
        expected = list(map(operator.not_, table.said)) if opposite else table.said
        results: list[Any] = []
        try:
            results.extend(map(fn, table.paths))
            if results == expected:
                self._agreed_with = table, len(results)
                self.matched_in_table = True in results
                return True
        finally:
            if self._agreed_with is None:  # What it has said holds all the same.
                for path, took in zip(table.paths, results, strict=False):
                    if isinstance(took, (bool, np.bool_)):
                        said = self._of_function(bool(took) != opposite)
                        self._said[path.key] = cast(Any, said)
        return False

    def answer_in_older_tree(self, path: Path) -> Any:
        """What tells what a reader in a trace sees of a variable outside of it."""
        rule, said = self.rewrite.rule, self.ask(path)
        if not said:
            return said
        # The rule is applied outside of the trace: at each extent anew, if it makes
        # something there; to a path that depends on the owner.
        return (
            said,
            str(path) if rule.asks_path else None,
            self if rule.in_extent else None,
        )

    @functools.cached_property
    def asks_classes(self) -> bool:
        """Whether the filter chooses by the class of the module around a variable."""
        return filters.OfType in kinds_of(self.rewrite.where)

    def path_in(
        self, tree: TreeRef, key: Key, classes: Classes | None = None
    ) -> Path | None:
        """The path of a variable of another tree; None if nobody knows."""
        if self.owner_path and (tree is None or tree() is None):
            return None
        return Path.of(*key, self.owner_path if tree == self.tree else (), classes)
