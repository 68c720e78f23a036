"""The demo: what it claims holds, and each of its checks can fail."""

import contextlib
import dataclasses
import io
import re
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_sg import demo
from flax_sg.demo import by_hand, checks, data, report, train
from flax_sg.demo import model as models

SMALL = models.DigitModel(code_size=3, hidden=8, sampler_steps=4)


@pytest.fixture(scope='module')
def batch() -> data.Digits:
    return data.load()[0].take(np.arange(16))


@pytest.fixture(scope='module')
def params(batch):
    rngs = {'params': jax.random.key(0), 'sampler': jax.random.key(1)}
    return jax.jit(SMALL.init)(rngs, batch.images)['params']


@dataclasses.dataclass(frozen=True)
class Demo:
    """One run of the whole demo, with few steps."""

    status: int
    printed: str
    picture: bytes
    initial: train.Params
    runs: dict[str | None, train.Run]
    measured: checks.Measured


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> Demo:
    out = tmp_path_factory.mktemp('demo') / 'new' / 'folder'
    printed, trainers, runs, measurements = io.StringIO(), set(), {}, []
    trained, measured = train.Trainer.run, checks.measure

    def run(self, frozen, on_step):
        trainers.add(self)
        runs[frozen] = trained(self, frozen, on_step)
        return runs[frozen]

    def measure(*args):
        measurements.append(measured(*args))
        return measurements[0]

    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion('standard'),
        contextlib.redirect_stdout(printed),
    ):
        patch.setattr(train, 'LOOKS', 2)
        patch.setattr(train.Trainer, 'run', run)
        patch.setattr(checks, 'measure', measure)
        status = demo.main(['--steps', '150', '--out', str(out)])
    text = printed.getvalue().replace(str(out), 'OUT')
    picture = (out / 'flax_sg_demo.png').read_bytes()
    (trainer,), (measures,) = trainers, measurements
    return Demo(status, text, picture, trainer.initial, runs, measures)


@pytest.fixture
def measured(whole) -> checks.Measured:
    return whole.measured


def test_each_loss_trains_its_part_only(measured):
    np.testing.assert_array_equal(measured.trains != 0, np.eye(3, dtype=bool))


def test_without_blocks_each_loss_trains_every_part(measured):
    assert np.all(measured.trains_unstopped != 0)


def test_equals_four_weight_copies_to_the_last_bit(measured, params):
    assert measured.different == []
    # Codes and three losses; five gradients of all parameters and the observation.
    assert measured.leaves == 4 + 5 * (len(jax.tree.leaves(params)) + 1)


def test_the_report_says_what_is_so(measured):
    rows = measured.flow.matrix(depth=1).rows
    assert {row.name: row.cells for row in rows} == {
        'code_message': ('stopped', 'flows', 'stopped'),
        'code_step': ('stopped', 'flows', 'stopped'),
        'explanation': ('stopped', 'stopped', 'flows'),
        'gln_0': ('flows', 'stopped', 'stopped'),
        'gln_1': ('flows', 'unused', 'unused'),  # Only labels are read with it.
    }
    assert measured.disproved == []


def test_a_report_of_another_program_is_disproved(params, batch):
    spelled = checks.programs(SMALL, batch)
    args = params, jnp.asarray(batch.images)
    grads = checks.gradients(spelled.with_copies, *args)
    assert checks.disproved(checks.flow(spelled.with_copies, *args), grads) == []
    found = checks.disproved(checks.flow(spelled.unstopped, *args), grads)
    # All that is stopped: of each loss what the others train, if it uses that.
    unused = 2 * len(jax.tree.leaves(params['gln_1']))
    assert len(found) == 2 * len(jax.tree.leaves(params)) - unused
    assert 'gln -> explanation/out/kernel' in found


def test_codes_send_cotangents_to_the_observation_only(measured):
    assert measured.code_to_observation > 0
    assert measured.code_to_params == 0


def test_the_sampler_runs_once(measured, params, batch):
    assert measured.scans == [models.DigitModel().sampler_steps]
    # Without the blocks, it runs backwards too.
    step = checks.training_step(checks.programs(SMALL, batch).unstopped)
    assert checks.scan_lengths(step, params, batch.images) == [4, 4]


def test_the_comparison_finds_a_stop_too_many(params, batch):
    def copies(params):
        copies = by_hand.stopped_copies(params)
        stopped = jax.lax.stop_gradient(params['gln_1'])
        return copies._replace(weights_gln={**copies.weights_gln, 'gln_1': stopped})

    def wrong(params, observation):
        rngs, label = {'sampler': jax.random.key(5)}, jnp.asarray(batch.labels)
        return by_hand.infer(SMALL, params, observation, label, rngs, copies)

    one, other = (
        checks.gradients(infer, params, jnp.asarray(batch.images))
        for infer in (checks.programs(SMALL, batch).with_blocks, wrong)
    )
    assert checks.different_leaves(one, other) == [
        f"{grads}[0]['gln_1']['{layer}']['{name}']"
        for grads in ('.total', ".losses['gln']")
        for layer in ('gate', 'linear')
        for name in ('bias', 'kernel')
    ]


@pytest.mark.usefixtures('standard_promotion')
def test_training_is_that_of_the_program_by_hand(batch):
    trainer = train.Trainer(SMALL, batch, batch, steps=3)
    tx = optax.adam(optax.cosine_decay_schedule(train.LEARNING_RATE, 3))

    @jax.jit
    def step(params, state, images, labels, index, pace):
        def total(params):
            rngs = {'sampler': jax.random.fold_in(jax.random.key(3), index)}
            return sum(by_hand.infer(SMALL, params, images, labels, rngs)[1])

        updates, state = tx.update(jax.grad(total)(params), state)
        # Also where nothing is frozen, since a factor of 1 changes how XLA rounds.
        updates = jax.tree.map(lambda update: pace * update, updates)
        return optax.apply_updates(params, updates), state

    params = trainer.initial
    state = tx.init(params)
    rng = np.random.default_rng(2)
    for index in range(3):
        drawn = batch.take(rng.integers(len(batch), size=train.BATCH_SIZE))
        params, state = step(
            params, state, drawn.images, drawn.labels, index, jnp.float32(1)
        )
    assert checks.different_leaves(trainer.run().params, params) == []


def test_digits_are_recognised_only_if_every_part_learns(whole):
    accuracy = {frozen: run.accuracy[-1] for frozen, run in whole.runs.items()}
    assert accuracy.pop(None) > 0.85
    assert set(accuracy) == set(models.PARTS)
    assert max(accuracy.values()) < 0.75


def test_a_frozen_part_is_kept_and_the_others_learn(whole):
    for frozen, run in whole.runs.items():
        kept = {
            name
            for name, weights in run.params.items()
            if not checks.different_leaves(weights, whole.initial[name])
        }
        assert kept == set(by_hand.MODULES[frozen] if frozen else ())


def test_main_prints_verdicts_and_the_table(whole):
    assert whole.status == 0
    assert '\x1b' not in whole.printed
    lines = whole.printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith('ok ')]) == 6
    assert len([line for line in lines if re.match('- +[A-Z]', line)]) == 2
    rows = [line for line in lines if re.match(' (gln|code|explanation) loss ', line)]
    # A bare 0 is exactly zero.
    entries = [re.findall(r' (\S+) \(\d', row) for row in rows]
    assert [[entry == '0' for entry in row] for row in entries] == [
        [False, True, True],
        [True, False, True],
        [True, True, False],
    ]


def test_main_says_how_far_each_training_came(whole):
    lines = [line for line in whole.printed.splitlines() if '150/150' in line]
    names = ['every part learns', *(f'{part} frozen' for part in models.PARTS)]
    for line, name, run in zip(lines, names, whole.runs.values(), strict=True):
        assert line.startswith(name)
        assert line.endswith(f' accuracy {run.accuracy[-1]:.3f}')


def test_main_draws_a_picture_and_says_where(whole):
    assert whole.picture.startswith(b'\x89PNG')
    width, height = struct.unpack('>II', whole.picture[16:24])
    assert (width, height) == (2100, 960)
    assert 'OUT/flax_sg_demo.png' in whole.printed


def runs_of(**accuracy: float) -> dict[str | None, train.Run]:
    accuracy = {'none': 0.95, 'gln': 0.1, 'code': 0.5, 'explanation': 0.6} | accuracy
    parts = {name: None if name == 'none' else name for name in accuracy}
    return {
        parts[name]: train.Run(parts[name], {}, [1], np.ones((1, 3)), [value])
        for name, value in accuracy.items()
    }


def test_all_claims_hold(measured):
    assert all(claim.holds for claim in report.claims(measured, runs_of(), whole=True))


@pytest.mark.parametrize(
    ('index', 'change'),
    [
        (0, {'trains': np.ones((3, 3))}),
        (0, {'trains': np.zeros((3, 3))}),
        (1, {'disproved': ['gln -> gln_0/gate/bias']}),
        (2, {'trains_unstopped': np.eye(3)}),
        (3, {'different': ["['gln_0']"]}),
        (4, {'code_to_observation': 0.0}),
        (4, {'code_to_params': 1e-30}),
        (5, {'scans': [4, 4]}),
        (5, {'scans': []}),
        (6, {'none': 0.89}),
        (7, {'code': 0.91}),
    ],
)
def test_each_claim_can_fail(measured, index, change):
    names = {field.name for field in dataclasses.fields(checks.Measured)}
    measurements = {name: value for name, value in change.items() if name in names}
    accuracy = {name: value for name, value in change.items() if name not in names}
    claims = report.claims(
        dataclasses.replace(measured, **measurements), runs_of(**accuracy), whole=True
    )
    assert [claim.holds for claim in claims] == [at != index for at in range(8)]


def test_main_fails_if_a_claim_does(tmp_path, capsys, monkeypatch, measured):
    broken = dataclasses.replace(measured, different=["['gln_0']['kernel']"])
    monkeypatch.setattr(checks, 'measure', lambda *args: broken)
    monkeypatch.setattr(train.Trainer, 'run', lambda *args: runs_of()[None])
    reading = models.Reading(np.zeros((360, 10)), np.zeros((360, 64)))
    monkeypatch.setattr(train.Trainer, 'read', lambda *args: reading)
    assert demo.main(['--steps', '1', '--out', str(tmp_path)]) == 1
    printed = ' '.join(capsys.readouterr().out.split())
    assert 'FAILED' in printed
    assert "Different: ['gln_0']['kernel']" in printed


@pytest.mark.parametrize('steps', ['0', '-1', 'many'])
def test_main_refuses_steps_that_are_none(capsys, steps):
    with pytest.raises(SystemExit) as info:
        demo.main(['--steps', steps])
    assert info.value.code == 2
    assert 'argument --steps' in capsys.readouterr().err


@pytest.mark.every_case
@pytest.mark.parametrize('package', ['sklearn', 'matplotlib'])
def test_a_missing_package_is_named_before_training(tmp_path, monkeypatch, package):
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
