"""``sg.tabulate``: the modules of a model, and which of them are trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from flax import linen

from flax_sg import errors
from flax_sg.rendering import groups, text
from flax_sg.summary import programs

TRAINABLE, PARTLY, FROZEN = 'trainable', 'partly', 'frozen'
FIT = 'fit'
_LINES = 50
_DEPTHS = {
    FIT: f'as deep as fits into {_LINES} lines',
    'an int': 'so many submodules deep',
    None: 'all submodules',
}


def tabulate(
    module: linen.Module,
    rngs: Any,
    depth: int | str | None = FIT,
    width: int | None = None,
    **kwargs: Any,
) -> Callable[..., str]:
    """Returns a function that shows which modules of a model are trained.

    A module counts all parameters in it and in its submodules. Equal layers beside each
    other are one row. A module whose submodules are frozen in part is ``partly``.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> layers = [nn.Frozen(nn.Dense(8)), nn.Frozen(nn.Dense(8)), nn.Dense(2)]
    >>> model = nn.Sequential(layers)
    >>> print(sg.tabulate(model, jax.random.key(0), width=80)(jnp.ones((4, 8))))
    module          class        parameters   trainable   gradient
    ───────────────────────────────────────────────────────────────
    (model)         Sequential          162          18   partly
      layers_0..1   Dense               144           0   frozen
      layers_2      Dense                18          18   trainable
    <BLANKLINE>
    Trainable: 18 (72 B)   Frozen: 144 (576 B)

    Args:
        module: the module.
        rngs: random keys, as for ``init``.
        depth: how many submodules deep the table goes: an int, ``None`` for all of
            them, or ``'fit'``, the default: as deep as fits into 50 lines, at least
            one.
        width: in characters; that of the terminal by default. Names of classes are cut
            where there is too little room.
        **kwargs: further arguments of ``init``; ``method=`` says what is called. What
            is trained is judged by its outputs alone, so give a method that returns the
            loss if something in the loss trains more.

    Returns:
        A function of the arguments of the method, arrays or their shapes, which returns
        the table as text. Nothing is compiled or run.

    Raises:
        ArgumentTypeError: if ``module`` is none.
        ArgumentValueError: if ``depth`` is none of these.

    Note:
        Modules without parameters are left out. For flops and the shapes of inputs and
        outputs see ``nn.tabulate``.
    """
    if not isinstance(module, linen.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _no_module(module)
    if depth not in (FIT, None) and not isinstance(depth, int):
        raise errors.unknown_choice('depth', depth, _DEPTHS)

    def show(*args: Any, **call_kwargs: Any) -> str:
        program = programs.program_of(module, rngs, args, {**call_kwargs, **kwargs})
        rows = sizes(program)
        deepest = max(len(row.names) for row in rows)
        depths = range(2, deepest + 1)
        fitting = (n for n in depths if len(joined(rows, n)) <= _LINES)
        fits = max(fitting, default=1) if isinstance(depth, str) else depth
        lines = [_as_text(joined(rows, fits), width), '']
        if fits is not None and fits < deepest:
            lines.append(f'Deeper than {fits} nothing is shown; depth=None shows all.')
        lines.append(f'Trainable: {rows[0].trainable}   Frozen: {rows[0].frozen}')
        return '\n'.join(lines)

    return show


@dataclasses.dataclass(frozen=True)
class Size:
    """How many values some parameters have, and their bytes."""

    values: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.values + other.values, self.bytes + other.bytes)

    def __str__(self) -> str:
        size, unit = float(self.bytes), 0
        while size >= 1000 and unit < len(_UNITS) - 1:
            size, unit = size / 1000, unit + 1
        size_text = f'{size:.1f}' if unit else f'{self.bytes}'
        return f'{self.values:,} ({size_text} {_UNITS[unit]})' if self.values else '0'


_UNITS = ('B', 'KB', 'MB', 'GB', 'TB')


@dataclasses.dataclass(frozen=True)
class Row:
    """A module, or equal modules beside each other, with all that is in them.

    Attributes:
        names: of the path.
        cls: the name of the class, ``''`` for a module that is not called.
        trainable: the parameters that the outputs train.
        frozen: those that get no gradient: stopped, not used, or integers.
    """

    names: tuple[str, ...]
    cls: str
    trainable: Size = Size()
    frozen: Size = Size()

    @property
    def gradient(self) -> str:
        """``'trainable'``, ``'partly'`` or ``'frozen'``; ``''`` without parameters."""
        states = [(TRAINABLE, self.trainable.values), (FROZEN, self.frozen.values)]
        found = [state for state, values in states if values]
        return PARTLY if len(found) == 2 else ''.join(found)


def sizes(program: programs.Program) -> list[Row]:
    """A row for the model, and for each module in it that has parameters.

    Submodules follow their module, in the order of the first calls.
    """
    prefixes = (names[:n] for names in program.classes for n in range(len(names) + 1))
    order = {names: number for number, names in enumerate(dict.fromkeys(prefixes))}
    rows: dict[tuple[str, ...], Row] = {(): Row((), program.classes[()])}
    for path, leaf, is_trained in program.parameters():
        values = math.prod(leaf.shape)
        size = Size(values, values * leaf.dtype.itemsize)
        for n in range(len(path.parts)):
            names = path.parts[:n]
            if names in order:
                row = rows.get(names) or Row(names, program.classes.get(names, ''))
                field = 'trainable' if is_trained else 'frozen'
                added = {field: getattr(row, field) + size}
                rows[names] = dataclasses.replace(row, **added)
    return sorted(
        rows.values(),
        key=lambda row: [order[row.names[: n + 1]] for n in range(len(row.names))],
    )


def joined(rows: list[Row], depth: int | None = None) -> list[Row]:
    """Rows to a depth, with equal ones of repeated layers joined and added up."""
    shown = [row for row in rows if depth is None or len(row.names) <= depth]
    groups_ = groups.repeated(
        [row.names for row in shown],
        [(row.cls, row.trainable, row.frozen) for row in shown],
    )
    return [
        dataclasses.replace(
            shown[same[0]],
            names=names,
            trainable=sum((shown[n].trainable for n in same), Size()),
            frozen=sum((shown[n].frozen for n in same), Size()),
        )
        for names, same in groups_
    ]


def _as_text(rows: list[Row], width: int | None) -> str:
    cells = [
        (
            '  ' * len(row.names) + (row.names[-1] if row.names else '(model)'),
            row.cls,
            f'{row.trainable.values + row.frozen.values:,}',
            f'{row.trainable.values:,}',
            row.gradient,
        )
        for row in rows
    ]
    head = ['module', 'class', 'parameters', 'trainable', 'gradient']
    return text.table(head, cells, right=(2, 3), shrinks=1, width=width)


def _no_module(target: object) -> errors.ArgumentTypeError:
    """Something that is no module is to be shown as a table."""
    what = f'{target!r} of type {type(target).__name__}'
    if isinstance(target, type):
        what = f'the class {target.__name__}'
    return errors.ArgumentTypeError(
        f'tabulate() takes a Module instance, and was given {what}.\n'
        'Make the module: sg.tabulate(Model(...), rngs)(x).'
    )
