"""The demo: what it claims holds, and each of its claims can fail."""

import contextlib
import io
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest

import oracle
from flax_sg import demo
from flax_sg.demo import data
from flax_sg.demo import model as models

SIZE = {'code_size': 3, 'hidden': 8, 'sampler_steps': 2}
SMALL = models.DigitModel(**SIZE)
OWN_PART, REPORT, BY_HAND, CODES = range(4)


@pytest.fixture(scope='module')
def batch() -> data.Digits:
    images, labels = data.load()[0]
    return data.Digits(images[:16], labels[:16])


@pytest.fixture(scope='module')
def params():
    return demo.initial(SMALL)


@pytest.fixture(scope='module')
def measured(params, batch) -> Any:
    return demo.measure(SMALL, params, batch)


def test_a_run_of_the_demo(measured, monkeypatch):
    printed, trained, train = io.StringIO(), {}, demo.train

    def noted(model, params, digits, steps, frozen):
        trained[None] = params
        trained[frozen or 'whole'] = train(model, params, digits, steps, frozen)
        return trained[frozen or 'whole']

    monkeypatch.setattr(demo, 'train', noted)
    monkeypatch.setattr(demo, 'DigitModel', lambda: SMALL)
    monkeypatch.setattr(demo, 'RUNS', {None: 'all learn', 'code': 'code frozen'})
    monkeypatch.setattr(demo, 'measure', lambda *_: measured)
    with jax.numpy_dtype_promotion('standard'), contextlib.redirect_stdout(printed):
        assert demo.main(['--steps', '3']) == 0
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    # All claims hold. With --steps nothing is claimed of accuracy.
    assert len([line for line in lines if line.startswith('ok ')]) == 4
    runs = [line.partition('  ')[0] for line in lines if '  accuracy 0.' in line]
    assert runs == list(demo.RUNS.values())
    initial = trained.pop(None)
    for frozen, params in trained.items():
        still = {n for n in initial if demo.bits(params[n]) == demo.bits(initial[n])}
        assert still == set(models.MODULES.get(frozen, ()))


def test_the_report_names_what_each_loss_trains(measured, params):
    flow, claims = measured
    assert {row.name: row.cells for row in flow.matrix(depth=1).rows} == {
        'code_message': ('stopped', 'flows', 'stopped'),
        'code_step': ('stopped', 'flows', 'stopped'),
        'explanation': ('stopped', 'stopped', 'flows'),
        'gln_0': ('flows', 'stopped', 'stopped'),
        'gln_1': ('flows', 'unused', 'unused'),  # Only labels are read with it.
    }
    assert all(claims.values())
    # Codes and three losses; four gradients of all parameters and the observation.
    compared = 4 + 4 * (len(jax.tree.leaves(params)) + 1)
    assert f'All {compared} arrays' in list(claims)[BY_HAND]


class NoBlocks(models.DigitModel):
    def infer(self, observation, label):
        code = self.sample(observation)
        return code, models.Losses(
            self.gln_loss(code, observation, label),
            self.code_loss(code, observation),
            self.explanation_loss(code, observation),
        )


def failing(model: Any, params: Any, batch: Any) -> set[int]:
    _, claims = demo.measure(model, params, batch)
    return {n for n, holds in enumerate(claims.values()) if not holds}


def test_the_claims_fail_of_another_model(params, batch):
    expected = {OWN_PART, BY_HAND, CODES}
    assert failing(NoBlocks(**SIZE), params, batch) == expected


def test_a_report_and_a_program_by_hand_that_are_wrong_are_found_out(
    params, batch, monkeypatch
):
    report, by_hand = demo.gradient_flow, demo.infer_by_hand

    def of_no_blocks(_, params):
        def losses(params):
            model = NoBlocks(**SIZE)
            return demo.infer(model, params, *batch, jax.random.key(5))[1]

        return report(losses, params)

    def stopped(model, params, *args):
        stopped = {'gln_1': jax.lax.stop_gradient(params['gln_1'])}
        return by_hand(model, {**params, **stopped}, *args)

    monkeypatch.setattr(demo, 'gradient_flow', of_no_blocks)
    monkeypatch.setattr(demo, 'infer_by_hand', stopped)
    assert failing(SMALL, params, batch) == {REPORT, BY_HAND}


@pytest.mark.parametrize(
    ('accuracies', 'fail'),
    [
        ((0.95, 0.1, 0.5, 0.6), []),
        ((0.89, 0.1, 0.5, 0.6), ['Held-out digits recognised: 0.890']),
        ((0.95, 0.1, 0.91, 0.6), ['At most 0.910 if a part is frozen.']),
    ],
)
def test_the_accuracies_required(accuracies, fail, params, capsys, monkeypatch):
    given = iter(accuracies)
    flow = demo.gradient_flow(lambda p: p, 1.0)
    monkeypatch.setattr(demo, 'initial', lambda model: params)
    monkeypatch.setattr(demo, 'train', lambda model, params, *_: params)
    monkeypatch.setattr(demo, 'accuracy', lambda *_: next(given))
    monkeypatch.setattr(demo, 'measure', lambda *_: (flow, {'Pigs fly.': True}))
    assert demo.main([]) == bool(fail)
    lines = capsys.readouterr().out.splitlines()
    failed = [line.removeprefix('FAILED  ') for line in lines if 'FAILED' in line]
    assert [line[: len(text)] for line, text in zip(failed, fail, strict=True)] == fail


@pytest.mark.usefixtures('standard_promotion')
def test_training_is_that_of_the_program_by_hand(params, batch):
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, 3))

    def step(state, batch):
        params, opt_state = state
        images, labels, number = batch

        def total(params):
            key = jax.random.fold_in(jax.random.key(3), number)
            return sum(models.infer_by_hand(SMALL, params, images, labels, key)[1])

        updates, opt_state = tx.update(jax.grad(total)(params), opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    chosen = np.random.default_rng(2).integers(16, size=(3, demo.BATCH_SIZE))
    batches = batch.images[chosen], batch.labels[chosen], np.arange(3)
    scan = jax.jit(lambda *args: jax.lax.scan(step, *args))
    (expected, _), _ = scan((params, tx.init(params)), batches)
    oracle.assert_same(demo.train(SMALL, params, batch, 3), expected)


def test_sklearn_is_imported_late_and_its_lack_is_said(monkeypatch):
    code = 'import sys, flax_sg.demo; print("sklearn" in sys.modules)'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stdout == 'False\n'
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    with pytest.raises(ModuleNotFoundError) as info:
        demo.main([])
    assert str(info.value) == (
        'The demo needs sklearn, which is not installed. '
        "Install what it needs with: pip install 'flax_sg[demo]'"
    )
