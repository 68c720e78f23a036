"""Programs that are killed, that run side by side, and that die beside another one."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import flax_sg as sg
from tests.stored import program

ROOT = Path(__file__).parents[2]
BATCHES = -(-program.ROWS // program.BATCH)


def started(folder: Path, seconds: float, *more: object) -> subprocess.Popen[str]:
    """A process that stores rows, with one device."""
    command = [sys.executable, program.__file__, folder, seconds, *more]
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_NUM_CPU_DEVICES': '1'}
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, env=env
    )


def calls_of(process: subprocess.Popen[str]) -> int:
    """How often the function of a process was called, which is done."""
    said = process.communicate(timeout=60)[0].split()
    assert said[-2] == 'done', said
    return int(said[-1])


def check(folder: Path) -> None:
    """All rows are those by hand."""
    rows, right = sg.Rows(folder), program.by_hand(*program.data())
    found = rows[:]
    for name in right:
        np.testing.assert_array_equal(found[name], right[name], strict=True)
    assert len([*folder.glob('*.npy')]) == BATCHES


@pytest.mark.parametrize('sign', [signal.SIGKILL, signal.SIGINT])
def test_a_program_that_is_stopped_goes_on(tmp_path: Path, sign: signal.Signals):
    """Nothing is lost but what was computed at that moment."""
    calls = 0
    for stop in (3, 9):
        process = started(tmp_path, 0.01)
        assert process.stdout is not None
        for _ in range(stop):
            assert process.stdout.readline() == 'call\n'
        time.sleep(0.003 * stop)  # Somewhere in a call or in a write.
        process.send_signal(sign)
        calls += stop + process.communicate()[0].count('call')
        assert process.returncode != 0
        if sign is signal.SIGINT:  # Python has cleaned up.
            assert not [*tmp_path.glob('*.part')]
    old = time.time() - 7200
    for part in tmp_path.glob('*.part'):
        os.utime(part, (old, old))
    last = calls_of(started(tmp_path, 0.0))
    # A call that was stopped before its file had its name is made again; and one batch
    # is computed again at each start.
    assert BATCHES <= calls + last <= BATCHES + 2 * 3 + 2
    assert last < BATCHES
    check(tmp_path)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(('localhost', 0))
        return free.getsockname()[1]


def test_two_processes_of_jax_distributed_share_the_batches(tmp_path: Path):
    port = free_port()
    both = [started(tmp_path, 0.05, port, 2, index) for index in range(2)]
    calls = list(map(calls_of, both))
    # Whoever is done first helps, so a batch near the end may be computed twice.
    assert BATCHES <= sum(calls) <= BATCHES + 6
    assert min(calls) > BATCHES // 4
    check(tmp_path)


def test_a_process_dies_beside_another_one(tmp_path: Path):
    dies = started(tmp_path, 0.01, '--dies-after', 4)
    lives = started(tmp_path, 0.01)
    calls_of(lives)
    assert dies.wait() == 9
    dies.communicate()
    check(tmp_path)


def test_a_host_with_other_weights_writes_nothing(tmp_path: Path):
    """Each begins with the first batch, and one of them is told."""
    port = free_port()
    both = [
        started(tmp_path, 0.05, port, 2, n, '--factor', factor)
        for n, factor in enumerate((2, 3))
    ]
    ends = [process.communicate(timeout=60)[0].split() for process in both]
    [won] = [n for n, said in enumerate(ends) if said[-2] == 'done']
    assert ends[1 - won][-2] == 'stale'
    assert int(ends[won][-1]) == BATCHES  # It has computed all of them.
    rows, (x, y) = sg.Rows(tmp_path)[:], program.data()
    np.testing.assert_array_equal(rows['double'], np.float32([2, 3][won]) * x)
    np.testing.assert_array_equal(rows['number'], y)
