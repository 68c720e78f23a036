"""``python -m flax_sg demo`` trains three parts of a model, each by its own loss.

The model (``model.py``) comes from google/flax issue #1857. The data (``data.py``) are
scikit-learn's handwritten digits. The demo prints which loss trains which part, by
``sg.gradient_flow`` and by real gradients. It compares these gradients with the same
program written by hand.

Every part has to learn. To show that, the demo trains the model four times, from the
same weights on the same batches: once as a whole, and once with each part frozen.
Held-out accuracy after 1000 steps, for seeds of ``data.load``:

======  =================  ==========  ===========  ==================
seed    every part learns  gln frozen  code frozen  explanation frozen
======  =================  ==========  ===========  ==================
0       0.972              0.089       0.542        0.692
1       0.958              0.114       0.564        0.658
2       0.939              0.108       0.583        0.672
3       0.967              0.103       0.547        0.614
======  =================  ==========  ===========  ==================

(flax 0.12.8, jax 0.10.2 on CPU.)
"""

from __future__ import annotations

import argparse
import functools
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from flax_sg.demo import data
from flax_sg.demo.data import NEEDED
from flax_sg.demo.model import MODULES, PARTS, DigitModel, infer, infer_by_hand
from flax_sg.flow import GradientFlow, gradient_flow
from flax_sg.internals import optional
from flax_sg.optim import freeze

Params = Mapping[str, Any]
Claims = dict[str, bool]

STEPS = 1000
BATCH_SIZE = 128
# The name of each training run, by the frozen part.
RUNS = {None: 'every part learns', **{part: f'{part} frozen' for part in PARTS}}


def main(argv: Sequence[str]) -> int:
    """Trains the model, measures, prints, draws.

    Args:
        argv: ``[--out DIR] [--steps N]``.

    Returns:
        The exit status: 0 if every claim of the demo holds, 1 otherwise. With
        ``--steps`` the demo makes no claim about accuracy.

    Raises:
        ModuleNotFoundError: if scikit-learn or matplotlib is not installed.
    """
    parser = argparse.ArgumentParser('python -m flax_sg demo')
    parser.add_argument('--out', metavar='DIR', type=Path, default=Path())
    parser.add_argument('--steps', metavar='N', type=int)
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f'argument --steps: expected 1 or more, got {options.steps}')
    # Report a missing package before the slow training.
    digits, held_out = data.load()
    optional.optional('matplotlib', *NEEDED)
    options.out.mkdir(parents=True, exist_ok=True)

    began = time.perf_counter()
    print('Three losses, each of which trains its own part of a model:')
    print('code compresses digits, explanation draws codes, gln reads the drawings.')
    print('Each part is then frozen in turn. Accuracy on held-out digits:\n')
    model = DigitModel()
    params, trained, readings = initial(model), list[Params](), list[Any]()
    for frozen, name in RUNS.items():
        steps = options.steps or STEPS
        trained.append(train(model, params, digits, steps, frozen))
        readings.append(read(model, trained[-1], held_out.images))
        print(f'{name:18}  accuracy {accuracy(readings[-1], held_out):.3f}', flush=True)
    batch = data.Digits(digits.images[:BATCH_SIZE], digits.labels[:BATCH_SIZE])
    flow, trains, claims = measure(model, trained[0], batch)
    print('\nWhich loss trains which module, by sg.gradient_flow:')
    print(flow.table(depth=1, width=80))
    print('\nGradients of each loss (x: some are not zero, 0: all are exactly zero):')
    print(''.join(f'{name:>14}' for name in ('', *PARTS)))
    for loss, row in zip(PARTS, trains, strict=True):
        print(f'{loss:>14}' + ''.join(f'{"x" if cell else "0":>14}' for cell in row))
    print()
    if options.steps is None:
        claims |= accuracy_claims([accuracy(one, held_out) for one in readings])
    for text, holds in claims.items():
        verdict = 'ok' if holds else 'FAILED'
        print(textwrap.fill(f'{verdict:6}  {text}', 80, subsequent_indent=' ' * 8))
    path = options.out / 'flax_sg_demo.png'
    draw(path, readings, held_out)
    print(f'\nDigits and how each training explains them: {path}')
    print(f'{time.perf_counter() - began:.0f} s')
    return int(not all(claims.values()))


def initial(model: DigitModel) -> Params:
    """Returns the initial parameters."""
    rngs = {'params': jax.random.key(0), 'sampler': jax.random.key(1)}
    return jax.jit(model.init)(rngs, jnp.zeros((1, 64)))['params']


def step_of(model: DigitModel, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns a training step, for ``jax.lax.scan``.

    The step takes ``(params, opt_state)`` and ``(images, labels, number of the step)``.
    It returns the new ``(params, opt_state)`` and the losses. One ``jax.grad`` call
    differentiates the sum of the three losses.
    """

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        images, labels, number = batch
        key = jax.random.fold_in(jax.random.key(3), number)

        def total(params: Params) -> tuple[Any, Any]:
            _, losses = infer(model, params, images, labels, key)
            return losses.gln + losses.code + losses.explanation, losses

        grads, losses = jax.grad(total, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses

    return step


def train(
    model: DigitModel,
    params: Params,
    digits: data.Digits,
    steps: int,
    frozen: str | None = None,
) -> Params:
    """Trains a model with Adam, and returns its parameters.

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
    chosen = np.random.default_rng(2).integers(
        len(digits.labels), size=(steps, BATCH_SIZE)
    )
    batches = digits.images[chosen], digits.labels[chosen], np.arange(steps)
    all_steps = jax.jit(functools.partial(jax.lax.scan, step_of(model, tx)))
    (params, _), _ = all_steps((params, tx.init(params)), batches)
    return params


@functools.partial(jax.jit, static_argnums=0)
def read(model: DigitModel, params: Params, images: Any) -> Any:
    """Returns logits and explanations of images, with fixed noise in the sampler."""
    return model.apply({'params': params}, images, rngs={'sampler': jax.random.key(4)})


def accuracy(reading: Any, held_out: data.Digits) -> float:
    """Returns the share of digits that the model reads correctly."""
    logits, _ = reading
    return float(np.mean(np.argmax(logits, axis=-1) == held_out.labels))


def measure(
    model: DigitModel, params: Params, batch: data.Digits
) -> tuple[GradientFlow, NDArray[np.bool_], Claims]:
    """Measures which loss trains which part; compares with the program by hand.

    Returns:
        The gradient flow of the traced program; whether a loss (row) has a gradient
        for a part (column); and the claims of the demo, each with whether it holds.
    """
    args = model, params, batch
    ours, by_hand = gradients(infer, *args), gradients(infer_by_hand, *args)

    def losses(params: Params) -> Any:
        return infer(model, params, *batch, jax.random.key(5))[1]

    flow = gradient_flow(losses, params)
    flows = [[nonzero(x) for x in jax.tree.leaves(ours[loss][0])] for loss in PARTS]
    to_params, to_images = map(nonzero, ours['codes'])
    step = jax.make_jaxpr(jax.grad(lambda params: sum(losses(params))))(params)
    claims: Claims = {
        'Each loss trains its own part, and nothing else at all.': np.array_equal(
            trained_parts(ours), np.eye(3)
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
        'The sampler runs once: a training step has one scan.': (
            str(step).count(' scan[') == 1
        ),
    }
    return flow, trained_parts(ours), claims


def gradients(
    infer: Callable[..., Any], model: DigitModel, params: Params, batch: data.Digits
) -> dict[str, Any]:
    """Computes all gradients of a program with a single compilation.

    Returns:
        Gradients with respect to parameters and images, by name: each loss in
        ``PARTS``, the ``'codes'`` (the result of the inference pass), and the ``'sum'``
        of the losses. ``'values'`` is what ``infer`` returns.
    """

    def weighted(params: Params, images: jax.Array, weights: jax.Array) -> Any:
        values = infer(model, params, images, batch.labels, jax.random.key(5))
        code, losses = values
        return jnp.dot(weights, jnp.stack([*losses, jnp.sum(code)])), values

    grad = jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))
    of_sum, values = grad(params, batch.images, np.array([1, 1, 1, 0], np.float32))
    weights = zip([*PARTS, 'codes'], np.eye(4, dtype=np.float32), strict=True)
    alone = {name: grad(params, batch.images, weight)[0] for name, weight in weights}
    return {'values': values, 'sum': of_sum, **alone}


def trained_parts(grads: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Whether a loss (row) has a gradient for a part (column), as in ``PARTS``."""
    by_params = [grads[loss][0] for loss in PARTS]
    parts = MODULES.values()
    return np.array([[nonzero([g[m] for m in p]) for p in parts] for g in by_params])


def nonzero(tree: Any) -> bool:
    """Whether any value in a tree of arrays is nonzero."""
    return any(bool(np.any(leaf)) for leaf in jax.tree.leaves(tree))


def bits(tree: Any) -> list[bytes]:
    """Returns the bytes of each array in a tree.

    >>> bits(np.zeros(2)) == bits(-np.zeros(2))
    False
    """
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def accuracy_claims(accuracies: Sequence[float]) -> Claims:
    """Returns the claims about accuracies, which are in the order of ``RUNS``."""
    whole, *frozen = accuracies
    return {
        f'Held-out digits recognised: {whole:.3f} (0.9 required).': whole >= 0.9,
        f'At most {max(frozen):.3f} if a part is frozen.': max(frozen) < 0.9,
    }


def draw(path: Path, readings: Sequence[Any], held_out: data.Digits) -> None:
    """Draws held-out digits, and how each training explains and reads them."""
    # Figure instead of pyplot: pyplot opens a display and has global state.
    figure_type = optional.optional('matplotlib.figure', *NEEDED).Figure
    figure = figure_type((7.5, 4.8), layout='constrained')
    rows = figure.subplots(1 + len(readings), 10)
    # The first held-out image of each digit.
    shown = [int(np.argmax(held_out.labels == label)) for label in range(10)]
    pictures = [held_out.images, *(explained for _, explained in readings)]
    names = 'observed', *RUNS.values()
    for row, name, images in zip(rows, names, pictures, strict=True):
        row[0].set_ylabel(name, rotation=0, ha='right', va='center')
        for axes, number in zip(row, shown, strict=True):
            image = np.reshape(images[number], (8, 8))
            axes.imshow(image, cmap='gray_r', vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    for row, (logits, _) in zip(rows[1:], readings, strict=True):
        for label, (axes, number) in enumerate(zip(row, shown, strict=True)):
            answer = int(np.argmax(logits[number]))
            axes.set_xlabel(answer, color='black' if answer == label else 'red')
    figure.suptitle('How each training explains digits, and what it reads', x=0.5)
    figure.savefig(path, dpi=150, backend='agg')
