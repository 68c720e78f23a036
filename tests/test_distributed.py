"""Several processes: the demo's training is that of one, and its claims can fail."""

import dataclasses
import sys

import numpy as np
import pytest

from flax_sg import demo
from flax_sg.demo import distributed


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


def test_a_number_of_processes(capsys):
    with pytest.raises(SystemExit):
        demo.main(['--processes', '0'])
    assert 'argument --processes' in capsys.readouterr().err
