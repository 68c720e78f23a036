"""``store``: what a function makes of all examples of a source, computed once."""

from __future__ import annotations

import operator
import os
import random
import sys
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from flax_sg import errors
from flax_sg.errors.texts import wrong_argument
from flax_sg.internals.types import PyTree
from flax_sg.stored.batches import Source
from flax_sg.stored.progress import Bar
from flax_sg.stored.rows import Rows
from flax_sg.stored.writing import Writer

_WRITE = "sg.store(early, (x, y), 'features', batch_size=256)"


def store(
    fun: Callable[..., PyTree],
    source: Any,
    folder: str | os.PathLike[str],
    *,
    batch_size: int,
    axes: PyTree = 0,
) -> Rows:
    """Computes a function of all examples of a data set, once, and keeps it in files.

    For features of a frozen backbone, logits of a teacher, log-probabilities of a
    reference model. Call it at each start of your program: it computes the batches
    whose files are not there yet, so it goes on after a kill. With several processes of
    ``jax.distributed`` and a folder that all of them see, each computes a part.

    >>> import tempfile
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import flax_sg as sg
    >>> x, y = jnp.ones((10, 3)), jnp.arange(10)
    >>> features = jax.jit(lambda x, y: {'feature': x.sum(1), 'label': y})
    >>> rows = sg.store(features, (x, y), tempfile.mkdtemp(), batch_size=4)
    >>> rows
    <10 rows of float32[], int32[]>
    >>> rows[[9, 2]]
    {'feature': array([3., 3.], dtype=float32), 'label': array([9, 2], dtype=int32)}

    Before it goes on, it computes the last batch that is there once more. So other
    weights, other code, another order of the data and a random function raise. One
    example that was edited, and weights that moved by a thousandth, do not show.

    The folder has ``about.json``; a file for each batch, which ``numpy.load`` reads,
    with a record for each row; and ``fixed.npy`` for what is in no row. A bucket has to
    be mounted. It has no hard links, so only processes of one program may write there:
    two programs that start at once overwrite each other's rows.

    Args:
        fun: a function of a batch, which returns a tree of dicts, lists and tuples of
            arrays. It is called as it is, with ``batch_size`` examples: the last batch
            is filled up, and cut off again. Most often it is
            ``jax.jit(functools.partial(ahead.early, params))``, see ``sg.precompute``.
            With several processes its weights are the process's own, equal in all.
        source: arrays with the examples in front, or a tuple or a dict of them: ``fun``
            gets each array of a tuple as an argument. Or anything with ``len`` and
            ``[n]``, such as a data set of Grain, PyTorch, Hugging Face or tfds: an
            example is a tree of arrays, and the batch has the same tree.
        folder: where the files are. It is made if it is missing.
        batch_size: how many examples a call and a file have.
        axes: as ``out_axes=`` of ``jax.vmap``: 0 for arrays with a row for each example
            in front, None for what is the same for all examples and is kept once; for
            all arrays, or as a tree. Of a loss of one example it is ``one.axes``.

    Returns:
        The rows, for all processes. Those of others are there when it returns.

    Raises:
        StaleRowsError: if the folder has rows of another function, of other data, or of
            another ``batch_size``.
        StructureError: if the function does not return rows, if a batch has other
            shapes, or if examples differ in shape.
        ArgumentTypeError: if it returns typed keys, texts or objects, or arrays that
            are spread over processes.
        ArgumentValueError: if there are no examples.

    What ``source`` and ``fun`` raise has a note, which says for which examples.
    """
    if not callable(fun):
        raise wrong_argument(fun, 'function', _WRITE)
    if not hasattr(folder, '__fspath__') and not isinstance(folder, str):
        raise wrong_argument(folder, 'folder', _WRITE)
    if '://' in os.fspath(folder):
        raise errors.ArgumentValueError(
            f'{folder} is no folder of a file system.\nMount the bucket.'
        )
    batch_size = operator.index(batch_size)
    examples = Source(source, batch_size)
    count = len(examples)
    if batch_size < 1 or not 0 < count < sys.maxsize:
        raise errors.ArgumentValueError(
            f'The source has {count} examples, and batch_size is {batch_size}.\n'
            'Give 1 or more of both, and a source that ends.'
        )
    writer = Writer(os.path.abspath(folder), count, batch_size, axes)
    about, done = writer.about, writer.done()
    first = max(done, default=0)

    def write(batch: int, out: PyTree) -> int:
        with examples.named(batch):
            return writer.keep(batch, out)

    # The device computes a batch while the next one is read and the last one written.
    # The function is called when that is done: it may use its memory again.
    with (
        Bar(count, sum(map(about.rows_in, done))) as bar,
        ThreadPoolExecutor(1) as writing,
    ):
        now, going = [], writing.submit(int)
        for batch in _in_order(about.batches, first, done):
            if batch != first and writer.has(batch):  # Another process has written it.
                bar.add(about.rows_in(batch))
                continue
            args = examples.batch(batch)
            jax.block_until_ready(now)
            bar.add(going.result())
            if now:
                going = writing.submit(write, *now)
            with examples.named(batch):
                now = [batch, _own(fun(*args))]
        bar.add(going.result())
        bar.add(write(*now))
    return Rows(writer.folder)


def _in_order(batches: range, first: int, done: Set[int]) -> Iterator[int]:
    """The first batch, and all that are not done: those of this process first.

    Each process begins with the same batch, so that one with other weights is seen
    before it writes. At the end it helps with those of the others: nobody waits for a
    process that is slow or dead. Those who help begin with different ones.
    """
    count, index = jax.process_count(), jax.process_index()
    others = [batch for batch in batches if batch % count != index]
    random.Random(index).shuffle(others)
    yield first
    for batch in (*batches[index::count], *others):
        if batch != first and batch not in done:
            yield batch


def _own(out: PyTree) -> PyTree:
    """What a function returned; of arrays that it may write again, copies."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), out)
