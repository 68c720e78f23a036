"""Programs as data: filters, blocks, and what is done in them.

A program is a tuple of statements. Two interpreters run it: ``real.Real`` opens blocks
with ``with``, and ``by_hand.ByHand`` changes the weights one by one instead. Random
models, and the programs that test caches, have statements of their own beside these.

This file and ``by_hand.py`` do not import flax_sg.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

Path = tuple[str, ...]
Program = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Where:
    """A filter.

    Attributes:
        kind: ``'all'``, or what has to be one of the names: ``'name'`` (the variable's
            own), ``'under'`` (a module above it), ``'second'`` (the second component of
            a path of three in the owner), ``'root'`` (the first one from the root).
        names: the names.
        style: how it is written for flax_sg, one of those in ``real.py``.
        negated: whether all other variables are meant.
    """

    kind: str = 'all'
    names: tuple[str, ...] = ()
    style: str = 'predicate'
    negated: bool = False

    @property
    def everywhere(self) -> bool:
        """Whether its answers do not depend on which module opens the block."""
        return self.kind not in ('second', 'root')

    def takes(self, path: Path, owner: Path = ()) -> bool:
        """Whether a variable is meant, in a block of the module at ``owner``."""
        inside = path[: len(owner)] == owner
        seen = path[len(owner) :] if inside else path
        looked_at = {
            'all': self.names,
            'name': seen[-1:],
            'under': seen[:-1],
            'second': seen[1:2] if inside and len(seen) == 3 else (),
            'root': path[:1],
        }[self.kind]
        taken = self.kind == 'all' or any(part in self.names for part in looked_at)
        return taken != self.negated


EVERYTHING = Where()


@dataclasses.dataclass(frozen=True)
class Block:
    """A block around statements.

    Attributes:
        where: what its rule is for.
        body: the statements.
        rule: ``'stop'`` for gradients; ``'only'``, which is the same, written as
            ``train_only`` of all else; ``'function'`` or ``'collection'`` for values
            from there instead; ``'scale'`` for cotangents times a negative number;
            ``'read_only'`` to raise for writes.
        judged: whether it raises if its filter takes nothing.
    """

    where: Where
    body: Program = ()
    rule: str = 'stop'
    judged: bool = False


@dataclasses.dataclass(frozen=True)
class Leave:
    """Leaves the block or module around it by an exception, and more ``levels``."""

    levels: int = 0


@dataclasses.dataclass(frozen=True)
class Use:
    """Calls a module.

    Attributes:
        kid: which, of several.
        lift: a transform of a function of the module, or ``''``.
        mirror: what a view that is called instead stops, None without a view.
    """

    kid: int = 0
    lift: str = ''
    mirror: Where | None = None


@dataclasses.dataclass(frozen=True)
class Residual:
    """Adds what the statements make to what they were given."""

    body: Program


def without_blocks(body: Program) -> Program:
    """The same statements, with no block or view around any."""
    out: list[Any] = []
    for item in body:
        match item:
            case Block():
                out += without_blocks(item.body)
            case Residual():
                out.append(Residual(without_blocks(item.body)))
            case Use():
                out.append(dataclasses.replace(item, mirror=None))
            case Leave():
                pass
            case _:
                out.append(item)
    return tuple(out)


class LeaveError(Exception):
    """Raised to leave a given number of blocks and modules more."""

    def __init__(self, levels: int) -> None:
        super().__init__(f'leaves {levels}')
        self.levels = levels


@contextlib.contextmanager
def left() -> Iterator[None]:
    """The end of a block or module, which an exception may leave."""
    try:
        yield
    except LeaveError as error:
        if error.levels:
            error.levels -= 1
            raise


class Interpreter:
    """Runs statements. For each kind there is a method of the same name."""

    def run(self, body: Program, place: Any = None) -> None:
        """Runs statements one after the other.

        Args:
            body: the statements.
            place: what is known of the place where they are, for the methods.
        """
        for item in body:
            getattr(self, type(item).__name__.lower())(item, place)

    def leave(self, item: Leave, place: Any) -> None:
        raise LeaveError(item.levels)
