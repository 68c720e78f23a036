"""The base of every exception, and the one that importing may raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax
import jax

SUPPORTED = 'flax 0.12.0 to 0.12.8 with jax 0.7.2 to 0.10.2, and later ones as tested'


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
    """Flax or JAX lack a name that the library rests on."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(
            f'flax_sg needs names that this installation lacks: {", ".join(missing)}.\n'
            f'Found flax {flax.__version__} and jax {jax.__version__}; supported are '
            f'{SUPPORTED}.'
        )
