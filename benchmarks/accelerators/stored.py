"""A head on stored features, at scale: no frozen weight is on the chips.

The models are those of ``scale.py``, with a frozen backbone. What ``sg.precompute``
leaves of a step stands beside a trainer by hand that reads stored features.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import flax_sg as sg
from benchmarks.accelerators import compilers
from benchmarks.accelerators.models import Adapted, Decoder
from benchmarks.accelerators.rows import Row, measured
from benchmarks.accelerators.scale import MODELS, TOKENS
from benchmarks.accelerators.sharded import CLIPPED, Placement, data_of, placed
from benchmarks.trainers import Data, Trainer, optimized

CASE = 'a head on stored features'


def rows(
    platform: str,
    topologies: Sequence[str],
    only: str,
    models: Mapping[str, Decoder] = MODELS,
    tokens: int = TOKENS,
) -> Iterator[Row]:
    """Compiles a step of each model; arguments are those of ``scale.rows``."""
    for topology in topologies:
        devices = compilers.devices(platform, topology)
        mesh = (placement := Placement(sharded=True)).mesh(devices)
        along = NamedSharding(mesh, PartitionSpec('data'))
        for name, model in models.items():
            if not re.search(only, f'{name}, {CASE}'):
                continue

            def spread(x: jax.Array, along: Any = along) -> jax.Array:
                return jax.lax.with_sharding_constraint(x, along)

            module = model.clone(spread=spread)
            text = data_of(module, len(devices), tokens)
            specs = placement.specs(mesh, text.params)

            def place(tree: Any, mesh: Any = mesh, specs: Any = specs) -> Any:
                is_kept = isinstance(tree, list)
                return (
                    jax.tree.map(lambda x: _along(x, mesh), tree)
                    if is_kept
                    else placed(mesh, specs, tree)
                )

            makers, kept = _ways(module, text)
            yield from measured(topology, f'{name}, {CASE}', makers, kept, place)


def _along(x: Any, mesh: Any) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec('data'))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _ways(module: Decoder, text: Data) -> tuple[dict[str, Any], list[Any]]:
    """What makes the steps, and the shapes of what is stored."""

    def loss(params: Any, tokens: Any) -> Any:
        return module.apply({'params': params}, tokens)

    def by_hand(params: Any, features: Any, tokens: Any) -> Any:
        head = Adapted(module.vocabulary)
        logits = module.spread(head.apply({'params': params['head']}, features))
        logits = logits.astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[..., 0], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    [tokens], live = text.inputs, sg.where('head/**')
    ahead = sg.precompute(loss, text.params, tokens, wrt=live)
    trained = {**dict.fromkeys(text.params, sg.ABSENT), 'head': text.params['head']}
    head = {'head': text.params['head']}

    def made(params: Any, gradient: Any) -> Trainer:
        def with_state(params: Any, state: Any, *kept: Any) -> Any:
            value, grads = gradient(params, *kept)
            return (value, state), grads

        return optimized(CLIPPED, with_state, Data(params, {}, []), one_jit=True)

    late = sg.value_and_grad(ahead.late, wrt=live)
    return {
        'partition by hand': lambda: made(head, jax.value_and_grad(by_hand)),
        'sg.precompute': lambda: made(trained, lambda p, *kept: late(p, [*kept])),
    }, ahead.kept
