"""A rewrite as a value: a rule, a filter, the collections that it looks at.

What an extent holds on to. ``rewrites.py`` makes it the value that users open and call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any, Self

from flax.core.scope import CollectionFilter, DenyList

from flax_sg import blocks, errors, filters, rules


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A rule, applied to the variables that a filter selects.

    Attributes:
        where: the filter.
        rule: what a reader sees instead of the stored value.
        collections: the collections that the filter looks at.
        unused: what to do if a part of the filter took no variable: ``'raise'`` or
            ``'ignore'``. Judged when an extent ends.
    """

    where: filters.Filter
    rule: rules.Rule
    collections: CollectionFilter = 'params'
    unused: str = 'raise'

    def __post_init__(self) -> None:
        object.__setattr__(self, 'collections', _collections(self.collections))
        if self.unused not in ('raise', 'ignore'):
            raise errors.FilterValueError(
                f"unused={self.unused!r}: expected 'raise' or 'ignore'."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self._meaning() == other._meaning()

    def __hash__(self) -> int:
        return hash(self._meaning())

    def _meaning(self) -> tuple[Any, ...]:
        return self.where, self.rule, self.collections

    def key(self) -> Hashable:
        """What stands for the rewrite in the keys of JAX's caches, which outlive it."""
        return self.where, self.rule.key(), self.collections

    def __repr__(self) -> str:
        more = '' if self.collections == 'params' else f', {self.collections=!r}'
        return f'{self.rule.name}({self.where!r}{more.replace("self.", "")})'

    def snapshot(self) -> Self:
        """The rewrite as it is now; functions in a filter may read what changes."""
        where, rule = self.where.snapshot(), self.rule.snapshot()
        if where is self.where and rule is self.rule:
            return self
        return dataclasses.replace(self, where=where, rule=rule)


def _collections(collections: Any) -> CollectionFilter:
    """A hashable collection filter; raises for what is none."""
    if isinstance(collections, (bool, str)):
        out: Any = collections
    elif isinstance(collections, DenyList):
        out = DenyList(_collections(collections.deny))
    elif isinstance(collections, Iterable):
        out = tuple(collections)
    else:
        out = None
    names = (out,) if isinstance(out, str) else out if isinstance(out, tuple) else ()
    if out is None or not all(isinstance(name, str) for name in names):
        raise errors.FilterTypeError(
            f'collections={collections!r} is no collection filter: expected a name, '
            'a sequence of names, True, or flax.core.DenyList.'
        )
    if blocks.OVERWRITE_WITH_GRADIENT in names:
        raise errors.OverwriteWithGradientError(names)
    return out
