"""`python3 dev.py notebooks` makes notebooks and reports the faulty ones."""

import json
from pathlib import Path

import pytest

# `dev.py versions` does not install Jupyter.
pytest.importorskip('nbclient', reason="needs the extra 'notebooks'")

from tests import run_notebooks

SOURCE = """# %% [markdown]
# # A title

# %%
import os

size = os.environ['FLAX_SG_NOTEBOOKS']
size

# %%
assert size in ('ci', 'full')
"""


STREAM = '{"output_type": "stream", "name": "stderr", "text": "x"}'


def run(folder: Path, *options: str) -> int:
    return run_notebooks.main([*options, '--folder', str(folder)])


@pytest.fixture(scope='module')
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A source, and the notebook that is made of it."""
    folder = tmp_path_factory.mktemp('notebooks')
    (folder / '01_name.py').write_text(SOURCE)
    assert run(folder) == 0
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.fixture
def folder(made: dict[str, str], tmp_path: Path) -> Path:
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_notebook_is_the_source_at_full_size_with_its_outputs(made: dict[str, str]):
    assert sorted(made) == ['01_name.ipynb', '01_name.py']
    notebook = json.loads(made['01_name.ipynb'])
    title, shows, asserts = notebook['cells']
    assert title['cell_type'] == 'markdown'
    assert ''.join(title['source']) == '# A title'
    assert [o['data'] for o in shows['outputs']] == [{'text/plain': ["'full'"]}]
    assert asserts['outputs'] == []
    # The notebook holds nothing that differs between runs or machines.
    assert [cell['id'] for cell in notebook['cells']] == ['cell-0', 'cell-1', 'cell-2']
    assert notebook['metadata']['language_info'] == {'name': 'python'}


def test_a_check_runs_at_the_small_size_and_writes_nothing(
    folder: Path, made: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    assert run(folder, '--check') == 0
    assert {file.name: file.read_text() for file in folder.iterdir()} == made
    # The source has changed, and raises at the small size.
    (folder / '01_name.py').write_text(SOURCE.replace("('ci', 'full')", "('full',)"))
    capsys.readouterr()
    assert run(folder, '--check', '01') == 1
    out = capsys.readouterr().out
    assert '01_name.py raises:' in out
    assert "assert size in ('full',)" in out
    assert 'AssertionError' in out
    assert '01_name.ipynb is not that of 01_name.py any more' in out
    assert (folder / '01_name.ipynb').read_text() == made['01_name.ipynb']


@pytest.mark.parametrize(
    ('before', 'after', 'said'),
    [
        ('# A title', '# Another', 'is not that of 01_name.py any more'),
        ("'full'\"", "'full' \"", None),  # an output is no part of the source
        ('"execution_count": 2', '"execution_count": 5', 'was not run from the top'),
        ('"id": "cell-0"', '"id": "other"', None),
        ('"outputs": []', f'"outputs": [{STREAM}]', 'shows errors or warnings'),
        ("'full'\"", "'full'" + 400_000 * 'x' + '"', 'more than 400,000 bytes'),
    ],
)
def test_what_is_found_in_the_notebook_beside_a_source(
    folder: Path, before: str, after: str, said: str | None
):
    file = folder / '01_name.ipynb'
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    faults = list(run_notebooks.differences(folder / '01_name.py'))
    assert len(faults) == (said is not None)
    assert said is None or said in faults[0]


def test_each_source_has_a_notebook_and_the_other_way_round(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / '01_name.ipynb').rename(folder / '02_other.ipynb')
    [missing] = run_notebooks.differences(folder / '01_name.py')
    assert missing == '01_name.ipynb is missing: run python3 dev.py notebooks 01_name'
    assert list(run_notebooks.orphans(folder)) == ['02_other.ipynb has no source']


def test_a_name_that_no_notebook_has():
    with pytest.raises(SystemExit, match='begins with 99'):
        run_notebooks.main(['99'])
