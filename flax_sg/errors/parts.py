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


class PartError(FlaxSGError, IndexError):
    """A part of an array is meant that there is not, or that cannot be told apart.

    Such a program looks frozen and is not::

        nn.stop_gradient(sg.at('embed/embedding', np.s_[50_000:]))  # of 50,000 rows

    Also raised where a leaf is taken as a whole or not at all::

        sg.partition(params, sg.at('embed/embedding', np.s_[:100]))  # raises

    ``sg.stop_gradient``, the gradient calls and ``sg.freeze`` take parts::

        sg.freeze(tx, sg.at('embed/embedding', np.s_[:100]))

    Args:
        index: the index.
        path: where the array is.
        shape: its shape.
        problem: what is wrong.
    """

    def __init__(
        self, index: Any, path: str, shape: tuple[int, ...], problem: str
    ) -> None:
        super().__init__(
            f'{index!r} does not fit {path!r}, an array of shape {shape}: {problem}.\n'
            'Give the elements of that array, or name other variables in sg.at.'
        )

    @classmethod
    def no_index(cls, index: Any) -> PartError:
        """What was given is no index."""
        error = cls.__new__(cls)
        IndexError.__init__(
            error,
            f'{index!r} is no index: expected ints, slices, ..., arrays of ints or of '
            'bools, or a tuple of these.\n'
            "Write it as numpy does: sg.at('embed/embedding', np.s_[:100]).",
        )
        return error

    @classmethod
    def whole_only(cls, what: str, path: str) -> PartError:
        """A leaf cannot be split here."""
        error = cls.__new__(cls)
        IndexError.__init__(
            error,
            f'{what} takes a leaf or leaves it, and the filter means a part of '
            f'{path!r}.\n'
            'Blocks, gradient calls and sg.freeze take parts; here name whole leaves.',
        )
        return error
