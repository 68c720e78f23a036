"""How much of the library one read through a block runs: calls, and files.

A reader who follows a read has to open these files. If a change needs more, say so
here; if it needs fewer, lower the numbers.
"""

import sys
import types
from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp

import flax_sg
from flax_sg import linen as nn
from tests.helpers import oracle

CALLS, FILES = 196, 27

X = jnp.ones((3, 2))
MODEL = fnn.Dense(2)
VARIABLES = oracle.init(MODEL, jax.random.key(0), X)


def test_a_read_through_a_block_is_short():
    met: list[str] = []
    ours = str(Path(flax_sg.__file__).parent)

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        # A generator counts each time that it goes on. Newer versions of Python call
        # no function for a list comprehension, and count fewer.
        if event == 'call' and frame.f_code.co_filename.startswith(ours):
            met.append(frame.f_code.co_filename)

    before = sys.getprofile()
    for _ in range(2):  # The first time fills caches.
        met.clear()
        sys.setprofile(note)
        try:
            with nn.stop_gradient('kernel'):
                MODEL.apply(VARIABLES, X)
        finally:
            sys.setprofile(before)
    assert 0 < len(met) <= CALLS
    assert len({*met}) <= FILES
