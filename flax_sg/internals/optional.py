"""Imports packages that only some parts of the library need."""

from __future__ import annotations

import importlib
from types import ModuleType


def optional(module: str, who: str, extra: str) -> ModuleType:
    """Imports an optional module, or says how to install its package.

    Args:
        module: the dotted name of the module.
        who: the feature that needs the module, as the subject of a sentence.
        extra: the extra of flax_sg that installs the package.

    Raises:
        ModuleNotFoundError: if the module is missing; the message says what to install.
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
