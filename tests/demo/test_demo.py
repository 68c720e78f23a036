"""The demo: what it claims holds, and each of its claims can fail."""

import contextlib
import io
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

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
OWN_PART, REPORT, UNSTOPPED, BY_HAND, CODES, SCANS = 0, 1, 2, 3, 4, 5


@pytest.fixture(scope='module')
def batch() -> data.Digits:
    images, labels = data.load()[0]
    return data.Digits(images[:16], labels[:16])


@pytest.fixture(scope='module')
def params():
    return demo.initial(SMALL)


class Whole(NamedTuple):
    """One run of the whole demo, with few steps."""

    status: int
    printed: str
    picture: bytes
    runs: dict[str | None, demo.Run]


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> Whole:
    out = tmp_path_factory.mktemp('demo') / 'new' / 'folder'
    printed, runs, trained = io.StringIO(), {}, demo.train

    def train(model, params, split, steps, frozen):
        runs[frozen] = trained(model, params, split, steps, frozen)
        return runs[frozen]

    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion('standard'),
        contextlib.redirect_stdout(printed),
    ):
        patch.setattr(demo, 'POINTS', 2)
        patch.setattr(demo, 'train', train)
        status = demo.main(['--steps', '150', '--out', str(out)])
    text = printed.getvalue().replace(str(out), 'OUT')
    return Whole(status, text, (out / 'flax_sg_demo.png').read_bytes(), runs)


def test_all_claims_hold_and_are_printed(whole):
    assert whole.status == 0
    lines = whole.printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith('ok ')]) == 6
    # With --steps no accuracy is required.
    assert len([line for line in lines if re.match('-  +[A-Z]', line)]) == 2
    for part in models.PARTS:
        assert part in lines[1]


def test_the_table_marks_what_is_exactly_zero(whole):
    rows = re.findall(
        r'^ +(?:gln|code|explanation) +([x0]) +([x0]) +([x0])$', whole.printed, re.M
    )
    assert rows == [('x', '0', '0'), ('0', 'x', '0'), ('0', '0', 'x')]


def test_each_training_is_printed_with_its_accuracy(whole):
    names = ['every part learns', *(f'{part} frozen' for part in models.PARTS)]
    for name, run in zip(names, whole.runs.values(), strict=True):
        assert f'\n{name:18}  accuracy {run.accuracy[-1]:.3f}\n' in whole.printed


def test_digits_are_recognised_only_if_every_part_learns(whole):
    accuracy = {frozen: run.accuracy[-1] for frozen, run in whole.runs.items()}
    assert accuracy.pop(None) > 0.85
    assert set(accuracy) == set(models.PARTS)
    assert max(accuracy.values()) < 0.75


def test_a_frozen_part_does_not_move_and_the_others_do(whole):
    initial = demo.initial(models.DigitModel())
    for frozen, run in whole.runs.items():
        still = {
            n for n in initial if demo.bits(run.params[n]) == demo.bits(initial[n])
        }
        assert still == set(models.MODULES[frozen] if frozen else ())


def test_a_learning_curve_ends_with_the_last_step(whole):
    for run in whole.runs.values():
        assert run.steps == [75, 150]
        assert run.losses.shape == (2, 3)
        assert len(run.accuracy) == 2


def test_the_picture_is_saved_and_its_path_printed(whole):
    assert whole.picture.startswith(b'\x89PNG')
    assert struct.unpack('>II', whole.picture[16:24]) == (2100, 960)
    assert 'OUT/flax_sg_demo.png' in whole.printed


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


class NothingToTrain(models.DigitModel):
    """What reads the codes has no gradient, with blocks and without."""

    def improve(self, code, observation):
        return jax.lax.stop_gradient(super().improve(code, observation))


@pytest.mark.parametrize(
    ('model', 'failing'),
    [
        (NoBlocks, {OWN_PART, BY_HAND, CODES, SCANS}),
        (StoppedInputs, {BY_HAND, CODES}),
        (TwoSamples, {BY_HAND, CODES, SCANS}),
        (StoppedLoss, {OWN_PART, BY_HAND}),
        (NothingToTrain, {UNSTOPPED, CODES}),
    ],
)
def test_the_claims_fail_of_another_model(params, batch, model, failing):
    _, _, claims = demo.measure(model(**SIZE), params, batch)
    assert {n for n, holds in enumerate(claims.values()) if not holds} == failing


def test_a_report_of_another_program_is_found_out(params, batch, monkeypatch):
    report = demo.gradient_flow

    def of_no_blocks(_, params):
        def losses(params):
            model = NoBlocks(**SIZE)
            return demo.infer(model, params, *batch, jax.random.key(5))[1]

        return report(losses, params)

    monkeypatch.setattr(demo, 'gradient_flow', of_no_blocks)
    _, _, claims = demo.measure(SMALL, params, batch)
    assert [holds for holds in claims.values()] == [n != REPORT for n in range(6)]


def test_a_program_by_hand_with_a_stop_too_many_is_found_out(
    params, batch, monkeypatch
):
    by_hand = demo.infer_by_hand

    def wrong(model, params, *args, stop=jax.lax.stop_gradient):
        stopped = {'gln_1': jax.tree.map(stop, params['gln_1'])}
        return by_hand(model, {**params, **stopped}, *args, stop=stop)

    monkeypatch.setattr(demo, 'infer_by_hand', wrong)
    _, _, claims = demo.measure(SMALL, params, batch)
    assert [holds for holds in claims.values()] == [n != BY_HAND for n in range(6)]


def runs_of(*accuracies: float) -> Any:
    runs = [demo.Run({}, [1], np.ones((1, 3)), [value]) for value in accuracies]
    return dict(zip((None, *models.PARTS), runs, strict=True))


@pytest.mark.parametrize(
    ('accuracies', 'holds'),
    [
        ((0.95, 0.1, 0.5, 0.6), [True, True]),
        ((0.89, 0.1, 0.5, 0.6), [False, True]),
        ((0.95, 0.1, 0.91, 0.6), [True, False]),
    ],
)
def test_the_accuracies_required(accuracies, holds):
    runs = runs_of(*accuracies)
    assert list(demo.accuracy_claims(runs, required=True).values()) == holds
    assert list(demo.accuracy_claims(runs, required=False).values()) == [None, None]


def test_the_status_is_1_if_a_claim_fails(tmp_path, capsys, monkeypatch):
    measured, trained = demo.measure, runs_of(0.95, 0.1, 0.5, 0.6)

    def train(model, params, split, steps, frozen):
        return trained[frozen]._replace(params=params)

    def measure(*args):
        flow, trains, claims = measured(*args)
        return flow, trains, {**claims, 'Pigs fly.': False}

    monkeypatch.setattr(demo, 'DigitModel', lambda: SMALL)
    monkeypatch.setattr(demo, 'train', train)
    monkeypatch.setattr(demo, 'measure', measure)
    assert demo.main(['--steps', '1', '--out', str(tmp_path)]) == 1
    assert '\nFAILED  Pigs fly.\n' in capsys.readouterr().out


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, 'POINTS', 1)
        run = demo.train(SMALL, params, (batch, batch), 3)
    oracle.assert_same(run.params, expected)


@pytest.mark.parametrize('steps', ['0', '-1', 'many'])
def test_steps_that_are_no_number_from_1_are_refused(capsys, steps):
    with pytest.raises(SystemExit) as info:
        demo.main(['--steps', steps])
    assert info.value.code == 2
    assert 'argument --steps' in capsys.readouterr().err


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
