"""``python -m flax_sg demo --processes N``: the same training, in several processes.

Each process has one device and its part of every batch. JAX's multi-controller runtime
(``jax.distributed``) joins them, and XLA puts the all-reduce of the gradients into the
step. What they compute is compared with one process that has as many devices.
"""

import argparse
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from flax_sg.demo import data, train
from flax_sg.demo import model as models

Arrays = dict[str, NDArray[Any]]
PARAMS = 'params'


@dataclasses.dataclass(frozen=True)
class Trained:
    """What some processes computed.

    Attributes:
        curves: the learning curves that each process saw, by name.
        params: the parameters that each process holds at the end, by key path.
        restored: the parameters, from the checkpoint that all processes wrote.
    """

    curves: list[Arrays]
    params: list[Arrays]
    restored: Arrays


def main(processes: int, steps: int) -> int:
    """Trains in several processes and in one, compares, prints.

    Args:
        processes: how many; each batch is divided among them.
        steps: of training.

    Returns:
        The exit status: 0 if all processes hold the same parameters to the last bit,
        the checkpoint too, and the learning curve is that of one process.
    """
    data.optional('sklearn')
    console = Console(highlight=False)
    console.print(f'[bold]One training in {processes} processes[/]')
    start = time.perf_counter()
    many = trained(processes, 1, steps)
    alone = trained(1, processes, steps)
    show_curves(console, many, alone)
    claims = {
        'Every process holds the same parameters': same(many.params),
        'A checkpoint that all wrote, restored in one, is these': same(
            [many.restored, many.params[0]]
        ),
        'The learning curve is that of one process': same(
            [*many.curves, *alone.curves]
        ),
        'So are the parameters': same([*many.params, *alone.params]),
    }
    for claim, holds in claims.items():
        verdict = '[green]holds[/]' if holds else '[red]FAILED[/]'
        console.print(f'{verdict}  {claim}, to the last bit.', soft_wrap=True)
    console.print(f'{time.perf_counter() - start:.0f} s')
    return int(not all(claims.values()))


def same(trees: Sequence[Arrays]) -> bool:
    """Whether all have the same arrays to the last bit."""

    def bits(tree: Arrays) -> dict[str, Any]:
        return {name: (a.dtype, a.shape, a.tobytes()) for name, a in tree.items()}

    return all(bits(tree) == bits(trees[0]) for tree in trees)


def show_curves(console: Console, many: Trained, alone: Trained) -> None:
    """Prints what the first process saw, beside what one process alone saw."""
    table = Table('step', 'gln', 'code', 'explanation', 'accuracy', 'alone')
    [single], first = alone.curves, many.curves[0]
    for row in np.unique(np.linspace(0, len(first['steps']) - 1, 6).astype(int)):
        numbers = [f'{loss:.4f}' for loss in first['losses'][row]]
        of_many, of_one = first['accuracy'][row], single['accuracy'][row]
        step = str(first['steps'][row])
        table.add_row(step, *numbers, f'{of_many:.3f}', f'{of_one:.3f}')
    console.print(table)


def trained(processes: int, devices: int, steps: int) -> Trained:
    """Trains in new processes.

    Args:
        processes: how many.
        devices: how many each of them has.
        steps: of training.

    Raises:
        RuntimeError: if one of them fails, with what it wrote.
    """
    address = f'localhost:{_free_port()}'
    environment = {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices)}
    with contextlib.ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: list[subprocess.Popen[bytes]] = []
        for number in range(processes):
            log = stack.enter_context((out / f'{number}.log').open('w'))
            args = [address, *map(str, (processes, number, steps, out))]
            worker = subprocess.Popen(
                [sys.executable, '-m', __name__, *args],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
            workers.append(worker)
        _wait(workers, out)
        saved = [out / f'{number}' for number in range(processes)]
        return Trained(
            [_load(path / 'curves.npz') for path in saved],
            [_load(path / 'params.npz') for path in saved],
            _by_name(restored(out / PARAMS)),
        )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(('localhost', 0))
        return free.getsockname()[1]


def restored(path: Path) -> train.Params:
    """The parameters in a checkpoint, on the default device of this process."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        jax.eval_shape(lambda: train.initial(models.DigitModel())),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def _wait(workers: Sequence[subprocess.Popen[bytes]], out: Path) -> None:
    """Waits for all, or for the first that fails."""
    try:
        while None in (codes := [worker.poll() for worker in workers]):
            if any(codes):
                break
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for number, code in enumerate(codes):
        if code:
            said = (out / f'{number}.log').read_text()
            raise RuntimeError(
                f'process {number} of {len(workers)} ended with {code}:\n{said}'
            )


def _save(path: Path, arrays: Arrays) -> None:  # pragma: no cover (as ``work``)
    named: dict[str, Any] = arrays
    np.savez(path, **named)


def _load(path: Path) -> Arrays:
    with np.load(path) as arrays:
        return dict(arrays)


def _by_name(tree: Any) -> Arrays:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys): np.asarray(leaf) for keys, leaf in pairs}


def work(argv: Sequence[str]) -> None:  # pragma: no cover (in its own process)
    """Trains as one of several processes.

    Args:
        argv: the address of the first process, how many there are, which this is, how
            many steps, and the folder for the results.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument('address')
    for name in ('processes', 'number', 'steps'):
        parser.add_argument(name, type=int)
    parser.add_argument('out', type=Path)
    given = parser.parse_args(argv)
    if given.processes > 1:
        jax.config.update('jax_cpu_collectives_implementation', 'gloo')
        jax.distributed.initialize(given.address, given.processes, given.number)
    mesh = Mesh(np.array(jax.devices()), (train.DATA,))
    digits, held_out = data.load()
    trainer = train.Trainer(models.DigitModel(), digits, held_out, given.steps, mesh)
    run = trainer.run()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(given.out / PARAMS, run.params)
    mine = given.out / str(given.number)
    mine.mkdir()
    _save(mine / 'params.npz', _by_name(run.params))
    curves = {'steps': run.steps, 'losses': run.losses, 'accuracy': run.accuracy}
    _save(mine / 'curves.npz', {name: np.asarray(of) for name, of in curves.items()})


if __name__ == '__main__':
    work(sys.argv[1:])
