"""What is frozen: a pattern for whole paths, and which rows of each array."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Selection:
    """Parameters by path.

    Attributes:
        pattern: what a path has to match as a whole.
        rows: the first row of each array, as of a stack of scanned layers, and the one
            after the last; None for all.
    """

    pattern: re.Pattern[str]
    rows: tuple[int, int] | None = None

    @classmethod
    def of(cls, pattern: str, rows: tuple[int, int] | None = None) -> 'Selection':
        """A selection by the text of a regular expression."""
        return cls(re.compile(pattern), rows)

    def takes(self, path: str) -> bool:
        """Whether a parameter is selected, or rows of it."""
        return self.pattern.fullmatch(path) is not None

    def map(self, fn: Callable[[jax.Array], Any], params: Any) -> Any:
        """The parameters, with what a function makes of the selected ones."""
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: fn(leaf) if self.takes(path_of(keys)) else leaf, params
        )

    def mask(self, params: Any) -> Any:
        """A tree of bools, True at the parameters that are frozen as a whole."""
        return jax.tree_util.tree_map_with_path(
            lambda keys, _: self.rows is None and self.takes(path_of(keys)), params
        )


NOTHING = Selection.of('(?!)')


def path_of(keys: Any) -> str:
    """The path of a leaf in a tree of parameters."""
    return '/'.join(str(key.key) for key in keys)
