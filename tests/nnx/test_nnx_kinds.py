"""``kind=``, an NNX filter, and what is in no Variable: beside what Flax selects."""

import contextlib
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import flax_sg as sg
from flax_sg import errors, nnx, testing
from tests.helpers import oracle
from tests.helpers.nnx_by_hand import Layer, Net, X, pure, total, zeros

pytestmark = [
    pytest.mark.usefixtures('standard_promotion'),
    pytest.mark.filterwarnings('ignore:Using .Module.sow:DeprecationWarning'),
]


class Layers(nnx.Module):
    """Layers in a list, in a dict by number, and a Variable with a tag."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(rngs), Layer(rngs)])
        self.by_number = nnx.data({2: Layer(rngs), 0: Layer(rngs)})
        self.scale = nnx.Param(jnp.ones((3, 4)), tag='outer')
        self.seen = nnx.BatchStat(jnp.ones((3, 4)))
        self.raw = nnx.data([jnp.ones((3, 4)), jnp.arange(4)])

    def features(self, x):
        for layer in (*self.layers, *self.by_number.values()):
            x = layer(x)
        return x * self.scale * self.seen * self.raw[0]


# Every class of ``nnx.filterlib``, every literal, and functions.
FILTERS: dict[str, Any] = {
    'OfType': nnx.OfType(nnx.BatchStat),
    'WithTag': nnx.WithTag('outer'),
    'PathContains': nnx.PathContains(0),
    'PathIn': nnx.filterlib.PathIn(('layers', 1, 'bias'), ('by_number', 2, 'kernel')),
    'Any': nnx.Any('outer', nnx.PathContains(1)),
    'All': nnx.All(nnx.Param, nnx.Not(nnx.PathContains(0))),
    'Not': nnx.Not(nnx.Param),
    'Everything': nnx.Everything(),
    'Nothing': nnx.Nothing(),
    'a type': nnx.Param,
    'a tag': 'outer',
    'True': True,
    'False': False,
    '...': ...,
    'None': None,
    'a list': ['outer', nnx.BatchStat],
    'a tuple': (nnx.PathContains('scale'), nnx.PathContains(2)),
    'a function': lambda path, value: path[1:2] == (1,) or value.ndim == 0,
    'a function of the value': lambda path, value: not isinstance(value, nnx.Variable),
}
if 'exact' in inspect.signature(nnx.PathContains).parameters:
    FILTERS['PathContains, inexact'] = nnx.PathContains('ern', exact=False)


def test_every_filter_of_flax_is_here():
    lib = vars(nnx.filterlib).values()
    known = {type(one) for one in FILTERS.values()}
    classes = {x for x in lib if isinstance(x, type) and '__call__' in vars(x)}
    # ``Predicate`` and the like are types of Python.
    assert {x for x in classes if x.__module__ == nnx.filterlib.__name__} <= known


def by_hand(kind: Any) -> Any:
    def loss(model):
        graph, some, rest = nnx.split(model, nnx.All(kind), ...)
        stop = functools.partial(jax.tree.map, jax.lax.stop_gradient)
        return total(nnx.merge(graph, stop(some), rest))

    return loss


def derivatives(loss: Any) -> Any:
    """The gradients of all numbers in a model, raw arrays too."""
    graph, state = nnx.split(Layers())
    grads = jax.grad(lambda state: loss(nnx.merge(graph, state)), allow_int=True)(state)
    return [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]


@pytest.mark.parametrize('name', FILTERS)
def test_a_kind_is_asked_as_flax_asks(name):
    """A view stops what ``nnx.state`` selects, and ``nnx.where`` selects it too."""
    kind, model = FILTERS[name], Layers()
    how: Any = {'kind': kind, 'unused': 'ignore'}
    ours = derivatives(lambda m: total(nnx.stop_gradient(m, True, **how)))
    oracle.assert_same(ours, derivatives(by_hand(kind)))
    selected = nnx.where(model, True, **how)
    found, expected = (
        [path for path, _ in nnx.to_flat_state(nnx.state(model, each))]
        for each in (selected, kind)
    )
    assert found == expected


def nowhere(path: Any, value: Any) -> bool:
    return 'nowhere' in path


@pytest.mark.parametrize(
    ('kind', 'shown', 'where'),
    [
        ('params', "kind='params'", True),
        (nnx.LoRAParam, 'kind=nnx.LoRAParam', '**'),
        (None, 'kind=None', 'head/**'),
        (nowhere, 'kind=nowhere at test_nnx_kinds.py', True),
    ],
)
def test_a_kind_that_matches_nothing(kind, shown, where):
    for fn in nnx.stop_gradient, nnx.train_only, nnx.where:
        with pytest.raises(errors.UnusedFilterError) as raised:
            fn(Net(), where, kind=kind)
        assert shown in str(raised.value)
        assert 'There are: (nnx.Param, nnx.RngCount, ' in str(raised.value)
        fn(Net(), where, kind=kind, unused='ignore')
    # A layer without parameters is no mistake.
    assert nnx.stop_gradient(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), True) is not None


# What is in no Variable


class Tempered(nnx.Module):
    """Flax's WeightNorm keeps its scales in plain arrays."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
        self.temperature = nnx.data(jnp.full((), 2.0))
        self.steps = nnx.data(jnp.zeros((), int))

    def features(self, x):
        return self.norm(x) * self.temperature + self.steps


LAYER = ['norm/layer_instance/bias', 'norm/layer_instance/kernel']
PATHS = [*LAYER, "norm/scales/('kernel',)", 'temperature']


@pytest.mark.parametrize(
    'where', [True, False, 'temperature', 'norm/**', 'norm/scales/*', PATHS]
)
def test_arrays_in_no_variable(where):
    """What ``jax.grad`` differentiates can be selected, and no more."""
    takes = sg.filters.as_filter(where)
    chosen = [path for path in PATHS if takes(sg.Path(path))]

    def hand(model):
        def stop(keys, x):
            is_chosen = '/'.join(map(str, keys)) in chosen
            return jax.tree.map(jax.lax.stop_gradient, x) if is_chosen else x

        graph, state = nnx.split(model)
        flat = [(keys, stop(keys, x)) for keys, x in nnx.to_flat_state(state)]
        return total(nnx.merge(graph, nnx.from_flat_state(flat)))

    def frozen(model):
        return total(nnx.stop_gradient(model, where))

    ours, expected = (jax.grad(fn, allow_int=True)(Tempered()) for fn in (frozen, hand))
    oracle.assert_same(pure(nnx.state(ours)), pure(nnx.state(expected)))
    rest = [path for path in PATHS if path not in chosen]
    testing.assert_trains_only(frozen, rest, Tempered())
    everything = pytest.warns(UserWarning, match='trains none of')
    with contextlib.nullcontext() if rest else everything:
        live = sg.live(frozen, Tempered())
    both = (nnx.Param, jax.Array)
    taken = [nnx.where(Tempered(), one, kind=both) for one in (live, rest)]
    assert taken[0] == taken[1]
    # Reports and views list the same.
    reported = map(str, sg.gradient_flow(frozen, Tempered()).parameters)
    assert sorted(reported) == sorted([*PATHS, 'steps'])  # It has no gradient.
    selected = nnx.where(Tempered(), where, kind=both)
    some = nnx.state(Tempered(), selected)
    found = ['/'.join(map(str, path)) for path, _ in nnx.to_flat_state(some)]
    assert found == [*chosen[:3], *['steps'] * (where is True), *chosen[3:]]


def test_an_optimizer_leaves_alone_what_is_in_no_variable():
    """It may be a table. Whoever wants it trained names its kind."""

    def trained(wrt, argnums):
        model = Tempered()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt(model))
        loss = lambda m: jnp.sum(m.features(X) ** 2)  # noqa: E731
        argnums = 0 if argnums is None else nnx.DiffState(0, argnums)
        optimizer.update(model, nnx.grad(loss, argnums=argnums)(model))
        return pure(nnx.state(model))

    by_hand = trained(lambda _: nnx.Param, None)
    for wrt in '**', sg.live(total, Tempered()), ['norm/**']:
        for argnums in None, wrt:
            oracle.assert_same(trained(lambda _, w=wrt: w, argnums), by_hand)
    both = (nnx.Param, jax.Array)
    every = trained(lambda m: nnx.where(m, PATHS, kind=both), PATHS)
    assert float(every['temperature']) != 2.0
    with pytest.raises(errors.UnusedFilterError, match='another kind: write kind=jax'):
        nnx.where(Tempered(), 'temperature')


def test_rules_for_arrays_in_no_variable():
    model = Tempered()

    def grad_of(view):
        return jax.grad(lambda m: total(view(m)), allow_int=True)(model).temperature

    plain = grad_of(lambda m: m)
    halved = grad_of(lambda m: nnx.scale_gradient(m, 'temperature', 0.5))
    oracle.assert_same(halved, 0.5 * plain)
    other = nnx.substitute(model, {'temperature': jnp.full((), 5.0)})
    assert (float(other.temperature), float(model.temperature)) == (5.0, 2.0)
    assert float(nnx.substitute(model, other).temperature) == 5.0
    view = nnx.stop_gradient(model, True)
    assert view.steps is model.steps and view.norm is not model.norm


@pytest.mark.skipif(not hasattr(nnx, 'as_pure'), reason='flax 0.12.2 has it')
def test_pure_models():
    """``nnx.as_pure`` leaves arrays alone: views select them, ``nnx.where`` too."""
    model = nnx.as_pure(Net(dropout=0.0))
    model.eval()

    def loss(model, where):
        view = nnx.stop_gradient(model, where)
        return sum(jnp.sum(layer.kernel) for layer in view.body)

    for where, stopped in ((True, 2), ('body/0/*', 1), ('body/**', 2), (False, 0)):
        grads = jax.grad(loss, allow_int=True)(model, where)
        still = [bool(layer.kernel.any()) for layer in grads.body]
        assert still == [False] * stopped + [True] * (2 - stopped)
    some = nnx.where(Net(), 'body/0/*')
    for state in nnx.as_pure(nnx.state(Net())), nnx.as_pure(Net()):
        found = nnx.to_flat_state(nnx.state(state, some))
        assert [path[1:] for path, _ in found] == [(0, 'bias'), (0, 'kernel')]


# What a rule leaves as it is


def test_what_a_rule_does_not_change_is_the_models_own():
    model = Net()
    view = nnx.stop_gradient(model, True, kind=...)
    assert view.drop.rngs.count is model.drop.rngs.count
    assert view.norm.mean is not model.norm.mean
    draws = [view.drop(jnp.ones((8, 8))) for _ in range(2)]
    assert (draws[0] != draws[1]).any()
    other = Net()
    expected = [other.drop(jnp.ones((8, 8))) for _ in range(2)]
    oracle.assert_same(draws, expected)
    assert int(model.drop.rngs.count[...]) == int(other.drop.rngs.count[...]) == 2


# New Variables


class Sower(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attend = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        x = self.attend(x)
        self.sow(nnx.Intermediate, 'h', x)
        return self.head(x)


NEW: dict[str, Any] = {
    'a cache': lambda m: m.attend.init_cache((1, 3, 4)),
    'sown values': lambda m: m(jnp.ones((1, 3, 4))),
    'a statistic': lambda m: setattr(m, 'seen', nnx.BatchStat(jnp.zeros(()))),
}


@pytest.mark.parametrize('name', NEW)
def test_new_variables_of_another_kind_are_not_selected(name):
    def trained(wrt):
        model = Sower()
        wrt = wrt(model)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)
        NEW[name](model)
        loss = lambda m: m(jnp.ones((1, 3, 4))).sum()  # noqa: E731
        optimizer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model))
        return pure(nnx.state(model, nnx.Param))

    by_hand = trained(lambda m: nnx.All(nnx.Param, nnx.PathContains('head')))
    oracle.assert_same(trained(lambda m: nnx.where(m, 'head/**')), by_hand)


def test_a_new_parameter_is_an_error():
    model = Net()
    head = nnx.where(model, 'head/**')
    model.table = nnx.data(jnp.ones(3))
    assert list(nnx.state(model, head)) == ['head']
    model.adapter = nnx.Param(jnp.ones(3))
    with pytest.raises(errors.UnknownNameError, match="no 'adapter'"):
        nnx.state(model, head)
    assert zeros(lambda m: nnx.stop_gradient(m, 'adapter').adapter.sum(), model)
