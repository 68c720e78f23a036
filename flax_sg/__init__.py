"""Stop gradients in Flax linen by path: choose parameters and say where it holds."""

import importlib as _importlib
import typing as _typing

from flax_sg import errors, filters
from flax_sg.autodiff.gradients import grad, value_and_grad, vjp
from flax_sg.errors.elsewhere import missing as _missing
from flax_sg.filters import where
from flax_sg.filters.arrays import arrays
from flax_sg.filters.indices import at
from flax_sg.filters.paths import Path
from flax_sg.optim.adopting import adopt
from flax_sg.optim.freezing import freeze
from flax_sg.optim.masks import labels, mask
from flax_sg.rules.plain_trees import rewrite, stop_gradient, substitute
from flax_sg.trees import combine, partition, partition_n
from flax_sg.trees.leaves import ABSENT
from flax_sg.trees.nondifferentiable import NonDifferentiable
from flax_sg.trees.trainable import DECLARED, trainable

if _typing.TYPE_CHECKING:
    from flax_sg import core, linen, testing
    from flax_sg.ahead import precompute
    from flax_sg.flow import gradient_flow, live
    from flax_sg.stored import Rows, store
    from flax_sg.summary import paths, tabulate
else:
    # Imported when they are used. Blocks need hooks on the reads of Flax, so linen and
    # core replace methods of Flax and JAX. Reports are no part of a training run.
    _LATER = {
        'core': 'flax_sg.core',
        'linen': 'flax_sg.linen',
        'testing': 'flax_sg.testing',
        'Rows': 'flax_sg.stored',
        'gradient_flow': 'flax_sg.flow',
        'live': 'flax_sg.flow',
        'paths': 'flax_sg.summary',
        'precompute': 'flax_sg.ahead',
        'store': 'flax_sg.stored',
        'tabulate': 'flax_sg.summary',
    }

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(_missing(__name__, name))
        module = _importlib.import_module(_LATER[name])
        globals()[name] = value = getattr(module, name, module)
        return value


def __dir__():
    return sorted(__all__)


__version__ = '0.1.0'

__all__ = [
    'ABSENT',
    'DECLARED',
    'NonDifferentiable',
    'Path',
    'Rows',
    'adopt',
    'arrays',
    'at',
    'combine',
    'core',
    'errors',
    'filters',
    'freeze',
    'grad',
    'gradient_flow',
    'labels',
    'linen',
    'live',
    'mask',
    'partition',
    'partition_n',
    'paths',
    'precompute',
    'rewrite',
    'stop_gradient',
    'store',
    'substitute',
    'tabulate',
    'testing',
    'trainable',
    'value_and_grad',
    'vjp',
    'where',
]
