"""The value that every extent takes: a rule, a filter, the collections it looks at."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

from flax_sg.engine import extents, places
from flax_sg.forms import lifted
from flax_sg.internals import modules
from flax_sg.rules import rules

T = TypeVar('T')


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rewrite(rules.Rewrite):
    """A rule, applied to the variables that a filter selects, over an extent.

    The value is immutable, hashable and may be entered any number of times::

        r = nn.stop_gradient('gln_*/**')
        with r: ...        # the extent is the body
        r(nn.Dense)        # each call of a method of the class; see ``lift``
        @r                 # each call of the method or function
        r(nn.Dense(4))     # all that goes through the wrapper; see ``nn.Frozen``
    """

    _is_used: ClassVar[bool] = False
    _call: ClassVar[tuple[int, int]]

    def __post_init__(self) -> None:
        object.__setattr__(self, '_call', places.call_of_user())
        super().__post_init__()

    def __enter__(self) -> Self:
        self._use()
        owner = modules.current_module()
        extents.open_block(self, None if owner is None else owner.scope)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: types.TracebackType | None,
    ) -> None:
        before = extents.open_now()
        try:
            extents.close_last(self, exc_type)
        except BaseException:
            # What comes before the block is closed (Ctrl-C) must not leave it open.
            if extents.open_now() is before:
                extents.close_last(self, BaseException)
            raise

    def _use(self) -> None:
        object.__setattr__(self, '_is_used', True)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A statement ``nn.stop_gradient('x/**')``: Python drops its value at once.
        if self._is_used or is_finalizing():
            return
        if places.is_dropped_at(self._call):
            place = places.Place.here()
            places.warn_without_effect(
                f'{self!r} is made at {place} and dropped, so it has no effect.\n'
                f'Write with nn.{self.rule.name}(...): and the code below it.',
                place,
            )

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
        self._use()
        return lifted.lift(self, target, methods)
