"""Names of parameters in a report, and the rows of its table."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence
from typing import TypeVar

from flax_sg import errors
from flax_sg.filters.paths import Path, natural_key
from flax_sg.rendering import text

T = TypeVar('T', bound=Hashable)

NO_MODULE = '(no module)'


def qualified(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """The names in each path, below the collection if there are several."""
    if len({path.collection for path in paths}) > 1:
        return [(path.collection, *path.parts) for path in paths]
    return [path.parts for path in paths]


def unique(paths: Sequence[Path]) -> list[str]:
    """A name for each path, told apart from a name with a slash."""
    names = qualified(paths)
    plain = list(map('/'.join, names))
    if len({*plain}) == len({*names}):
        return plain
    return [''.join(f'[{name!r}]' for name in each) for each in names]


def index(role: str, name: str, names: Sequence[str]) -> int:
    """The index of an output or a parameter.

    Raises:
        UnknownNameError: if the report has none of this name.
    """
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, 3, cutoff=0.0)
    meant = f'Did you mean {" or ".join(map(repr, near))}?' if near else 'It has none.'
    raise errors.UnknownNameError(f'The report has no {role} {name!r}. {meant}')


def grouped(
    paths: Sequence[Path], depth: int | None
) -> dict[tuple[str, ...], list[int]]:
    """The indices of the parameters in each module, in natural order.

    Args:
        paths: the paths of the parameters.
        depth: the number of names of a module's path to group by. Default all.
    """
    text.check_depth(depth)
    names = qualified(paths)
    groups: dict[tuple[str, ...], list[int]] = {}
    for n in sorted(range(len(paths)), key=lambda n: natural_key(paths[n])):
        head = names[n][: len(names[n]) - len(paths[n].parts)]
        groups.setdefault(head + paths[n].parts[:-1][:depth], []).append(n)
    return groups


def alike(
    paths: Sequence[Path], contents: Sequence[T], depth: int | None = None
) -> dict[tuple[str, ...], T]:
    """A row for each module whose parameters are alike, and for each other parameter.

    Args:
        paths: the paths of the parameters.
        contents: what the rows of the parameters have in them.
        depth: as for ``grouped``.
    """
    names, rows = qualified(paths), dict[tuple[str, ...], T]()
    for module, indices in grouped(paths, depth).items():
        distinct = {contents[n] for n in indices}
        is_one = paths[indices[0]].parts[:-1][:depth] and len(indices) > 1
        for n in indices:
            rows[module if is_one and len(distinct) == 1 else names[n]] = contents[n]
    return rows


def repeated(rows: dict[tuple[str, ...], T]) -> list[tuple[str, T]]:
    """The rows of a table, one for repeated modules.

    Below the name of a row, ``/**`` means what is in the row. If submodules have rows
    of their own, the row is a module's own parameters: its name ends in ``/*``.
    """
    keys, contents = [*rows], [*rows.values()]
    outer = {names[:n] for names in keys for n in range(1, len(names))}
    return [
        (
            '/'.join(names) + '/*' * (keys[same[0]] in outer) or NO_MODULE,
            contents[same[0]],
        )
        for names, same in text.repeated(keys, contents)
    ]
