"""Loads scikit-learn's handwritten digits, split into training and held-out digits.

The 1797 images of 8 x 8 pixels ship with scikit-learn: nothing is downloaded.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flax_sg.internals import optional

HELD_OUT = 360


class Digits(NamedTuple):
    """Images with their labels.

    Attributes:
        images: ``float32[n, 64]``, 0 for paper to 1 for ink.
        labels: ``int32[n]``, 0 to 9.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int32]


def load(seed: int = 0) -> tuple[Digits, Digits]:
    """Returns the training digits and the held-out digits.

    The same seed gives the same split:

    >>> train, held_out = load()
    >>> train.images.shape, held_out.images.shape
    ((1437, 64), (360, 64))

    Args:
        seed: chooses which digits are held out.

    Raises:
        ModuleNotFoundError: if scikit-learn is not installed.
    """
    bunch = optional.optional(
        'sklearn.datasets', 'The demo', 'scikit-learn'
    ).load_digits()
    order = np.random.default_rng(seed).permutation(len(bunch.target))
    images = (bunch.data[order] / 16).astype(np.float32)
    labels = bunch.target[order].astype(np.int32)
    return (
        Digits(images[HELD_OUT:], labels[HELD_OUT:]),
        Digits(images[:HELD_OUT], labels[:HELD_OUT]),
    )
