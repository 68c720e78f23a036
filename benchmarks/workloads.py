"""The measured workloads: models, their frozen parameters, and their sizes."""

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
    """A model and its frozen parameters.

    Attributes:
        name: the name in the tables.
        module: the model; its field ``stop`` opens the blocks inside the model.
        inputs: the shapes of the model's arguments.
        frozen: the parameters that are never trained.
        uses: for parameters that are frozen in some uses only: the loss as a function
            of ``call(stopped, *args, method=)`` and the inputs. By default the loss
            calls the model once, with ``frozen`` stopped.
        split: for a scanned model, the version whose frozen layers run in a separate
            loop.
        traced: called whenever Python runs the loss.
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
        """Whether a parameter is frozen in some uses and trained in others."""
        return self.uses is not None

    def arrays(self) -> tuple[Any, Any, list[jax.Array]]:
        """Returns parameters, other variables and inputs, from a fixed seed."""
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
        """Returns the loss, a function of parameters, other variables and inputs.

        The function returns the loss and the new variables.

        Args:
            spelling: how to stop the frozen parameters; None for the model's blocks.
        """
        if spelling is not None:
            return self._loss(self.module, spelling, self.uses)
        fields: dict[str, Any] = {'stop': nn.stop_gradient}
        if hasattr(self.module, 'frozen'):
            fields['frozen'] = spellings.where(self.frozen)
        return self.loss_of(self.module.clone(**fields))

    def loss_of(self, module: linen.Module) -> Loss:
        """Returns the loss of a module that freezes its own parameters."""
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
    """Returns the loss of a model's output."""
    return jnp.mean(out**2) if out.ndim else out


def three_losses(call: Callable[..., Any], x: jax.Array) -> jax.Array:
    """Sums three losses, each with the weights of the other parts stopped."""
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
        depth: layers of a transformer; some workloads freeze half of them.
        width: the default width.
        batch: the number of examples.
        tokens: tokens in an example.
        image: the side of an image, in pixels.
        channels: channels of the residual network.
        blocks: blocks of the residual network.
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
    """Returns all workloads in the given sizes."""
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
    """Returns transformers with separate layers."""
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
    """Returns transformers with the same layers in one scan."""
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
