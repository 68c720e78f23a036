"""The demo: what it claims holds, and each of its claims can fail."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import oracle
from flax_sg import demo
from flax_sg.demo import data
from flax_sg.demo import model as models

SIZE = {'code_size': 3, 'hidden': 8, 'sampler_steps': 4}
SMALL = models.DigitModel(**SIZE)
OWN_PART, REPORT, BY_HAND, CODES, SCANS = range(5)


@pytest.fixture(scope='module')
def batch() -> data.Digits:
    images, labels = data.load()[0]
    return data.Digits(images[:16], labels[:16])


@pytest.fixture(scope='module')
def params():
    return demo.initial(SMALL)


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> Any:
    """One run of the whole demo with few steps: what is printed, drawn and trained."""
    out = tmp_path_factory.mktemp('demo') / 'new' / 'folder'
    printed, trained, train = io.StringIO(), {}, demo.train

    def noted(model, params, digits, steps, frozen):
        trained[frozen] = train(model, params, digits, steps, frozen)
        return trained[frozen]

    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion('standard'),
        contextlib.redirect_stdout(printed),
    ):
        patch.setattr(demo, 'train', noted)
        assert demo.main(['--steps', '150', '--out', str(out)]) == 0
    text = printed.getvalue().replace(str(out), 'OUT')
    return text, (out / 'flax_sg_demo.png').read_bytes(), trained


def test_what_the_demo_prints_and_draws(whole):
    printed, picture, _ = whole
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    # All claims hold. With --steps nothing is claimed of accuracy.
    assert len([line for line in lines if line.startswith('ok ')]) == 5
    # The table marks what is exactly zero.
    rows = re.findall(
        r'^ +(gln|code|explanation) +([x0]) +([x0]) +([x0])$', printed, re.M
    )
    assert rows == [
        ('gln', 'x', '0', '0'),
        ('code', '0', 'x', '0'),
        ('explanation', '0', '0', 'x'),
    ]
    assert picture.startswith(b'\x89PNG')
    assert 'OUT/flax_sg_demo.png' in printed


def test_digits_are_recognised_only_if_every_part_learns(whole):
    found = re.findall(r'^(\w.*?) +accuracy (0\.\d{3})$', whole[0], re.M)
    assert [name for name, _ in found] == list(demo.RUNS.values())
    everything, *frozen = (float(accuracy) for _, accuracy in found)
    assert everything > 0.85
    assert max(frozen) < 0.75


def test_a_frozen_part_does_not_move_and_the_others_do(whole):
    initial = demo.initial(models.DigitModel())
    for frozen, params in whole[2].items():
        still = {n for n in initial if demo.bits(params[n]) == demo.bits(initial[n])}
        assert still == set(models.MODULES[frozen] if frozen else ())


def test_the_report_names_what_each_loss_trains(params, batch):
    flow, trains, claims = demo.measure(SMALL, params, batch)
    assert {row.name: row.cells for row in flow.matrix(depth=1).rows} == {
        'code_message': ('stopped', 'flows', 'stopped'),
        'code_step': ('stopped', 'flows', 'stopped'),
        'explanation': ('stopped', 'stopped', 'flows'),
        'gln_0': ('flows', 'stopped', 'stopped'),
        'gln_1': ('flows', 'unused', 'unused'),  # Only labels are read with it.
    }
    np.testing.assert_array_equal(trains, np.eye(3, dtype=bool))
    assert all(claims.values())
    # Codes and three losses; five gradients of all parameters and the observation.
    compared = 4 + 5 * (len(jax.tree.leaves(params)) + 1)
    assert f'All {compared} arrays' in list(claims)[BY_HAND]


class NoBlocks(models.DigitModel):
    def infer(self, observation, label):
        code = self.sample(observation)
        return code, models.Losses(
            self.gln_loss(code, observation, label),
            self.code_loss(code, observation),
            self.explanation_loss(code, observation),
        )


class StoppedInputs(models.DigitModel):
    """No gradient reaches the observation."""

    def infer(self, observation, label):
        return super().infer(jax.lax.stop_gradient(observation), label)


class TwoSamples(models.DigitModel):
    def infer(self, observation, label):
        _, losses = super().infer(observation, label)
        return self.sample(observation), losses


class StoppedLoss(models.DigitModel):
    """The loss of the codes trains nothing."""

    def infer(self, observation, label):
        code, losses = super().infer(observation, label)
        return code, losses._replace(code=jax.lax.stop_gradient(losses.code))


@pytest.mark.parametrize(
    ('model', 'failing'),
    [
        (NoBlocks, {OWN_PART, BY_HAND, CODES, SCANS}),
        pytest.param(StoppedInputs, {BY_HAND, CODES}, marks=pytest.mark.long),
        pytest.param(TwoSamples, {BY_HAND, CODES, SCANS}, marks=pytest.mark.long),
        pytest.param(StoppedLoss, {OWN_PART, BY_HAND}, marks=pytest.mark.long),
    ],
)
def test_the_claims_fail_of_another_model(params, batch, model, failing):
    _, _, claims = demo.measure(model(**SIZE), params, batch)
    assert {n for n, holds in enumerate(claims.values()) if not holds} == failing


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
    _, _, claims = demo.measure(SMALL, params, batch)
    failing = {n for n, holds in enumerate(claims.values()) if not holds}
    assert failing == {REPORT, BY_HAND}


@pytest.mark.parametrize(
    ('accuracies', 'holds'),
    [
        ((0.95, 0.1, 0.5, 0.6), [True, True]),
        ((0.89, 0.1, 0.5, 0.6), [False, True]),
        ((0.95, 0.1, 0.91, 0.6), [True, False]),
    ],
)
def test_the_accuracies_required(accuracies, holds):
    assert list(demo.accuracy_claims(accuracies).values()) == holds


def test_the_status_is_1_if_a_claim_fails(tmp_path, capsys, monkeypatch):
    measured = demo.measure

    def measure(*args):
        flow, trains, claims = measured(*args)
        return flow, trains, {**claims, 'Pigs fly.': False}

    monkeypatch.setattr(demo, 'DigitModel', lambda: SMALL)
    monkeypatch.setattr(demo, 'train', lambda model, params, *_: params)
    monkeypatch.setattr(demo, 'measure', measure)
    assert demo.main(['--out', str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert '\nFAILED  Pigs fly.\n' in out
    assert '\nFAILED  Held-out digits recognised: ' in out  # None has learned.


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


@pytest.mark.every_case
@pytest.mark.parametrize('package', ['sklearn', 'matplotlib'])
def test_a_missing_package_is_named_before_training(
    tmp_path: Path, monkeypatch, package
):
    for name in [name for name in sys.modules if name.partition('.')[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError) as info:
        demo.main(['--out', str(tmp_path / 'out')])
    assert info.value.name == package
    assert str(info.value) == (
        f'The demo needs {package}, which is not installed. '
        "Install what it needs with: pip install 'flax_sg[demo]'"
    )
    assert not (tmp_path / 'out').exists()


def test_the_packages_of_the_demo_are_imported_late():
    code = (
        'import sys, flax_sg.demo;'
        'print([name for name in ("sklearn", "matplotlib") if name in sys.modules])'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, check=True
    )
    assert done.stdout == '[]\n'
