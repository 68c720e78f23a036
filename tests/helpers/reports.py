"""Reports of gradient flow written by hand."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from flax_sg.filters.paths import Path
from flax_sg.flow import GradientFlow
from flax_sg.flow.way import Way

NOTHING = Way()


def report(
    status: Mapping[str, Sequence[str]], parameters: Iterable[str], way: Way = NOTHING
) -> GradientFlow:
    """A report from a status for each parameter, by output, and one way for all."""
    names = tuple(parameters)
    return GradientFlow(
        outputs=tuple(status),
        parameters=tuple(Path.of('params', tuple(p.split('/'))) for p in names),
        shapes=tuple(jax.ShapeDtypeStruct((2,), jnp.float32) for _ in names),
        status=tuple(map(tuple, status.values())),
        explain=lambda parameter, output: way,
    )


LINE = 'model.py:31 (Net.__call__)'
WAY = Way((LINE, 'model.py:32 (Net.__call__)'), 'round at model.py:32 (Net.__call__)')

# One of three losses trains a part of the head, and one does not use the head.
LOSSES = report(
    {
        'gln': ['flows', 'stopped', 'flows', 'stopped', 'flows'],
        'code': ['stopped', 'flows', 'unused', 'unused', 'flows'],
        'explanation': ['stopped', 'stopped', 'flows', 'flows', 'flows'],
    },
    ['gln_0/dense/kernel', 'code/kernel', 'head/bias', 'head/kernel', 'scale'],
    WAY,
)
