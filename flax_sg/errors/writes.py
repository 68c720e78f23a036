"""Exceptions of values in the place of variables, and of variables that stay."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from flax_sg.errors.base import FlaxSGError
from flax_sg.errors.selection import UnusedFilterError


class SubstituteTypeError(FlaxSGError, TypeError):
    """Something was given as values that can be read in the place of no variable.

    ::

        nn.substitute(nn.Dense)                # wrong: a class
        nn.substitute(jnp.zeros(3))            # wrong: of which variable?
        nn.substitute({'encoder': {'bias': jnp.zeros(3)}})
    """

    def __init__(self, what: str, fix: str = '') -> None:
        lines = [
            f'nn.substitute was given {what}.',
            'Expected: a tree of values, nested as the variables are; the name of '
            'another collection; a bound module; or a function (path, value) -> value.',
            fix,
        ]
        super().__init__('\n'.join(filter(None, lines)))


class SubstituteError(FlaxSGError, ValueError):
    """A value does not fit the variable that it should be read in place of.

    Structure, boxes, shape and dtype are those of the variable::

        nn.substitute({'kernel': kernel.astype(jnp.bfloat16)})  # wrong
        nn.substitute(lambda path, value: value.astype(jnp.bfloat16))
    """

    def __init__(self, path: Any, expected: str, found: str, fix: str = '') -> None:
        lines = [
            f'nn.substitute: the value for {str(path)!r} of the collection '
            f'{path.collection!r} does not fit.',
            f'Expected: {expected}',
            f'Found:    {found}',
            f'Fix: {fix}' if fix else '',
        ]
        super().__init__('\n'.join(filter(None, lines)))

    @classmethod
    def absent(cls, path: Any, where: str) -> SubstituteError:
        """The error for a selected variable that has no other value."""
        error = cls.__new__(cls)
        ValueError.__init__(
            error,
            f'nn.substitute: there is no value for {str(path)!r} of the collection '
            f'{path.collection!r} in {where}.\n'
            'Fix: select with where= the variables that have one.',
        )
        return error


class UnusedSubstituteError(UnusedFilterError):
    """A value was given that belongs to no variable.

    The tree is nested as the variables are, from the module on that opens the block,
    and without the collection if ``collections`` is one name::

        nn.substitute({'params': {'encoder': values}})  # wrong
        nn.substitute({'encoder': values})
    """

    def __init__(self, missing: Sequence[str], paths: Iterable[str]) -> None:
        known = list(dict.fromkeys(map(str, paths)))
        values = 'value' if len(missing) == 1 else 'values'
        lines = [f'nn.substitute: {len(missing)} {values} without a variable:']
        for name in missing[:3]:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)
            lines.append(f'  {name!r}' + (f', nearest {near[0]!r}' if near else ''))
        if len(missing) > 3:
            lines.append(f'  and {len(missing) - 3} more')
        first = missing[0].partition('/')
        if first[2] in known:
            lines.append(f'Fix: give values[{first[0]!r}] in place of values.')
        else:
            lines.append(
                'Fix: spell them as the variables, or take them out. If they may be '
                "missing, pass unused='ignore'."
            )
        Exception.__init__(self, '\n'.join(lines))


class ReadOnlyError(FlaxSGError, ValueError):
    """A variable was written where ``nn.read_only`` holds.

    What a lifted transform hands through and what is written back as it was read is no
    write::

        with nn.read_only('encoder/**'):
            y = self.encoder(x)  # raises if it updates batch statistics

    To have the update and drop it, wrap the module::

        y = nn.Frozen(self.encoder, state='hold')(x)
    """

    def __init__(self, rewrite: Any, path: Any, by: str, exists: bool) -> None:
        done = 'wrote' if exists else 'created'
        super().__init__(
            f'{by} {done} the variable {path.name!r} of the collection '
            f'{path.collection!r} in the module at {path.from_root().module!r}, which '
            f'is read only under {rewrite!r}.\n'
            'Fix: leave the block for the write, or leave the variable out with where= '
            'or collections=.'
        )
