"""The value that every extent takes: a rule, a filter, the collections it looks at."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Self, TypeVar

from flax_sg import _private, blocks, errors, extents, lifted, values

T = TypeVar('T')


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rewrite(values.Value):
    """A rule, applied to the variables that a filter selects, over an extent.

    The value is immutable, hashable and may be entered any number of times::

        r = nn.stop_gradient('gln_*/**')
        with r: ...        # the extent is the body
        r(nn.Dense)        # each call of a method of the class; see ``lift``
        @r                 # each call of the method or function
        r(nn.Dense(4))     # all that goes through the wrapper; see ``nn.Frozen``
    """

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
        before = blocks.thread.blocks
        try:
            self._close(exc_type)
        except BaseException:
            # What comes before the block is closed (Ctrl-C) must not leave it open.
            if blocks.thread.blocks is before:
                self._close(BaseException)
            raise

    def _close(self, exc_type: type[BaseException] | None) -> None:
        mine = [b for b in blocks.thread.blocks if b.source is self]
        if mine:
            # One value may be open in a suspended generator and around it.
            here = [block for block in mine if block.is_here() is None]
            extents.close_block((here or mine)[-1], judge=exc_type is None)
            return
        blocks.abandon(self)
        if exc_type is None or exc_type is GeneratorExit:
            raise errors.BlockOrderError(self, 'it is not open in this thread')

    def __call__(self, target: T) -> T:
        """Lifts a Module class, a method or a function of a module, wraps a module."""
        return self.lift(target)

    def lift(self, target: T, methods: Any = None) -> T:
        """Lifts a Module class, a method or a function of a module.

        Args:
            target: a Module class (or ``functools.partial`` of one), a method, or a
                function ``(module, *args, **kwargs)``. Paths are relative to the
                module. A module is wrapped, see ``nn.Frozen``.
            methods: for a class, the names of the methods to lift. By default
                ``('__call__',)``.

        Returns:
            The same kind of thing. A class keeps its name, so that parameters keep
            their paths.
        """
        return lifted.lift(self, target, methods)
