"""Trains the demo in several processes.

Each process has its own devices and its part of every batch. JAX's multi-controller
runtime (``jax.distributed``) joins the processes. XLA adds the all-reduce of the
gradients to the step.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_sg import demo
from flax_sg.demo import data

DATA = 'data'  # the axis of the mesh along which a batch is cut


def trained(processes: int, steps: int, out: Path) -> list[Any]:
    """Trains in new processes, each with one device.

    Args:
        processes: how many.
        steps: of training.
        out: a folder, for what they hold in the end.

    Returns:
        The losses and the parameters that each process holds at the end, by name.
    """
    with socket.socket() as free:
        free.bind(('localhost', 0))
        address = f'localhost:{free.getsockname()[1]}'
    settings = {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1'}
    command = [sys.executable, __file__, address]
    workers = [
        subprocess.Popen(
            [*command, *map(str, (processes, number, steps, out))],
            env={**os.environ, **settings},
        )
        for number in range(processes)
    ]
    try:
        assert [worker.wait(timeout=300) for worker in workers] == [0] * processes
    finally:
        for worker in workers:
            worker.kill()
    return [dict(np.load(out / f'{number}.npz')) for number in range(processes)]


def by_name(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their key paths."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys): np.asarray(leaf) for keys, leaf in pairs}


def work(number: int, steps: int, out: Path, devices: Sequence[Any] = ()) -> None:
    """Trains as one of several processes, and saves what it holds at the end."""
    mesh = Mesh(np.array(devices or jax.devices()), (DATA,))

    def placed(tree: Any, *spec: str) -> Any:
        """Arrays that every process has, on the devices of all."""
        sharding = NamedSharding(mesh, PartitionSpec(*spec))

        def put(leaf: Any) -> jax.Array:
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(
                whole.shape, sharding, lambda index: whole[index]
            )

        return jax.tree.map(put, tree)

    model, (digits, _) = demo.DigitModel(), data.load()
    tx = optax.adam(1e-2)
    params = demo.initial(model)
    state = placed((params, tx.init(params)))

    @jax.jit
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        images, labels, number = batch
        key = jax.random.fold_in(jax.random.key(3), number)

        def total(params: Any) -> tuple[Any, Any]:
            losses = demo.losses(model, params, images, labels, key)
            return sum(losses), losses

        grads, losses = jax.grad(total, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses

    draw, losses = np.random.default_rng(2), []
    for index in range(steps):
        chosen = draw.integers(len(digits.labels), size=demo.BATCH_SIZE)
        batch = placed((digits.images[chosen], digits.labels[chosen]), DATA)
        # Each device holds its part of the batch only.
        parts = {part.data.shape for part in batch[0].addressable_shards}
        assert parts == {(demo.BATCH_SIZE // mesh.size, 64)}
        state, loss = step(state, (*batch, index))
        losses.append(loss)
    results = by_name({'losses': np.array(losses), 'params': state[0]})
    np.savez(out / f'{number}.npz', **results)


if __name__ == '__main__':
    address, *counts, folder = sys.argv[1:]
    processes, number, steps = map(int, counts)
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(address, processes, number)
    work(number, steps, Path(folder))
