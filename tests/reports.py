"""Reports of gradient flow written by hand."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from flax_sg.filters.paths import Path
from flax_sg.flow import GradientFlow, Use


def report(
    status: Mapping[str, Sequence[str]], uses: Mapping[str, Sequence[Use]]
) -> GradientFlow:
    """A report from a status for each parameter, by output, and uses by parameter."""
    return GradientFlow(
        outputs=tuple(status),
        parameters=tuple(Path.of('params', tuple(p.split('/'))) for p in uses),
        shapes=tuple(jax.ShapeDtypeStruct((2,), jnp.float32) for _ in uses),
        status=tuple(map(tuple, status.values())),
        uses=tuple(map(tuple, uses.values())),
    )


LIVE = Use('Net/dense', 'model.py:31 (Net.__call__)', stopped=False)
STOPPED = Use('Net/target/dense', 'model.py:35 (Net.target)', stopped=True)

# One of three losses trains a part of the head, and one does not use the head.
LOSSES = report(
    {
        'gln': ['flows', 'stopped', 'flows', 'stopped', 'flows'],
        'code': ['stopped', 'flows', 'unused', 'unused', 'flows'],
        'explanation': ['stopped', 'stopped', 'flows', 'flows', 'flows'],
    },
    {
        'gln_0/dense/kernel': [LIVE, STOPPED],
        'code/kernel': [LIVE, STOPPED, STOPPED],
        'head/bias': [LIVE],
        'head/kernel': [LIVE, STOPPED],
        'scale': [LIVE],
    },
)
