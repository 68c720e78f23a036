"""Stop gradients in Flax linen by path: choose parameters and say where it holds."""

import importlib as _importlib
import typing as _typing

from flax_sg import core as core
from flax_sg import errors as errors
from flax_sg import filters as filters
from flax_sg import linen as linen
from flax_sg.autodiff.gradients import grad as grad
from flax_sg.autodiff.gradients import value_and_grad as value_and_grad
from flax_sg.autodiff.gradients import vjp as vjp
from flax_sg.filters.arrays import arrays as arrays
from flax_sg.filters.indices import at as at
from flax_sg.filters.paths import Path as Path
from flax_sg.forms.plain_trees import rewrite as rewrite
from flax_sg.forms.plain_trees import stop_gradient as stop_gradient
from flax_sg.forms.plain_trees import substitute as substitute
from flax_sg.optim.adopting import adopt as adopt
from flax_sg.optim.freezing import freeze as freeze
from flax_sg.optim.masks import labels as labels
from flax_sg.optim.masks import mask as mask
from flax_sg.trees import combine as combine
from flax_sg.trees import partition as partition
from flax_sg.trees import partition_n as partition_n
from flax_sg.trees.leaves import ABSENT as ABSENT
from flax_sg.trees.nondifferentiable import NonDifferentiable as NonDifferentiable
from flax_sg.trees.trainable import DECLARED as DECLARED
from flax_sg.trees.trainable import trainable as trainable

if _typing.TYPE_CHECKING:
    from flax_sg import testing as testing
    from flax_sg.flow import gradient_flow as gradient_flow
    from flax_sg.flow import live as live
    from flax_sg.summary import paths as paths
    from flax_sg.summary import tabulate as tabulate
else:
    # Imported when they are used: reports and assertions are no part of a training run.
    _LATER = {
        'testing': 'flax_sg.testing',
        'gradient_flow': 'flax_sg.flow',
        'live': 'flax_sg.flow',
        'paths': 'flax_sg.summary',
        'tabulate': 'flax_sg.summary',
    }

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        module = _importlib.import_module(_LATER[name])
        globals()[name] = value = getattr(module, name, module)
        return value

    def __dir__():
        return sorted({*globals(), *_LATER})


__version__ = '0.1.0'
