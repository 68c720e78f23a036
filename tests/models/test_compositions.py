"""Two rules on one parameter: each cell of a table in ``flax_sg/README.md``.

The table is made here. ``pytest --rewrite`` on this file writes it to the page.
"""

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

# The rules in the table, and what each alone makes of a gradient, in the symbols of the
# cells: the gradient g of the parameter, the gradient h of the other parameter, a
# factor c, a function f, a value r, a clip k.
RULES = {
    'stop': (lambda: nn.stop_gradient('w'), '0'),
    'stop, levels=1': (lambda: nn.stop_gradient('w', levels=1), '0'),
    'scale c': (lambda: nn.scale_gradient('w', 0.25), 'c * {}'),
    'map f': (lambda: nn.map_cotangent('w', lambda path, ct: ct * ct + 1.0), 'f({})'),
    'clip k': (lambda: nn.clip_gradient('w', global_norm=2.0), 'k({})'),
    'replace r': (lambda: nn.replace_cotangent('w', 5.0), 'r'),
    'copy h': (lambda: nn.copy_cotangent({'w': 'v'}), 'h'),
    'print': (lambda: nn.print_cotangent('w'), '{}'),
    'substitute': (lambda: nn.substitute({'w': jnp.array(4.0)}), '0'),
    'read_only': (lambda: nn.read_only('w', collections='params'), '{}'),
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


def cell(outer: str, inner: str) -> str:
    """The gradient below two rules: a rule gets no cotangent where there is none."""
    within = RULES[inner][1].format('g')
    is_reached = within != '0' or outer == 'copy h'
    return RULES[outer][1].format(within) if is_reached else '0'


def table() -> str:
    """The table of the page: a row for each outer rule, a column for each inner one."""
    head = ['outer \\ inner', *(f'`{inner}`' for inner in RULES)]
    rows = [[f'`{outer}`', *(f'`{cell(outer, x)}`' for x in RULES)] for outer in RULES]
    first, *others = (f'| {" | ".join(cells)} |\n' for cells in (head, *rows))
    return ''.join([first, '|---' * len(head), '|\n', *others])


def gradient(outer: Any, inner: Any) -> float:
    def loss(params: Any) -> jax.Array:
        return Model().apply({'params': params}, outer, inner)

    params = {'w': jnp.array(1.0), 'v': jnp.array(1.0)}
    return float(stepwise.evaluate(jax.grad(loss), params)['w'])


def test_the_page_has_the_table(request):
    page = README.read_text()
    [written] = re.findall(r'^\| outer \\ inner.*\n(?:\|.*\n)+', page, re.MULTILINE)
    if request.config.getoption('--rewrite'):
        README.write_text(page.replace(written, table()))
        return
    assert written.splitlines() == table().splitlines()


@pytest.mark.parametrize('outer', RULES)
def test_each_cell(outer, capfd):
    for inner in RULES:
        expected = eval(cell(outer, inner), dict(NAMES))
        actual = gradient(RULES[outer][0](), RULES[inner][0]())
        assert actual == pytest.approx(expected, abs=0), (outer, inner)
    capfd.readouterr()


def test_the_rules_alone_are_what_the_cells_say(capfd):
    for name, (rule, alone) in RULES.items():
        actual = gradient(contextlib.nullcontext(), rule())
        assert actual == eval(alone.format('g'), dict(NAMES)), name
    capfd.readouterr()
