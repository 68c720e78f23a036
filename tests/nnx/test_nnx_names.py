"""``flax_sg.nnx`` in place of ``flax.nnx``."""

import subprocess
import sys

from flax import nnx as flax_nnx

import flax_sg
from flax_sg import nnx


def test_all_names_of_flax_and_ours():
    theirs = {name for name in dir(flax_nnx) if not name.startswith('_')}
    ours = {name for name in dir(nnx) if not name.startswith('_')} - theirs
    assert all(getattr(nnx, name) is getattr(flax_nnx, name) for name in theirs)
    assert all(getattr(nnx, name).__doc__ for name in ours)
    assert len(ours) == 10


def test_an_old_flax_says_which_one_is_needed_and_linen_imports_no_nnx():
    program = """
import sys, flax_sg
from flax_sg import linen
flax_sg.mask({'a': 1.0}, trained='a')
assert 'flax.nnx' not in sys.modules
from flax import nnx
del nnx.Variable.get_value
linen.Dense, flax_sg.grad
try:
    from flax_sg import nnx
except ImportError as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, '-c', program]
    out = subprocess.check_output(command, text=True, timeout=120)
    assert out == (
        'UnsupportedVersionError flax_sg.nnx needs flax 0.12.1 or newer: Variables of '
        'this one have no get_value.\n'
        "Update it: pip install 'flax>=0.12.1'. flax_sg.linen works with this one.\n"
    )
    assert flax_sg.nnx is nnx
