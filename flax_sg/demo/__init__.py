"""``python -m flax_sg demo``: three losses, each of which trains its part of a model.

The demo trains the model of google/flax issue #1857 (``model.py``) on scikit-learn's
handwritten digits (``data.py``): one ``infer`` with an inference pass that trains
nothing, an expensive sampler that runs once, and three losses. It prints which loss
trains which part, by ``sg.gradient_flow`` and by real gradients, and compares these
with the same program written by hand.

That every part has to learn is not taken for granted: the model is trained four times,
from the same weights on the same batches, once as a whole and once with each part
frozen. Held-out accuracy after 1000 steps, for seeds of ``data.load``:

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from flax_sg.demo import data
from flax_sg.demo.model import MODULES, PARTS, DigitModel, infer, infer_by_hand
from flax_sg.flow import GradientFlow, gradient_flow
from flax_sg.optim import freeze

Params = Mapping[str, Any]
Claims = dict[str, bool | None]

STEPS = 1000
BATCH_SIZE = 128
POINTS = 50  # of a learning curve
COLORS = {'gln': '#0072b2', 'code': '#d55e00', 'explanation': '#009e73'}


class Run(NamedTuple):
    """What one training left behind.

    Attributes:
        params: the trained parameters.
        steps: after which steps losses and accuracy were taken.
        losses: ``[len(steps), 3]``, each a mean since the point before, as ``Losses``.
        accuracy: ``[len(steps)]``, on held-out digits.
    """

    params: Params
    steps: list[int]
    losses: NDArray[np.float32]
    accuracy: list[float]


Runs = dict[str | None, Run]  # by what was frozen


def main(argv: Sequence[str]) -> int:
    """Trains the model, measures, prints, draws.

    Args:
        argv: ``[--out DIR] [--steps N]``.

    Returns:
        The exit status: 0 if everything holds that the demo claims, 1 otherwise. With
        ``--steps`` accuracy is reported, and no accuracy is required.

    Raises:
        ModuleNotFoundError: if scikit-learn or matplotlib is not installed.
    """
    parser = argparse.ArgumentParser('python -m flax_sg demo')
    parser.add_argument('--out', metavar='DIR', type=Path, default=Path())
    parser.add_argument('--steps', metavar='N', type=int)
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f'argument --steps: expected 1 or more, got {options.steps}')
    # A missing package is named before anything takes time.
    digits, held_out = data.load()
    data.optional('matplotlib')
    options.out.mkdir(parents=True, exist_ok=True)

    began = time.perf_counter()
    print('Three losses, each of which trains its own part of a model:')
    print('code compresses digits, explanation draws codes, gln reads the drawings.')
    print('Each part is then frozen in turn. Accuracy on held-out digits:\n')
    model, runs = DigitModel(), Runs()
    params = initial(model)
    for frozen in (None, *PARTS):
        run = train(model, params, (digits, held_out), options.steps or STEPS, frozen)
        print(f'{title(frozen):18}  accuracy {run.accuracy[-1]:.3f}', flush=True)
        runs[frozen] = run
    params = runs[None].params
    batch = data.Digits(digits.images[:BATCH_SIZE], digits.labels[:BATCH_SIZE])
    flow, trains, claims = measure(model, params, batch)
    print('\nWhich loss trains which module, by sg.gradient_flow:')
    print(flow.table(depth=1, width=80))
    print('\nGradients of each loss (x: some are not zero, 0: all are exactly zero):')
    print(''.join(f'{name:>14}' for name in ('', *PARTS)))
    for loss, row in zip(PARTS, trains, strict=True):
        cells = ''.join(f'{"x" if cell else "0":>14}' for cell in row)
        print(f'{loss:>14}{cells}')
    print()
    claims |= accuracy_claims(runs, required=options.steps is None)
    for text, holds in claims.items():
        verdict = {True: 'ok', False: 'FAILED', None: '-'}[holds]
        print(textwrap.fill(f'{verdict:6}  {text}', 80, subsequent_indent=' ' * 8))
    path = options.out / 'flax_sg_demo.png'
    draw(path, runs, flow, held_out, read(model, params, held_out.images))
    print(f'\nLearning curves and digits: {path}')
    print(f'{time.perf_counter() - began:.0f} s')
    return int(False in claims.values())


def initial(model: DigitModel) -> Params:
    """Returns the parameters that training begins with."""
    rngs = {'params': jax.random.key(0), 'sampler': jax.random.key(1)}
    return jax.jit(model.init)(rngs, jnp.zeros((1, 64)))['params']


def step_of(model: DigitModel, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns a training step, for ``jax.lax.scan``.

    The step takes one gradient of the sum of the three losses. It takes
    ``(params, opt_state)`` and ``(images, labels, number of the step)``, and returns
    the new ``(params, opt_state)`` and the losses.
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
    model: DigitModel, params: Params, split: Any, steps: int, frozen: str | None = None
) -> Run:
    """Trains a model with Adam.

    Args:
        model: the model.
        params: its initial parameters.
        split: the digits to learn from and the held-out ones, as ``data.load`` returns.
        steps: of training.
        frozen: a part of ``PARTS`` that is not trained.
    """
    (images, labels), held_out = split
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    if frozen is not None:
        tx = freeze(tx, PARTS[frozen])
    several_steps = jax.jit(functools.partial(jax.lax.scan, step_of(model, tx)))
    batches = np.random.default_rng(2).integers(len(labels), size=(steps, BATCH_SIZE))
    state = params, tx.init(params)
    points, curve, accuracy = list[int](), list[Any](), list[float]()
    for part in np.array_split(np.arange(steps), min(steps, POINTS)):
        batch = images[batches[part]], labels[batches[part]], part
        state, losses = several_steps(state, batch)
        points.append(int(part[-1]) + 1)
        curve.append(np.mean(losses, axis=1))
        logits, _ = read(model, state[0], held_out.images)
        accuracy.append(float(np.mean(np.argmax(logits, axis=-1) == held_out.labels)))
    return Run(state[0], points, np.stack(curve), accuracy)


@functools.partial(jax.jit, static_argnums=0)
def read(model: DigitModel, params: Params, images: Any) -> Any:
    """Returns logits and explanations of images, with fixed noise in the sampler."""
    return model.apply({'params': params}, images, rngs={'sampler': jax.random.key(4)})


def measure(
    model: DigitModel, params: Params, batch: data.Digits
) -> tuple[GradientFlow, NDArray[np.bool_], Claims]:
    """Measures which loss trains what, and compares with the program by hand.

    Returns:
        Which loss trains which parameter, as the traced program says; whether a loss
        (row) has a gradient for a part (column); and what the demo claims, each with
        whether it holds.
    """
    args = model, params, batch
    ours, by_hand = gradients(infer, *args), gradients(infer_by_hand, *args)
    unstopped = gradients(functools.partial(infer_by_hand, stop=lambda x: x), *args)

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
        'Without the blocks each of them would train all three parts.': np.array_equal(
            trained_parts(unstopped), np.ones((3, 3))
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
    """Takes all gradients of a program, which is compiled once for all of them.

    Returns:
        Gradients by parameters and by images, of each loss by its name in ``PARTS``, of
        the ``'codes'`` (the result of the inference pass), and of the ``'sum'`` of the
        losses; and what ``infer`` returns as ``'values'``.
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
    """Whether some number in a tree of arrays is not zero."""
    return any(bool(np.any(leaf)) for leaf in jax.tree.leaves(tree))


def bits(tree: Any) -> list[bytes]:
    """The bytes of each array in a tree.

    >>> bits(np.zeros(2)) == bits(-np.zeros(2))
    False
    """
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def accuracy_claims(runs: Runs, required: bool) -> Claims:
    """What is claimed of the accuracies; without ``required`` none of it is decided."""
    whole, *frozen = (run.accuracy[-1] for run in runs.values())
    claims = {
        f'Held-out digits recognised: {whole:.3f} (0.9 required).': whole >= 0.9,
        f'At most {max(frozen):.3f} if a part is frozen.': max(frozen) < 0.9,
    }
    return {text: holds if required else None for text, holds in claims.items()}


def title(frozen: str | None) -> str:
    """What a run is called."""
    return f'{frozen} frozen' if frozen else 'every part learns'


def draw(
    path: Path, runs: Runs, flow: GradientFlow, held_out: data.Digits, reading: Any
) -> None:
    """Draws which loss trains what, learning curves, and digits with explanations."""
    logits, explained = reading
    # Without pyplot no display is opened, and no global state is changed.
    figure = data.optional('matplotlib.figure').Figure((14, 6.4), layout='constrained')
    top, bottom = figure.subfigures(2, 1, height_ratios=[2, 1])
    matrix, losses, accuracy = top.subplots(1, 3)
    flow.draw(matrix, depth=1)
    matrix.set_title('Which loss trains what', pad=10)
    for part, curve in zip(PARTS, runs[None].losses.T, strict=True):
        # The last two losses are nearly the same number, with different gradients.
        style = '--' if part == 'explanation' else '-'
        losses.plot(runs[None].steps, curve, style, color=COLORS[part], label=part)
    losses.set(title='Three losses, one gradient call', xlabel='step', yscale='log')
    for part, run in runs.items():
        color = COLORS[part] if part else 'black'
        accuracy.plot(run.steps, run.accuracy, color=color, label=title(part))
    accuracy.set(title='Held-out accuracy', xlabel='step', ylim=(0, 1.02))
    for axes, place in ((losses, (1, 0.8)), (accuracy, (1, 0.28))):
        axes.legend(loc='center right', bbox_to_anchor=place, frameon=False)
        axes.spines[['top', 'right']].set_visible(False)
    panels = bottom.subplots(2, 10)
    panels[0, 0].set_ylabel('observed', rotation=0, ha='right', va='center')
    panels[1, 0].set_ylabel('explained,\nread as', rotation=0, ha='right', va='center')
    for label, column in enumerate(panels.T):
        # The first held-out digit of each kind.
        shown = int(np.argmax(held_out.labels == label))
        for axes, images in zip(column, (held_out.images, explained), strict=True):
            image = np.reshape(images[shown], (8, 8))
            axes.imshow(image, cmap='gray_r', vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        answer = int(np.argmax(logits[shown]))
        column[1].set_xlabel(answer, color='black' if answer == label else 'red')
    figure.savefig(path, dpi=150, backend='agg')
