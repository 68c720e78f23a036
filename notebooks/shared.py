"""What all notebooks share: the size of a run, digits, colours and a comparison."""

import os

import jax
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

# CI runs each notebook at a small size.
FULL = os.environ.get('FLAX_SG_NOTEBOOKS', 'full') == 'full'

# Colours that colour-blind readers can tell apart (Okabe and Ito).
BLUE, ORANGE, GREEN, GREY = '#0072b2', '#d55e00', '#009e73', '#767676'
plt.rcParams |= {
    'figure.dpi': 90,
    'figure.constrained_layout.use': True,
    'axes.spines.top': False,
    'axes.titlelocation': 'left',
    'axes.spines.right': False,
    'legend.frameon': False,
}


def digits():
    """Scikit-learn's 1797 digits, shuffled: ``float32[1797, 8, 8]`` and labels."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order] / 16).astype(np.float32)
    return images, found.target[order].astype(np.int32)


def equal(one, other):
    """Whether two trees of arrays are equal to the last bit."""
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))
