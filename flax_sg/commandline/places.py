"""``package.module:name``: objects of the user's program, named on a command line."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

from flax_sg.errors.texts import shown


class UsageError(Exception):
    """The command is wrong: what is said with status 2."""


def example(place: str) -> tuple[Any, ...]:
    """The tuple at a place, or what a function without arguments returns there."""
    given = load(place)
    given = called(given, place) if callable(given) else given
    if not isinstance(given, (tuple, list)):
        raise UsageError(
            f'--args {place} is {shown(given)}; expected a tuple of arguments'
        )
    return tuple(given)


def called(function: Any, place: str) -> Any:
    """What a function returns that takes no arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        required = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        raise UsageError(
            f'{place} takes arguments ({", ".join(required)}): say where they are, '
            '--args package.module:name, or name a function without arguments that '
            'returns (loss, *args)'
        ) from None
    return function()


def load(place: str) -> Any:
    """The object at ``package.module:name``."""
    module, _, name = place.partition(':')
    if not module or not name or module.endswith('.py') or '/' in module:
        dotted = module.removesuffix('.py').strip('./').replace('/', '.')
        raise UsageError(
            f'{place!r} is no place: write package.module:name, such as '
            f"'{dotted or 'train'}:{name or 'loss'}'"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Of the program, if it is not the module that was asked for, or one around it.
        if error.name is None or not f'{module}.'.startswith(f'{error.name}.'):
            raise
        raise UsageError(f'there is no module {error.name!r} to import') from None
    for part in name.split('.'):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 3)
            meant = f'; did you mean {" or ".join(map(repr, near))}?' if near else ''
            raise UsageError(f'{module} has no {name!r}{meant}')
        found = getattr(found, part)
    return found
