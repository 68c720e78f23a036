"""Packages that only some parts of the library need."""

from __future__ import annotations

import importlib
from types import ModuleType


def optional(module: str, who: str, extra: str) -> ModuleType:
    """Imports a module that does not come with the library.

    Args:
        module: its dotted name.
        who: what needs it, as the subject of a sentence.
        extra: the extra of flax_sg that brings it.

    Raises:
        ModuleNotFoundError: if it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition('.')[0]
        raise ModuleNotFoundError(
            f'{who} needs {missing}, which is not installed. '
            f"Install what it needs with: pip install 'flax_sg[{extra}]'",
            name=missing,
        ) from error
