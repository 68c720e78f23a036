"""`python3 dev.py witness CHECKOUT` runs Flax's own tests with blocks around them."""

import re
import subprocess
import sys
from pathlib import Path

import flax
import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

from flax_sg.engine import blocks
from tests import witness

ROOT = Path(__file__).parents[2]

# These tests look for the hooks on Flax. Other tests should not see a block.
LINEN = """
from flax import linen as nn
from flax_sg.engine.blocks import thread

def test_passes(): pass

def test_fails(): assert nn is None

def test_around(): assert not thread.blocks, 'a block around'

class Looks(nn.Module):
  def __call__(self): return not thread.blocks

def test_inside(): assert Looks().apply({}), 'a block in a method'
"""
CORE = """
import unittest
from flax_sg.engine.blocks import thread

class ScopeTest(unittest.TestCase):
  def test_around(self): self.assertEqual(thread.blocks, ())
  def test_skipped(self): self.skipTest('no reason')
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        'flax/version.py': f"__version__ = '{flax.__version__}'\n",
        'pyproject.toml': '[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n',
        'tests/linen/tiny_test.py': LINEN,
        'tests/core/core_tiny_test.py': CORE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def files_in(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob('*')}


@pytest.mark.long
def test_a_test_whose_outcome_a_block_changes_is_listed(checkout: Path):
    before = files_in(checkout)
    script, modes = ROOT / 'tests/witness.py', 'test-false'
    command = [sys.executable, script, checkout, '--modes', modes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    report = [line for line in done.stdout.splitlines() if ': ' in line]
    report = [re.sub(r', \d+ s: ', ': ', line) for line in report]
    assert report[0] == 'plain: 6 as without a block (1 fail), 0 faults'
    assert report[1] == 'test-false: 3 as without a block (1 fail), 3 faults'
    starts = {
        'core/core_tiny_test.py::ScopeTest::test_around': '',
        'linen/tiny_test.py::test_around': 'a block around',
        'linen/tiny_test.py::test_inside': 'a block in a method',
    }
    for line, (test, said) in zip(report[2:5], starts.items(), strict=True):
        start = f'  tests/{test}: passed -> failed: AssertionError: {said}'
        assert line.startswith(start)
    assert files_in(checkout) == before


def test_a_checkout_of_another_version_is_refused(checkout: Path):
    assert witness.check_checkout(checkout) is None
    (checkout / 'flax/version.py').write_text("__version__ = '0.0.7'")
    said = f'has Flax 0.0.7, and {flax.__version__} is installed.'
    with pytest.raises(SystemExit, match=said):
        witness.main([str(checkout)])


class Net(fnn.Module):
    def setup(self):
        self.dense = fnn.Dense(2)

    def __call__(self, x):
        return self.dense(x) + self.open_blocks()

    def open_blocks(self):
        return float(len(blocks.thread.blocks))


X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
VARIABLES = Net().init(jax.random.key(0), X)


def test_a_block_in_every_method_is_one_for_each_call_on_the_stack():
    def opened() -> float:
        return (Net().apply(VARIABLES, X) - fnn.Dense(2).apply(dense, X)).mean()

    dense = {'params': VARIABLES['params']['dense']}
    assert opened() == 0
    for block in witness.BLOCKS.values():
        with witness.in_every_method(block):
            assert opened() == 2  # __call__ and open_blocks
        with witness.in_block(block):
            assert opened() == 1
    assert opened() == 0
