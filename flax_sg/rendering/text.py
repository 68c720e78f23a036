"""Formats tables as text, with one row for repeated layers: ``layers_[0-5]``."""

from __future__ import annotations

import itertools
import math
import re
import sys
import textwrap
import unicodedata
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from flax_sg.errors.texts import unknown_choice

WIDTH = 80
"""How many columns of a terminal a report takes."""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    in_blocks: bool = False,
) -> str:
    """Formats rows of text below a heading, in 80 columns.

    >>> print(table(['module', 'size'], [['head', '8'], ['body', '64']], ['size']))
    module   size
    ─────────────
    head        8
    body       64

    Cells that are too long are continued on the next line, behind a '/' or a space.

    Args:
        head: the heading of each column.
        rows: the cells of each row.
        right: the headings of the columns that are aligned on the right.
        in_blocks: whether a table with many columns is several below each other, each
            with the first column.
    """
    first, *columns = zip(head, *rows, strict=True)
    blocks = [[first]]
    for column in columns:
        widths = [min(max(map(width, x)), WIDTH // 2) for x in (*blocks[-1], column)]
        is_full = sum(widths) + 3 * len(blocks[-1]) > WIDTH
        if in_blocks and is_full and len(blocks[-1]) > 1:
            blocks.append([first])
        blocks[-1].append(column)
    return '\n\n'.join(_table(block, right) for block in blocks)


def _table(columns: Sequence[Sequence[str]], right: Sequence[str]) -> str:
    """Formats columns of text, each of which begins with its heading."""
    columns = [[*map(printable, cells)] for cells in columns]
    widths = [max(map(width, cells)) for cells in columns]
    gaps = 3 * (len(widths) - 1)
    while sum(widths) + gaps > WIDTH:
        widths[widths.index(max(widths))] -= 1
    is_right = [cells[0] in right for cells in columns]

    def lines_of(row: Sequence[str]) -> Iterator[str]:
        for parts in itertools.zip_longest(*map(_in_lines, row, widths), fillvalue=''):
            yield '   '.join(map(_padded, parts, widths, is_right)).rstrip()

    head, *rows = zip(*columns, strict=True)
    lines = [*lines_of(head), '─' * (sum(widths) + gaps)]
    return encodable('\n'.join([*lines, *(x for row in rows for x in lines_of(row))]))


def _padded(cell: str, most: int, is_right: bool) -> str:
    gap = ' ' * (most - width(cell))
    return gap + cell if is_right else cell + gap


def _in_lines(cell: str, most: int) -> list[str]:
    """A cell in lines of so many columns. Only a word that is longer is cut."""
    lines = ['']
    for word in re.split(r'(?<=[/ ])', cell):
        pieces = [word] if width(word.rstrip()) <= most else word
        for piece in pieces:
            if width(lines[-1] + piece.rstrip()) > most:
                lines.append('')
            lines[-1] += piece
    return lines


def wrapped(line: str, indent: int = 0) -> str:
    """A sentence below a table, in lines of 80 columns. No word is cut."""
    return textwrap.fill(
        line,
        WIDTH,
        subsequent_indent=' ' * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def width(text: str) -> int:
    """The number of columns of a terminal that a text takes."""
    widths = map(unicodedata.east_asian_width, text)
    marks = sum(map(bool, map(unicodedata.combining, text)))
    return len(text) + sum(x in 'WF' for x in widths) - marks


def printable(name: str) -> str:
    r"""A name on one line, without what a terminal obeys.

    >>> print(printable('a\nb'))
    a\nb
    """
    return ''.join(
        c if c.isprintable() else c.encode('unicode_escape').decode() for c in name
    )


def encodable(text: str) -> str:
    """A text that the terminal can print: plain ASCII if it is not UTF-8."""
    encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.replace('─', '-').encode('ascii', 'backslashreplace').decode()


def check_depth(depth: int | None) -> None:
    """Raises for a depth of modules that means nothing."""
    if depth is not None and depth < 0:
        raise unknown_choice('depth', depth, (0, 1, 2, None))


def amount(counts: Sequence[tuple[int, Any]]) -> str:
    """Returns numbers of values, and their bytes, as text."""
    values = sum(count for count, _ in counts)
    size: float = sum(count * dtype.itemsize for count, dtype in counts)
    if size < 1000:
        return f'{values:,} ({size} B)' if values else '0'
    power = min(4, int(math.log10(size)) // 3)
    return f'{values:,} ({size / 1000**power:.1f} {"_KMGT"[power]}B)'


class _Rows(NamedTuple):
    names: tuple[str, ...]
    content: Hashable
    members: list[int]


def repeated(
    paths: Sequence[tuple[str, ...]], contents: Sequence[Hashable]
) -> list[tuple[tuple[str, ...], list[int]]]:
    """Joins neighbouring rows with equal contents and consecutive numbers.

    The joint name is a glob that takes the joined rows and no others.

    >>> paths = [('block_0', 'a'), ('block_0', 'b'), ('block_1', 'a'), ('block_1', 'b')]
    >>> repeated([*paths, ('head',)], [1, 2, 1, 2, 1])
    [(('block_[0-1]', 'a'), [0, 2]), (('block_[0-1]', 'b'), [1, 3]), (('head',), [4])]
    >>> repeated([(f'layer_{n}',) for n in range(12)], [0] * 12)[0][0]
    ('layer_{0..11}',)

    Args:
        paths: the names of each row, in tree order.
        contents: joined rows have equal contents, and so have all rows below them.

    Returns:
        The names of each joined row, and the indices of the rows in it.
    """
    rows = [_Rows(*row, [n]) for n, row in enumerate(zip(paths, contents, strict=True))]
    # Deepest level first: rows below a row are joined before the row is compared.
    for level in reversed(range(max(map(len, paths), default=0))):
        rows = _joined(rows, level)
    return [(_as_globs(row, paths[row.members[0]]), row.members) for row in rows]


def _as_globs(row: _Rows, first: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a row; in one of several rows each is a glob."""
    if len(row.members) == 1:
        return row.names
    pairs = zip(row.names, first, strict=True)
    return tuple(_literal(name) if name == own else name for name, own in pairs)


def _literal(name: str) -> str:
    """The glob that takes a name and no other."""
    return re.sub(r'([*?\[\\{])', r'\\\1', name)


def _joined(rows: list[_Rows], level: int) -> list[_Rows]:
    """Joins rows with equal subtrees whose names differ at one level."""
    groups = itertools.groupby(rows, key=lambda row: row.names[: level + 1])
    runs: list[list[list[_Rows]]] = []
    for _, group in groups:
        subtree = list(group)
        if runs and _follows(runs[-1][-1], subtree, level):
            runs[-1].append(subtree)
        else:
            runs.append([subtree])
    out: list[_Rows] = []
    for run in runs:
        name = _glob(*(run[n][0].names[level] for n in (0, -1))) if run[1:] else ''
        for same in zip(*run, strict=True):
            names, content, _ = same[0]
            if run[1:]:
                names = (*names[:level], name, *names[level + 1 :])
            out.append(_Rows(names, content, [n for row in same for n in row.members]))
    return out


def _follows(before: list[_Rows], after: list[_Rows], level: int) -> bool:
    """Whether two subtrees are equal, and have consecutive numbers at a level."""

    def below(subtree: list[_Rows]) -> list[object]:
        return [(row.names[level + 1 :], row.content) for row in subtree]

    first, second = before[0].names, after[0].names
    if len(first) <= level or len(second) <= level or first[:level] != second[:level]:
        return False
    left, right = _numbered(first[level]), _numbered(second[level])
    if not left[1] or not right[1] or below(before) != below(after):
        return False
    return right == (left[0], str(int(left[1]) + 1).zfill(len(left[1])), left[2])


def _numbered(name: str) -> tuple[str, str, str]:
    """What stands before the last number in a name, the number, and what follows."""
    match = re.fullmatch(r'(.*?)([0-9]+)([^0-9]*)', name, re.DOTALL)
    return (match[1], match[2], match[3]) if match else (name, '', '')


def _glob(first: str, last: str) -> str:
    """The glob of consecutive names: a class of digits, or a range of numbers."""
    stem, low, end = _numbered(first)
    _, high, _ = _numbered(last)
    if low[:-1] == high[:-1]:
        digits = f'{low[:-1]}[{low[-1]}-{high[-1]}]'
    else:
        digits = f'{{{low}..{high}}}'
    return f'{_literal(stem)}{digits}{_literal(end)}'
