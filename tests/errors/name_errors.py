"""Names that a model has not, and blocks that are closed elsewhere; see test_errors."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax
import flax.linen as fnn
import jax
import jax.numpy as jnp

from flax_sg import linen as nn
from flax_sg.internals import required, versions
from tests.helpers.tasks import read_while_another_waits

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(fnn.Module):
    """An encoder and a normalisation."""

    def setup(self):
        self.encoder = fnn.Dense(3)
        self.norm = fnn.BatchNorm(use_running_average=True)

    def __call__(self, x):
        return self.norm(self.encode(x))

    def encode(self, x):
        return jnp.tanh(self.encoder(x))


def writes() -> None:
    norm = fnn.BatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), X)
    with nn.read_only('mean'):
        norm.apply(variables, X, mutable=True)


MODEL = Model()

VARIABLES = MODEL.init(jax.random.key(0), X)


def run(block: Any) -> None:
    with block:
        MODEL.apply(VARIABLES, X)


def nothing_read() -> None:
    with nn.stop_gradient('encoder/nothing'):
        pass


def close_first() -> None:
    first, second = nn.stop_gradient('encoder/**'), nn.stop_gradient('norm/*')
    first.__enter__()
    second.__enter__()
    try:
        first.__exit__(None, None, None)
    finally:
        MODEL.apply(VARIABLES, X)
        second.__exit__(None, None, None)


def close_in_another_thread() -> None:
    block = nn.stop_gradient('encoder/**')
    with block, ThreadPoolExecutor(1, 'another') as pool:
        MODEL.apply(VARIABLES, X)
        pool.submit(block.__exit__, None, None, None).result()


def awaited() -> None:
    block = nn.stop_gradient('encoder/**')
    read_while_another_waits(block, lambda: MODEL.apply(VARIABLES, X))


def lacks_a_name() -> None:
    programs = {
        **required.PROGRAMS,
        'Module.sow has to call put_variable': lambda: False,
        'attributes of a scope': lambda: required._has(flax.core.Scope({}), '_none'),
    }
    versions.check(programs)


CASES: dict[str, Any] = {
    'unused=': lambda: nn.stop_gradient('encoder/**', unused='warn'),
    'collections=': lambda: nn.stop_gradient('encoder/**', collections=3),
    'overwrite with gradient': lambda: nn.stop_gradient(
        True, collections=['params', '_overwrite_with_gradient']
    ),
    'unused at top level': lambda: run(nn.stop_gradient('encodr/**')),
    'no such collection': lambda: run(
        nn.stop_gradient('norm/mean', collections='batch_stat')
    ),
    'nothing read': nothing_read,
    'methods without a class': lambda: nn.stop_gradient(
        'encoder/**', methods=['encode']
    ),
    'no target': lambda: nn.train_only(3, 'encoder/**'),
    'a value that does not fit': lambda: run(
        nn.substitute({'encoder': {'bias': jnp.zeros(3, jnp.bfloat16)}})
    ),
    'a result that does not fit': lambda: run(
        nn.substitute(lambda path, value: value[0], where='norm/bias')
    ),
    'no value for a variable': lambda: run(nn.substitute('ema', where='encoder/bias')),
    'written and read only': lambda: writes(),
    'closed before an inner one': close_first,
    'closed in another thread': close_in_another_thread,
    'suspended task': awaited,
    'versions': lacks_a_name,
}
