"""Several processes: the demo's training is that of one, and its claims can fail."""

import dataclasses
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import oracle
from flax_sg import demo
from flax_sg.demo import data, distributed, train
from flax_sg.demo import model as models


def test_two_processes_train_as_one(capsys):
    assert demo.main(['--processes', '2', '--steps', '12']) == 0
    printed = capsys.readouterr().out
    assert printed.count('holds  ') == 4
    assert 'FAILED' not in printed


def arrays(value: float) -> distributed.Arrays:
    return {'w': np.full(2, value, np.float32)}


CURVES = {name: np.arange(3) for name in ('steps', 'accuracy')}
CURVES['losses'] = np.ones((3, 3))
RIGHT = distributed.Trained([CURVES] * 2, [arrays(1)] * 2, arrays(1))
WRONG = {
    'Every process holds': {'params': [arrays(1), arrays(1 + 1e-7)]},
    'A checkpoint': {'restored': arrays(2)},
    'The learning curve': {'curves': [CURVES, {**CURVES, 'losses': np.zeros((3, 3))}]},
    'So are the parameters': {'params': [arrays(3)] * 2, 'restored': arrays(3)},
}


@pytest.mark.parametrize('claim', WRONG)
def test_each_claim_can_fail(capsys, monkeypatch, claim):
    many = dataclasses.replace(RIGHT, **WRONG[claim])
    alone = distributed.Trained([CURVES], [arrays(1)], arrays(1))
    monkeypatch.setattr(
        distributed, 'trained', lambda processes, *_: many if processes > 1 else alone
    )
    assert demo.main(['--processes', '2', '--steps', '3']) == 1
    assert f'FAILED  {claim}' in capsys.readouterr().out


def test_a_process_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(sys, 'executable', 'false')
    with pytest.raises(RuntimeError, match=r'^process \d of 2 ended with 1:'):
        distributed.trained(2, 1, 3)


def test_the_others_do_not_wait_for_a_process_that_has_failed(tmp_path):
    (tmp_path / '0.log').write_text('why')
    fails, waits = map(subprocess.Popen, (['false'], ['sleep', '600']))
    with pytest.raises(RuntimeError, match=r'^process 0 of 2 ended with 1:\nwhy$'):
        distributed._wait([fails, waits], tmp_path)
    assert waits.returncode == -signal.SIGKILL


def test_a_batch_is_divided_among_devices():
    digits = data.Digits(np.zeros((0, 0)), np.zeros(0))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), (train.DATA,))
    trainer = train.Trainer(models.DigitModel(), digits, digits, 1, mesh)
    batch = {'images': np.arange(6.0, dtype=np.float32).reshape(2, 3)}
    placed = trainer._placed(batch, jax.sharding.PartitionSpec(train.DATA))['images']
    oracle.assert_same(placed, batch['images'])
    assert [part.data.tolist() for part in placed.addressable_shards] == [
        [[0.0, 1.0, 2.0]],
        [[3.0, 4.0, 5.0]],
    ]


def test_a_number_of_processes(capsys):
    with pytest.raises(SystemExit):
        demo.main(['--processes', '0'])
    assert 'argument --processes' in capsys.readouterr().err
