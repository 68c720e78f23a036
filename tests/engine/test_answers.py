"""JAX reuses a compiled program when the filters give the same answers.

A predicate may read anything: a config, a file, a clock. Each program here has
a filter that means module 'a' at first, module 'b' after a change, and 'a' again after
the change is taken back. Gradients are compared with those of weights that were stopped
by hand, to the last bit, and Python in the model counts how often JAX traces it.
"""

import contextlib
import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as fnn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import omegaconf
import pytest

import flax_sg as sg
from flax_sg import errors, filters
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.described.modules import Do
from tests.helpers.left_over import forget_contexts

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)
TRACES: list[Any] = []


@pytest.fixture(autouse=True)
def _no_traces_yet() -> Iterator[None]:
    TRACES.clear()
    forget_contexts()  # No filter is asked for what other tests have read.
    yield
    TRACES.clear()


class Net(fnn.Module):
    """Two modules of two parameters each, and a record of each time Python runs."""

    names: tuple[str, ...] = ('a', 'b')
    times: int = 1

    @fnn.compact
    def __call__(self, x):
        if not self.is_initializing():
            TRACES.append(None)
        layers = [fnn.Dense(2, name=name) for name in self.names]
        for layer in layers * self.times:
            x = jnp.tanh(layer(x))
        return x


NET = Net()
PARAMS = jax.jit(NET.init)(jax.random.key(0), X)['params']
PATHS = ('a/bias', 'a/kernel', 'b/bias', 'b/kernel')


def loss(params: Any, model: Any = NET) -> Any:
    return jnp.sum(model.apply({'params': params}, X))


def make_step(model: Any = NET) -> Callable[[Any], Any]:
    """A compiled step that gives gradients; JAX has cached nothing of it yet."""
    return jax.jit(lambda params: jax.grad(loss)(params, model))


@functools.cache
def by_hand(*paths: str) -> Any:
    """The gradients of a compiled step on weights that were stopped by hand."""

    def of_copy(params: Any) -> Any:
        return loss(oracle.stopped(params, paths.__contains__))

    before = len(TRACES)
    found = jax.jit(jax.grad(of_copy))(PARAMS)
    del TRACES[before:]
    return found


def inside(name: str) -> tuple[str, ...]:
    """The paths of the parameters of one module."""
    return tuple(path for path in PATHS if path.startswith(name))


# What predicates read.


class Reads(NamedTuple):
    """A predicate, and what says which module it selects.

    Attributes:
        put: writes the name of the module where predicates read it.
        fresh: makes the predicate, anew for each step.
    """

    put: Callable[[str], Any]
    fresh: Callable[[], Any]


def of_config(config: Any, effect: Callable[[Any], Any] = lambda path: None) -> Reads:
    """An attribute names the module; the predicate may do more than answer."""

    def fresh() -> Callable[[Any], bool]:
        def where(path: Any) -> bool:
            effect(path)
            return path.startswith(config.frozen)

        return where

    return Reads(lambda name: setattr(config, 'frozen', name), fresh)


def a_mask_of_numpy() -> Reads:
    mask, names = np.array([True, False]), ['a', 'b']

    def put(name: str) -> None:
        mask[:] = [name == other for other in names]

    return Reads(put, lambda: lambda path: mask[names.index(path.parts[0])])


class Table(dict[str, bool]):
    """A table that cannot be compared, hashed or taken for a bool, as in pandas."""

    def __eq__(self, other: object) -> Any:
        raise TypeError('tables of other labels cannot be compared')

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'Table'")

    def __bool__(self) -> bool:
        raise ValueError('the truth value of a table is ambiguous')


def a_table() -> Reads:
    table = Table()
    return Reads(
        lambda name: table.update({n: n == name for n in 'ab'}),
        lambda: lambda path: table[path.parts[0]],
    )


def a_predicate_that_knows_no_other_path() -> Reads:
    frozen: dict[str, bool] = {}
    return Reads(
        lambda name: frozen.update({path: path[0] == name for path in PATHS}),
        lambda: lambda path: frozen[path],
    )


CASES: dict[str, Callable[[], Reads]] = {
    'OmegaConf': lambda: of_config(omegaconf.OmegaConf.create({'frozen': 'a'})),
    'ml_collections': lambda: of_config(ml_collections.ConfigDict({'frozen': 'a'})),
    'SimpleNamespace': lambda: of_config(types.SimpleNamespace()),
    # Its answers are the same, so nothing is compiled again.
    'prints': lambda: of_config(types.SimpleNamespace(), print),
    'a mask of numpy': a_mask_of_numpy,
    'a table': a_table,
    'a predicate that knows no other path': a_predicate_that_knows_no_other_path,
}


@pytest.fixture
def reads(request) -> Reads:
    """The predicate of a case, by its name."""
    found = CASES[request.param]()
    found.put('a')
    return found


every_case = pytest.mark.parametrize('reads', CASES, indirect=True)
a_config = pytest.mark.parametrize('reads', ['SimpleNamespace'], indirect=True)


def phases(reads: Reads) -> Iterator[tuple[str, int]]:
    """Which module is frozen, and how often a step has been traced by then."""
    yield 'a', 1
    reads.put('b')
    yield 'b', 2
    reads.put('a')  # The first program is found again.
    yield 'a', 2
    reads.put('b')
    yield 'b', 2


@every_case
def test_a_predicate_may_read_anything(reads):
    step = make_step()
    for frozen, traces in phases(reads):
        for _ in range(3):
            with nn.stop_gradient(reads.fresh()):
                found = step(PARAMS)
            oracle.assert_same(found, by_hand(*inside(frozen)))
            assert len(TRACES) == traces


# What is put around a step, and the gradients that this gives.


def plus_one(path: Any, value: Any) -> Any:
    return value + 1.0


def half(path: Any, cotangent: Any) -> Any:
    return cotangent * 0.5


def of_halves(name: str) -> Any:
    grads = by_hand()
    return {**grads, name: jax.tree.map(lambda g: g * 0.5, grads[name])}


def plus_ones(name: str) -> Any:
    def of_copy(params: Any) -> Any:
        return loss({**params, name: jax.tree.map(lambda p: p + 1.0, params[name])})

    return jax.jit(jax.grad(of_copy))(PARAMS)


AROUND: dict[str, tuple[Callable[[Any], list[Any]], Callable[[str], Any]]] = {
    'a predicate in a changing block': (
        lambda fresh: [nn.stop_gradient(fresh()), nn.stop_gradient('*/bias')],
        lambda name: by_hand(*inside(name), 'a/bias', 'b/bias'),
    ),
    'a predicate in a fixed block': (
        lambda fresh: [nn.stop_gradient('*/bias'), nn.stop_gradient(fresh())],
        lambda name: by_hand(*inside(name), 'a/bias', 'b/bias'),
    ),
    'train_only': (
        lambda fresh: [nn.train_only(fresh())],
        lambda name: by_hand(*{*PATHS} - {*inside(name)}),
    ),
    'map_cotangent': (lambda fresh: [nn.map_cotangent(fresh(), half)], of_halves),
    'substitute': (lambda fresh: [nn.substitute(plus_one, where=fresh())], plus_ones),
    'one level': (
        lambda fresh: [nn.stop_gradient(fresh(), levels=1)],
        lambda name: by_hand(*inside(name)),
    ),
}


@pytest.mark.parametrize('around', AROUND)
@a_config
def test_blocks_around_a_compiled_step(reads, around):
    blocks, expected = AROUND[around]
    by_name = {name: expected(name) for name in 'ab'}
    TRACES.clear()
    step = make_step()
    for frozen, traces in phases(reads):
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                for block in blocks(reads.fresh):
                    stack.enter_context(block)
                found = step(PARAMS)
            oracle.assert_same(found, by_name[frozen])
            assert len(TRACES) == traces


def writes(self):
    """Writes the state of 'a' in every call, and reads that of 'b'."""
    TRACES.append(None)
    states = [self.variable('state', name, jnp.zeros, ()) for name in 'ab']
    states[0].value = states[1].value + 1.0


@a_config
def test_read_only_asks_its_filter_too(reads):
    step = jax.jit(lambda state: Do(writes).apply({'state': state}, mutable='state')[1])
    state = {name: jnp.zeros(()) for name in 'ab'}
    for frozen, _ in phases(reads):
        for _ in range(3):
            with nn.read_only(reads.fresh(), collections='state'):
                if frozen == 'a':
                    with pytest.raises(errors.BlockError):
                        step(state)
                else:
                    step(state)
    # Three times two programs that raised, which are not kept, and the one that is.
    assert len(TRACES) == 7


class Asked:
    """A predicate that notes what it is asked."""

    def __init__(self) -> None:
        self.paths: list[Any] = []
        self.frozen = 'a'

    def __call__(self, path: Any) -> bool:
        self.paths.append(path)
        return path.startswith(self.frozen)


def _a_typo_beside_it(asked: Any) -> None:
    where = nn.stop_gradient([asked, 'aa/kernel'])
    with pytest.raises(errors.UnusedFilterError), where:
        jax.grad(loss)(PARAMS)


def _ignored(asked: Any) -> None:
    nowhere = filters.as_filter(asked) & 'nothing/**'
    with nn.stop_gradient(nowhere, unused='ignore'):
        jax.grad(loss)(PARAMS)
    asked.frozen = 'params/a'
    with nn.stop_gradient(asked, unused='ignore'):
        jax.grad(loss)(PARAMS)
        make_step()(PARAMS)


def _init(asked: Any) -> None:
    with nn.stop_gradient(asked):
        NET.init(jax.random.key(0), X)
        jax.jit(NET.init)(jax.random.key(0), X)


ASKING = [_a_typo_beside_it, _ignored, _init]


@pytest.mark.parametrize('program', ASKING, ids=lambda fn: fn.__name__.strip('_'))
def test_a_filter_is_asked_about_variables_that_exist_and_nothing_else(program):
    asked = Asked()
    program(asked)
    assert asked.paths
    assert {type(path) for path in asked.paths} == {sg.Path}
    assert {(*path.parts, path.collection) for path in asked.paths} <= {
        (*path.split('/'), 'params') for path in PATHS
    }


def test_a_variable_is_asked_about_once_in_a_block():
    step, asked = make_step(), Asked()
    for _ in range(3):  # The first opening has nothing to ask.
        asked.paths.clear()
        with nn.stop_gradient(asked):
            for _ in range(2):
                step(PARAMS)
                jax.grad(loss)(PARAMS)
                jax.jit(lambda p: loss(p))(PARAMS)
        assert Counter(asked.paths) == dict.fromkeys(PATHS, 1)


# Answers that change where nobody expects it.


@a_config
@pytest.mark.parametrize('opened_before', [0, 2])
def test_answers_that_change_while_the_block_is_open(reads, opened_before):
    """What has been asked, by a step or for a program's number, keeps its answer."""
    step, names = make_step(), inside('a')
    eager = jax.grad(lambda p: loss(oracle.stopped(p, names.__contains__)))(PARAMS)
    for _ in range(opened_before):
        with nn.stop_gradient(reads.fresh()):
            oracle.assert_same(step(PARAMS), by_hand(*inside('a')))
    with nn.stop_gradient(reads.fresh()):
        if not opened_before:
            step(PARAMS)
        reads.put('b')
        oracle.assert_same(step(PARAMS), by_hand(*inside('a')))
        oracle.assert_same(make_step()(PARAMS), by_hand(*inside('a')))
        oracle.assert_same(jax.grad(loss)(PARAMS), eager)
    TRACES.clear()
    for _ in range(2):
        with nn.stop_gradient(reads.fresh()):
            oracle.assert_same(step(PARAMS), by_hand(*inside('b')))
    reads.put('a')
    with nn.stop_gradient(reads.fresh()):
        oracle.assert_same(step(PARAMS), by_hand(*inside('a')))
    assert len(TRACES) == 1


def test_a_variable_of_the_same_path_in_another_collection():
    def both(self):
        return [self.get_variable(name, 'w') for name in ('params', 'ema')]

    names = {'ema'}

    def read(variables: Any) -> Any:
        with nn.stop_gradient(lambda path: path.collection in names, collections=True):
            return sum(Do(both).apply(variables))

    grads = jax.grad(read)({'params': {'w': 1.0}, 'ema': {'w': 2.0}})
    assert grads == {'params': {'w': 1.0}, 'ema': {'w': 0.0}}


# Several models under one filter.

OTHERS = Net(('c', 'd'))


def test_a_filter_that_knows_one_of_two_models():
    """It raises for the paths of the other model: it was not made for these.

    Opening asks of each variable once that was traced under the code of the function.
    """
    asked: list[str] = []

    def of_a_table(table: Any) -> Any:
        def where(path):
            asked.append(path)
            return table[path]

        return nn.stop_gradient(where)

    theirs = {'c': PARAMS['a'], 'd': PARAMS['b']}
    tables = [
        {f'{name}/{leaf}': name == names[0] for name in names for leaf in PARAMS['a']}
        for names in (NET.names, OTHERS.names)
    ]
    steps = [make_step(), make_step(OTHERS)]
    for _ in range(3):
        for step, params, table in zip(steps, (PARAMS, theirs), tables, strict=True):
            asked.clear()
            with of_a_table(table):
                early = [*asked]
                found = step(params)
            assert len(early) == len(set(early))
            expected = by_hand(*inside('a'))
            oracle.assert_same(list(found.values()), list(expected.values()))
    assert early and len(TRACES) == 2
    # Where the model does read such a variable, the filter's own error comes out.
    for run in (lambda: steps[1](theirs), lambda: loss(theirs, OTHERS)):
        with pytest.raises(KeyError), of_a_table(tables[0]):
            run()


def test_a_lambda_in_a_cell_that_runs_again_traces_nothing():
    step, code = make_step(), "lambda path: path.startswith('a')"
    for line in range(4):
        cell = compile('\n' * line + code, 'cell', 'eval')
        with nn.stop_gradient(eval(cell)):
            step(PARAMS)
    assert len(TRACES) == 1


def test_functions_of_the_path_alone_ask_about_no_program():
    """Equal code finds the program; another constant does not."""
    step, asked = make_step(), []

    def say(path):
        asked.append(path)
        return path.startswith('a')

    for _ in range(3):
        with nn.stop_gradient(lambda path: path.startswith('a')):
            step(PARAMS)
    assert len(TRACES) == 1
    with nn.stop_gradient(lambda path: path.startswith('b')):
        step(PARAMS)
    assert len(TRACES) == 2
    with nn.stop_gradient(say):
        step(PARAMS)
    asked.clear()
    # What was asked under one code is asked again; nothing of the others is.
    with nn.stop_gradient(say):
        assert sorted(asked) == [*PATHS]


def test_a_predicate_that_answers_by_chance_is_never_stale():
    """A block that opens may ask for several programs: its last answers hold."""
    step, numbers = make_step(), itertools.count()
    for _ in range(20):
        said: dict[str, bool] = {}

        def where(path: Any, said: Any = said) -> bool:
            said[path] = next(numbers) % 3 == 0
            return said[path]

        with nn.stop_gradient(where, unused='ignore'):
            found = step(PARAMS)
        frozen = [path for path, answer in said.items() if answer]
        oracle.assert_same(found, by_hand(*frozen))
