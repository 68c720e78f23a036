"""Tells which cached programs ran in a block, and which variables they had read.

JAX runs the Python of a function once, and keeps the program. When it finds the program
again, no variable is read, and a block cannot see what ran in it. But to find it, JAX
compares the keys of its caches. A ``Stamp`` is our part of a key. It is equal to all
stamps of its number, it knows what was read by the programs that were traced under it,
and it notices when JAX compares it.

Small programs that many models call, such as ``relu``, are found in every block that
traces something. So the open blocks get new stamps when a program has begun, and when
an ``apply`` ends: what is traced afterwards does not count as that program.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from flax_sg.filters.paths import Classes, Path
from flax_sg.internals import tracing, versions
from flax_sg.trees.variables import Key

versions.load_once(globals())

_serials = itertools.count(1)
_Variable: TypeAlias = tuple[Key, Classes | None]


class _Block(Protocol):
    """What is needed of an open block.

    Attributes:
        kept_trace: the innermost trace around it that JAX may cache.
        stamp: its stamp in JAX's cache keys.
        found: the stamps of the programs that JAX has found in it, by serial number.
    """

    kept_trace: Any
    found: dict[int, Stamp]

    @property
    def stamp(self) -> Stamp: ...

    def renew_stamp(self) -> None:
        """Takes a new stamp."""


class Stamp(int):
    """A number in JAX's cache keys, and what the programs under it have read.

    All of these say of a variable whether it is *foreign*: in another tree than that of
    the block's owner.

    Attributes:
        serial: tells stamps of one number apart.
        read: the variables that the programs read and ``trees`` does not have, with the
            classes of the modules around.
        trees: by ``id``, the variables of the trees that the programs read.
        hints: by the depth of a block, and whether it selects them: variables that the
            programs read, one of each kind.
        beside: the variables that were read beside the programs, in their block itself.
        found: stamps of other programs that these programs call, by serial number.
    """

    def __init__(self, _number: int) -> None:
        self.serial = next(_serials)
        self.read: dict[_Variable, bool] = {}
        self.trees: dict[int, tuple[Sequence[Key], bool]] = {}
        self.hints: dict[tuple[int, bool], tuple[_Variable, bool]] = {}
        self.beside: set[Key] = set()
        self.found: dict[int, Stamp] = {}

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        equal = int.__eq__(self, other)  # type: ignore[arg-type]
        if equal is True and self is not other and isinstance(other, Stamp):
            running.note_found(self, other)
        return equal

    @property
    def is_blank(self) -> bool:
        """Whether no program under it has read or found anything."""
        return not (self.hints or self.found)


class _Running(threading.local):
    """What a thread traces in its open blocks, and the stamps of it."""

    def __init__(self) -> None:
        self._no_context = tracing.user_context(0)
        with self._no_context:
            pass
        self._blocks: Sequence[_Block] = ()
        self._now: Stamp | None = None
        # The traces that run in the blocks, and the stamp under which each began.
        self._traces: list[tuple[weakref.ref[Any], Stamp]] = []

    def enter(self, blocks: Sequence[_Block]) -> None:
        """Sets the stamp of the innermost block as JAX's context.

        Only one context is entered at a time, so blocks may close in any order. Ctrl-C
        may raise between any two lines: a second call completes the change.
        """
        stamp = blocks[-1].stamp if blocks else None
        self._blocks, self._now = blocks, stamp
        self._no_context.__exit__(None, None, None)  # Restores the initial number.
        if stamp is not None:
            tracing.user_context(stamp).__enter__()

    def forget(self) -> None:
        """Forgets what was traced, once no block is left."""
        self._traces = []

    def _now_traced(self) -> list[weakref.ref[Any]]:
        """Returns the traces around the running code, innermost first.

        There are none while JAX itself works on an equation.
        """
        if self._now is None:
            return []
        around = self._blocks[0].kept_trace
        traces = [*tracing.kept_traces()][:-1]
        return list(itertools.takewhile(lambda trace: trace != around, traces))

    def begin(self) -> list[Stamp]:
        """Returns the stamps of the programs that are being traced in the blocks.

        What is traced from now on gets other stamps than a program that has just begun.
        """
        now = self._now_traced()
        if not now:
            return []
        known = [trace for trace, _ in self._traces]
        if now[0] in known:  # Those that began later have ended.
            del self._traces[known.index(now[0]) + 1 :]
        else:
            # A jitted function's trace does not know the trace that it is called in.
            self._traces = [
                (trace, stamp)
                for trace, stamp in self._traces
                if trace in now or tracing.is_running(trace())
            ]
            new = [trace for trace in reversed(now) if trace not in known]
            self._traces += [(trace, self._now) for trace in new if self._now]
            self.renew()
        return list({stamp.serial: stamp for _, stamp in self._traces}.values())

    def note_read(
        self, variable: _Variable, kind: tuple[int, bool], foreign: bool, listed: bool
    ) -> None:
        """Notes a variable that is read by the programs that are being traced.

        Args:
            variable: the variable.
            kind: the depth of a block, and whether the block selects the variable.
            foreign: whether it is in another tree than that of the block's owner.
            listed: whether it is in the tree that was noted.
        """
        for stamp in self.begin():
            stamp.hints.setdefault(kind, (variable, foreign))
            if not listed:
                stamp.read[variable] = foreign

    def note_tree(self, keys: tuple[Key, ...], foreign: bool) -> None:
        """Notes the variables of a tree that is read by these programs."""
        keys = _one_of_equal(keys)
        for stamp in self.begin():
            stamp.trees[id(keys)] = keys, foreign

    def note_found(self, one: Stamp, other: Stamp) -> None:
        """Notes that JAX found a program: one of the stamps is its, one is current."""
        found = other if one is self._now else one
        if self._now is None or found.is_blank:  # No block, or nothing to say.
            return
        for block in self._blocks:
            block.found[found.serial] = found
        if self._now_traced():
            for stamp in (self._now, *(stamp for _, stamp in self._traces)):
                if stamp is not found:
                    stamp.found[found.serial] = found

    def renew(self) -> None:
        """Gives the blocks new stamps, for the programs that begin from now on."""
        for block in self._blocks:
            block.renew_stamp()
        self.enter(self._blocks)


running = _Running()


@functools.lru_cache(256)  # JAX keeps the stamps of one model many times.
def _one_of_equal(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    return keys


def variables_of(stamps: Sequence[Stamp], foreign: bool) -> Iterator[Path]:
    """Yields the variables of some programs, once each; first those that tell most.

    Args:
        stamps: the stamps of the programs.
        foreign: whether to leave out the trees of the owners of their blocks.
    """
    known: set[Key] = set()
    for (key, classes), is_foreign in itertools.chain(
        (hint for stamp in stamps for hint in list(stamp.hints.values())),
        (pair for stamp in stamps for pair in list(stamp.read.items())),
        (
            ((key, None), is_foreign)
            for stamp in stamps
            for keys, is_foreign in list(stamp.trees.values())
            for key in keys
        ),
    ):
        if key not in known and (is_foreign or not foreign):
            known.add(key)
            yield Path.of(*key, (), classes)


def with_callees(stamps: Iterable[Stamp], all_of_them: bool = True) -> list[Stamp]:
    """Returns the stamps of some programs, and of the programs that these call.

    Args:
        stamps: the stamps.
        all_of_them: whether to add also what is called by programs that read variables
            themselves. Much of that are small programs that others call, too.
    """
    known = {stamp.serial: stamp for stamp in stamps}
    waiting = list(known.values())
    while waiting:
        stamp = waiting.pop()
        if all_of_them or not stamp.hints:
            new = {n: s for n, s in list(stamp.found.items()) if n not in known}
            known |= new
            waiting += new.values()
    return list(known.values())
