"""``flax_sg.nnx`` in place of ``flax.nnx``."""

import subprocess
import sys

from flax import nnx as flax_nnx

import flax_sg
from flax_sg import nnx

OURS = {
    'clip_gradient',
    'map_cotangent',
    'print_cotangent',
    'read_only',
    'replace_cotangent',
    'reverse_gradient',
    'scale_gradient',
    'stop_gradient',
    'substitute',
    'train_only',
    'where',
}


def test_all_names_of_flax_and_ours():
    theirs = {name for name in dir(flax_nnx) if not name.startswith('_')}
    public = {name for name in dir(nnx) if not name.startswith('_')}
    assert public == theirs | OURS
    assert not theirs & OURS
    for name in theirs:
        assert getattr(nnx, name) is getattr(flax_nnx, name)


def test_every_name_of_ours_is_documented():
    for name in OURS:
        assert getattr(nnx, name).__doc__
        assert getattr(nnx, name).__name__ == name


def test_an_old_flax_says_which_one_is_needed():
    program = """
from flax import nnx
del nnx.Variable.get_value
import flax_sg
from flax_sg import linen
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
