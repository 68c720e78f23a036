"""Imports optional packages, or tells whether the program has imported them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def optional(module: str, who: str, package: str) -> ModuleType:
    """Imports an optional module, or says how to install its package.

    Args:
        module: the dotted name of the module.
        who: the feature that needs the module, as the subject of a sentence.
        package: the name by which pip installs it.

    Raises:
        ModuleNotFoundError: if the module is missing; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{who} needs {package}, which is not installed. '
            f'Install it with: pip install {package}',
            name=error.name,
        ) from error


def is_of_nnx(cls: type, *names: str) -> bool:
    """Whether a class is one of these classes of ``flax.nnx``, or a subclass of one.

    ``flax.nnx`` is not imported: models of linen would wait for it.
    """
    nnx = sys.modules.get('flax.nnx')
    return issubclass(cls, tuple(getattr(nnx, name, ()) for name in names))


def is_nnx_model(value: object) -> bool:
    """Whether a value is a model of NNX."""
    return is_of_nnx(type(value), 'Module')
