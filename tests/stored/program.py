"""A program that stores rows, which tests start as processes and kill.

python program.py FOLDER SECONDS [PORT COUNT INDEX] [--dies-after CALLS] [--factor F]
"""

import argparse
import os
import signal
import time

import jax
import numpy as np

import flax_sg as sg

ROWS, BATCH = 203, 8


def data():
    """Examples, and their numbers."""
    x = np.random.default_rng(0).standard_normal((ROWS, 5)).astype(np.float32)
    return x, np.arange(ROWS)


def by_hand(x, y):
    """What is stored."""
    return {'double': 2 * x, 'number': y}


def main():
    """Stores the rows, and prints how often the function was called."""
    parser = argparse.ArgumentParser()
    parser.add_argument('folder')
    parser.add_argument('seconds', type=float)
    parser.add_argument('where', type=int, nargs='*')
    parser.add_argument('--dies-after', type=int, default=0)
    parser.add_argument('--factor', type=float, default=2.0)
    options = parser.parse_args()
    # Shells let programs in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.where:
        port, count, index = options.where
        jax.distributed.initialize(f'localhost:{port}', count, index)
        assert jax.process_count() == count
    calls = []

    def slow(x, y):
        calls.append(len(x))
        print('call', flush=True)
        if len(calls) == options.dies_after:
            os._exit(9)
        time.sleep(options.seconds)
        return {**by_hand(x, y), 'double': np.float32(options.factor) * x}

    try:
        sg.store(slow, data(), options.folder, batch_size=BATCH)
    except sg.errors.StaleRowsError:
        print('stale', len(calls), flush=True)
    else:
        assert {*calls} <= {BATCH}
        print('done', len(calls), flush=True)


if __name__ == '__main__':
    main()
