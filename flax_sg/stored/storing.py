"""``store``: what a function makes of all examples of a source, computed once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from flax_sg import errors
from flax_sg.internals.types import Args, PyTree
from flax_sg.stored.batches import Source
from flax_sg.stored.progress import Bar
from flax_sg.stored.rows import Rows
from flax_sg.stored.writing import Writer


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
    be mounted.

    Args:
        fun: a function of a batch, which returns a tree of dicts, lists and tuples of
            arrays. It is called as it is, with ``batch_size`` examples: the last batch
            is filled up, and cut off again. Most often it is
            ``jax.jit(functools.partial(ahead.early, params))``, see ``sg.precompute``.
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
    examples = Source(source, batch_size)
    count = len(examples)
    if min(count, batch_size) < 1:
        raise errors.ArgumentValueError(
            f'The source has {count} examples, and batch_size is {batch_size}.\n'
            'Both have to be 1 or more.'
        )
    writer = Writer(os.path.abspath(folder), count, batch_size, axes)
    about, done = writer.about, writer.done()
    with (
        Bar(count, sum(map(about.rows_in, done))) as bar,
        ThreadPoolExecutor(1) as reading,
        ThreadPoolExecutor(1) as writing,
    ):

        def todo() -> Iterator[tuple[int, Args]]:
            for batch in _in_order(about.batches, done):
                if batch not in done and writer.has(batch):  # Another process has.
                    bar.add(about.rows_in(batch))
                else:
                    yield batch, examples.batch(batch)

        # The device computes a batch while the next one is read and the last written.
        batches = todo()
        coming, going = reading.submit(next, batches, None), writing.submit(int)
        while (now := coming.result()) is not None:
            coming = reading.submit(next, batches, None)
            with examples.named(now[0]):
                out = _own(fun(*now[1]))
            bar.add(going.result())
            going = writing.submit(writer.keep, now[0], out)
        bar.add(going.result())
    return Rows(folder)


def _in_order(batches: range, done: Set[int]) -> Iterator[int]:
    """The last batch that is done, and all that are not: those of this process first.

    Then it helps with those of the others, so that nobody waits for a process that is
    slow or dead. Those who help begin with different ones.
    """
    count, index = jax.process_count(), jax.process_index()
    mine = batches[index::count]
    others = sorted({*batches}.difference(mine))
    random.Random(index).shuffle(others)
    yield from [max(done)] if done else []
    yield from (batch for batch in (*mine, *others) if batch not in done)


def _own(out: PyTree) -> PyTree:
    """What a function returned; of arrays that it may write again, copies."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), out)
