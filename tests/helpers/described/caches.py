"""Which programs JAX must find in its caches, and which it must not."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from flax_sg.engine import numbers
from tests.helpers.described.language import Block, Path
from tests.helpers.described.nets import NET_PATHS, PAIR_PATHS


def forget_contexts() -> None:
    """Forgets what was traced and judged before, as in a new process."""
    numbers.NONE.inside.clear()


@dataclasses.dataclass(eq=False)
class Open:
    """A block that is open.

    Attributes:
        block: the block.
        owner: the path of the module that opened it; None at top level.
        called: whether a function was called in it that reads what it selects.
    """

    block: Block
    owner: Path | None
    called: bool = False

    @property
    def label(self) -> Any:
        """What is equal for blocks that surely give the same answers."""
        everywhere = self.block.where.everywhere
        owner = self.owner is None if everywhere else self.owner
        return dataclasses.replace(self.block, body=()), owner

    def takes(self, path: Path) -> bool:
        """Whether it stops a variable."""
        return self.block.where.takes(path, self.owner or ())

    def answers(self, paths: list[Path]) -> list[list[bool]]:
        """Which variables it would take, for each owner."""
        owners: list[Path] = [(), ('a',), ('b',)]
        return [[self.block.where.takes(p, owner) for p in paths] for owner in owners]


class Caches:
    """Records traces: which ones JAX must find in its caches, and which it must not.

    JAX must trace a program that was never traced with these parameters stopped. It
    must not trace the program again in the same open blocks. The same holds in equal
    blocks, if one thread alone opens blocks and all answers of other filters differ
    early. In other cases both are right: another thread may use the number, or the
    number may have taken other answers.
    """

    def __init__(self) -> None:
        self._noted = set[Any]()
        self._opened_by = set[int]()
        self._opened: dict[Any, Open] = {}
        self.raw_called = False  # Another tree does not find such a program.

    def opened(self, block: Open) -> None:
        """Notes which block was opened, and by which thread."""
        self._opened_by.add(threading.get_ident())
        self._opened[block.label] = block

    def note(self, key: Any, blocks: tuple[Open, ...], stopped: Any) -> None:
        """Notes that a function was traced, or found."""
        labels = tuple(block.label for block in blocks)
        self._noted |= {(key, stopped), (key, blocks), (key, labels)}

    def must_trace(self, key: Any, stopped: Any) -> bool:
        return (key, stopped) not in self._noted

    def must_find(self, key: Any, blocks: tuple[Open, ...]) -> bool:
        if (key, blocks) in self._noted:
            return True
        labels = tuple(block.label for block in blocks)
        alone = len(self._opened_by) <= 1 and not self.raw_called
        known = (key, labels) in self._noted
        return alone and known and all(map(self._differs_early, blocks))

    def _differs_early(self, block: Open) -> bool:
        """Whether filters that agree with it on one tree agree with it on the other."""
        return all(
            block.answers(PAIR_PATHS) == other.answers(PAIR_PATHS)
            for other in self._opened.values()
            if block.answers(NET_PATHS) == other.answers(NET_PATHS)
        )
