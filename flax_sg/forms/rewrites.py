"""What ``nn.stop_gradient(where)`` returns, for ``with``, ``@`` and calls."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from flax_sg import errors, filters
from flax_sg.engine import extents
from flax_sg.forms import lifted, targets
from flax_sg.internals import places
from flax_sg.rules import rules

T = TypeVar('T')


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockDecorator(extents.Guarded, rules.Rewrite):
    """A rewrite that opens a block, or puts one around the calls of something.

    The value is immutable, hashable and may be used any number of times::

        r = nn.stop_gradient('gln_*/**')
        with r: ...        # around these lines
        @r                 # around each call of the method or function
        r(model.apply)     # around each call of the function
        r(nn.Dense)        # around each call of a method of the class; see ``lift``
        r(nn.Dense(4))     # around all that goes through the wrapper; see ``nn.Frozen``
    """

    _is_used: ClassVar[bool] = False
    _call: ClassVar[tuple[int, int]]

    def __post_init__(self) -> None:
        object.__setattr__(self, '_call', places.call_of_user())
        super().__post_init__()

    def __enter__(self) -> Self:
        self._use()
        extents.open_block(self, lifted.running_scope())
        return self

    def _close(self, exc_type: type[BaseException] | None) -> None:
        extents.close_last(self, exc_type)

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
        """Puts a block around a function, a method, a Module class or a module."""
        return self.lift(target)

    def lift(self, target: T, methods: Any = None) -> T:
        """Puts a block around each call of a function, a method or a Module class.

        Args:
            target: a function or a method. If the first argument of a call is a bound
                module, paths are relative to that module. Otherwise the block is that
                of a ``with`` statement in the first line of the function. A Module
                class (or ``functools.partial`` of one): paths are relative to each
                module of the class. A module is wrapped, see ``nn.Frozen``.
            methods: for a class, the names of the methods to lift. By default
                ``('__call__',)``.

        Returns:
            The same kind of thing. A class keeps its name, so that parameters keep
            their paths.

        Raises:
            ArgumentTypeError: for a generator function or a coroutine: its body runs
                when the call is over.
        """
        self._use()
        return lifted.lift(self, target, methods)


class _LeftOut:
    """No argument; signatures, as editors and the reference show them, say so."""

    def __repr__(self) -> str:
        return 'LEFT_OUT'


LEFT_OUT: Any = _LeftOut()


def filter_of(name: str, target: Any, where: Any) -> filters.Filter:
    """The filter that is asked for; the only positional argument is the filter."""
    if where is LEFT_OUT:
        where = target
    if where is LEFT_OUT:
        raise errors.FilterTypeError(
            f'{name}() takes a filter that says which parameters are meant, such as '
            f"{name}('encoder/**')."
        )
    return filters.as_filter(where)


def decorated(
    name: str, rewrite: BlockDecorator, target: Any, argument: Any, methods: Any
) -> Any:
    """The target with blocks around its calls; the rewrite itself without a target.

    Args:
        name: the name of the function that is called.
        rewrite: what is asked for.
        target: the first positional argument.
        argument: the second one; without it the first is no target.
        methods: the names of the methods of a class that are lifted.
    """
    if target is not LEFT_OUT and argument is not LEFT_OUT:
        if isinstance(target, (str, Mapping, Sequence, re.Pattern, filters.Filter)):
            raise targets.not_liftable(name, target, argument)
        return rewrite.lift(target, methods)
    if methods is not None:
        raise targets.methods_without_class(methods)
    return rewrite
