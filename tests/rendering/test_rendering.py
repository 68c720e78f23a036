"""Reports as text and pictures."""

import html
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import flax_sg as sg
from flax_sg import Path
from flax_sg.filters import Glob
from flax_sg.flow.report import WORDS
from flax_sg.rendering import text
from flax_sg.rendering.matrix import Row
from flax_sg.rendering.text import repeated
from tests.helpers.reports import LOSSES, report

MATRIX = """\
                     gln       code      explanation
────────────────────────────────────────────────────
code/kernel          stopped   trains    stopped
gln_0/dense/kernel   trains    stopped   stopped
head/bias            trains    -         trains
head/kernel          stopped   -         trains
scale                trains    trains    trains

trains   a gradient reaches every parameter there
stopped  the output uses the parameters there; their gradient is exactly zero
-        the output does not use the parameters there

gln trains 6 (24 B) of 10 values
code trains 4 (16 B) of 10 values
explanation trains 6 (24 B) of 10 values"""

# Text.


def test_the_matrix_and_its_legend():
    assert str(LOSSES) == LOSSES.table() == MATRIX


# Rows.


def test_numbers_in_names_are_in_order():
    # As JAX orders the keys of a dict.
    layer = ['enc/layer/0/b_10', 'enc/layer/0/b_9']
    tenth, second = ([f'enc/layer/{n}/{x}/w' for x in ('att', 'mlp')] for n in (10, 2))
    status = ['flows', 'stopped', 'unused', 'flows', 'flows', 'flows', 'flows']
    layers = report({'loss': status}, [*layer, *tenth, *second, 'scale'])
    rows = [row.name for row in layers.matrix().rows]
    assert rows == [*layer[::-1], *second, *tenth, 'scale']
    groups = ['enc/layer/0', 'enc/layer/2', 'enc/layer/10', '']
    assert list(layers.by_module(3)) == groups
    assert layers.by_module(3)['enc/layer/10'] == ('partly',)
    # What is data stays in the order of the leaves.
    assert [row['parameter'] for row in layers.rows()] == list(layers.parameters)


def test_equal_rows_of_repeated_layers_are_one_row():
    names = [
        *(f'net/layers/{n}/{m}/w' for n in range(12) for m in 'ab'),
        *(f'net/out_{n}/w' for n in (0, 1, 3)),
        *(f'tail_{n}/{m}' for n in range(3) for m in ('bias', 'kernel')),
    ]
    # The first six layers are frozen, and of out_0 and out_1 one is not used.
    frozen = ['stopped'] * 12 + ['flows'] * 12 + ['unused', 'flows', 'flows']
    found = report({'loss': frozen + ['stopped', 'flows'] * 3}, names).matrix()
    assert [(row.name, row.cells[0]) for row in found.rows] == [
        ('net/layers/[0-5]/a/w', 'stopped'),
        ('net/layers/[0-5]/b/w', 'stopped'),
        ('net/layers/{6..11}/a/w', 'flows'),
        ('net/layers/{6..11}/b/w', 'flows'),
        ('net/out_0/w', 'unused'),
        ('net/out_1/w', 'flows'),
        ('net/out_3/w', 'flows'),
        ('tail_[0-2]/bias', 'stopped'),
        ('tail_[0-2]/kernel', 'flows'),
    ]
    whole = report({'loss': frozen + ['flows'] * 6}, names).matrix()
    assert whole.rows[-1] == Row('tail_[0-2]', ('flows',))
    by_part = report({'loss': frozen + ['stopped', 'flows'] * 3}, names).matrix(1)
    assert [*by_part.rows] == [Row(name, ('partly',)) for name in ('net', 'tail_[0-2]')]


def test_what_is_repeated():
    for given, joined in (
        ('a_1 a_2 a_3', 'a_[1-3]'),
        ('a_1 a_3 a_4', 'a_1 a_[3-4]'),
        ('a_1 b_2', 'a_1 b_2'),
        ('a_9 a_10 a_11', 'a_{9..11}'),
        ('a_10 a_11 a_12', 'a_1[0-2]'),
        ('a_98 a_99 a_100', 'a_{98..100}'),
        ('a_1 a_02 a_03', 'a_1 a_0[2-3]'),
        ('a_9 a_10 a_10b', 'a_{9..10} a_10b'),
        ('a_8 a_9 a_10 a_11 a_x', 'a_{8..11} a_x'),
        ('a_08 a_09 a_10', 'a_{08..10}'),
        ('w[0]_1 w[0]_2 w0_3', r'w\[0]_[1-2] w0_3'),
        ('{a,b}_1* {a,b}_2* a_1x', r'\{a,b}_[1-2]\* a_1x'),
        ('x1y x2y x3z', 'x[1-2]y x3z'),
        # A module with a parameter of its own, and one without.
        ('a_1 a_1/b a_2 a_2/b a_3/b', 'a_[1-2] a_[1-2]/b a_3/b'),
        ('a_1/b_0 a_1/b_1 a_2/b_0 a_2/b_1', 'a_[1-2]/b_[0-1]'),
        ('a_1/b_0 a_1/b_1 a_2/b_0', 'a_1/b_[0-1] a_2/b_0'),
        ('a_1/c a_2/d a_3/d', 'a_1/c a_[2-3]/d'),
        ('p/a_1 q/a_2', 'p/a_1 q/a_2'),
    ):
        paths = [tuple(path.split('/')) for path in given.split()]
        found = repeated(paths, [None] * len(paths))
        assert ' '.join('/'.join(names) for names, _ in found) == joined
        for names, members in found if '/' not in given else ():
            glob = Glob(names[0])
            taken = [n for n, p in enumerate(paths) if glob(Path.of('params', p))]
            assert taken == members
        numbers = sorted(n for _, members in found for n in members)
        assert numbers == [*range(len(paths))]


# Terminals.


@pytest.mark.parametrize('encoding', ['ascii', 'latin-1', 'cp1252'])
def test_a_terminal_that_is_not_utf8_gets_ascii(encoding, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, 'stdout', stream)
    odd = report({'loss': ['flows']}, ['编码器/w'])
    for shown in (odd, LOSSES, odd.why('loss', '编码器/w')):
        print(shown)
    stream.flush()
    shown = stream.buffer.getvalue().decode('ascii')
    assert r'\u7f16' in shown and '-' * 20 in shown


# Pictures.


def drawn(monkeypatch, path, flow, **options):
    """Draws a picture; returns its axes and its pixels."""
    from matplotlib import figure, image

    saved = []
    save = figure.Figure.savefig
    noted = lambda self, *args, **kw: saved.append(self) or save(self, *args, **kw)  # noqa: E731
    monkeypatch.setattr(figure.Figure, 'savefig', noted)
    flow.plot(path, **options)
    (axes,) = saved[-1].axes
    return axes, image.imread(path)


@pytest.mark.parametrize('dark', [False, True])
def test_the_picture_has_the_matrix_in_its_cells(dark, monkeypatch, tmp_path):
    options = {'title': 'Who trains whom', 'dark': dark}
    axes, pixels = drawn(monkeypatch, tmp_path / 'flow.png', LOSSES, **options)
    rows = LOSSES.matrix().rows
    words = {text.get_position(): text.get_text() for text in axes.texts}
    colors = axes.collections[0].get_facecolor().reshape(len(rows), 3, 4)
    for y, row in enumerate(rows):
        for x, status in enumerate(row.cells):
            assert words[x + 0.5, y + 0.5] == WORDS[status].text
            strength = {'flows': 1, 'partly': 2 / 3, 'stopped': 1 / 3, 'unused': 0}
            assert colors[y, x, 3] == pytest.approx(strength[status])
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert shown == list(LOSSES.outputs)
    shown = [label.get_text().strip() for label in axes.get_yticklabels()]
    assert shown == [row.name for row in rows]
    assert axes.get_title(loc='left') == 'Who trains whom'
    legend = axes.texts[-1].get_text().replace('\n', ' ')
    for key in 'flows', 'stopped', 'unused':
        assert f'{WORDS[key].text}: {WORDS[key].meaning}' in legend
    assert_inside(pixels)
    assert (pixels[0, 0, :3].mean() < 0.1) == dark
    # Letters of 11 points are legible on a phone, which is 390 pixels wide.
    assert pixels.shape[1] / 150 < 6


def assert_inside(pixels):
    """All that is written lies inside: the margin is empty."""
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert np.all(edge == pixels[0, 0])


def test_long_names_and_many_outputs_fit(monkeypatch, tmp_path):
    names = [f'a_module_with_a_long_name/{"inner_" * 9}{n}x/w' for n in range(3)]
    flow = report({f'{"loss_" * 6}{n}x': ['flows'] * 3 for n in range(0, 60, 2)}, names)
    _, pixels = drawn(monkeypatch, tmp_path / 'flow.png', flow)
    assert_inside(pixels)
    assert 2000 < pixels.shape[1] <= 6100


def test_a_cell_of_a_notebook_that_ends_in_a_report_shows_the_table():
    params = {'body': {'<w>': jnp.ones(2)}, 'head': {'w': jnp.ones(2)}}

    def loss(params, x):
        hidden = jnp.tanh(jnp.sin(params['body']['<w>']) * x)
        return jnp.sum(jax.lax.stop_gradient(hidden) * params['head']['w'])

    for each in (
        sg.gradient_flow(loss, params, jnp.ones(2)),
        sg.precompute(loss, params, jnp.ones(2), wrt='head/**'),
        sg.testing.moves(params, params),
        sg.paths(params),
        sg.tabulate(linen.Dense(2), jnp.ones(2)),
    ):
        shown = each._repr_html_()
        assert shown.startswith('<pre')
        assert html.unescape(shown.partition('>')[2]) == f'{each}</pre>'
        assert '<w>' not in shown


def test_a_table_takes_80_columns() -> None:
    """Long cells go on in the next line, behind a '/' or a space; numbers stay."""
    a = 'encoder/blocks_0/attention/query/w', '1,234', 'tanh at net.py:12 (A.__call__)'
    b = 'head/kernel', '8', 'dot_general at network.py:123 (Attention.__call__.f.g)'
    rows = [[*a], [*b]]
    shown = text.table(['path', 'bytes', 'made by'], rows, ['bytes']).splitlines()
    assert max(map(text.width, shown)) <= 80
    assert shown[2:] == [
        'encoder/blocks_0/attention/query/w   1,234   tanh at net.py:12 (A.__call__)',
        'head/kernel                              8   dot_general at network.py:123',
        '                                             (Attention.__call__.f.g)',
    ]
    # What has no such place is cut; wide letters take two columns.
    for cell in 'x' * 300, '\u5b57' * 100:
        shown = text.table(['path', 'b'], [[cell, 'c' * 100]]).splitlines()
        assert max(map(text.width, shown)) <= 80
        assert ''.join(''.join(shown[2:]).split()).count(cell[0]) == len(cell)


def test_many_columns_are_several_tables() -> None:
    """Each has the first column, also if that is long."""
    head = ['', *(f'output_{n}' for n in range(12))]
    rows = [['a/long/name/' * 8, *['trains'] * 12], ['b', *['-'] * 12]]
    shown = text.table(head, rows, in_blocks=True)
    assert max(map(text.width, shown.splitlines())) <= 80
    assert shown.count('\nb ') == 4
    assert shown.count('trains') == 12
