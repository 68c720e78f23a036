"""The model of google/flax issue #1857: one ``infer``, three losses, three parts.

``DigitModel.infer`` freezes with blocks. ``infer_by_hand`` is the same program without
flax_sg: it stops copies of the weights, as programs had to before flax_sg.

The model compresses a digit into a short code. A noisy sampler improves the code step
by step. The explanation network draws the code, and nothing else, as an image. A gated
linear network then has to recognise the drawing::

    observation --code_message--> code            a first guess: 64 pixels, 10 numbers
    code --code_step, explanation--> code         the sampler, many noisy steps
    code --explanation--> explained               the code drawn as an image
    explained --gln_0, gln_1--> label             the drawing read

The model recognises a digit only if all three parts have learned: ``gln_*`` to read,
``code_*`` to find a code, ``explanation`` to draw it. Each part has its own loss, and
the value of each loss depends on all three parts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flax_sg import linen as nn

Params = Mapping[str, Any]

# The loss of each part trains what its filter selects, and nothing else.
PARTS = {'gln': 'gln_*/**', 'code': 'code_*/**', 'explanation': 'explanation/**'}
# The modules of each part, written out: a wrong pattern in ``infer`` must not be
# repeated in the program by hand.
MODULES = {
    'gln': ('gln_0', 'gln_1'),
    'code': ('code_message', 'code_step'),
    'explanation': ('explanation',),
}


class Losses(NamedTuple):
    """One loss for each of ``PARTS``, in that order."""

    gln: jax.Array
    code: jax.Array
    explanation: jax.Array


class GatedLinear(nn.Module):
    """A linear layer whose outputs are gated by side information."""

    features: int

    @nn.compact
    def __call__(self, inputs: jax.Array, side: jax.Array) -> jax.Array:
        """Returns the inputs mapped linearly, each output scaled by its gate."""
        gate = nn.sigmoid(nn.Dense(self.features, name='gate')(side))
        return gate * nn.Dense(self.features, name='linear')(inputs)


def two_layers(hidden: int, features: int) -> nn.Module:
    """Makes two dense layers."""
    return nn.Sequential([nn.Dense(hidden), nn.tanh, nn.Dense(features)])


class DigitModel(nn.Module):
    """Explains digits, and reads its own explanations.

    Attributes:
        code_size: how many numbers a code has.
        hidden: the width of the hidden layers.
        sampler_steps: how often the sampler improves a code.
        noise: the standard deviation of the noise that each sampler step adds.
    """

    code_size: int = 10
    hidden: int = 96
    sampler_steps: int = 16
    noise: float = 0.05

    def setup(self) -> None:
        """Names the modules so that one glob selects each part."""
        self.code_message = two_layers(self.hidden, self.code_size)
        self.code_step = two_layers(self.hidden, self.code_size)
        self.explanation = two_layers(self.hidden, 64)
        self.gln_0 = GatedLinear(self.hidden)
        self.gln_1 = GatedLinear(10)

    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits ``[n, 10]``, read from the explanations ``[n, 64]`` alone."""
        explained = self.explanation(self.sample(observation))
        return self.read(explained, explained)[1], explained

    def infer(
        self, observation: jax.Array, label: jax.Array
    ) -> tuple[jax.Array, Losses]:
        """Samples codes once, and returns them with the loss of each part."""
        # Trains nothing; the cotangent of the code still reaches the observation.
        with nn.stop_gradient(True):
            code = self.sample(observation)
        with nn.train_only('gln_*/**'):
            gln_loss = self.gln_loss(code, observation, label)
        with nn.train_only('code_*/**'):
            code_loss = self.code_loss(code, observation)
        with nn.train_only('explanation/**'):
            explanation_loss = self.explanation_loss(code, observation)
        return code, Losses(gln_loss, code_loss, explanation_loss)

    def sample(self, observation: jax.Array) -> jax.Array:
        """Guesses codes and improves them in many noisy steps (the expensive part)."""

        def step(
            model: DigitModel, code: jax.Array, observation: jax.Array
        ) -> tuple[jax.Array, None]:
            noise = jax.random.normal(model.make_rng('sampler'), code.shape)
            return model.improve(code, observation) + model.noise * noise, None

        steps = nn.scan(
            step,
            variable_broadcast='params',
            split_rngs={'params': False, 'sampler': True},
            in_axes=nn.broadcast,
            length=self.sampler_steps,
        )
        return steps(self, self.code_message(observation), observation)[0]

    def improve(self, code: jax.Array, observation: jax.Array) -> jax.Array:
        """Moves a code halfway to the one that its explanation's error calls for."""
        error = observation - self.explanation(code)
        return 0.5 * (code + self.code_step(jnp.concatenate([error, code], axis=-1)))

    def read(self, image: jax.Array, side: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns features and logits of an image; ``side`` gates the layers."""
        features = self.gln_0(image, side)
        return features, self.gln_1(features, side)

    # The sampler trains nothing, so each loss improves the sampled code once more.
    # Through this extra step, without its filter, a loss could train every part.

    def gln_loss(
        self, code: jax.Array, observation: jax.Array, label: jax.Array
    ) -> jax.Array:
        """Cross-entropy of reading the digit itself, gated by its explanation.

        Only this loss uses labels: code and explanation never learn from them.
        """
        explained = self.explanation(self.improve(code, observation))
        _, logits = self.read(observation, explained)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return jnp.mean(losses)

    def code_loss(self, code: jax.Array, observation: jax.Array) -> jax.Array:
        """The error of a code's explanation, and of the first guess of the code."""
        improved = self.improve(code, observation)
        surprise = jnp.mean((self.code_message(observation) - code) ** 2)
        distance = self.distance(self.explanation(improved), observation)
        return distance + 0.1 * surprise

    def explanation_loss(self, code: jax.Array, observation: jax.Array) -> jax.Array:
        """The distance of explanations from the observations."""
        explained = self.explanation(self.improve(code, observation))
        return self.distance(explained, observation)

    def distance(self, explained: jax.Array, observation: jax.Array) -> jax.Array:
        """The distance of two images, as pixels and as the gated network sees them."""
        seen, _ = self.read(explained, explained)
        expected, _ = self.read(observation, observation)
        pixels = jnp.mean((explained - observation) ** 2)
        return pixels + 0.1 * jnp.mean((seen - expected) ** 2)


def infer(
    model: DigitModel, params: Params, observation: Any, label: Any, key: jax.Array
) -> Any:
    """Calls ``model.infer``; ``key`` seeds the sampler."""
    args = {'params': params}, observation, label
    return model.apply(*args, rngs={'sampler': key}, method='infer')


def infer_by_hand(
    model: DigitModel,
    params: Params,
    observation: Any,
    label: Any,
    key: jax.Array,
) -> tuple[jax.Array, Losses]:
    """Computes what ``infer`` returns, with four copies of the weights.

    Args:
        model: the model; only methods that open no block are called.
        params: its parameters, as ``init`` returns them.
        observation: ``[n, 64]``, images.
        label: ``int32[n]``.
        key: seeds the sampler.
    """

    def call(trained: tuple[str, ...], method: str, *args: Any, **kwargs: Any) -> Any:
        weights = {
            name: module if name in trained else jax.lax.stop_gradient(module)
            for name, module in params.items()
        }
        return model.apply({'params': weights}, *args, method=method, **kwargs)

    code = call((), 'sample', observation, rngs={'sampler': key})
    return code, Losses(
        call(MODULES['gln'], 'gln_loss', code, observation, label),
        call(MODULES['code'], 'code_loss', code, observation),
        call(MODULES['explanation'], 'explanation_loss', code, observation),
    )
