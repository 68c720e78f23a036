"""Rows in files are those of the function on the whole data set, to the bit."""

import collections
import contextlib
import errno
import functools
import itertools
import os
import pickle
import resource
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich import progress

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.stored import progress as bars
from flax_sg.stored.writing import Writer

ROWS = 11
X = np.random.default_rng(0).standard_normal((ROWS, 3)).astype(np.float32)
Y = np.arange(ROWS)


def of_pair(x, y):
    return [2 * np.asarray(x), np.asarray(y)]


class Counted:
    """A function that counts its calls, and keeps what it was given."""

    def __init__(self, fun=of_pair):
        self.fun, self.given = fun, []

    def __call__(self, *args):
        self.given.append(args)
        return self.fun(*args)


def assert_rows(rows, *right):
    """All rows are equal to arrays, and so are those at any indices."""
    for at in (slice(None), 4, -1, [7, 0, 7], [[1, 10], [3, 4]], slice(9, 2, -3), []):
        picked = np.asarray(at, int) if isinstance(at, list) else at
        for found, array in zip(jax.tree.leaves(rows[at]), right, strict=True):
            assert isinstance(found, np.ndarray)
            np.testing.assert_array_equal(found, array[picked], strict=True)


# Sources.


class Pairs:
    """A data set as those of PyTorch: ``len`` and ``[n]``."""

    def __len__(self):
        return ROWS

    def __getitem__(self, n):
        assert isinstance(n, int)
        return X[n], int(Y[n])


class Columns:
    """A data set as those of Hugging Face: lists for arrays, and several at once."""

    def __len__(self):
        return ROWS

    def __getitem__(self, n):
        raise AssertionError('It is asked for several at once.')

    def __getitems__(self, indices):
        return [{'x': X[n].astype(float).tolist(), 'y': int(Y[n])} for n in indices]


def of_columns(batch):
    return of_pair(batch['x'].astype(np.float32), batch['y'])


SOURCES: dict[str, Any] = {
    'a tuple of arrays': ((X, Y), of_pair),
    'arrays of jax': ((jnp.asarray(X), Y), of_pair),
    'a dict of arrays': ({'x': X, 'y': Y}, of_columns),
    'a mapping': (collections.UserDict({'x': X, 'y': Y}), of_columns),
    'an array': (X, lambda x: of_pair(x, [n for v in x for n in _number(v)])),
    'a list of examples': ([*zip(X, Y, strict=True)], of_pair),
    'a list of dicts': ([{'x': X[n], 'y': Y[n]} for n in range(ROWS)], of_columns),
    'len and [n]': (Pairs(), of_pair),
    'several at once': (Columns(), of_columns),
}


def _number(row):
    return np.flatnonzero((row == X).all(1))


@pytest.mark.parametrize('batch_size', [1, 4, ROWS, 16])
@pytest.mark.parametrize('case', SOURCES)
def test_every_source(case: str, batch_size: int, tmp_path: Path):
    source, fun = SOURCES[case]
    counted = Counted(fun)
    rows = sg.store(counted, source, tmp_path, batch_size=batch_size)
    assert_rows(rows, 2 * X, Y)
    assert_rows(sg.Rows(tmp_path), 2 * X, Y)
    # The function sees whole batches, the last one filled up.
    shapes = {jax.tree.leaves(args)[0].shape for args in counted.given}
    assert shapes == {(batch_size, 3)}
    assert len(counted.given) == -(-ROWS // batch_size)


def test_numpy_reads_the_files(tmp_path: Path):
    sg.store(of_pair, (X, Y), tmp_path, batch_size=4)
    names = ['00000000.npy', '00000001.npy', '00000002.npy', 'about.json']
    assert sorted(os.listdir(tmp_path)) == names
    records = np.concatenate([np.load(tmp_path / name) for name in names[:3]])
    np.testing.assert_array_equal(records['0'], 2 * X, strict=True)
    np.testing.assert_array_equal(records['1'], Y, strict=True)


def test_every_dtype_to_the_bit(tmp_path: Path):
    """Also arrays without elements, and in another order of bytes."""
    kinds = [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4, jnp.uint4]
    kinds += [*'?bBhHiIlLefdFD']
    arrays = {f'{n:02d}': np.arange(ROWS * 2).astype(k) for n, k in enumerate(kinds)}
    arrays['float32 of big endians'] = np.arange(ROWS * 2).astype('>f4')
    arrays['nothing'] = np.zeros((ROWS * 2, 0, 3), np.float32)
    arrays['nan'] = np.full(ROWS * 2, np.nan, np.float32)
    data = {name: x.reshape(ROWS, 2, *x.shape[1:]) for name, x in arrays.items()}
    for _ in range(2):  # The second time, the last batch is compared.
        rows = sg.store(lambda batch: batch, data, tmp_path, batch_size=4)
    for name, found in rows[:].items():
        array = data[name].astype(data[name].dtype.newbyteorder('='))
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    'tree',
    [
        lambda x, y: x,
        lambda x, y: (x, [y, {'b': x, 'a': (y,)}], None),
        lambda x, y: {7: x, 3: {'a/b': {'it': y}}},
    ],
)
def test_the_structure_comes_back(tree, tmp_path: Path):
    rows = sg.store(tree, (X, Y), tmp_path, batch_size=4)
    want = tree(X, Y)
    assert jax.tree.structure(rows[:]) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, rows[:], want)


def test_typed_keys_are_data(tmp_path: Path):
    keys = jax.random.split(jax.random.key(0), ROWS)
    draw = jax.jit(jax.vmap(lambda key: jax.random.normal(key, (2,))))
    rows = sg.store(draw, keys, tmp_path, batch_size=4)
    assert_rows(rows, np.asarray(draw(keys)))


def test_arrays_of_64_bits(tmp_path: Path):
    old = not hasattr(jax, 'enable_x64')
    with jax.experimental.enable_x64() if old else jax.enable_x64():
        x = jnp.asarray(np.arange(ROWS) / 3)
        rows = sg.store(lambda x: x, x, tmp_path, batch_size=4)
    assert_rows(rows, np.arange(ROWS) / 3)


# Going on.


def test_what_is_there_is_not_computed_again(tmp_path: Path):
    store = functools.partial(sg.store, batch_size=2)
    first, again, last = Counted(), Counted(), Counted()
    store(first, (X, Y), tmp_path)
    assert len(first.given) == 6
    store(again, (X, Y), tmp_path)
    assert [args[1].tolist() for args in again.given] == [[10, 10]]  # The last batch.
    # A file is deleted, one is cut off, one has a byte too many.
    (tmp_path / '00000001.npy').unlink()
    os.truncate(tmp_path / '00000003.npy', 140)
    with open(tmp_path / '00000005.npy', 'ab') as file:
        file.write(b'x')
    (tmp_path / 'note.txt').write_text('Files of others stay.')
    assert_rows(store(last, (X, Y), tmp_path), 2 * X, Y)
    given = [args[1].tolist() for args in last.given]
    assert given == [[8, 9], [2, 3], [6, 7], [10, 10]]  # The first one is compared.
    assert (tmp_path / 'note.txt').exists()


def test_a_file_of_another_process_stays_for_an_hour(tmp_path: Path):
    sg.store(of_pair, (X, Y), tmp_path, batch_size=4)
    young = tmp_path / f'00000000.npy.{"1" * 32}.part'
    old, of_others = (
        tmp_path / f'about.json.{"2" * 32}.part',
        tmp_path / 'film.mkv.part',
    )
    for part in (young, old, of_others):
        part.touch()
        os.utime(part, (time.time() - 7200 * (part is not young),) * 2)
    sg.store(of_pair, (X, Y), tmp_path, batch_size=4)
    assert young.exists() and of_others.exists() and not old.exists()


def test_what_another_process_has_written_meanwhile(tmp_path: Path):
    sg.store(of_pair, (X, Y), tmp_path / 'other', batch_size=2)
    calls = []

    def fun(x, y):
        calls.append(y[0])
        if y[0] == 0:
            for n in (2, 4):
                name = f'0000000{n}.npy'
                shutil.copy(tmp_path / 'other' / name, tmp_path / 'rows' / name)
        return of_pair(x, y)

    (tmp_path / 'rows').mkdir()
    assert_rows(sg.store(fun, (X, Y), tmp_path / 'rows', batch_size=2), 2 * X, Y)
    assert calls == [0, 2, 6, 10]


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def link(*_):
        raise OSError(errno.ENOTSUP, 'no links here')

    monkeypatch.setattr(os, 'link', link)
    for _ in range(2):
        assert_rows(sg.store(of_pair, (X, Y), tmp_path, batch_size=4), 2 * X, Y)
    assert not [*tmp_path.glob('*.part')]


def test_a_missing_row_raises_when_it_is_read(tmp_path: Path):
    rows = sg.store(of_pair, (X, Y), tmp_path, batch_size=4)
    (tmp_path / '00000001.npy').unlink()
    os.truncate(tmp_path / '00000002.npy', 170)
    np.testing.assert_array_equal(rows[[0, 3]][1], [0, 3])
    with pytest.raises(errors.MissingRowsError, match=r'00000001\.npy is missing'):
        rows[[0, 5]]
    said = r'00000002\.npy is missing, cut off'
    with pytest.raises(errors.MissingRowsError, match=said):
        rows[-1]


def test_a_full_disk(tmp_path: Path):
    """The error is that of the system, no part of a file stays, and it goes on."""
    x = np.zeros((ROWS, 50_000), np.float32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError) as raised:
            sg.store(lambda x: x, x, tmp_path, batch_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ['about.json']
    assert_rows(sg.store(lambda x: x, x, tmp_path, batch_size=4), x)


# Stale rows.


def scaled(factor):
    return lambda x, y: [2 * factor * x, y]


def stored(rows, folder):
    """Stores arrays, or a tuple of them, as they are."""
    return sg.store(lambda *rows: rows, rows, folder, batch_size=4)


def masked(x, value=-1e9):
    """Logits of which some are masked."""
    return np.where(np.arange(3) == 1, value, x)


WIDE = X.astype(float)
FEW, INTS = (
    np.eye(ROWS, 5000) > 0,
    np.arange(ROWS * 100, dtype=np.int8).reshape(ROWS, -1),
)
STALE: dict[str, tuple[Any, Any]] = {
    'other weights': ((X, Y), (1.05 * X, Y)),
    'other code': ((X, Y), (np.tanh(X), Y)),
    'another order of the data': ((X, Y), (X[::-1], Y)),
    'another order of the labels': ((X, Y), (X, Y[::-1])),
    'one label in a batch': ((X, Y), (X, np.where(Y == 9, 0, Y))),
    'not a number': (X, X * np.float32(np.nan)),
    'infinite': (X, X * np.float32(np.inf)),
    'a random function': (X, np.random.default_rng(7).random(X.shape, np.float32)),
    # What a norm alone does not see.
    'a few numbers are far larger': (masked(X), masked(-X)),
    'bools of which few hold': (FEW, np.roll(FEW, 7, 1)),
    'small ints of which few hold': (FEW.astype('i1'), np.roll(FEW, 7, 1).astype('i1')),
    'large ints': (10**9 + Y, 10**9 + Y[::-1]),
}


@pytest.mark.parametrize('case', STALE)
def test_stale_rows_raise(case: str, tmp_path: Path):
    one, other = STALE[case]
    stored(one, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(errors.StaleRowsError, match='is stale'):
        stored(other, tmp_path)
    # Nothing is lost.
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


# What is stored, what it is the next time, and what a warning says.
ROUNDED: dict[str, tuple[Any, Any, str]] = {
    'the last bits': (X, X * np.float32(1 + 1e-6), ''),
    'half a per cent': (
        (X, Y),
        (1.005 * X, Y),
        r'rows\[0\] of batch 2 differs by 0\.5%',
    ),
    # Features of 8 bits, a tenth of which are rounded to the other side.
    'small ints': (INTS, INTS + (INTS % 10 == 0).astype('i1'), 'It may be rounding'),
    'beside infinities': (masked(WIDE, -np.inf), masked(WIDE + 1e-9, -np.inf), ''),
}


@pytest.mark.parametrize('case', ROUNDED)
def test_rounding_is_not_stale(case: str, tmp_path: Path):
    one, other, said = ROUNDED[case]
    stored(one, tmp_path)
    with pytest.warns(UserWarning, match=said) if said else contextlib.nullcontext():
        stored(other, tmp_path)


def test_open_rows_see_that_the_folder_has_others(tmp_path: Path):
    rows = sg.store(of_pair, (X, Y), tmp_path, batch_size=4)
    for file in tmp_path.iterdir():
        file.unlink()
    sg.store(of_pair, (X, Y), tmp_path, batch_size=3)
    for at in 0, slice(None):
        with pytest.raises(errors.MissingRowsError, match='of another store'):
            rows[at]


def test_of_two_first_starts_one_is_right(tmp_path: Path, monkeypatch):
    """Both have written their first files before one of these gets its name."""
    both, calls, sync = threading.Barrier(2), itertools.count(), os.fsync

    def waits(file):
        sync(file)
        if next(calls) < 4:  # Two of about.json, and two of the first batch.
            both.wait(10)

    monkeypatch.setattr(os, 'fsync', waits)

    def run(factor):
        try:
            return sg.store(scaled(factor), (X, Y), tmp_path, batch_size=4)
        except errors.StaleRowsError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        ends = [*pool.map(run, [1, 3])]
    [won] = [n for n in (0, 1) if isinstance(ends[n], sg.Rows)]
    assert isinstance(ends[1 - won], errors.StaleRowsError)
    # Later batches of the other one were compared, too, or never written.
    rows = sg.store(scaled([1, 3][won]), (X, Y), tmp_path, batch_size=4)
    assert_rows(rows, 2 * [1, 3][won] * X, Y)


# What is in no row.


def test_what_no_example_changes_is_kept_once(tmp_path: Path):
    fixed = jnp.arange(6.0).reshape(2, 3)
    fun = lambda x: {'row': x, 'fixed': fixed, 'number': 7}  # noqa: E731
    how: Any = {'batch_size': 4, 'axes': {'row': 0, 'fixed': None, 'number': None}}
    rows = sg.store(fun, X, tmp_path, **how)
    for at in (3, [1, 2], slice(None)):
        np.testing.assert_array_equal(rows[at]['fixed'], fixed, strict=True)
        assert rows[at]['number'] == 7 and rows[at]['number'].shape == ()
    with pytest.raises(ValueError, match='read-only'):
        rows[0]['fixed'][:] = 0
    np.testing.assert_array_equal(rows[:]['row'], X, strict=True)
    assert os.path.getsize(tmp_path / 'fixed.npy') < 500
    os.truncate(tmp_path / 'fixed.npy', 150)
    said = r'fixed\.npy is missing, cut off'
    with pytest.raises(errors.MissingRowsError, match=said):
        sg.Rows(tmp_path)
    rows = sg.store(fun, X, tmp_path, **how)
    np.testing.assert_array_equal(rows[0]['fixed'], fixed, strict=True)


def test_another_value_that_is_no_row_is_stale(tmp_path: Path):
    def store(fixed):
        fun = lambda x: (x, fixed)  # noqa: E731
        return sg.store(fun, X, tmp_path, batch_size=4, axes=(0, None))

    store(np.ones(3))
    with pytest.raises(errors.StaleRowsError, match=r'rows\[1\] of batch 2'):
        store(np.full(3, 2.0))


# Readers.


def test_rows_travel_as_their_folder(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = sg.store(of_pair, (X, Y), 'features', batch_size=4)
    monkeypatch.chdir('/')
    sent = pickle.dumps(rows)
    assert len(sent) < 300
    assert repr(pickle.loads(sent)) == repr(rows) == '<11 rows of float32[3], int64[]>'
    assert_rows(pickle.loads(sent), 2 * X, Y)
    assert rows.folder == str(tmp_path / 'features')


def test_threads_read_and_loops_end(tmp_path: Path):
    rows = sg.store(of_pair, (X, Y), tmp_path, batch_size=2)
    with ThreadPoolExecutor(4) as pool:
        for n, found in enumerate(pool.map(rows.__getitem__, [*range(ROWS)] * 20)):
            assert found[1] == n % ROWS
    assert [int(row[1]) for row in rows] == [*range(ROWS)]


def test_grain_shuffles_and_goes_on(tmp_path: Path):
    """In its threads, in order, and from the state of an iterator."""
    grain = pytest.importorskip('grain', reason='grain is an extra of the pages')
    rows = sg.store(of_pair, (X, Y), tmp_path, batch_size=4)
    numbers = grain.MapDataset.range(len(rows)).shuffle(seed=0).repeat(2)
    batches = numbers.batch(4, drop_remainder=True).map(rows.__getitem__)
    plain = [batches[n] for n in range(len(batches))]
    for x, y in plain:
        np.testing.assert_array_equal(x, 2 * X[y], strict=True)
    assert sorted(np.concatenate([y for _, y in plain])[:8]) != [*range(8)]
    iterator, fresh = (iter(batches.to_iter_dataset()) for _ in range(2))
    read = [next(iterator) for _ in range(2)]
    fresh.set_state(iterator.get_state())
    for found, right in zip([*read, *fresh], plain, strict=True):
        np.testing.assert_array_equal(found[1], right[1])
    assert isinstance(rows, grain.sources.RandomAccessDataSource)


# While it computes.


def test_a_batch_is_computed_while_others_are_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events, called = list[str](), [threading.Event() for _ in range(3)]

    class Noted(Pairs):
        def __getitem__(self, n):
            events.extend([f'read {n // 4}'] if n % 4 == 0 else [])
            return super().__getitem__(n)

    def fun(x, y):
        called[y[0] // 4].set()
        events.append(f'call {y[0] // 4}')
        return [jnp.asarray(2 * x), jnp.asarray(y)]

    def ready(out, wait=jax.block_until_ready):
        events.extend([f'ready {out[0]}'] if out else [])
        return wait(out)

    def keep(self, batch, out, keep=Writer.keep):
        assert batch == 2 or called[batch + 1].wait(10)
        return keep(self, batch, out)

    monkeypatch.setattr(jax, 'block_until_ready', ready)
    monkeypatch.setattr(Writer, 'keep', keep)
    rows = sg.store(fun, Noted(), tmp_path, batch_size=4)
    assert_rows(rows, 2 * X, Y.astype(np.int32))
    # The function may use its memory again: it is called when the last one is ready.
    assert events == [
        *('read 0', 'call 0', 'read 1', 'ready 0', 'call 1'),
        *('read 2', 'ready 1', 'call 2'),
    ]


def test_a_function_that_changes_the_folder_and_its_input(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'other').mkdir()
    data = X.copy()

    def fun(x):
        os.chdir(tmp_path / 'other')
        x *= 2
        return x

    assert_rows(sg.store(fun, data, 'rows', batch_size=4), 2 * X)
    np.testing.assert_array_equal(data, X)


def test_a_source_that_fills_one_buffer(tmp_path: Path):
    class Buffered(Pairs):
        buffer = np.empty(3, np.float32)

        def __getitem__(self, n):
            self.buffer[:] = X[n]
            return self.buffer, n

    assert_rows(sg.store(of_pair, Buffered(), tmp_path, batch_size=4), 2 * X, Y)


def test_an_array_that_the_function_writes_again(tmp_path: Path):
    buffer = np.empty((4, 3), np.float32)

    def fun(x):
        np.multiply(x, 2, out=buffer)
        return buffer

    assert_rows(sg.store(fun, X, tmp_path, batch_size=4), 2 * X)


def test_an_error_says_for_which_examples(tmp_path: Path):
    class Broken(Pairs):
        def __getitem__(self, n):
            if n == 6:
                raise KeyError('no such picture')
            return super().__getitem__(n)

    def fun(x, y):
        assert y[0] < 8
        return of_pair(x, y)

    for source, said in (Broken(), 'examples 4 to 7 of 11'), ((X, Y), '8 to 10 of 11'):
        with pytest.raises((KeyError, AssertionError)) as raised:
            sg.store(fun, source, tmp_path, batch_size=4)
        assert said in raised.value.__notes__[0]
    assert_rows(sg.store(of_pair, (X, Y), tmp_path, batch_size=4), 2 * X, Y)


def test_a_log_has_a_line_in_a_minute(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(bars, '_PAUSE', -1)
    sg.store(of_pair, (X, Y), tmp_path, batch_size=4)
    said = capsys.readouterr()
    assert said.out == ''
    assert said.err.split('\n')[-2] == '11 of 11 rows'
    monkeypatch.undo()
    sg.store(of_pair, (X, Y), tmp_path, batch_size=4)
    assert capsys.readouterr() == ('', '')


def test_a_bar_in_a_terminal(tmp_path: Path, monkeypatch, capsys):
    """Also beside a bar of the program."""
    monkeypatch.setenv('FORCE_COLOR', '1')
    with progress.Progress(disable=False):
        sg.store(of_pair, (X, Y), tmp_path / 'a', batch_size=4)
    sg.store(of_pair, (X, Y), tmp_path / 'b', batch_size=4)
    assert '11/11' in capsys.readouterr().err


# Training from files.


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        with nn.stop_gradient('body_*/**'):
            for n in range(2):
                x = nn.relu(nn.Dense(8, name=f'body_{n}', dtype=jnp.bfloat16)(x))
        return nn.Dense(3, name='head')(x.astype(jnp.float32))


@pytest.mark.usefixtures('standard_promotion')
@pytest.mark.parametrize('way', ['of one example', 'examples=True'])
def test_six_steps_of_adam_are_those_of_the_whole_loss(way: str, tmp_path: Path):
    """By hand: the gradient of the whole loss, for the head alone."""
    net, count, size = Net(), 23, 8
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((count, 5), np.float32), rng.integers(0, 3, count)
    params = net.init(jax.random.key(0), x[:1])['params']
    names = jax.random.normal(jax.random.key(5), (3, 5))

    def of_one(p, x, y):
        frozen = jax.lax.stop_gradient(p['body_0']['kernel'])
        text = jnp.tanh(names @ frozen).sum(1)  # It reads no data.
        logits = net.apply({'params': p}, x[None])[0] + text * p['head']['bias']
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    def loss(p, x, y):
        return jnp.mean(jax.vmap(of_one, (None, 0, 0))(p, x, y))

    if way == 'examples=True':
        split: Any = {'wrt': 'head/**', 'examples': True}
        ahead = sg.precompute(loss, params, x[:size], y[:size], **split)
        late, axes = ahead.late, 0
        early = functools.partial(ahead.early, params)
    else:
        ahead = sg.precompute(of_one, params, x[0], y[0], wrt='head/**')
        axes = ahead.axes
        assert None in axes
        early = jax.vmap(functools.partial(ahead.early, params), out_axes=axes)

        def late(p, kept):
            return jnp.mean(jax.vmap(ahead.late, (None, axes))(p, kept))

    rows = sg.store(jax.jit(early), (x, y), tmp_path, batch_size=size, axes=axes)
    order = [rng.permutation(count)[:size] for _ in range(6)]

    def trained(value_and_grad, data):
        p, tx, values = params, optax.adam(1e-2), []
        state = tx.init(p['head'])
        for n in order:
            value, grads = value_and_grad(p, data(n))
            updates, state = tx.update(grads['head'], state, p['head'])
            p = {**p, 'head': optax.apply_updates(p['head'], updates)}
            values.append(float(value))
        return values

    whole = jax.jit(jax.value_and_grad(lambda p, data: loss(p, *data)))
    split = jax.jit(sg.value_and_grad(late, wrt='head/**'))
    by_hand = trained(whole, lambda n: (x[n], y[n]))
    np.testing.assert_allclose(trained(split, rows.__getitem__), by_hand, rtol=1e-5)
    assert by_hand[-1] < by_hand[0]
