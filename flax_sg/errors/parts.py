"""What cannot be said of a part of an array."""

from __future__ import annotations

from typing import Any

from flax_sg.errors.base import FlaxSGError


class FrozenLayersError(FlaxSGError, IndexError):
    """``frozen_layers=`` names layers that a scan does not have.

    Such a program looks frozen and is not::

        nn.scan(Layer, ..., length=12, frozen_layers=slice(12, 16))  # raises

    Layers are counted from 0 along the scan::

        nn.scan(Layer, ..., length=12, frozen_layers=slice(0, 8))

    Args:
        layers: what was given.
        length: how many layers there are.
        problem: what is wrong.
    """

    @classmethod
    def written(cls, path: str) -> FrozenLayersError:
        """A parameter of a layer comes out of its body as another one."""
        error = cls.__new__(cls)
        IndexError.__init__(
            error,
            f'the parameter {path!r} of layers of which some are frozen is written, or '
            'handed to a lifted transform that may write it.\n'
            "Take 'params' out of mutable=, or use nn.stop_gradient(sg.at(...)) around "
            'a scan without frozen_layers=.',
        )
        return error

    def __init__(self, layers: Any, length: int, problem: str) -> None:
        super().__init__(
            f'frozen_layers={layers!r} does not fit a scan of {length} layers: '
            f'{problem}.\n'
            f'Write indices from 0 to {length - 1}, such as '
            f'frozen_layers=slice(0, {max(1, length // 2)}), or a bool for each layer.'
        )
