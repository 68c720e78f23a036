"""Measures ``sg.store`` beside a memory map of numpy, and a training that reads rows.

Run as ``python -m benchmarks.store``. Rows of four sizes are written and read at
random, from the page cache. A head is trained on rows that Grain shuffles, from files
and from memory. Prints a table, and writes ``results/``. Files go into ``TMPDIR``.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import flax_sg as sg
from benchmarks.checkout import RESULTS, commit
from benchmarks.report import device_name, file_of, versions
from benchmarks.timing import Ratio, interleaved, ratios


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        rows: for each size of a row in bytes, how many there are, and in a file.
        batch: how many rows are read at once.
        rounds: how often the programs run in turn.
        features: the width of the rows of the training.
        examples: how many rows it has.
        hidden: the width of the head.
    """

    rows: Mapping[int, tuple[int, int]]
    batch: int = 256
    rounds: int = 9
    features: int = 2048
    examples: int = 20_000
    hidden: int = 1024


REAL = Sizes(
    {
        4: (200_000, 4096),
        512: (200_000, 4096),
        300_000: (4096, 256),
        3_000_000: (512, 32),
    }
)
SMALL = Sizes({4: (20, 8), 3000: (7, 2)}, 4, 1, 4, 40, 3)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for files, which are deleted."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def of_rows(nbytes: int, count: int, batch: int, sizes: Sizes) -> dict[str, Ratio]:
    """The times of writing and reading relative to a memory map."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 255, (count, nbytes), np.uint8).view(np.float32)
    with folder() as place:
        names = map(str, itertools.count())

        def mapped() -> np.ndarray:
            return np.lib.format.open_memmap(
                *(place / next(names), 'w+'), data.dtype, data.shape
            )

        def by_map() -> None:
            file = mapped()
            for start in range(0, count, batch):
                file[start : start + batch] = data[start : start + batch]
            file.flush()

        def by_store() -> None:
            sg.store(lambda x: x, data, place / next(names), batch_size=batch)

        def clear() -> None:
            for path in place.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        writing = {'store': by_store, 'map': by_map}
        wrote = interleaved(writing, sizes.rounds, before=clear)
        clear()
        rows = sg.store(lambda x: x, data, place / 'rows', batch_size=batch)
        file = mapped()
        file[:] = data
        order: list[Any] = [slice(0)]

        def another() -> None:
            order[0] = rng.permutation(count)[: sizes.batch]

        reading = {'store': lambda: rows[order[0]], 'map': lambda: file[order[0]]}
        read = interleaved(reading, 3 * sizes.rounds, before=another)
    return {
        'write': ratios(wrote, 'map')['store'],
        'read': ratios(read, 'map')['store'],
    }


def training(sizes: Sizes) -> Ratio:
    """The time of a step on rows from files, relative to rows in memory."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sizes.examples, sizes.features), np.float32)
    y = rng.integers(0, 10, sizes.examples).astype(np.int32)
    tx = optax.adam(1e-3)
    shapes = (sizes.features, sizes.hidden), (sizes.hidden, 10)
    params = [jnp.asarray(rng.standard_normal(s, np.float32)) / 30 for s in shapes]

    def loss(params: Any, x: Any, y: Any) -> Any:
        logits = jax.nn.relu(x @ params[0]) @ params[1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def epoch(read: Any) -> Any:
        order = grain.MapDataset.range(sizes.examples).shuffle(seed=0)
        batches = order.batch(sizes.batch, drop_remainder=True).map(read)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        now = params, tx.init(params)
        for batch in batches.to_iter_dataset(options):
            now = step(*now, *batch)
        return now

    with folder() as place:
        rows = sg.store(lambda *data: data, (x, y), place, batch_size=sizes.batch)
        runs = {
            'store': functools.partial(epoch, rows.__getitem__),
            'memory': functools.partial(epoch, lambda n: (x[n], y[n])),
        }
        return ratios(interleaved(runs, sizes.rounds), 'memory')['store']


def run(sizes: Sizes, place: Path) -> dict[str, dict[str, Ratio]]:
    """Measures everything, prints a table and writes the results."""
    found = {
        f'{nbytes:,} bytes': of_rows(nbytes, *counts, sizes)
        for nbytes, counts in sizes.rows.items()
    }
    step = training(sizes)
    print('| a row of | writing | reading 256 at random | ms |\n|---|---|---|---|')
    for name, times in found.items():
        cells = [shown(times[way]) for way in ('write', 'read')]
        print(f'| {name} | {" | ".join(cells)} | {1e3 * times["read"].seconds:.3g} |')
    print(f'\nA step of a training through Grain, to memory: {shown(step)}')
    found['training'] = {'step': step}
    device = device_name()
    results = {
        'device': device,
        'versions': versions(),
        'commit': commit(),
        'sizes': dataclasses.asdict(sizes),
        'ratios': {
            name: {way: dataclasses.asdict(it) for way, it in times.items()}
            for name, times in found.items()
        },
    }
    place.mkdir(parents=True, exist_ok=True)
    file = place / f'{file_of(device)}_store.json'
    file.write_text(json.dumps(results, indent=1) + '\n')
    return found


def shown(ratio: Ratio) -> str:
    """A ratio, with its quartiles."""
    return f'{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})'


if __name__ == '__main__':
    run(REAL, RESULTS)
