"""All of flax.linen, plus the names that choose where gradients stop.

``from flax_sg import linen as nn`` takes the place of ``from flax import linen as nn``.
Every public name is there and is the same object, so modules written against either
work together. The import puts hooks on Flax's reads, which do what Flax does while no
block is open; ``import flax_sg`` alone replaces nothing. Only ``scan`` is our own,
which takes ``frozen_layers=`` too, and is flax.linen's without:

    >>> from flax import linen
    >>> from flax_sg import linen as nn
    >>> nn.Dense is linen.Dense
    True
"""

import typing as _typing

from flax import linen as _linen

if _typing.TYPE_CHECKING:  # Of two imports of one name mypy keeps the first.
    from flax_sg.scans.layers import scan as scan

from flax.linen import *  # type: ignore[assignment]  # pyright: ignore[reportWildcardImportFromLibrary]

from flax_sg.errors.elsewhere import missing as _missing
from flax_sg.forms.blocks import clip_gradient as clip_gradient
from flax_sg.forms.blocks import copy_cotangent as copy_cotangent
from flax_sg.forms.blocks import map_cotangent as map_cotangent
from flax_sg.forms.blocks import print_cotangent as print_cotangent
from flax_sg.forms.blocks import read_only as read_only
from flax_sg.forms.blocks import replace_cotangent as replace_cotangent
from flax_sg.forms.blocks import reverse_gradient as reverse_gradient
from flax_sg.forms.blocks import scale_gradient as scale_gradient
from flax_sg.forms.blocks import stop_gradient as stop_gradient
from flax_sg.forms.blocks import substitute as substitute
from flax_sg.forms.blocks import train_only as train_only
from flax_sg.forms.mirror import mirror as mirror
from flax_sg.forms.wrappers import Frozen as Frozen
from flax_sg.scans.layers import scan as scan

if _typing.TYPE_CHECKING:
    # Submodules are among the names of a star import for Python, and not for mypy.
    from flax.linen import activation as activation
    from flax.linen import attention as attention
    from flax.linen import initializers as initializers
    from flax.linen import linear as linear
    from flax.linen import module as module
    from flax.linen import normalization as normalization
    from flax.linen import pooling as pooling
    from flax.linen import recurrent as recurrent
    from flax.linen import spmd as spmd
    from flax.linen import stochastic as stochastic
    from flax.linen import transforms as transforms
else:
    # The star import takes the names that flax.linen has now, types and all. Submodules
    # that are imported later become attributes of it only then, so they are looked up
    # when asked for. Type checkers do not see this function: it would tell them that
    # every name exists.
    def __getattr__(name):
        # Python's import system asks for `__path__`: answering it with flax.linen's
        # would load a second copy of every submodule.
        if name.startswith('_') or not hasattr(_linen, name):
            raise AttributeError(_missing(__name__, name))
        return getattr(_linen, name)

    def __dir__():
        public = {name for name in dir(_linen) if not name.startswith('_')}
        return sorted(public | set(globals()))
