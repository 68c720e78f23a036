"""``python -m flax_sg demo`` trains three parts of a model, each by its own loss.

The model (``model.py``) comes from google/flax issue #1857. The data (``data.py``) are
scikit-learn's handwritten digits. The demo prints which loss trains which part, by
``sg.gradient_flow``. It compares all gradients with the same program written by hand.

Every part has to learn. To show that, the demo trains the model four times, from the
same weights on the same batches: once as a whole, and once with each part frozen.
Held-out accuracy after 500 steps, for seeds of ``data.load``:

======  =================  ==========  ===========  ==================
seed    every part learns  gln frozen  code frozen  explanation frozen
======  =================  ==========  ===========  ==================
0       0.964              0.092       0.533        0.653
1       0.944              0.114       0.550        0.608
2       0.917              0.111       0.594        0.667
3       0.956              0.103       0.544        0.581
======  =================  ==========  ===========  ==================

(flax 0.12.8, jax 0.10.2 on CPU.)
"""

from __future__ import annotations

import argparse
import functools
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_sg.demo import data
from flax_sg.demo.model import MODULES, PARTS, DigitModel, infer, infer_by_hand
from flax_sg.flow import GradientFlow, gradient_flow
from flax_sg.optim.freezing import freeze

Params = Mapping[str, Any]
Claims = dict[str, bool]

STEPS = 500
BATCH_SIZE = 128
# The name of each training run, by the frozen part.
RUNS = {None: 'every part learns', **{part: f'{part} frozen' for part in PARTS}}


def main(argv: Sequence[str]) -> int:
    """Trains the model, measures, prints.

    Args:
        argv: ``[--steps N]``.

    Returns:
        The exit status: 0 if every claim of the demo holds, 1 otherwise. With
        ``--steps`` the demo makes no claim about accuracy.

    Raises:
        ModuleNotFoundError: if scikit-learn is not installed.
    """
    parser = argparse.ArgumentParser('python -m flax_sg demo')
    parser.add_argument('--steps', metavar='N', type=int)
    steps = parser.parse_args(argv).steps
    if steps is not None and steps < 1:
        parser.error(f'argument --steps: expected 1 or more, got {steps}')
    began = time.perf_counter()
    digits, held_out = data.load()
    print('Three losses, each of which trains its own part of a model:')
    print('code compresses digits, explanation draws codes, gln reads the drawings.')
    print('Each part is then frozen in turn. Accuracy on held-out digits:\n')
    model = DigitModel()
    params, trained, accuracies = initial(model), list[Params](), list[float]()
    for frozen, name in RUNS.items():
        trained.append(train(model, params, digits, steps or STEPS, frozen))
        accuracies.append(accuracy(model, trained[-1], held_out))
        print(f'{name:18}  accuracy {accuracies[-1]:.3f}', flush=True)
    batch = data.Digits(digits.images[:BATCH_SIZE], digits.labels[:BATCH_SIZE])
    flow, claims = measure(model, trained[0], batch)
    print('\nWhich loss trains which module, by sg.gradient_flow:')
    print(flow.table(depth=1, width=80) + '\n')
    if steps is None:
        whole, *frozen = accuracies
        claims |= {
            f'Held-out digits recognised: {whole:.3f} (0.9 required).': whole >= 0.9,
            f'At most {max(frozen):.3f} if a part is frozen.': max(frozen) < 0.9,
        }
    for text, holds in claims.items():
        verdict = 'ok' if holds else 'FAILED'
        print(textwrap.fill(f'{verdict:6}  {text}', 80, subsequent_indent=' ' * 8))
    print(f'{time.perf_counter() - began:.0f} s')
    return int(not all(claims.values()))


def initial(model: DigitModel) -> Params:
    """Returns the initial parameters."""
    rngs = {'params': jax.random.key(0), 'sampler': jax.random.key(1)}
    return jax.jit(model.init)(rngs, jnp.zeros((1, 64)))['params']


def train(
    model: DigitModel,
    params: Params,
    digits: data.Digits,
    steps: int,
    frozen: str | None = None,
) -> Params:
    """Trains a model with Adam, and returns its parameters.

    One ``jax.grad`` call differentiates the sum of the three losses.

    Args:
        model: the model.
        params: its initial parameters.
        digits: the digits to learn from.
        steps: the number of steps.
        frozen: the part of ``PARTS`` to freeze, if any.
    """
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    if frozen is not None:
        tx = freeze(tx, PARTS[frozen])

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state = state
        images, labels, number = batch
        key = jax.random.fold_in(jax.random.key(3), number)

        def total(params: Params) -> Any:
            _, losses = infer(model, params, images, labels, key)
            return losses.gln + losses.code + losses.explanation

        updates, opt_state = tx.update(jax.grad(total)(params), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    chosen = np.random.default_rng(2).integers(
        len(digits.labels), size=(steps, BATCH_SIZE)
    )
    batches = digits.images[chosen], digits.labels[chosen], np.arange(steps)
    all_steps = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches)[0])
    return all_steps((params, tx.init(params)), batches)[0]


@functools.partial(jax.jit, static_argnums=0)
def read(model: DigitModel, params: Params, images: Any) -> jax.Array:
    """Returns logits of images, with fixed noise in the sampler."""
    rngs = {'sampler': jax.random.key(4)}
    return model.apply({'params': params}, images, rngs=rngs)[0]


def accuracy(model: DigitModel, params: Params, held_out: data.Digits) -> float:
    """Returns the share of digits that the model reads correctly."""
    answers = np.argmax(read(model, params, held_out.images), axis=-1)
    return float(np.mean(answers == held_out.labels))


def measure(
    model: DigitModel, params: Params, batch: data.Digits
) -> tuple[GradientFlow, Claims]:
    """Measures which loss trains which part; compares with the program by hand.

    Returns:
        The gradient flow of the traced program; and the claims of the demo, each with
        whether it holds.
    """
    ours = grads, _ = gradients(infer, model, params, batch)
    by_hand = gradients(infer_by_hand, model, params, batch)

    def losses(params: Params) -> Any:
        return infer(model, params, *batch, jax.random.key(5))[1]

    flow = gradient_flow(losses, params)
    flows = [[nonzero(x) for x in jax.tree.leaves(grads[loss][0])] for loss in PARTS]
    trains = [
        [nonzero([grads[loss][0][name] for name in part]) for part in MODULES.values()]
        for loss in PARTS
    ]
    to_params, to_images = map(nonzero, grads['codes'])
    claims = {
        'Each loss trains its own part, and nothing else at all.': np.array_equal(
            trains, np.eye(3)
        ),
        f'sg.gradient_flow finds which of {np.size(flows)} gradients are zero.': (
            np.array_equal(np.array(flow.status) == 'flows', flows)
        ),
        f'All {len(bits(ours))} arrays of values and gradients are, to the last bit, '
        'those of the program by hand, with copies of weights.': (
            bits(ours) == bits(by_hand)
        ),
        'The codes of the stopped inference pass send a gradient to the observation, '
        'and none to a parameter.': to_images and not to_params,
    }
    return flow, claims


def gradients(
    infer: Callable[..., Any], model: DigitModel, params: Params, batch: data.Digits
) -> Any:
    """Computes all gradients of a program with a single compilation.

    Returns:
        Gradients with respect to parameters and images, by name: each loss in
        ``PARTS``, and the ``'codes'`` (the result of the inference pass). And what
        ``infer`` returns.
    """

    def outputs(params: Params, images: jax.Array) -> Any:
        values = infer(model, params, images, batch.labels, jax.random.key(5))
        code, losses = values
        return {**losses._asdict(), 'codes': jnp.sum(code)}, values

    jacobian = jax.jit(jax.jacrev(outputs, argnums=(0, 1), has_aux=True))
    return jacobian(params, batch.images)


def nonzero(tree: Any) -> bool:
    """Whether any value in a tree of arrays is nonzero."""
    return any(bool(np.any(leaf)) for leaf in jax.tree.leaves(tree))


def bits(tree: Any) -> list[bytes]:
    """Returns the bytes of each array in a tree.

    >>> bits(np.zeros(2)) == bits(-np.zeros(2))
    False
    """
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
