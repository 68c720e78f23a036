"""Two rules on one parameter: each cell of the table in ``flax_sg/README.md``."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

from flax_sg import linen as nn
from tests.helpers import stepwise

README = Path(__file__).parents[2] / 'flax_sg' / 'README.md'

# The rules in the table, and the symbols in its cells: the gradient g of the parameter,
# the gradient h of the other parameter, a factor c, a function f, a value r, a clip k.
RULES = {
    'stop': lambda: nn.stop_gradient('w'),
    'stop, levels=1': lambda: nn.stop_gradient('w', levels=1),
    'scale c': lambda: nn.scale_gradient('w', 0.25),
    'map f': lambda: nn.map_cotangent('w', lambda path, ct: ct * ct + 1.0),
    'clip k': lambda: nn.clip_gradient('w', global_norm=2.0),
    'replace r': lambda: nn.replace_cotangent('w', 5.0),
    'copy h': lambda: nn.copy_cotangent({'w': 'v'}),
    'print': lambda: nn.print_cotangent('w'),
    'substitute': lambda: nn.substitute({'w': jnp.array(4.0)}),
    'read_only': lambda: nn.read_only('w', collections='params'),
}
G, H = 3.0, -7.0
NAMES: dict[str, Any] = {
    'g': G,
    'h': H,
    'c': 0.25,
    'r': 5.0,
    'f': lambda ct: ct * ct + 1.0,
    'k': lambda ct: math.copysign(min(abs(ct), 2.0), ct),
}


class Model(fnn.Module):
    @fnn.compact
    def __call__(self, outer, inner):
        w = self.param('w', fnn.initializers.ones, ())
        self.param('v', fnn.initializers.ones, ())
        with outer, inner:
            w, v = (self.get_variable('params', name) for name in 'wv')
            return G * w + H * v


def table() -> dict[tuple[str, str], str]:
    """The cells of the table, by the outer and the inner rule."""
    lines = README.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('| outer'))
    rows = [
        [cell.strip().strip('`') for cell in re.split(r'(?<!\\)\|', line)[1:-1]]
        for line in lines[start:]
        if line.startswith('|')
    ]
    head, _, *rest = rows
    return {
        (row[0], inner): cell
        for row in rest
        for inner, cell in zip(head[1:], row[1:], strict=True)
    }


def gradient(outer: Any, inner: Any) -> float:
    def loss(params: Any) -> jax.Array:
        return Model().apply({'params': params}, outer, inner)

    params = {'w': jnp.array(1.0), 'v': jnp.array(1.0)}
    return float(stepwise.evaluate(jax.grad(loss), params)['w'])


def test_the_table_is_complete():
    assert set(table()) == {(outer, inner) for outer in RULES for inner in RULES}


@pytest.mark.parametrize('outer', RULES)
def test_each_cell(outer, capfd):
    cells = table()
    for inner in RULES:
        expected = eval(cells[outer, inner], dict(NAMES))
        actual = gradient(RULES[outer](), RULES[inner]())
        assert actual == pytest.approx(expected, abs=0), (outer, inner)
    capfd.readouterr()


def test_the_rules_alone_are_what_the_cells_say(capfd):
    alone = ['0', '0', 'c * g', 'f(g)', 'k(g)', 'r', 'h', 'g', '0', 'g']
    for name, cell in zip(RULES, alone, strict=True):
        actual = gradient(contextlib.nullcontext(), RULES[name]())
        assert actual == eval(cell, dict(NAMES)), name
    capfd.readouterr()
