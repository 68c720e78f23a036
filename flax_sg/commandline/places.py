"""Loads ``package.module:name`` for the commands, and makes their parser."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
from collections.abc import Generator
from typing import Any

from flax_sg.errors.texts import shown


class UsageError(Exception):
    """The command is wrong: the error's text is printed, and the status is 2."""


def parser_of(command: str, about: str | None, place: str) -> argparse.ArgumentParser:
    """Makes a parser with ``PLACE`` and ``--args``.

    Args:
        command: the name of the command.
        about: the text of its help.
        place: the help text of ``PLACE``, in a few words.
    """
    parser = argparse.ArgumentParser(
        f'python -m flax_sg {command}',
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('place', metavar='PLACE', help=place)
    parser.add_argument('--args', metavar='PLACE', help='its arguments')
    return parser


@contextlib.contextmanager
def usage_errors(
    parser: argparse.ArgumentParser, *kinds: type[Exception]
) -> Generator[None]:
    """Ends the process with status 2 if the command is wrong.

    Args:
        parser: the parser that prints the error.
        kinds: more exceptions that mean a wrong command.
    """
    try:
        yield
    except (UsageError, *kinds) as error:
        parser.error(str(error))


def example(place: str) -> tuple[Any, ...]:
    """Returns the tuple at a place, or from the function there."""
    given = load(place)
    given = called(given, place) if callable(given) else given
    if not isinstance(given, (tuple, list)):
        raise UsageError(
            f'--args {place} is {shown(given)}; expected a tuple of arguments'
        )
    return tuple(given)


def called(function: Any, place: str) -> Any:
    """Calls a function without arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind()
    except TypeError:
        raise UsageError(
            f'{place} takes arguments {signature}: say where they are, '
            '--args package.module:name, or name a function without arguments that '
            'returns (loss, *args)'
        ) from None
    return function()


def load(place: str) -> Any:
    """Imports the object at ``package.module:name``."""
    module, _, name = place.partition(':')
    if not module or not name or module.endswith('.py') or '/' in module:
        dotted = module.removesuffix('.py').strip('./').replace('/', '.')
        raise UsageError(
            f'{place!r} is not a place. Write package.module:name, such as '
            f"'{dotted or 'train'}:{name or 'loss'}'"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An import inside the user's module failed: an error of the user's program.
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
