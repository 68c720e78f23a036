"""Several processes train as one process does, to the last bit."""

import jax
import numpy as np
import pytest

from flax_sg import demo
from tests.helpers import oracle, processes

STEPS = 4


@pytest.mark.long
def test_two_processes_train_as_one(tmp_path):
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
        processes.work(0, STEPS, tmp_path, jax.devices()[:2])
    alone = dict(np.load(tmp_path / '0.npz'))
    for one_of_two in processes.trained(2, STEPS, tmp_path):
        oracle.assert_same(one_of_two, alone)
    # They have learned.
    losses = alone.pop("['losses']")
    assert losses.shape == (STEPS, 3)
    assert np.all(losses[-1] < losses[0])
    before = processes.by_name({'params': demo.initial(demo.DigitModel())})
    assert not any(np.array_equal(before[name], alone[name]) for name in alone)
