"""Measures frozen layers of a scanned stack: flops, memory, time of a training step.

Run as ``python -m benchmarks.layers``. The stack has sixteen layers, 256 wide; the
first twelve are frozen. It runs with and without remat, and with and without trained
parameters below it. Prints the flops, the temporary memory and the time of each
program. The time is a ratio to the split scan by hand (median and quartiles). All
programs take turns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import flax_sg as sg
from benchmarks.compiled import shapes
from benchmarks.timing import interleaved, ratios
from flax_sg import linen as nn

DEPTH, FROZEN, WIDTH, BATCH = 16, 12, 256, 512
ROUNDS = 11
# Not of JAX, which would ask for a device when this file is imported.
X = np.random.default_rng(0).standard_normal((BATCH, WIDTH), np.float32)
Loss = Callable[[Any], jax.Array]


class Layer(linen.Module):
    """Two dense layers around a residual."""

    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        """One layer."""
        h = linen.gelu(linen.Dense(4 * WIDTH, use_bias=False, name='grow')(x))
        return x + linen.Dense(WIDTH, use_bias=False, name='shrink')(h), None


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of layers, and the losses that freeze a part of it.

    Attributes:
        below: whether parameters below the stack are trained.
        remat: whether layers are checkpointed.
        unroll: as in ``nn.scan``: the steps of a loop that are written out.
    """

    below: bool
    remat: bool
    unroll: int = 1

    def params(self) -> Any:
        """Returns the parameters of the stack, and those below it."""
        layers = self.scan().init(jax.random.key(1), X, None)['params']
        return {'below': jnp.ones((1, WIDTH)), 'layers': layers}

    def scan(self, **options: Any) -> linen.Module:
        """Makes the scanned layers."""
        layer = linen.remat(Layer, prevent_cse=False) if self.remat else Layer
        return nn.scan(
            layer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=DEPTH,
            unroll=self.unroll,
            **options,
        )()

    def _loss(self, params: Any, apply: Callable[[Any, jax.Array], jax.Array]) -> Any:
        x = X * params['below'] if self.below else X
        return jnp.mean(apply(params['layers'], x) ** 2)

    def plain(self, params: Any) -> Any:
        """The loss that trains everything."""
        stack = self.scan()
        return self._loss(
            params, lambda layers, x: stack.apply({'params': layers}, x, None)[0]
        )

    def masked(self, params: Any) -> Any:
        """The loss with a mask on the stack, by hand."""
        mask = (np.arange(DEPTH) < FROZEN).reshape(-1, 1, 1)

        def stop(leaf: jax.Array) -> jax.Array:
            return jnp.where(mask, jax.lax.stop_gradient(leaf), leaf)

        return self.plain({**params, 'layers': jax.tree.map(stop, params['layers'])})

    def at(self, params: Any) -> Any:
        """The loss with a mask on the stack, by ``sg.at``."""
        with nn.stop_gradient(sg.at('**', np.s_[:FROZEN])):
            return self.plain(params)

    def frozen_layers(self, params: Any) -> Any:
        """The loss with the split scan of flax_sg."""
        stack = self.scan(frozen_layers=slice(0, FROZEN))
        return self._loss(
            params, lambda layers, x: stack.apply({'params': layers}, x, None)[0]
        )

    def by_hand(self, params: Any) -> Any:
        """The loss with two scans; the first reads the whole stack by index."""

        def layer(params: Any, x: jax.Array) -> jax.Array:
            h = linen.gelu(x @ params['grow']['kernel'])
            return x + h @ params['shrink']['kernel']

        layer = jax.checkpoint(layer, prevent_cse=False) if self.remat else layer

        def apply(layers: Any, x: jax.Array) -> jax.Array:
            stopped = jax.lax.stop_gradient(layers)

            def frozen(x: jax.Array, number: jax.Array) -> Any:
                index = jax.lax.dynamic_index_in_dim
                params = jax.tree.map(
                    lambda leaf: index(leaf, number, keepdims=False), stopped
                )
                return layer(params, x), None

            numbers = jnp.arange(FROZEN, dtype=jnp.uint32)
            x, _ = jax.lax.scan(frozen, x, numbers, unroll=self.unroll)
            live = jax.tree.map(lambda leaf: leaf[FROZEN:], layers)

            def trained(x: jax.Array, params: Any) -> Any:
                return layer(params, x), None

            return jax.lax.scan(trained, x, live, unroll=self.unroll)[0]

        return self._loss(params, apply)

    def programs(self) -> dict[str, Loss]:
        """Returns the losses by name, ``by_hand`` first."""
        losses = (self.by_hand, self.frozen_layers, self.masked, self.at, self.plain)
        return {loss.__name__: loss for loss in losses}


def compiled(loss: Loss, params: Any, place: Callable[[Any], Any] = shapes) -> Any:
    """Compiles a step that returns all gradients; ``place`` names the device."""
    return jax.jit(jax.value_and_grad(loss)).lower(place(params)).compile()


def main() -> None:
    """Prints the table."""
    print('| below | remat | program | MFLOP | temporary MB | time (quartiles) |')
    print('|---|---|---|---|---|---|')
    for below in (False, True):
        for remat in (False, True):
            stack = Stack(below, remat)
            params = stack.params()
            # XLA counts one step of a loop, so unroll all steps to count flops.
            whole = dataclasses.replace(stack, unroll=DEPTH).programs()
            steps = {n: compiled(f, params) for n, f in stack.programs().items()}
            runs = {
                name: functools.partial(step, params) for name, step in steps.items()
            }
            times = ratios(interleaved(runs, ROUNDS), 'by_hand')
            for name, step in steps.items():
                flops = compiled(whole[name], params).cost_analysis()['flops'] / 1e6
                memory = step.memory_analysis().temp_size_in_bytes / 1e6
                print(
                    f'| {"yes" if below else "no"} | {"yes" if remat else "no"} '
                    f'| {name} | {flops:.0f} | {memory:.1f} '
                    f'| {times[name].median:.2f} '
                    f'({times[name].low:.2f} to {times[name].high:.2f}) |'
                )


if __name__ == '__main__':
    main()
