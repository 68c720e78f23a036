"""The value that every extent takes: a rule, a filter, the collections it looks at."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable
from typing import Any, Self, TypeVar

from flax.core.scope import CollectionFilter, DenyList

from flax_sg import _private, blocks, errors, extents, filters, lifted, rules

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """A rule, applied to the variables that a filter selects, over an extent.

    The value is immutable, hashable and may be entered any number of times::

        r = nn.stop_gradient('gln_*/**')
        with r: ...        # the extent is the body
        r(nn.Dense)        # each call of a method of the class; see ``lift``
        @r                 # each call of the method or function

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
    unused: str = dataclasses.field(default='raise', compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, 'collections', _collections(self.collections))
        if self.unused not in ('raise', 'ignore'):
            raise errors.FilterValueError(
                f"unused={self.unused!r}: expected 'raise' or 'ignore'."
            )

    def __repr__(self) -> str:
        more = '' if self.collections == 'params' else f', {self.collections=!r}'
        return f'{self.rule.name}({self.where!r}{more.replace("self.", "")})'

    def snapshot(self) -> Self:
        """The rewrite as it is now; functions in a filter may read what changes."""
        where = self.where.snapshot()
        return self if where is self.where else dataclasses.replace(self, where=where)

    def __enter__(self) -> Self:
        owner = _private.current_module()
        extents.open_block(self, None if owner is None else owner.scope)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: types.TracebackType | None,
    ) -> None:
        mine = [b for b in blocks.thread.blocks if b.source is self]
        if mine:
            # One value may be open in a suspended generator and around it.
            here = [block for block in mine if block.is_here() is None]
            extents.close_block((here or mine)[-1], judge=exc_type is None)
        elif exc_type is None or exc_type is GeneratorExit:
            blocks.abandon(self)
            raise errors.BlockOrderError(self, 'it is not open in this thread')

    def __call__(self, target: T) -> T:
        """Lifts a Module class, a method or a function of a module."""
        return self.lift(target)

    def lift(self, target: T, methods: Any = None) -> T:
        """Lifts a Module class, a method or a function of a module.

        Args:
            target: a Module class (or ``functools.partial`` of one), a method, or a
                function ``(module, *args, **kwargs)``. Paths are relative to the
                module.
            methods: for a class, the names of the methods to lift. By default
                ``('__call__',)``.

        Returns:
            The same kind of thing. A class keeps its name, so that parameters keep
            their paths.
        """
        return lifted.lift(self, target, methods)


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
