"""The other rules as views of NNX models, against programs by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_sg as sg
from flax_sg import errors, nnx
from tests.helpers import oracle
from tests.helpers.nnx_by_hand import Net, X, pure, total


class Scale(nnx.Module):
    def __init__(self, value: float = 2.0):
        self.w = nnx.Param(jnp.full(3, value))
        self.v = nnx.Param(jnp.arange(1.0, 4.0))

    def __call__(self, x):
        return jnp.sum(self.w * x + self.w * self.w * self.v)


ONES = jnp.ones(3)
# The gradient of ``w``: 1 + 4 v.
PLAIN = jnp.array([5.0, 9.0, 13.0])


def apply(model: Any) -> Any:
    return model(ONES)


def grad_of_w(loss: Any) -> Any:
    return pure(nnx.grad(loss)(Scale()))['w'].tolist()


TWICE = functools.partial(nnx.scale_gradient, where='w', factor=2.0)
SQUARE = functools.partial(nnx.map_cotangent, where='w', fn=lambda path, ct: ct**2)
STOP = functools.partial(nnx.stop_gradient, where='w')
NORM = (5.0**2 + 9.0**2 + 13.0**2) ** 0.5
BOTH = (5.0**2 + 9.0**2 + 13.0**2 + 3 * 4.0**2) ** 0.5
RULES: list[tuple[Any, list[float]]] = [
    # A rule gets the whole array, so parts of it can be meant.
    (lambda m: nnx.stop_gradient(m, sg.at('w', 1)), [5.0, 0.0, 13.0]),
    (lambda m: nnx.scale_gradient(m, 'w', 0.5), [2.5, 4.5, 6.5]),
    (lambda m: nnx.reverse_gradient(m, 'w'), [-5.0, -9.0, -13.0]),
    (lambda m: nnx.reverse_gradient(m, 'w', 2.0), [-10.0, -18.0, -26.0]),
    (lambda m: nnx.clip_gradient(m, 'w', value=8.0), [5.0, 8.0, 8.0]),
    (lambda m: nnx.replace_cotangent(m, 'w', 7.0), [7.0, 7.0, 7.0]),
    (lambda m: nnx.map_cotangent(m, 'w', lambda _, ct: ct**2), [25.0, 81.0, 169.0]),
    (lambda m: nnx.map_cotangent(m, '*', lambda p, ct: ct * len(p)), [5.0, 9.0, 13.0]),
    (lambda m: nnx.map_cotangent(m, 'w', lambda _, ct, k: ct * k, 2.0), [10.0, 18, 26]),
    # Rules meet as those of linen.
    (lambda m: TWICE(TWICE(m)), [20.0, 36.0, 52.0]),
    (lambda m: TWICE(SQUARE(m)), [100.0, 324.0, 676.0]),
    (lambda m: SQUARE(TWICE(m)), [50.0, 162.0, 338.0]),
    (lambda m: TWICE(STOP(m)), [0.0, 0.0, 0.0]),
    (lambda m: STOP(TWICE(m)), [0.0, 0.0, 0.0]),
    (lambda m: nnx.clip_gradient(m, 'w', norm=NORM / 2), [2.5, 4.5, 6.5]),
    # A view has all Variables, so they have a norm together.
    (lambda m: nnx.clip_gradient(m, True, global_norm=BOTH / 2), [2.5, 4.5, 6.5]),
]
EXACT = len(RULES) - 2


@pytest.mark.parametrize('number', range(len(RULES)))
def test_rules_for_gradients(number):
    """The gradient of ``w`` is the sum over all three reads."""
    view, expected = RULES[number]
    oracle.assert_same(apply(view(Scale())), apply(Scale()))
    for fn in apply, nnx.jit(apply), nnx.remat(apply):
        found = grad_of_w(lambda model, fn=fn: fn(view(model)))
        assert found == (expected if number < EXACT else pytest.approx(expected))


def test_a_rule_acts_once_for_all_reads_through_a_view():
    """Reads in a closure, a loop and beside are summed before the rule."""

    def loss(model):
        view = nnx.map_cotangent(model, 'w', lambda path, ct: ct**2)
        scaled = nnx.scale_gradient(view, 'w', 2.0)
        inner = jax.jit(lambda x: jnp.sum(view.w * x))(ONES)
        looped = jax.lax.fori_loop(0, 3, lambda _, x: x + jnp.sum(view.w[...]), 0.0)
        once = jnp.sum(view.w[...]) + jnp.sum(scaled.w[...]) + jnp.sum(model.w[...])
        return once + inner + looped

    # 1 + 1 + 2 + 3, squared, and 1 beside the view.
    assert grad_of_w(loss) == [50.0] * 3


def test_a_traced_factor_and_forward_mode():
    def of_vector(w, factor):
        model = Scale()
        model.w[...] = w
        return apply(nnx.scale_gradient(model, 'w', factor))

    for mode in jax.jacrev, jax.jacfwd:
        found = jax.jit(mode(of_vector))(jnp.full(3, 2.0), 3.0)
        oracle.assert_same(found, 3.0 * PLAIN)


def test_maml_stops_one_level():
    def inner(model):
        return nnx.grad(lambda m: apply(nnx.stop_gradient(m, 'v', levels=1)))(model)

    def outer(model):
        return jnp.sum(inner(model)['w'][...] + inner(model)['v'][...])

    assert pure(nnx.grad(outer)(Scale()))['v'].tolist() == [4.0] * 3  # Of 1 + 2 w v.
    assert not pure(inner(Scale()))['v'].any()


# Other values

OTHER = nnx.Dict(a=Scale(5.0), b=Scale(3.0))
VALUES: dict[str, Any] = {
    'model': OTHER,
    'state': nnx.state(OTHER),
    'tree': nnx.to_pure_dict(nnx.state(OTHER)),
    'mixed': {'a': OTHER.a, 'b': {'w': OTHER.b.w, 'v': OTHER.b.v[...]}},
    'function': lambda path, x: x + {'a/w': 3.0, 'b/w': 1.0}.get(path, 0.0),
}


@pytest.mark.parametrize('form', VALUES)
def test_other_values(form):
    pair = nnx.Dict(a=Scale(), b=Scale())
    view = nnx.substitute(pair, VALUES[form])
    for transform in (lambda fn: fn), nnx.jit, nnx.remat:
        oracle.assert_same(transform(both)(view), transform(both)(OTHER))
    assert pair.a.w[...].tolist() == [2.0] * 3


@pytest.mark.parametrize('how', [{}, {'unused': 'ignore'}, {'where': '*/w'}])
def test_other_values_in_the_dict_of_a_variable(how):
    class Pair(nnx.Module):
        def __init__(self, factor):
            self.w = nnx.Param({'u': factor * ONES, 'v': (ONES,)})

        def __call__(self, x):
            value = self.w.get_value()
            return value['u'] * x + value['v'][0]

    model, target = (nnx.Dict(a=Pair(factor)) for factor in (1.0, 2.0))
    tree = {'a': {'w': target.a.w.get_raw_value()}}
    for values in target, nnx.state(target), {'a': target.a}, tree:
        view = nnx.substitute(model, values, **how)
        oracle.assert_same(apply(view.a), apply(target.a))
    with pytest.raises(errors.StructureError, match="'a/w'"):
        nnx.substitute(model, {'a': {'w': {'u': ONES}}}, **how)


@pytest.mark.parametrize('where', ['a/w', 'b/w', '*/w'])
def test_other_values_of_tied_weights(where):
    model, target = pair_of(2.0, True), pair_of(5.0, True)
    for values in target, nnx.state(target), {'b': {'w': target.a.w}}:
        view = nnx.substitute(model, values, where=where)
        assert view.a.w is view.b.w
        oracle.assert_same(apply(view.b), apply(target.b))


def pair_of(value: float, tied: bool) -> Any:
    pair = nnx.Dict(a=Scale(value), b=Scale(value + 1.0))
    if tied:
        pair.b.w = pair.a.w
    return pair


def both(pair: Any) -> Any:
    return apply(pair.a) + 2.0 * apply(pair.b)


def test_a_state_of_parameters_replaces_no_array_beside_them():
    model, target = Scale(), Scale(5.0)
    model.table, target.table = nnx.data(ONES), nnx.data(2.0 * ONES)
    view = nnx.substitute(model, nnx.state(target, nnx.Param))
    oracle.assert_same(apply(view), apply(target))
    assert view.table.tolist() == ONES.tolist()


def test_other_values_that_are_tied_elsewhere():
    """A target that ties what the model does not, and the reverse."""
    model, target = pair_of(2.0, False), pair_of(5.0, True)
    view = nnx.substitute(model, target)
    oracle.assert_same(both(view), both(target))
    assert view.a.w is not view.b.w

    # A state has one path of a tied weight.
    with pytest.raises(errors.StructureError, match="no value for 'b/w', beside"):
        nnx.substitute(model, nnx.state(target))
    seen = nnx.substitute(model, nnx.state(target), where=['a/*', 'b/v'])
    assert seen.b.w is model.b.w
    oracle.assert_same(apply(seen.a), apply(target.a))

    def loss(target):
        return both(nnx.substitute(model, target))

    oracle.assert_same(pure(nnx.grad(loss)(target)), pure(nnx.grad(both)(target)))
    model, target = target, model
    for values in target, nnx.state(target), {'a': target.a, 'b': target.b}:
        with pytest.raises(errors.StructureError, match="'a/w' and 'b/w' are one"):
            nnx.substitute(model, values)
        # What is not selected is not read.
        seen = nnx.substitute(model, values, where='*/v')
        oracle.assert_same(seen.b.v[...], target.b.v[...])
    # The same array contradicts nothing.
    twice = {'a': {'w': target.a.w}, 'b': {'w': target.a.w[...]}}
    oracle.assert_same(nnx.substitute(model, twice).b.w[...], target.a.w[...])
    # A model has a value for each Variable; a tree may have some.
    del target.b.w
    with pytest.raises(errors.StructureError, match="'b/w' has none"):
        nnx.substitute(model, target)
    view = nnx.substitute(model, nnx.state(target))
    oracle.assert_same(view.b.w[...], target.a.w[...])


STATES: dict[str, Any] = {
    'a state': nnx.state,
    'dicts of arrays': lambda model: nnx.to_pure_dict(nnx.state(model)),
    'a model': lambda model: model,
}
if hasattr(nnx, 'as_pure'):
    STATES |= {
        'a pure state': lambda model: nnx.as_pure(nnx.state(model)),
        'a pure model': nnx.as_pure,
    }


def test_a_state_of_some_variables():
    model, target = Net(0), Net(1)
    for some in nnx.PathContains('kernel'), nnx.PathContains('head'):
        view = nnx.substitute(model, nnx.state(target, nnx.All(nnx.Param, some)))
        oracle.assert_same(view.head.kernel[...], target.head.kernel[...])
        assert view.norm.scale is model.norm.scale


@pytest.mark.usefixtures('standard_promotion')
@pytest.mark.parametrize('form', STATES)
def test_other_values_of_a_model_with_statistics(form):
    """They are filtered by kind, whatever they are in."""
    model, target = Net(0), Net(1)
    target(X)
    values = STATES[form](target)
    view = nnx.substitute(model, values)
    oracle.assert_same(total(view), total(target))
    assert view.norm.mean is model.norm.mean
    stats = nnx.substitute(model, values, kind=nnx.BatchStat)
    oracle.assert_same(stats.norm.mean[...], target.norm.mean[...])
    assert stats.head.kernel is model.head.kernel
    with pytest.raises(errors.UnusedFilterError, match="'norm/extra'"):
        nnx.substitute(model, {'norm': {'extra': ONES}})
    with pytest.raises(errors.UnusedFilterError, match="'norm/maen'"):
        typo = {'norm': {'var': target.norm.var, 'maen': ONES}}
        nnx.substitute(model, typo, kind=nnx.BatchStat)
    target.extra = nnx.Param(ONES)
    with pytest.raises(errors.UnusedFilterError, match="'extra'"):
        nnx.substitute(model, STATES[form](target))


def test_other_values_that_an_optimizer_keeps():
    model = Scale()
    optimizer = nnx.Optimizer(model, optax.trace(0.9), wrt=nnx.Param)
    view = nnx.substitute(model, optimizer.opt_state.trace)
    assert not view.w[...].any() and type(view.w) is nnx.Param


def test_gradients_flow_to_other_values():
    def loss(target, model):
        return nnx.jit(apply)(nnx.substitute(model, target, where='w'))

    both = nnx.grad(loss, argnums=(0, 1))(Scale(5.0), Scale())
    target, model = map(pure, both)
    assert (target['w'].tolist(), target['v'].any()) == ([11.0, 21.0, 31.0], False)
    assert (model['w'].any(), model['v'].tolist()) == (False, [25.0] * 3)


def test_a_part_with_the_name_of_a_collection():
    model, target = (nnx.Dict(params=Scale(x), head=Scale(x)) for x in (2.0, 5.0))
    view = nnx.substitute(model, target)
    oracle.assert_same([apply(view.params), apply(view.head)], [apply(Scale(5.0))] * 2)


@pytest.mark.parametrize('form', ['state', 'model', 'tree'])
@pytest.mark.parametrize('value', [np.log(1 / 0.07), np.ones(2), np.arange(2), 0.5])
def test_what_jax_makes_of_a_value_of_numpy_counts(value, form):
    """The temperature of CLIP is a ``numpy.float64``, and its average is none."""

    class Clip(nnx.Module):
        def __init__(self):
            self.temperature = nnx.Param(value)

    model, average = Clip(), Clip()
    average.temperature = nnx.Param(jnp.asarray(value) + 1)
    tree = {'temperature': average.temperature[...]}
    values = {'state': nnx.state(average), 'model': average, 'tree': tree}
    for one, other in ((model, values[form]), (average, nnx.state(model))):
        view = nnx.substitute(one, other)
        wanted = average if one is model else model
        seen = [jnp.asarray(x.temperature.get_value()) for x in (view, wanted)]
        oracle.assert_same(*seen)
    with pytest.raises(errors.StructureError, match='does not fit'):
        nnx.substitute(model, {'temperature': jnp.zeros(jnp.shape(value), bool)})
