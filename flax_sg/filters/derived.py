"""A filter that was derived from a function, by ``sg.live``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Protocol

from flax_sg import _private
from flax_sg.errors import DerivedFilterError
from flax_sg.filters.expressions import Atom, Filter
from flax_sg.paths import Path


class Traced(Protocol):
    """A function that was traced: a program that does the same."""

    def is_of(self, fun: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether it is what a function does with some arguments."""
        ...

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        ...


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Derived(Atom):
    """The variables that something was found out about; it may well be none.

    Two are equal if they say the same of the same variables, wherever they come from.

    Attributes:
        selected: the variables that are meant, by collection and absolute path.
        known: all variables that there were.
        program: what the function does, so that it need not be traced again; no part
            of the value, and not in copies. Outside of ``jax.jit`` it is taken once.
    """

    selected: frozenset[tuple[str, str]]
    known: frozenset[tuple[str, str]]
    program: ClassVar[Traced | None] = None

    def with_program(self, program: Traced) -> Derived:
        """The same filter, which remembers a program."""
        new = Derived(self.selected, self.known)
        # No field: ``nn.jit`` compares the fields of what is in a field of a module.
        object.__setattr__(new, 'program', program)
        return new

    def snapshot(self) -> Filter:
        """The same filter without the program, which may hold what is traced."""
        return self if self.program is None else Derived(self.selected, self.known)

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.selected, self.known

    @property
    def may_be_empty(self) -> bool:
        """Always: a function may train nothing."""
        return True

    def _matches(self, path: Path) -> bool:
        key = path.collection, path.absolute
        if key not in self.known:
            raise DerivedFilterError(path.absolute, [name for _, name in self.known])
        return key in self.selected

    def __repr__(self) -> str:
        names = sorted(name for _, name in self.selected)
        shown = [repr(name) for name in names[:3]] + ['...'] * (len(names) > 3)
        return f'<live: {", ".join(shown) or "nothing"}>'


def program_of(
    where: Filter | None, fun: Callable[..., Any], args: Sequence[Any]
) -> Callable[..., Any]:
    """What a function does, if a filter knows it; otherwise the function itself.

    Outside of a trace that JAX keeps it does so once: a function may draw numbers or
    fetch its batch in Python, and is expected to do so again at each call.
    """
    for atom in () if where is None else where.atoms:
        known = atom.program if isinstance(atom, Derived) else None
        if known is not None and known.is_of(fun, args):
            if not _private.in_kept_trace():
                object.__setattr__(atom, 'program', None)
            return known
    return fun


def take_programs(where: Filter, other: Filter) -> None:
    """Gives a filter the programs that an equal one knows."""
    known: dict[Filter, Traced | None] = {
        atom: atom.program for atom in other.atoms if isinstance(atom, Derived)
    }
    for atom in where.atoms:
        if known.get(atom) is not None:
            object.__setattr__(atom, 'program', known[atom])
