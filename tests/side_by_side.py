"""Runs random programs on two checkouts, and compares what each call gives.

    python tests/side_by_side.py OTHER_CHECKOUT [--seeds 0:200]

A program is a sequence of calls in one process, under random filters, forms and orders,
of functions that are compiled once. Of each call the outputs and gradients are compared
bit by bit, and errors and warnings by their class. Run it after each change of the
engine, with the commit before it as the other checkout.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ['enc', 'mid', 'head']


def run(seed: int) -> list[Any]:
    """Runs the program of one seed; returns what each call gave."""
    import flax.linen as fnn
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flax_sg import linen as nn

    draw = random.Random(seed)
    x = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)
    # What a module does around some of its layers, chosen when it is made.
    filters: dict[str, Any] = {
        'glob': lambda name: f'{name}/**',
        'kernels': lambda name: '**/kernel',
        'regex': lambda name: re.compile(f'{name}/.+'),
        'function': lambda name: lambda path: path.startswith(f'{name}/'),
        'not': lambda name: lambda path: not path.startswith(f'{name}/'),
        'list': lambda name: [f'{name}/kernel', f'{name}/bias'],
        'true': lambda name: True,
    }
    blocks: dict[str, Any] = {
        'stop': nn.stop_gradient,
        'only': nn.train_only,
        'scale': lambda where: nn.scale_gradient(where, 0.5),
        'reverse': nn.reverse_gradient,
        'substitute': lambda where: nn.substitute(
            lambda path, leaf: 2.0 * leaf, where=where
        ),
    }

    def block() -> tuple[str, Any]:
        kind, rule = draw.choice(list(filters)), draw.choice(list(blocks))
        name = draw.choice([*LAYERS, draw.choice([*LAYERS, 'typo'])])
        return f'{rule} {kind} {name}', lambda: blocks[rule](filters[kind](name))

    def net(depth: int) -> Any:
        chosen = block() if draw.random() < 0.5 else ('', None)
        how = draw.choice(
            ['plain', 'frozen', 'mirror', 'remat', 'jit', 'scan', 'setup']
        )

        class Net(fnn.Module):
            inside: Any = chosen[1]

            def setup(self) -> None:
                self.enc, self.mid, self.head = (fnn.Dense(2) for _ in LAYERS)
                if how == 'setup':
                    self.gate = self.param('gate', fnn.initializers.ones, (2,)) * 2.0
                if how == 'frozen':
                    self.cold = nn.Frozen(fnn.Dense(2), where=draw_where)
                if how in ('remat', 'jit'):
                    self.other = getattr(nn, how)(fnn.Dense)(2)
                if how == 'scan':
                    self.cells = fnn.scan(
                        Cell,
                        variable_axes={'params': 0},
                        split_rngs={'params': True},
                        length=2,
                    )()

            def __call__(self, x: Any) -> Any:
                x = jnp.tanh(self.enc(x))
                with self.inside() if self.inside else contextlib.nullcontext():
                    x = jax.nn.relu(self.mid(x)) + x
                    if how == 'frozen':
                        x = x + self.cold(x)
                    if how == 'mirror':
                        x = x + nn.mirror(self.head)(x)
                    if how in ('remat', 'jit'):
                        x = x + self.other(x)
                    if how == 'scan':
                        x = self.cells(x, None)[0]
                    if how == 'setup':
                        x = x * self.gate
                return self.head(x)

        class Cell(fnn.Module):
            @fnn.compact
            def __call__(self, x: Any, _: Any) -> Any:
                return jnp.tanh(fnn.Dense(2, name='mid')(x)), None

        draw_where = draw.choice([True, 'kernel'])
        return Net(), f'{how} [{chosen[0]}]'

    functions: list[tuple[str, Any, Any]] = []
    for number in range(2):
        model, text = net(number)
        params = model.clone(inside=None).init(jax.random.key(number), x)

        def loss(v: Any, x: Any, model: Any = model) -> Any:
            return jnp.mean(model.apply(v, x) ** 2)

        makers = {
            'grad': lambda f: jax.value_and_grad(f),
            'jit grad': lambda f: jax.jit(jax.value_and_grad(f)),
            'grad jit': lambda f: jax.value_and_grad(jax.jit(f)),
            'checkpoint': lambda f: jax.value_and_grad(jax.checkpoint(f)),
            'value': lambda f: jax.jit(f),
            'vmap': lambda f: jax.jit(
                lambda v, x: jax.vmap(jax.value_and_grad(f), (None, 0))(v, x[:, None])
            ),
            'twice': lambda f: jax.jit(
                lambda v, x: jax.grad(
                    lambda x: jnp.sum(jax.tree.leaves(jax.grad(f)(v, x))[0])
                )(x)
            ),
        }
        shared = jax.jit(loss)
        for name in draw.sample(list(makers), 4):
            functions.append((f'{name} of {text}', makers[name](loss), params))
        functions.append((f'grad of one jit of {text}', jax.grad(shared), params))
        functions.append((f'value of one jit of {text}', shared, params))

    around = [block() for _ in range(3)] + [('', contextlib.nullcontext)]
    out: list[Any] = []
    for _ in range(14):
        name, fn, params = draw.choice(functions)
        opened = draw.sample(around, draw.choice([1, 1, 1, 2]))
        case = f'{name} in {[text for text, _ in opened]}'
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter('always')
            try:
                with contextlib.ExitStack() as stack:
                    for _, make in opened:
                        stack.enter_context(make())
                    found = jax.tree.leaves(fn(params, x))
                data = b''.join(np.asarray(leaf).tobytes() for leaf in found)
                said = hashlib.sha1(data).hexdigest()[:12]
            except Exception as error:
                said = f'{type(error).__name__}'
        out.append([case, said, sorted({w.category.__name__ for w in heard})])
    return out


def results_of(checkout: Path, first: int, last: int) -> list[Any]:
    """Runs programs on a checkout, in a process of their own."""
    env = {**os.environ, 'PYTHONPATH': str(checkout), 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, __file__, '--run', f'{first}:{last}']
    text = subprocess.check_output(command, env=env, cwd=checkout, text=True)
    return json.loads(text.splitlines()[-1])


def main() -> int:
    """Compares two checkouts; returns how many calls give other numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('other', nargs='?', type=Path)
    parser.add_argument('--seeds', default='0:100')
    parser.add_argument('--run')
    args = parser.parse_args()
    first, last = map(int, (args.run or args.seeds).split(':'))
    if args.run:
        print(json.dumps([run(seed) for seed in range(first, last)]))
        return 0
    counts: collections.Counter[str] = collections.Counter()
    for start in range(first, last, 20):
        stop = min(start + 20, last)
        ours = results_of(ROOT, start, stop)
        theirs = results_of(args.other.resolve(), start, stop)
        for seed, mine, others in zip(range(start, stop), ours, theirs, strict=True):
            for (case, one, heard), (_, other, heard_there) in zip(
                mine, others, strict=True
            ):
                if one != other:
                    is_error = one.endswith('Error') or other.endswith('Error')
                    kind = 'errors' if is_error else 'NUMBERS'
                    counts[kind] += 1
                    print(f'{kind} {seed}: {case}\n    {one} {heard}, was {other}')
                elif heard != heard_there:
                    counts['warnings'] += 1
                else:
                    counts['equal'] += 1
    print(dict(counts))
    return counts['NUMBERS']


if __name__ == '__main__':
    sys.exit(main())
