"""Training: one gradient of the sum of the three losses in every step, and Adam.

That every part has to learn is not taken for granted: the model is trained four times,
from the same weights on the same batches, once as a whole and once with each part kept
as it was initialised. Held-out accuracy after 1000 steps, for seeds of ``data.load``:

======  =================  ==========  ===========  ==================
seed    every part learns  gln frozen  code frozen  explanation frozen
======  =================  ==========  ===========  ==================
0       0.981              0.089       0.583        0.681
1       0.964              0.114       0.583        0.669
2       0.933              0.114       0.564        0.622
3       0.956              0.103       0.553        0.603
======  =================  ==========  ===========  ==================

(flax 0.12.8, jax 0.10.2 on CPU; each row is four ``Trainer.run``.)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from flax_sg.demo import by_hand, data
from flax_sg.demo import model as models

Params = Mapping[str, Any]

BATCH_SIZE = 128
LEARNING_RATE = 1e-2
LOOKS = 50  # points of a learning curve
DATA = 'data'  # the axis of a mesh along which a batch is cut


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training left behind.

    Attributes:
        frozen: the part that was kept as it was initialised, or None.
        params: the trained parameters.
        steps: the steps after which losses and accuracy were taken.
        losses: ``[len(steps), 3]``, each a mean since the one before, as ``Losses``.
        accuracy: ``[len(steps)]``, on held-out digits.
    """

    frozen: str | None
    params: Params
    steps: list[int]
    losses: NDArray[np.float32]
    accuracy: list[float]


@functools.partial(jax.jit, static_argnums=0)
def initial(model: models.DigitModel) -> Params:
    """The parameters that training begins with."""
    rngs = {'params': jax.random.key(0), 'sampler': jax.random.key(1)}
    return model.init(rngs, jnp.zeros((1, data.PIXELS)))['params']


class Trainer:
    """Trains one model; all runs share the compiled step.

    Args:
        model: the model.
        train: the digits to learn from.
        held_out: the digits to take the accuracy on.
        steps: how many steps a run has.
        mesh: devices to train on, data parallel: each has all parameters and its part
            of every batch. By default one device.
    """

    def __init__(
        self,
        model: models.DigitModel,
        train: data.Digits,
        held_out: data.Digits,
        steps: int,
        mesh: Mesh | None = None,
    ) -> None:
        self.model = model
        self.train = train
        self.held_out = held_out
        self.steps = steps
        self.mesh = mesh
        self._tx = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))

    @functools.cached_property
    def initial(self) -> Params:
        """The parameters that every run begins with."""
        return initial(self.model)

    def run(
        self,
        frozen: str | None = None,
        on_step: Callable[[], object] = lambda: None,
    ) -> Run:
        """Trains the model.

        Args:
            frozen: a part of ``PARTS`` to keep as it was initialised.
            on_step: called after each step.
        """
        # How far each module goes along with Adam: data, so that the same compiled step
        # serves all runs.
        pace = {
            name: jnp.float32(part != frozen)
            for part, names in by_hand.MODULES.items()
            for name in names
        }
        params, opt_state, pace = self._placed(
            (self.initial, self._tx.init(self.initial), pace), PartitionSpec()
        )
        batches = np.random.default_rng(2)
        look_at, seen, curve, accuracy = [], [], [], []
        for step in range(self.steps):
            batch = self.train.take(batches.integers(len(self.train), size=BATCH_SIZE))
            images, labels = self._placed(
                (batch.images, batch.labels), PartitionSpec(DATA)
            )
            params, opt_state, losses = self._step(
                params, opt_state, images, labels, step, pace
            )
            seen.append(losses)
            if (step + 1) % max(1, self.steps // LOOKS) == 0 or step + 1 == self.steps:
                look_at.append(step + 1)
                curve.append(np.mean(jax.device_get(seen), axis=0))
                accuracy.append(self.accuracy(params))
                seen = []
            on_step()
        return Run(frozen, params, look_at, np.stack(curve), accuracy)

    def _placed(self, tree: Any, spec: PartitionSpec) -> Any:
        """Arrays that every process has, on the devices of all."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, spec)

        def put(leaf: Any) -> jax.Array:
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(
                whole.shape, sharding, lambda index: whole[index]
            )

        return jax.tree.map(put, tree)

    @functools.partial(jax.jit, static_argnums=0)
    def _step(
        self,
        params: Params,
        opt_state: optax.OptState,
        images: jax.Array,
        labels: jax.Array,
        step: jax.Array,
        pace: Mapping[str, jax.Array],
    ) -> tuple[Params, optax.OptState, models.Losses]:
        rngs = {'sampler': jax.random.fold_in(jax.random.key(3), step)}

        def total(params: Params) -> tuple[jax.Array, models.Losses]:
            _, losses = self._apply(params, images, labels, rngs=rngs, method='infer')
            return losses.gln + losses.code + losses.explanation, losses

        grads, losses = jax.grad(total, has_aux=True)(params)
        updates, opt_state = self._tx.update(grads, opt_state)
        updates = jax.tree.map(
            lambda factor, of_module: jax.tree.map(lambda u: factor * u, of_module),
            pace,
            updates,
        )
        params = cast(Params, optax.apply_updates(params, updates))
        return params, opt_state, losses

    def accuracy(self, params: Params) -> float:
        """The share of held-out digits that are recognised from their explanation."""
        logits = self.read(params, self.held_out.images).logits
        right = np.argmax(np.asarray(logits), axis=-1) == self.held_out.labels
        return float(np.mean(right))

    @functools.partial(jax.jit, static_argnums=0)
    def read(self, params: Params, images: jax.Array) -> models.Reading:
        """The model's reading of images, with fixed noise in the sampler."""
        rngs = {'sampler': jax.random.key(4)}
        return self._apply(params, images, rngs=rngs)

    def _apply(self, params: Params, *args: jax.Array, **kwargs: Any) -> Any:
        return self.model.apply({'params': params}, *args, **kwargs)
