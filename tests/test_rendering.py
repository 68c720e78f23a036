"""Reports as text, HTML and pictures."""

import dataclasses
import html
import io
import re
import sys

import numpy as np
import pytest
from rich.console import Console

from flax_sg.flow import report as flow
from flax_sg.rendering import colors, pictures, tables
from reports import LIVE, LOSSES, STOPPED, report

MATRIX = """\
               gln       code      explanation   uses stopped
 ────────────────────────────────────────────────────────────
 gln_0/dense   trains    stopped   stopped             1 of 2
 code          stopped   trains    stopped             2 of 3
 head          partly    -         trains              1 of 3
   bias        trains    -         trains              0 of 1
   kernel      stopped   -         trains              1 of 2
 (no module)   trains    trains    trains              0 of 1

trains   the output depends differentiably on every parameter there
partly   on some of the parameters there, or of their elements
stopped  it uses them, and their gradient is exactly zero
-        it does not use them"""

PARAGRAPHS = """\
gln
trains   gln_0/dense, (no
         module)
partly   head (bias)
stopped  code

code
trains   code, (no module)
stopped  gln_0/dense
-        head

explanation
trains   head, (no module)
stopped  gln_0/dense, code"""


def test_every_status_has_its_word_colour_and_meaning():
    known = {flow.FLOWS, flow.PARTLY, flow.STOPPED, flow.UNUSED}
    for by_status in (tables.WORDS, tables.STYLES, tables.LEGEND, colors.CELLS):
        assert set(by_status) == known
    assert len(set(tables.WORDS.values())) == 4


def test_the_matrix():
    assert LOSSES.table(width=80).splitlines() == MATRIX.splitlines()


def test_str_is_the_matrix_in_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    assert str(LOSSES) == MATRIX
    monkeypatch.setenv('COLUMNS', '30')
    assert str(LOSSES) == LOSSES.table(width=30)


def test_text_has_no_styles_where_programs_are_asked_for_some(monkeypatch):
    monkeypatch.setenv('FORCE_COLOR', '1')  # As the kernel of a notebook does.
    assert LOSSES.table(width=80) == MATRIX


def test_where_the_matrix_does_not_fit_each_output_has_a_paragraph():
    assert LOSSES.table(width=63).startswith(MATRIX.splitlines()[0])
    for width in (62, 30):
        lines = LOSSES.table(width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert '…' not in ''.join(lines)
    assert LOSSES.table(width=30).splitlines()[:14] == PARAGRAPHS.splitlines()


def test_many_outputs_fit_nowhere_beside_each_other():
    names = [f'loss_{n}' for n in range(40)]
    many = report({name: ['flows'] for name in names}, {'dense/kernel': [LIVE]})
    lines = many.table(width=80).splitlines()
    assert [line for line in lines if line.startswith('loss')] == names


def test_groups_by_the_first_names():
    names = [row.name for row in tables.rows(LOSSES, 1)]
    assert names == ['gln_0', 'code', 'head', '(no module)']
    assert [row.name for row in tables.rows(LOSSES, 0)] == ['(no module)']
    assert tables.rows(LOSSES, 0)[0].status == ('partly',) * 3


def printed(**settings) -> str:
    file = io.StringIO()
    Console(file=file, width=80, force_terminal=True, **settings).print(LOSSES)
    return file.getvalue()


def test_rich_prints_it_in_colour_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv('NO_COLOR', raising=False)
    coloured = printed(color_system='standard')
    assert '\x1b[1;32mtrains' in coloured
    monkeypatch.setenv('NO_COLOR', '1')
    plain = printed(color_system='standard')
    assert not re.findall(r'\x1b\[[\d;]*3\d', plain)
    words = re.sub(r'\x1b\[[\d;]*m', '', plain)
    assert [line.rstrip() for line in words.splitlines()][1:] == MATRIX.splitlines()


def test_names_are_no_markup():
    odd = report({'[red]loss[/]': ['flows']}, {'[bold]/kernel': [LIVE]})
    assert '[red]loss[/]' in odd.table(width=80)
    assert '[bold]' in odd.table(width=80)
    assert '[red]loss[/]' in odd.table(width=20)


def test_a_single_output_has_no_name():
    assert 'output' in report({'': ['flows']}, {'a/b': [LIVE]}).table(width=80)


# Names with numbers in them, as JAX orders the keys of a dict.
LAYERS = report(
    {'loss': ['flows', 'stopped', 'unused', 'flows', 'flows', 'flows', 'flows']},
    {
        'enc/layer/0/b_10': [LIVE],
        'enc/layer/0/b_9': [STOPPED],
        'enc/layer/10/att/w': [],
        'enc/layer/10/mlp/w': [LIVE],
        'enc/layer/2/att/w': [LIVE],
        'enc/layer/2/mlp/w': [LIVE],
        'scale': [LIVE],
    },
)


def test_numbers_in_names_are_in_order(tmp_path):
    modules = [
        'enc/layer/0',
        'enc/layer/2/att',
        'enc/layer/2/mlp',
        'enc/layer/10/att',
        'enc/layer/10/mlp',
        '(no module)',
    ]
    found = tables.rows(LAYERS)
    assert [row.name for row in found if not row.parameter] == modules
    assert [row.name for row in found if row.parameter] == ['b_9', 'b_10']
    text = LAYERS.table(width=80)
    assert sorted(modules, key=text.index) == modules
    text = LAYERS._repr_html_()
    assert sorted(modules, key=text.index) == modules
    LAYERS.plot(tmp_path / 'flow.svg')
    assert [group.module for group in LAYERS.by_module(3)] == [
        'enc/layer/0',
        'enc/layer/2',
        'enc/layer/10',
        '',
    ]
    assert LAYERS.members(3)['enc/layer/10'] == [2, 3]
    # What is data stays in the order of the leaves.
    assert [row['parameter'] for row in LAYERS.rows()] == list(LAYERS.parameters)


# Two losses that stop a part of what they use, and leave the rest alone.
HIDING = report(
    {
        'first': ['stopped', 'unused', 'stopped', 'stopped'],
        'second': ['stopped', 'stopped', 'unused', 'stopped'],
    },
    {
        'enc/bias': [STOPPED],
        'enc/kernel': [STOPPED],
        'head/bias': [STOPPED],
        'head/kernel': [STOPPED],
    },
)


def test_a_row_hides_no_unused_member():
    assert [(row.name, row.status) for row in tables.rows(HIDING)] == [
        ('enc', ('stopped', 'stopped')),
        ('bias', ('stopped', 'stopped')),
        ('kernel', ('unused', 'stopped')),
        ('head', ('stopped', 'stopped')),
        ('bias', ('stopped', 'unused')),
        ('kernel', ('stopped', 'stopped')),
    ]
    lines = HIDING.table(width=30).splitlines()
    assert lines[1] == 'stopped  enc (bias), head'
    assert lines[4] == 'stopped  enc, head (kernel)'


def test_where_parameters_have_no_rows_a_note_says_what_is_hidden(
    monkeypatch, tmp_path
):
    note = (
        'Not used in rows with the word stopped: 1 parameter of enc, 1 parameter of '
        'head.'
    )
    assert HIDING.table(depth=1, width=100).splitlines()[-1] == note
    assert note not in HIDING.table(width=100)
    assert note not in HIDING._repr_html_()
    assert 'Not used' not in LOSSES.table(depth=1, width=100)
    HIDING.plot(tmp_path / 'flow.svg', depth=1)
    assert HIDING.table(depth=0, width=100).splitlines()[-1] == (
        'Not used in rows with the word stopped: 2 parameters of (no module).'
    )


def test_rows_are_plain_data():
    rows = LOSSES.rows()
    assert len(rows) == 15
    assert rows[6] == {
        'output': 'code',
        'parameter': 'code/kernel',
        'shape': (2,),
        'dtype': 'float32',
        'status': 'flows',
        'uses': 3,
        'stopped_uses': 2,
    }
    assert type(rows[6]['parameter']) is str


# HTML.


def test_html_has_a_cell_for_each_module_and_output():
    text = LOSSES._repr_html_()
    rows = re.findall(r'<tr>(.*)</tr>', text)
    cells = [re.findall(r'<t[dh] style="([^"]*)">([^<]*)</t[dh]>', row) for row in rows]
    assert [cell for _, cell in cells[0]] == [
        '',
        'gln',
        'code',
        'explanation',
        'uses stopped',
    ]
    shown = [[html.unescape(cell) for _, cell in row] for row in cells[1:]]
    assert shown == [
        [
            row.name,
            *(tables.WORDS[s] for s in row.status),
            f'{row.stopped} of {row.uses}',
        ]
        for row in tables.rows(LOSSES)
    ]
    assert colors.CELLS['flows'][0] in cells[1][1][0]
    assert colors.CELLS['stopped'][0] in cells[1][2][0]


def test_html_escapes_names():
    odd = report(
        {'<script>alert(1)</script>': ['flows']}, {'a"b<i>/kernel': [LIVE]}
    )._repr_html_()
    assert '<script>' not in odd
    assert '<i>' not in odd
    assert 'a&quot;b&lt;i&gt;' in odd


# Pictures.


def test_the_picture_has_the_matrix_in_its_cells(monkeypatch, tmp_path):
    from matplotlib import colors as mcolors
    from matplotlib import image

    drawn = []
    draw = pictures.draw
    monkeypatch.setattr(
        pictures, 'draw', lambda axes, *rest: draw(axes, *rest) or drawn.append(axes)
    )
    LOSSES.plot(tmp_path / 'flow.png', title='Who trains whom')
    pixels = image.imread(tmp_path / 'flow.png')
    (axes,) = drawn
    words = {text.get_position(): text.get_text() for text in axes.texts}
    statuses = [row.status for row in tables.rows(LOSSES)]
    height = len(pixels)
    for y, row in enumerate(statuses):
        for x, status in enumerate(row):
            assert words[x + 0.5, y + 0.5] == tables.WORDS[status]
            # The corner of the cell, where no letters are.
            place = axes.transData.transform((x + 0.05, y + 0.15))
            right, up = place * 150 / axes.figure.dpi
            expected = mcolors.to_rgba(colors.CELLS[status][0])
            at = pixels[height - 1 - round(up), round(right)]
            assert np.allclose(at, expected, atol=0.01), (x, y)
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert shown == list(LOSSES.outputs)
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == [row.name for row in tables.rows(LOSSES)]
    assert axes.figure.get_suptitle() == 'Who trains whom'
    # All that is written lies inside: the margin is empty.
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert np.all(edge == 1.0)


def test_the_matrix_beside_other_plots():
    from matplotlib.figure import Figure

    _, axes = Figure().subplots(1, 2)
    LOSSES.draw(axes, depth=1)
    found = [row.status for row in tables.rows(LOSSES, depth=1)]
    words = [text.get_text() for text in axes.texts]
    assert words == [tables.WORDS[status] for row in found for status in row]
    assert axes.get_xlim() == (0, len(LOSSES.outputs))
    assert axes.get_ylim() == (len(found), 0)


def test_colours_can_be_told_apart_in_grey():
    def lightness(colour: str) -> float:
        red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
        linear = [((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ground, ink in colors.CELLS.values():
        high, low = sorted([lightness(ground), lightness(ink)], reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5  # What WCAG asks of texts.
    grounds = [lightness(ground) for ground, _ in colors.CELLS.values()]
    assert np.all(np.diff(grounds) > 0.1)


def test_another_kind_of_file(tmp_path):
    LOSSES.plot(tmp_path / 'flow.svg', depth=1)
    assert '<svg' in (tmp_path / 'flow.svg').read_text()
    with pytest.raises(ValueError, match='not supported'):
        LOSSES.plot(tmp_path / 'flow.xyz')


def test_names_are_no_formulas(tmp_path):
    odd = report({'$loss': ['flows']}, {'a$/kernel': [LIVE]})
    odd.plot(tmp_path / 'flow.png')


def test_a_report_of_nothing(tmp_path):
    nothing = report({'loss': []}, {})
    nothing.plot(tmp_path / 'flow.png')
    assert nothing.table(width=80).split() == ['loss', 'uses', 'stopped', '─' * 22]


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith('matplotlib')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(ModuleNotFoundError) as info:
        LOSSES.plot(tmp_path / 'flow.png')
    assert str(info.value) == (
        'The picture needs matplotlib, which is not installed. '
        "Install what it needs with: pip install 'flax_sg[plot]'"
    )


def test_a_report_stays_plain_data():
    assert dataclasses.replace(LOSSES) == LOSSES
    assert hash(dataclasses.replace(LOSSES)) == hash(LOSSES)
