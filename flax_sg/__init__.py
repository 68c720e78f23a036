"""Stop gradients in Flax linen by path: choose parameters and say where it holds."""

from flax_sg import core as core
from flax_sg import errors as errors
from flax_sg import filters as filters
from flax_sg import linen as linen
from flax_sg.paths import Path as Path

__version__ = '0.1.0'
