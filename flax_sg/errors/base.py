"""The base of every exception, and the one that importing may raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax
import jax

# The oldest and newest that the tests have run on, by ``python3 dev.py versions``.
SUPPORTED = {'flax': ('0.12.0', '0.12.12'), 'jax': ('0.7.2', '0.12.0.1')}


class FlaxSGError(Exception):
    """Base of every exception that flax_sg raises."""

    def __reduce__(self) -> Any:
        # Some constructors compose the message; a copy has to keep it as it is.
        return _restore, (type(self), self.args)


def _restore(cls: type[FlaxSGError], args: tuple[Any, ...]) -> FlaxSGError:
    error = cls.__new__(cls)
    error.args = args
    return error


class UnsupportedVersionError(FlaxSGError, ImportError):
    """Flax or JAX lack a name that the library rests on, or it means something else.

    Raised by the import, with the versions that are supported.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        found = f'flax {flax.__version__} and jax {jax.__version__}'
        ranges = [f'{name} {old} to {new}' for name, (old, new) in SUPPORTED.items()]
        pins = [f"'{name}>={old},<={new}'" for name, (old, new) in SUPPORTED.items()]
        lines = [
            'flax_sg needs what this installation does not have:',
            *(f'  {fault}' for fault in faults),
            f'Found {found}; supported are {" with ".join(ranges)}.',
            f'Fix: pip install {" ".join(pins)}',
        ]
        super().__init__('\n'.join(lines))
