"""Losses of public projects, small, each with a loss by hand on stored features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Tree = Any
KEYS = jax.random.split(jax.random.key(7), 3)


class Situation(NamedTuple):
    """A loss, and the same by hand.

    Attributes:
        loss: of parameters, data, and what is new at each step.
        params: the parameters.
        data: the arguments for a batch.
        wrt: what is trained.
        early: by hand: the features, of parameters and data.
        late: by hand: the loss of parameters, features, and what is new.
        each: the last arguments of the loss at each of three steps.
    """

    loss: Callable[..., Any]
    params: Tree
    data: Sequence[Any]
    wrt: Any
    early: Callable[..., Tree]
    late: Callable[..., Any]
    each: Sequence[Sequence[Any]] = ((), (), ())


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / 2


def layers(seed: int, *sizes: int) -> list[jax.Array]:
    pairs = enumerate(itertools.pairwise(sizes))
    return [normal(seed + 10 * n, *pair) for n, pair in pairs]


def tower(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


X, LABELS = normal(0, 6, 8), jnp.arange(6) % 3
IDS = jax.random.randint(jax.random.key(1), (6, 5), 0, 11)


def data_of_a_closure() -> Situation:
    """The whole data set in the loss, as in a PINN or a graph."""
    params = {'body': layers(1, 8, 8, 8), 'head': normal(2, 8, 3)}

    def late(params: Tree, features: jax.Array) -> jax.Array:
        return entropy(features @ params['head'], LABELS)

    def early(params: Tree) -> jax.Array:
        return tower(params['body'], X)

    return Situation(
        *(lambda params: late(params, early(params)), params, (), 'head', early, late)
    )


def empty_prompt() -> Situation:
    """Classifier-free guidance: a prompt is left out now and then."""
    params = {
        'embed': normal(1, 11, 8),
        'text': layers(2, 8, 8, 8),
        'denoiser': normal(3, 16, 8),
    }

    def encoded(params: Tree, ids: jax.Array) -> jax.Array:
        return tower(params['text'], params['embed'][ids].mean(1))

    def early(params: Tree, x: jax.Array, ids: jax.Array) -> Tree:
        return x, encoded(params, ids), encoded(params, jnp.zeros((1, 5), int))

    def late(params: Tree, features: Tree, key: jax.Array) -> jax.Array:
        x, text, empty = features
        drop, key = jax.random.split(key)
        is_out = jax.random.bernoulli(drop, 0.5, (len(x), 1))
        context = jnp.where(is_out, empty, text)
        noise = jax.random.normal(key, x.shape)
        seen = jnp.concatenate([x + noise, context], -1)
        return jnp.mean((seen @ params['denoiser'] - noise) ** 2)

    def loss(params: Tree, x: jax.Array, ids: jax.Array, key: jax.Array) -> jax.Array:
        return late(params, early(params, x, ids), key)

    each = [(key,) for key in KEYS]
    return Situation(loss, params, (X, IDS), 'denoiser', early, late, each)


def relative_positions() -> Situation:
    """A frozen table of position biases, through a network, in trained attention."""
    n = 5
    offsets = jnp.arange(n)[:, None] - jnp.arange(n)[None]
    params = {
        'table': normal(1, 9, 8),
        'bias': layers(2, 8, 8, 1),
        'query': normal(3, 8, 8),
    }
    x = normal(4, 3, n, 8)

    def late(params: Tree, features: Tree) -> jax.Array:
        x, bias = features
        scores = jnp.einsum('btd,bsd->bts', x @ params['query'], x) + bias
        return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)

    def early(params: Tree, x: jax.Array) -> Tree:
        bias = tower(params['bias'], params['table'])[:, 0][offsets + n - 1]
        return x, bias[None]

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        return late(params, early(params, x))

    return Situation(loss, params, (x,), 'query', early, late)


def maskgit() -> Situation:
    """Tokens of a frozen tokenizer, of which some are masked at each step."""
    params = {
        'encoder': layers(1, 8, 8, 4),
        'codebook': normal(2, 9, 4),
        'tokens': normal(3, 10, 8),
        'head': normal(4, 8, 9),
    }
    x = normal(5, 3, 6, 8)

    def early(params: Tree, x: jax.Array) -> jax.Array:
        gap = tower(params['encoder'], x)[..., None, :] - params['codebook'][None, None]
        return jnp.argmin((gap**2).sum(-1), -1)

    def late(params: Tree, ids: jax.Array, key: jax.Array) -> jax.Array:
        is_masked = jax.random.bernoulli(key, 0.5, ids.shape)
        h = params['tokens'][jnp.where(is_masked, 9, ids)]
        return entropy(jnp.tanh(h + h.mean(1, keepdims=True)) @ params['head'], ids)

    def loss(params: Tree, x: jax.Array, key: jax.Array) -> jax.Array:
        return late(params, early(params, x), key)

    each = [(key,) for key in KEYS]
    return Situation(loss, params, (x,), ['tokens', 'head'], early, late, each)


def distil_whisper() -> Situation:
    """One frozen encoder for a frozen teacher and a student that decode."""
    params = {
        'encoder': layers(1, 8, 8, 8),
        'teacher': layers(2, 16, 8, 11),
        'embed': normal(3, 11, 8),
        'student': layers(4, 16, 11),
    }
    sound = normal(5, 6, 7, 8)

    def decode(
        weights: Tree, embed: Any, heard: jax.Array, ids: jax.Array
    ) -> jax.Array:
        h = embed[ids]
        context = jax.nn.softmax(jnp.einsum('btd,bsd->bts', h, heard)) @ heard
        return tower(weights, jnp.concatenate([h, context], -1))

    def loss(params: Tree, sound: jax.Array, ids: jax.Array) -> jax.Array:
        heard, embed = tower(params['encoder'], sound), params['embed']
        wanted = jax.nn.softmax(decode(params['teacher'], embed, heard, ids))
        said = jax.nn.log_softmax(decode(params['student'], embed, heard, ids))
        return entropy(said, ids) - jnp.mean(jnp.sum(wanted * said, -1))

    def early(params: Tree, sound: jax.Array, ids: jax.Array) -> Tree:
        heard, h = tower(params['encoder'], sound), params['embed'][ids]
        context = jax.nn.softmax(jnp.einsum('btd,bsd->bts', h, heard)) @ heard
        seen = jnp.concatenate([h, context], -1)
        return seen, jax.nn.softmax(tower(params['teacher'], seen)), ids

    def late(params: Tree, features: Tree) -> jax.Array:
        seen, wanted, ids = features
        said = jax.nn.log_softmax(tower(params['student'], seen))
        return entropy(said, ids) - jnp.mean(jnp.sum(wanted * said, -1))

    return Situation(loss, params, (sound, IDS), 'student/*', early, late)


def ridge_regression() -> Situation:
    """Few shots on frozen features: nothing is trained."""
    params = {'body': layers(1, 8, 8, 4)}
    support, shots = normal(2, 5, 8), jax.nn.one_hot(jnp.arange(5) % 3, 3)

    def early(params: Tree, x: jax.Array, support: jax.Array, y: jax.Array) -> Tree:
        h = tower(params['body'], support)
        head = jnp.linalg.solve(h.T @ h + jnp.eye(4), h.T @ y)
        return tower(params['body'], x) @ head

    return Situation(
        early, params, (X, support, shots), False, early, lambda _, scores: scores
    )


SITUATIONS = [
    *(data_of_a_closure, empty_prompt, relative_positions),
    *(maskgit, distil_whisper, ridge_regression),
]


class Repa(nnx.Module):
    """A denoiser whose layer is to look like what a frozen encoder sees."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.relu)
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.last = nnx.Linear(8, 8, rngs=rngs)
        self.match = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return self.of_features(x, self.encoder(x), key)

    def of_features(self, x: jax.Array, seen: jax.Array, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, x.shape)
        h = nnx.relu(self.first(x + noise))
        aligned = jnp.mean((self.match(h) - seen) ** 2)
        return jnp.mean((self.last(h) - noise) ** 2) + 0.5 * aligned
