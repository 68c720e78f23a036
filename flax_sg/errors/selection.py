"""Exceptions of filters: what is meant cannot be told, or is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Self

from flax_sg.errors.base import FlaxSGError


class FilterTypeError(FlaxSGError, TypeError):
    """Something that is no filter stands where a filter belongs.

    A filter says *which variables*; a module, an array or a value cannot::

        nn.stop_gradient(self.encoder)  # raises: a module says no paths

    Say the paths, and open a block around the call::

        with nn.stop_gradient('encoder/**'):
            y = self.encoder(x)

    Also raised when a predicate returns anything but a bool::

        nn.stop_gradient(lambda path: re.match('gln', path))  # a Match, or None
        nn.stop_gradient(lambda path: path.startswith('gln'))  # a bool
    """


class FilterValueError(FlaxSGError, ValueError):
    """A filter has the right type and a value that can mean nothing.

    A glob describes whole path components, so these are refused rather than
    guessed at::

        nn.stop_gradient('gln/')  # raises: a path never ends in '/'
        nn.stop_gradient('gln**')  # raises: '**' stands alone between slashes

    Write::

        nn.stop_gradient('gln/**')  # everything inside gln
        nn.stop_gradient('gln*/**')  # everything inside gln, gln_0, gln2, ...
    """


class TreeFilterError(FlaxSGError, ValueError):
    """A tree of bools does not fit the variables it was given for.

    A tree has to answer for every variable, and each of its leaves has to belong
    to one::

        nn.stop_gradient({'gln': True})  # raises if there is also a 'dec'

    Give it the missing branch, or say the same with a pattern::

        nn.stop_gradient({'gln': True, 'dec': False})
        nn.stop_gradient('gln/**')
    """

    @classmethod
    def for_missing(cls, missing: Sequence[str], paths: Iterable[str]) -> Self:
        """The error for leaves of the tree that belong to no variable."""
        known = list(dict.fromkeys(map(str, paths)))
        leaves = 'leaf' if len(missing) == 1 else 'leaves'
        lines = [f'A tree of bools has {len(missing)} {leaves} without a variable:']
        for name in missing[:3]:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.0)
            lines.append(f'  {name!r}' + (f', nearest {near[0]!r}' if near else ''))
        if len(missing) > 3:
            lines.append(f'  and {len(missing) - 3} more')
        lines.append('Fix: take them out of the tree, or spell them as the variables.')
        return cls('\n'.join(lines))


class TracerInFilterError(FlaxSGError, TypeError):
    """A predicate reads a value that JAX is tracing.

    Which variables a rule applies to is decided while the program is traced, when
    a traced value is not known yet::

        @jax.jit
        def loss(params, freeze):  # freeze is traced
            with nn.stop_gradient(lambda path: freeze):  # raises
                ...

    Make the choice static, or make it part of the computation::

        @functools.partial(jax.jit, static_argnames='freeze')
        def loss(params, freeze):  # freeze is True or False
            with nn.stop_gradient(lambda path: freeze):
                ...
    """


class UnusedFilterError(FlaxSGError, ValueError):
    """A filter, or one of its patterns, selected no variable.

    Such a program looks frozen and is not::

        with nn.stop_gradient('params/gln/**'):  # raises: paths start below 'params'
            y = self.gln(x)

    The message shows the pattern, how many variables were looked at, the nearest
    paths and, where one is found, what was probably meant::

        with nn.stop_gradient('gln/**'):
            y = self.gln(x)

    Where an empty selection is fine, say so with ``unused='ignore'``.

    Args:
        atom: the filter that matched nothing.
        paths: the path of every variable that it was asked about.
        owner: path of the module that opened the block, ``()`` at top level, None
            where no module did.
    """

    def __init__(
        self, atom: Any, paths: Sequence[Any], owner: tuple[str, ...] | None
    ) -> None:
        count = 'variable' if len(paths) == 1 else 'variables'
        looked = f'it matches none of the {len(paths)} {count}'
        if not paths:
            looked = 'there are no variables'
        lines = [f'{atom!r} selected nothing: {looked}.']
        if owner:
            lines.append(f'Paths are relative to the module at {"/".join(owner)!r}.')
        lines.extend(atom.explain(paths, owner))
        lines.append("If an empty selection is meant, pass unused='ignore'.")
        super().__init__('\n'.join(lines))
