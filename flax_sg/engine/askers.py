"""Answers, for one block, which variables its filter takes."""

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

# A tree older than the trace that reads it. None stands for any tree, if the answer
# does not depend on the tree.
TreeRef: TypeAlias = 'weakref.ref[Any] | None'


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
        shape: equal for filters that are spelled alike.
        sure: equal for askers that surely give the same answers; None if unknown.
        kind: the rule and collections; under another kind the same answers have
            another effect.
        blank_kind: equal for blocks that act alike until a question is asked.
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
        # A write asks a question only where the rule refuses writes. A lifted transform
        # writes back what it was handed, in the collections that the block looks at.
        self.blank_kind = rule.refuses_writes, self.rewrite.collections
        # The answers of the user's functions, by atom and path.
        self._said: dict[filters.Filter, dict[Hashable, bool]] = {}

    def ask(self, path: Path) -> Any:
        """Whether the filter takes a variable: a bool, or a ``Part`` of the variable.

        None if the answer depends on the unknown class of a module.
        """
        if not self.has_functions:
            return expressions.decide(self.rewrite.where, path)
        return expressions.decide(self.rewrite.where, path, asks=self.takes)

    def takes(self, atom: filters.Filter, path: Path) -> bool | None:
        """Whether an elementary filter takes a variable.

        A function is asked once for each variable; its answer holds for the block.
        """
        if not isinstance(atom, filters.Predicate):
            return expressions.takes(atom, path)
        said = self._said.setdefault(atom, {})
        found = said.get(path.key)
        if found is None:
            found = said[path.key] = atom(path)
        return found

    def matched_by(self, paths: Sequence[Path]) -> set[filters.Filter]:
        """Returns the atoms that take one of some variables, or may take one.

        An atom may take a variable if the class of a module is unknown. Literal paths
        are looked up, not compared one by one: a filter may have thousands.
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
        """Whether a filter with functions gives these answers for some paths."""
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
            # ``map`` calls the function directly: no code of ours runs between calls.
            results.extend(map(fn, new.values()))
        finally:  # Answers hold, even if the function disagrees or raises.
            pairs = zip(new, results, strict=False)
            if not set(map(type, results)) <= {bool}:
                pairs = ((key, bool(r)) for key, r in pairs if isinstance(r, _BOOLS))
            said.update(pairs)
        found = list(map(said.get, answers))
        expected = list(answers.values())
        return found == (list(map(operator.not_, expected)) if opposite else expected)

    def answer_in_older_tree(self, path: Path) -> Any:
        """Returns what decides how a trace sees a variable from outside the trace."""
        rule, said = self.rewrite.rule, self.ask(path)
        if not said:
            return said
        # The rule is applied outside the trace. The result differs by path, which
        # depends on the owner, and by extent, if each extent makes its own value.
        return (
            said,
            str(path) if rule.asks_path else None,
            self if rule.in_extent else None,
        )

    def path_in(
        self, tree: TreeRef, key: Key, classes: Classes | None = None
    ) -> Path | None:
        """Returns the path of a variable of ``tree``; None if it cannot be known."""
        if self.owner_path and (tree is None or tree() is None):
            return None
        return Path.of(*key, self.owner_path if tree == self.tree else (), classes)


_BOOLS = (bool, np.bool_)
