"""The same program without flax_sg: four explicit copies of the weights.

This is how the program had to be written before, and how google/flax issue #1857 tells
it. It opens no block and knows no filter, so it can tell whether the blocks are right:
values and gradients have to be equal to the last bit.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from flax_sg.demo import model as models

Params = Mapping[str, Any]

# Written out: a pattern that is wrong in the model must not be wrong here as well.
MODULES = {
    'gln': ('gln_0', 'gln_1'),
    'code': ('code_message', 'code_step'),
    'explanation': ('explanation',),
}


class Copies(NamedTuple):
    """Four copies of one set of weights, that differ in where gradients stop."""

    weights_sg: Params
    weights_gln: Params
    weights_code: Params
    weights_explanation: Params


def stopped_copies(params: Params) -> Copies:
    """One copy in which every weight is stopped, and one for each part that is not."""

    def copy(*live: str) -> Params:
        return {
            name: weights if name in live else jax.lax.stop_gradient(weights)
            for name, weights in params.items()
        }

    return Copies(
        weights_sg=copy(),
        weights_gln=copy(*MODULES['gln']),
        weights_code=copy(*MODULES['code']),
        weights_explanation=copy(*MODULES['explanation']),
    )


def live_copies(params: Params) -> Copies:
    """Nothing stopped: the program that one gets without the blocks."""
    return Copies(params, params, params, params)


def infer(
    model: models.DigitModel,
    params: Params,
    observation: jax.Array,
    label: jax.Array,
    rngs: Mapping[str, jax.Array],
    copies: Callable[[Params], Copies] = stopped_copies,
) -> tuple[jax.Array, models.Losses]:
    """What ``model.infer`` returns, by plain ``apply`` calls on copies of the weights.

    Args:
        model: the model; only methods that open no block are called.
        params: its parameters, as ``init`` returns them.
        observation: ``[n, 64]``, images.
        label: ``int32[n]``.
        rngs: random keys by name, as ``apply`` takes them.
        copies: makes the four copies of the weights.
    """

    def call(weights: Params, method: str, *args: jax.Array, **kwargs: Any) -> Any:
        return model.apply({'params': weights}, *args, method=method, **kwargs)

    weights_sg, weights_gln, weights_code, weights_explanation = copies(params)
    code = call(weights_sg, 'sample', observation, rngs=rngs)
    return code, models.Losses(
        gln=call(weights_gln, 'gln_loss', code, observation, label),
        code=call(weights_code, 'code_loss', code, observation),
        explanation=call(weights_explanation, 'explanation_loss', code, observation),
    )
