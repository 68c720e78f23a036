"""The list of deliberate faults fits flax_sg, and the table fits the list."""

import re
from pathlib import Path

import pytest

from tests import broken

PACKAGE = broken.ROOT / 'flax_sg'
FAULTS = broken.faults()


def test_each_fault_changes_what_stands_once():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 80
    for fault in FAULTS:
        text = (PACKAGE / fault.file).read_text()
        assert text.count(fault.text) == 1, fault.name
        assert fault.breaks and fault.other != fault.text
        compile(text.replace(fault.text, fault.other), fault.file, 'exec')


def test_each_package_has_faults_by_its_size():
    for folder in filter(Path.is_dir, PACKAGE.iterdir()):
        size = sum(len(file.read_text().splitlines()) for file in folder.rglob('*.py'))
        found = [fault for fault in FAULTS if fault.room == folder.name]
        assert len(found) >= size // 400, folder.name


def test_the_table_has_a_test_for_each_fault():
    rows = broken.table()
    assert [*rows] == [fault.name for fault in FAULTS]
    for test in rows.values():
        file, _, name = test.partition('::')
        assert '[' not in name or name.endswith(']'), test  # Not cut at a space.
        text = (broken.ROOT / file).read_text()
        if name and file.startswith('tests/'):  # Else the import fails.
            assert f'\ndef {name.partition("[")[0]}(' in text, test


def test_a_fault_is_put_in_for_a_while(tmp_path):
    fault = broken.Fault('rules.py', 'it adds', 'a + b', 'a - b')
    file = tmp_path / 'flax_sg' / 'rules.py'
    file.parent.mkdir()
    file.write_text('c = a + b\n')
    before = file.stat().st_mtime_ns
    with pytest.raises(KeyError), broken.put_in(tmp_path, fault):
        assert file.read_text() == 'c = a - b\n'
        assert file.stat().st_mtime_ns != before
        raise KeyError
    assert file.read_text() == 'c = a + b\n'
    assert file.stat().st_mtime_ns == before
    twice = fault._replace(text=' ')
    with pytest.raises(SystemExit, match='once'), broken.put_in(tmp_path, twice):
        pytest.fail('it is put in')


def test_results_are_found_again(tmp_path):
    results = broken.Results(tmp_path / 'results.jsonl')
    for test in ('one', 'other'):
        results.add({'name': 'a fault', 'test': test})
    found = broken.Results(results.file).known
    assert found == {'a fault': {'name': 'a fault', 'test': 'other'}}


def test_the_quick_run_is_read_off_the_table():
    text = (broken.ROOT / 'dev.py').read_text()
    [pattern] = re.findall(r"findall\(r'(.+)', TABLE", text)
    found = re.findall(pattern, broken.README.read_text(), re.MULTILINE)
    assert found == [test for test in broken.table().values() if '::' in test]
