"""Selects frozen parameters: a pattern for whole paths, and rows of each array."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Selection:
    """Selects parameters by path.

    Attributes:
        pattern: matches the whole path.
        rows: start and stop of the selected rows of each array, such as layers of a
            scanned stack; None for all rows.
    """

    pattern: re.Pattern[str]
    rows: tuple[int, int] | None = None

    @classmethod
    def of(cls, pattern: str, rows: tuple[int, int] | None = None) -> 'Selection':
        """Makes a selection from the text of a regular expression."""
        return cls(re.compile(pattern), rows)

    def takes(self, path: str) -> bool:
        """Whether a parameter, or some of its rows, is selected."""
        return self.pattern.fullmatch(path) is not None

    def map(self, fn: Callable[[jax.Array], Any], params: Any) -> Any:
        """Applies a function to the selected parameters; keeps the others."""
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: fn(leaf) if self.takes(path_of(keys)) else leaf, params
        )

    def mask(self, params: Any) -> Any:
        """Returns a tree of bools: True where a whole parameter is frozen."""
        return jax.tree_util.tree_map_with_path(
            lambda keys, _: self.rows is None and self.takes(path_of(keys)), params
        )


NOTHING = Selection.of('(?!)')


def path_of(keys: Any) -> str:
    """Returns the path of a leaf in a tree of dicts, which other nodes do not count."""
    return '/'.join(str(key.key) for key in keys if hasattr(key, 'key'))
