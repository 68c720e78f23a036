"""What a block answers with, when it is asked which variables it means."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from flax_sg import filters
from flax_sg.filters import expressions
from flax_sg.filters.paths import Classes, Path
from flax_sg.rules import rules
from flax_sg.trees.variables import Key

# A tree that is older than the trace that reads it. None stands for any tree, where
# the answer does not depend on it.
TreeRef: TypeAlias = 'weakref.ref[Any] | None'


@dataclasses.dataclass(eq=False)
class Asker:
    """What a block answers questions with.

    Attributes:
        rewrite: the rewrite of the block.
        owner_path: the path of the module that opened it, () at top level.
        tree: the tree of this module; None where paths do not depend on it.
        has_functions: whether the filter asks a function.
        asks_classes: whether it chooses by the class of the module around a variable.
        shape: equal for filters that are spelled alike.
        sure: equal for askers that surely give the same answers; None if nobody knows.
        kind: what the answers are for: others mean something else by the same ones.
        blank_kind: equal for blocks that do the same as long as nothing is asked.
    """

    rewrite: rules.Rewrite
    owner_path: tuple[str, ...]
    tree: TreeRef

    def __post_init__(self) -> None:
        where, rule = self.rewrite.where, self.rewrite.rule
        kinds = expressions.kinds_of(where)
        self.has_functions = filters.Predicate in kinds
        self.asks_classes = filters.OfType in kinds
        self.shape = expressions.shape_of(where)
        self.sure: Hashable = None
        if not self.has_functions:
            self.sure = where, rule.values(), self.owner_path, self.tree
        self.kind = rule.key(), self.rewrite.collections
        # A write is no question where it is allowed. A lifted transform writes back
        # what it is handed, of the collections that a block looks at.
        self.blank_kind = rule.refuses_writes, self.rewrite.collections
        # What functions have said of paths.
        self._said: dict[filters.Filter, dict[Hashable, bool]] = {}

    def ask(self, path: Path) -> Any:
        """Whether the filter takes a variable: a bool, or a part of it.

        None if that depends on the class of a module that is not known.
        """
        if not self.has_functions:
            return expressions.decide(self.rewrite.where, path)
        return expressions.decide(self.rewrite.where, path, asks=self.takes)

    def takes(self, atom: filters.Filter, path: Path) -> bool | None:
        """Whether an elementary filter takes a variable.

        A function is asked once for each variable; what it says holds for the block.
        """
        if not isinstance(atom, filters.Predicate):
            return expressions.takes(atom, path)
        said = self._said.setdefault(atom, {})
        found = said.get(path.key)
        if found is None:
            found = said[path.key] = atom(path)
        return found

    def matched_by(self, paths: Sequence[Path]) -> set[filters.Filter]:
        """The atoms that take one of some variables, or may: they do not know a class.

        Of thousands of literal paths each is found, and not compared with all.
        """
        where = self.rewrite.where
        if self.has_functions:
            return {
                atom
                for atom in where.atoms
                if any(self.takes(atom, path) is not False for path in paths)
            }
        matched: set[filters.Filter] = set()
        for path in paths:
            took, unknown = expressions.asked(where, path)
            matched |= took | unknown
            if len(matched) == len(where.atoms):
                break
        return matched

    def agrees_with(
        self, paths: Sequence[Path], answers: Mapping[Hashable, Any]
    ) -> bool:
        """Whether the functions of the filter give these answers for some paths."""
        where = self.rewrite.where
        function = expressions.as_function(where)
        if function is None or any(path.is_inner for path in paths):
            pairs = zip(paths, answers.values(), strict=False)
            return all(self.ask(path) == answer for path, answer in pairs)
        fn, opposite = function
        said = self._said.setdefault(where.atoms[0], {})
        new = dict(zip(answers, paths, strict=False))
        if said:
            new = {key: path for key, path in new.items() if key not in said}
        results: list[Any] = []
        try:
            # Nothing of ours is between one question and the next.
            results.extend(map(fn, new.values()))
        finally:  # What it has said holds, whether it agrees or raises.
            pairs = zip(new, results, strict=False)
            if not set(map(type, results)) <= {bool}:
                pairs = ((key, bool(r)) for key, r in pairs if isinstance(r, _BOOLS))
            said.update(pairs)
        found = list(map(said.get, answers))
        expected = list(answers.values())
        return found == (list(map(operator.not_, expected)) if opposite else expected)

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

    def path_in(
        self, tree: TreeRef, key: Key, classes: Classes | None = None
    ) -> Path | None:
        """The path of a variable of another tree; None if nobody knows."""
        if self.owner_path and (tree is None or tree() is None):
            return None
        return Path.of(*key, self.owner_path if tree == self.tree else (), classes)


_BOOLS = (bool, np.bool_)
