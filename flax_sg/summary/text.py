"""The table that ``nn.tabulate`` prints, with what is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flax.linen import summary
from rich.text import Text

from flax_sg.internals import tables
from flax_sg.summary import rows

STYLES = {rows.TRAINABLE: 'green', rows.PARTLY: 'yellow', rows.FROZEN: 'dim'}


class _Cells(rows.Row):
    """A row whose attributes are the cells of the columns that they are called by."""

    @property
    def gradient(self) -> Any:
        """The state and the sizes, as nn.tabulate writes nested dicts."""
        sizes = {
            _styled(state): _Markup(tables.size_text(*size))
            for state, size in (
                (rows.TRAINABLE, self.trainable),
                (rows.FROZEN, self.frozen),
            )
            if size.values
        }
        return {_styled(rows.PARTLY): sizes} if self.state == rows.PARTLY else sizes


class _Name(str):
    """A name that is sorted by the numbers in it: JAX sorts the keys of dicts."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return _parts(self) < _parts(other)


tables.written_as_text(_Name)


def _parts(name: str) -> list[str | int]:
    # Text and numbers in turns, so that like is compared with like.
    parts = enumerate(re.split('([0-9]{1,99})', name))
    return [int(part) if n % 2 else part for n, part in parts]


def _named(tree: Any) -> Any:
    """Nested dicts with such names."""
    if isinstance(tree, Mapping):
        return {_Name(name): _named(value) for name, value in tree.items()}
    return tree


class _Markup:
    """A text that nn.tabulate takes as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def render(self) -> str:
        """What nn.tabulate asks for."""
        return self._text


def _styled(state: str) -> str:
    return f'[{STYLES[state]}]{state}[/]'


def render(
    found: rows.Summary,
    columns: list[str],
    console_kwargs: Mapping[str, Any] | None,
    table_kwargs: Mapping[str, Any],
    column_kwargs: Mapping[str, Any],
) -> str:
    """The table as text.

    Args:
        found: what to show.
        columns: names of the columns to show beside those of ``nn.tabulate``.
        console_kwargs: as for ``nn.tabulate``.
        table_kwargs: as for ``nn.tabulate``.
        column_kwargs: as for ``nn.tabulate``.
    """
    table = summary.Table(
        found.table.module,
        sorted(found.table.collections),
        [
            _Cells(**{**vars(row), 'module_variables': _named(row.module_variables)})
            for row in found.rows
        ],
    )
    names = ['path', 'module', 'inputs', 'outputs', *columns]
    # More columns than those of nn.tabulate have to fit, and nothing is cut off.
    text = tables.render_rows(
        table,
        console_kwargs,
        {'padding': 0, **table_kwargs},
        {'overflow': 'fold', **column_kwargs},
        names,
    )
    if found.depth is not None:
        note = (
            f'Modules deeper than {found.depth} are counted in those that they belong '
            'to; depth=None shows all.'
        )
        text += tables.render_with(Text(note), console_kwargs)
    total = Text.from_markup(
        f'Trainable: {tables.size_text(*found.trainable) or 0}   '
        f'Frozen: {tables.size_text(*found.frozen) or 0}',
        style='bold',
    )
    return text + tables.render_with(total, console_kwargs)
