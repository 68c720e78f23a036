"""Several processes train as one process does, to the last bit."""

import signal
import subprocess

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import oracle
import processes
from flax_sg import demo

STEPS = 6


def test_two_processes_train_as_one(tmp_path):
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
        processes.work('', 1, 0, STEPS, tmp_path, jax.devices()[:2])
    alone = dict(np.load(tmp_path / '0.npz'))
    for one_of_two in processes.trained(2, 1, STEPS, tmp_path / 'two'):
        oracle.assert_same(one_of_two, alone)
    initial = demo.initial(demo.DigitModel())
    # The checkpoint that both processes wrote, restored in this process.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        initial,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(tmp_path / 'two' / processes.CHECKPOINT, target)
    restored = processes.by_name({'params': params})
    losses = alone.pop("['losses']")
    oracle.assert_same(restored, alone)
    # They have learned.
    assert losses.shape == (STEPS, 3)
    assert np.all(losses[-1] < losses[0])
    before = processes.by_name({'params': initial})
    assert not any(np.array_equal(before[name], alone[name]) for name in alone)


def test_the_others_do_not_wait_for_a_process_that_has_failed(tmp_path):
    (tmp_path / '0.log').write_text('why')
    fails, waits = map(subprocess.Popen, (['false'], ['sleep', '600']))
    with pytest.raises(RuntimeError, match=r'^process 0 of 2 ended with 1:\nwhy$'):
        processes.wait([fails, waits], tmp_path)
    assert waits.returncode == -signal.SIGKILL
