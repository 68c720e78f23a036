"""What is measured: models, what is frozen in each, and how large they are."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from benchmarks import models, spellings
from benchmarks.selections import NOTHING, Selection
from flax_sg import linen as nn

Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and what of it is frozen.

    Attributes:
        name: what tables call it.
        module: the model; its field ``stop`` opens the blocks that are written in it.
        inputs: the shapes of its arguments.
        frozen: what is never trained.
        uses: where a parameter is frozen in some uses only, the loss as a function of
            ``call(stopped, *args, method=)`` and the inputs. By default it is that of
            one call of the model, in which ``frozen`` is stopped.
        split: for a scanned model, that which runs frozen layers in a loop of their
            own.
        traced: called whenever Python runs through the loss.
    """

    name: str
    module: linen.Module
    inputs: Sequence[tuple[int, ...]]
    frozen: Selection = NOTHING
    uses: Callable[..., jax.Array] | None = None
    split: linen.Module | None = None
    traced: Callable[[], None] = lambda: None

    @property
    def per_use(self) -> bool:
        """Whether one parameter is frozen here and trained there."""
        return self.uses is not None

    def arrays(self) -> tuple[Any, Any, list[jax.Array]]:
        """Parameters, other variables and inputs, always the same."""
        numbers = np.random.default_rng(0)

        def normal(shape: Sequence[int], scale: float) -> jax.Array:
            values = scale * numbers.standard_normal(shape)
            return jnp.asarray(values, jnp.float32)

        inputs = [normal(shape, 1.0) for shape in self.inputs]
        shapes = jax.eval_shape(self.module.init, jax.random.key(0), *inputs)
        params = jax.tree.map(lambda leaf: normal(leaf.shape, 0.05), shapes['params'])
        state = {
            name: jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), tree)
            for name, tree in shapes.items()
            if name != 'params'
        }
        return params, state, inputs

    def loss(self, spelling: spellings.Spelling | None) -> Loss:
        """The loss: of parameters, other variables and inputs, with new variables.

        Args:
            spelling: how what is frozen is stopped; None for the blocks in the model.
        """
        if spelling is not None:
            return self._loss(self.module, spelling, self.uses)
        fields: dict[str, Any] = {'stop': nn.stop_gradient}
        if hasattr(self.module, 'frozen'):
            fields['frozen'] = spellings.where(self.frozen)
        return self.loss_of(self.module.clone(**fields))

    def loss_of(self, module: linen.Module) -> Loss:
        """The loss of a module that says itself what is frozen in it."""
        return self._loss(module, spellings.bare, None)

    def _loss(self, module: Any, spelling: spellings.Spelling, uses: Any) -> Loss:
        def loss(params: Any, state: Any, *inputs: jax.Array) -> Any:
            self.traced()
            variables = {**state, 'params': params}

            def call(stopped: Selection, *args: Any, **options: Any) -> Any:
                return spelling(module, stopped)(variables, *args, **options)

            if uses is not None:
                return uses(call, *inputs), state
            if not state:
                return objective(call(self.frozen, *inputs)), state
            out, new = call(self.frozen, *inputs, mutable=list(state))
            return objective(out), new

        return loss


def objective(out: jax.Array) -> jax.Array:
    """The loss of what a model returns."""
    return jnp.mean(out**2) if out.ndim else out


def three_losses(call: Callable[..., Any], x: jax.Array) -> jax.Array:
    """Each loss with the weights of the other parts stopped."""
    sample = call(Selection.of('.*'), x, method='sample')
    return (
        call(Selection.of('(code|explanation).*'), x, method='gln_loss')
        + call(Selection.of('(gln|explanation).*'), x, sample, method='code_loss')
        + call(Selection.of('(gln|code).*'), x, sample, method='explanation_loss')
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the models are.

    Attributes:
        depth: layers of a transformer; the half of them is frozen in some.
        width: the width of all that has no other one.
        batch: examples.
        tokens: tokens of an example.
        image: pixels of the side of an image.
        channels: of a residual network.
        blocks: of a residual network.
    """

    depth: int = 12
    width: int = 256
    batch: int = 4
    tokens: int = 32
    image: int = 32
    channels: int = 32
    blocks: int = 4


SMALL = Sizes(2, 8, 2, 4, 8, 4, 1)


def workloads(sizes: Sizes = Sizes()) -> list[Workload]:
    """All workloads, of one size."""
    text = [(sizes.batch, sizes.tokens, sizes.width)]
    vector = (8 * sizes.batch, sizes.width)
    image = (sizes.batch, sizes.image, sizes.image, 3)
    layers = tuple([sizes.width] * sizes.depth)
    return [
        Workload(
            'three losses',
            models.ThreeLosses(width=sizes.width),
            [(vector[0], 6)],
            uses=three_losses,
        ),
        *transformers(sizes, text),
        *scanned(sizes, text, False),
        *scanned(sizes, text, True),
        Workload(
            'ResNet, frozen stem',
            models.ResNet(sizes.blocks, sizes.channels),
            [image],
            Selection.of('stem/.*'),
        ),
        Workload(
            'BYOL pair',
            models.Byol(sizes.width),
            [vector] * 2,
            Selection.of('target/.*'),
        ),
        Workload(
            'LoRA', models.LoRANet(widths=layers), [vector], Selection.of('.*base/.*')
        ),
    ]


def transformers(sizes: Sizes, inputs: Any) -> list[Workload]:
    """Separate layers."""
    numbers = list(map(str, range(sizes.depth)))
    half = sizes.depth // 2
    parts = {
        'frozen backbone': numbers,
        'frozen first half': numbers[:half],
        'frozen second half': numbers[half:],
    }
    return [
        Workload(
            f'transformer, {name}',
            models.Transformer(sizes.depth, sizes.width),
            inputs,
            Selection.of(f'layer_({"|".join(part)})/.*'),
        )
        for name, part in parts.items()
    ]


def scanned(sizes: Sizes, inputs: Any, remat: bool) -> list[Workload]:
    """The same layers in one scan."""
    name = 'scan of remat' if remat else 'scan'
    module = models.ScannedTransformer(sizes.depth, sizes.width, remat)
    half = sizes.depth // 2
    halves = {'first': (0, half), 'second': (half, sizes.depth)}
    return [
        Workload(
            f'{name}, frozen backbone',
            module,
            inputs,
            Selection.of('(embed|layers)/.*'),
        ),
        *(
            Workload(
                f'{name}, frozen {which} half',
                module,
                inputs,
                Selection.of('layers/.*', rows),
                split=module.clone(
                    scan=functools.partial(nn.scan, frozen_layers=range(*rows))
                ),
            )
            for which, rows in halves.items()
        ),
    ]
