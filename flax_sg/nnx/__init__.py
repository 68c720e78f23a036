"""All of flax.nnx, plus the names that choose where gradients stop.

``from flax_sg import nnx`` takes the place of ``from flax import nnx``. Every public
name is there and is the same object, but for optimizers and ``DiffState``: these are
subclasses that take paths. Nothing in flax.nnx is changed:

    >>> from flax import nnx as flax_nnx
    >>> from flax_sg import nnx
    >>> nnx.Linear is flax_nnx.Linear
    True

It needs flax 0.12.1 or newer; linen has no such bound.
"""

import typing as _typing

from flax import nnx as _nnx

if _typing.TYPE_CHECKING:  # Of two imports of one name mypy keeps the first.
    from flax_sg.nnx.choosing import DiffState as DiffState
    from flax_sg.nnx.choosing import ModelAndOptimizer as ModelAndOptimizer
    from flax_sg.nnx.choosing import Optimizer as Optimizer

from flax.nnx import *  # type: ignore[assignment,misc]  # pyright: ignore[reportWildcardImportFromLibrary]

from flax_sg import errors as _errors
from flax_sg.errors.elsewhere import missing as _missing

if not hasattr(_nnx.Variable, 'get_value'):
    raise _errors.UnsupportedVersionError(
        'flax_sg.nnx needs flax 0.12.1 or newer: Variables of this one have no '
        'get_value.\n'
        "Update it: pip install 'flax>=0.12.1'. flax_sg.linen works with this one."
    )

from flax_sg.nnx.choosing import DiffState as DiffState
from flax_sg.nnx.choosing import ModelAndOptimizer as ModelAndOptimizer
from flax_sg.nnx.choosing import Optimizer as Optimizer
from flax_sg.nnx.choosing import where as where
from flax_sg.nnx.forms import clip_gradient as clip_gradient
from flax_sg.nnx.forms import map_cotangent as map_cotangent
from flax_sg.nnx.forms import print_cotangent as print_cotangent
from flax_sg.nnx.forms import replace_cotangent as replace_cotangent
from flax_sg.nnx.forms import reverse_gradient as reverse_gradient
from flax_sg.nnx.forms import scale_gradient as scale_gradient
from flax_sg.nnx.forms import stop_gradient as stop_gradient
from flax_sg.nnx.forms import substitute as substitute
from flax_sg.nnx.forms import train_only as train_only

if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        layer = 'nnx.stop_gradient(layer, True), a view'
        own = {'Frozen': layer, 'mirror': layer}
        raise AttributeError(_missing(__name__, name, own))
