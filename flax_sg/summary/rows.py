"""What a summary says of each module, collected; ``text.py`` renders it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from flax.linen import summary

from flax_sg.summary import flops, programs
from flax_sg.trees import leaves

TRAINABLE, PARTLY, FROZEN = 'trainable', 'partly', 'frozen'


class Size(NamedTuple):
    """How many values some parameters have, and their bytes."""

    values: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, shapes: Iterable[Any]) -> Size:
        """The size of arrays, or of their shapes."""
        counts = [(math.prod(s.shape), s.dtype.itemsize) for s in shapes]
        return cls(sum(n for n, _ in counts), sum(n * size for n, size in counts))


@dataclasses.dataclass
class Row(summary.Row):
    """A row of ``nn.tabulate``, and what is trained of the module and all in it.

    ``flops`` and ``backward_flops`` are those of all calls of the module in one step.

    Attributes:
        trainable: the parameters that the outputs train.
        frozen: those that get no gradient: stopped, not used, or integers.
        backward_flops: what training adds to ``flops``.
    """

    trainable: Size
    frozen: Size
    backward_flops: int

    @property
    def state(self) -> str:
        """``'trainable'``, ``'partly'`` or ``'frozen'``; ``''`` without parameters."""
        states = [(TRAINABLE, self.trainable.values), (FROZEN, self.frozen.values)]
        found = [state for state, values in states if values]
        return PARTLY if len(found) == 2 else ''.join(found)


@dataclasses.dataclass(frozen=True)
class Summary:
    """All that is known of a module.

    Attributes:
        table: what ``nn.tabulate`` knows.
        rows: one for each module that is called, in the order of the calls.
        trainable: the parameters that the outputs train.
        frozen: the others.
        depth: how many names the path of a module in ``rows`` may have, if modules are
            left out.
    """

    table: summary.Table
    rows: list[Row]
    trainable: Size
    frozen: Size
    depth: int | None = None


def collect(
    table: summary.Table,
    program: programs.Program,
    compute_flops: bool,
    compute_vjp_flops: bool,
) -> Summary:
    """Adds to the rows of ``nn.tabulate`` what a program trains, and its flops.

    Args:
        table: the rows, without flops.
        program: the program that they are rows of.
        compute_flops: whether to count those of the forward pass.
        compute_vjp_flops: whether to count those of the backward pass.
    """
    params = leaves.leaves_of(program.params)
    report = program.flow()
    live = report.live if report else (False,) * len(params.values)
    forward: dict[str, int] = {}
    trained: dict[str, int] = {}
    if compute_flops or compute_vjp_flops:
        forward = flops.of(program.forward, program.params, program.rest)
    if compute_vjp_flops and any(live):
        fun, args = program.train(live)
        trained = flops.of(fun, *args)

    def sizes(path: tuple[str, ...]) -> tuple[Size, Size]:
        inside = [
            (leaf, trained)
            for (name, leaf), trained in zip(params, live, strict=True)
            if name.parts[: len(path)] == path
        ]
        return (
            Size.of(leaf for leaf, trained in inside if trained),
            Size.of(leaf for leaf, trained in inside if not trained),
        )

    rows: list[Row] = []
    for row in table:
        path = '/'.join(row.path)
        count = forward.get(path, 0)
        known = {**vars(row), 'flops': count}
        parts = dict(zip(('trainable', 'frozen'), sizes(row.path), strict=True))
        added = max(0, trained.get(path, 0) - count)
        rows.append(Row(**known, **parts, backward_flops=added))
    return Summary(table, rows, *sizes(()))


def collapsed(found: Summary, depth: int | None) -> Summary:
    """The summary without the rows of deep modules; other rows count their variables.

    Args:
        found: a summary with a row for each module.
        depth: how many names of a path there may be; None for any number.
    """
    if depth is None or all(len(row.path) <= depth for row in found.rows):
        return found
    kept: list[Row] = []
    counted: dict[tuple[str, ...], dict[str, list[Any]]] = {}
    for row in found.rows:
        path = row.path[:depth]
        if path == row.path:
            # Repeated calls count nothing; the first one of a module has the sizes.
            counted.setdefault(path, {})
            kept.append(row)
    for row in found.rows:
        path = row.path[:depth]
        while path not in counted and path:
            path = path[:-1]  # A module that is not called has no row.
        of_path = counted.setdefault(path, {})
        for collection, variables in row.counted_variables.items():
            of_path.setdefault(collection, []).append(variables)
    # Of several rows of one module the first has all.
    rows = [
        dataclasses.replace(row, counted_variables=counted.pop(row.path, {}))
        for row in kept
    ]
    return dataclasses.replace(found, rows=rows, depth=depth)
