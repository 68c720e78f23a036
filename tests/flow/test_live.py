"""``sg.live``: the filter of what a function trains."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core.meta import Partitioned
from jax import lax

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from flax_sg.filters import Derived, as_filter
from flax_sg.flow import pullback
from flax_sg.trees.leaves import leaves_of
from tests.helpers import oracle

X = jnp.array([[1.0, -2.0, 0.5, 0.25], [-1.0, 0.75, 2.0, -0.5]])
PARAMS = {
    'body': {'w': jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), 'b': jnp.ones(3)},
    'head': {'w': jnp.linspace(1.0, 2.0, 3)},
}


def loss(params: Any, x: jax.Array) -> jax.Array:
    """The body is stopped, the head is trained."""
    body = jax.tree.map(lax.stop_gradient, params['body'])
    features = jnp.tanh(jnp.dot(x, body['w']) + body['b'][None])
    return jnp.mean(jnp.dot(features, params['head']['w']) ** 2)


def selected(where: Any, params: Any = PARAMS) -> list[str]:
    mask = sg.mask(params, trained=as_filter(where) & True)  # Of any side.
    return [str(path) for path, take in leaves_of(mask) if take]


def test_it_selects_what_flows_and_its_complement_the_rest():
    live = sg.live(loss, PARAMS, X)
    assert live == sg.live(loss, *jax.eval_shape(lambda *args: args, PARAMS, X))
    assert selected(live) == ['head/w']
    assert selected(~live) == ['body/b', 'body/w']
    assert selected(~live & '**/w') == ['body/w']
    assert selected(live | 'body/b') == ['body/b', 'head/w']
    assert repr(live) == "<live: 'head/w'>"
    assert as_filter(live) is live
    labels = sg.labels(PARAMS, {'trained': live, 'frozen': ~live})
    assert labels['head'] == {'w': 'trained'}
    trained, rest = sg.partition(PARAMS, live)
    oracle.assert_same(sg.combine(trained, rest), PARAMS)
    assert len(jax.tree.leaves(trained)) == 1


def test_equal_selections_are_equal_filters():
    live = sg.live(loss, PARAMS, X)
    again = sg.live(lambda p: p['head']['w'] * 2.0, PARAMS)
    assert live == again
    assert {live: 1}[again] == 1
    assert live != sg.live(lambda p: p['body']['b'], PARAMS)
    assert live != sg.live(lambda p: p['head']['w'], {'head': PARAMS['head']})
    for other in (pickle.loads(pickle.dumps(live)), copy.deepcopy(live)):
        assert other == live
        assert selected(other) == selected(live)


@pytest.mark.usefixtures('leaks')
def test_it_may_be_derived_inside_of_the_step_and_keeps_no_tracer():
    model = nn.Dense(2)
    variables = oracle.init(model, jax.random.key(0), X)

    @jax.jit
    def step(params, variables, x):
        scale = 2.0 * x[0, 0]
        live = sg.live(lambda v: v['params']['bias'] * scale, variables)
        with nn.stop_gradient(live & True):
            y = model.apply(variables, x)
        live = sg.live(lambda p: scale * loss(p, x), params)
        return y, sg.grad(lambda p: scale * loss(p, x), wrt=live)(params)

    y, grads = step(PARAMS, variables, X)
    assert y.shape == (2, 2)
    scaled = lambda p, x: 2.0 * x[0, 0] * loss(p, x)  # noqa: E731
    oracle.assert_same(grads['head'], jax.jit(jax.grad(scaled))(PARAMS, X)['head'])


def test_every_gradient_call_takes_it():
    live = sg.live(loss, PARAMS, X)
    value, by_hand = jax.value_and_grad(loss)(PARAMS, X)
    found, grads = sg.value_and_grad(loss, wrt=live)(PARAMS, X)
    oracle.assert_same((found, grads['head']), (value, by_hand['head']))
    assert grads['body'] == {'b': sg.ABSENT, 'w': sg.ABSENT}
    oracle.assert_same(sg.grad(loss, wrt=live & 'head/**')(PARAMS, X), grads)
    root = {('params', ('',))}
    [found] = live.filters
    both = Derived(found.selected | root, found.known | root)
    oracle.assert_same(sg.vjp(loss, PARAMS, X, wrt=both)[1](1.0)[0], grads)


def test_absent_stands_for_all_that_was_below_it():
    """Frozen weights that left the device. A value in their place is a mistake."""
    live, pruned = sg.live(loss, PARAMS, X), {**PARAMS, 'body': sg.ABSENT}
    grads = sg.grad(lambda p: jnp.sum(p['head']['w'] ** 2), wrt=live)(pruned)
    assert grads['body'] is sg.ABSENT
    oracle.assert_same(grads['head']['w'], 2 * PARAMS['head']['w'])
    tx = sg.freeze(optax.sgd(0.5), ~live)
    updates, _ = tx.update(grads, tx.init(pruned), pruned)
    head = {'w': -grads['head']['w'] / 2}
    oracle.assert_same(updates, {'body': sg.ABSENT, 'head': head})
    for wrong in ({'body': 1.0}, {'body': X}, {'bod': sg.ABSENT}):
        with pytest.raises(sg.errors.UnknownNameError, match='There was no'):
            sg.mask({**PARAMS, **wrong}, trained=live)


def test_a_derived_selection_may_be_empty():
    with pytest.warns(UserWarning, match='trains none of'):
        nothing = sg.live(lambda p: lax.stop_gradient(p['body']['b']), PARAMS)
    assert repr(nothing) == '<live: nothing>'
    for names, shown in ('cba', "'a', 'b', 'c'"), ('dcba', "'a', 'b', 'c' and 1 more"):
        some = Derived(frozenset(('params', (name,)) for name in names), frozenset())
        assert repr(some) == f'<live: {shown}>'
    assert selected(nothing) == selected(nothing & 'body/**') == []
    assert selected(~nothing & 'head/**') == ['head/w']
    assert jax.tree.leaves(sg.grad(loss, wrt=nothing)(PARAMS, X)) == []
    state = sg.freeze(optax.sgd(0.1, momentum=0.9), ~nothing).init(PARAMS)
    assert jax.tree.leaves(state) == []
    model = nn.Dense(3)
    variables = oracle.init(model, jax.random.key(0), X)
    with pytest.warns(UserWarning, match='No output uses them'):
        nothing_here = sg.live(lambda v: X.sum(), variables)
    with nn.stop_gradient(nothing_here & True):
        y = model.apply(variables, X)
    oracle.assert_same(y, model.apply(variables, X))
    # What is written beside it still has to be there.
    with pytest.raises(sg.errors.UnusedFilterError, match='boby'):
        selected(nothing | 'boby/**')


def test_what_any_leaf_of_a_box_or_any_output_trains_is_live():
    params = {'w': Partitioned((jnp.ones(2), jnp.ones(2)), (None,))}
    assert repr(sg.live(lambda p: p['w'].value[0].sum(), params)) == "<live: 'w'>"

    def rows(params: Any) -> Any:
        first, rest = sg.at('w', np.s_[:1]), sg.at('w', np.s_[1:])
        return [sg.stop_gradient(params, at)['w'].sum() for at in (first, rest)]

    params = {'w': jnp.ones((3, 2))}
    assert np.all(sg.mask(params, trained=sg.live(rows, params))['w'])


def test_two_networks_as_two_arguments_have_one_naming():
    """A generator's loss trains the generator through the discriminator."""

    def of_generator(gen: Any, dis: Any, z: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(gen['w'] * z) * lax.stop_gradient(dis['w']) * dis['v'])

    gen, dis, z = {'w': jnp.ones(2)}, {'w': jnp.ones(2), 'v': jnp.ones(2)}, jnp.ones(2)
    live = sg.live(of_generator, gen, dis, z, argnums=(0, 1))
    assert repr(live) == "<live: '0/w', '1/v'>"
    grads = sg.grad(of_generator, (0, 1), wrt=live)(gen, dis, z)
    assert grads[1]['w'] is sg.ABSENT
    by_hand = jax.grad(of_generator, (0, 1))(gen, dis, z)
    oracle.assert_same(*((g[0]['w'], g[1]['v']) for g in (grads, by_hand)))
    # The tuple of both networks has the same paths.
    assert sg.mask((gen, dis), frozen=~live) == ({'w': False}, {'w': True, 'v': False})
    alone = sg.live(of_generator, gen, dis, z, argnums=1)
    assert repr(alone) == "<live: 'v'>"


# What is said of a function, and its arguments.
NOTHING: dict[str, tuple[Any, ...]] = {
    "'bias' is stopped by nn.Frozen(Dense) at test_live.py:": (
        lambda p: jnp.sum(nn.Frozen(nn.Dense(3)).apply({'params': p}, X)),
        {'kernel': jnp.ones((4, 3)), 'bias': jnp.ones(3)},
    ),
    "'body/b' is stopped by stop_gradient at test_live.py:": (
        *(lambda p: lax.stop_gradient(jnp.sum(loss(p, X))), PARAMS),
    ),
    'No output uses them.': (lambda p: 0.0, PARAMS),
    "'n' is an integer or a factor of zeros, or its output is an integer.": (
        *(lambda p: jnp.sum(p['n']), {'n': jnp.arange(3)}),
    ),
    "'1/head/w' is stopped by stop_gradient at test_live.py:": (
        *(lambda p, q: lax.stop_gradient(q['head']['w']), PARAMS, PARAMS),
    ),
}


@pytest.mark.parametrize('said', NOTHING)
def test_a_function_that_trains_nothing_is_told_where_it_is_stopped(said):
    """Else a run that trains nothing says nothing: the filter may be empty."""
    fn, *args = NOTHING[said]
    with pytest.warns(UserWarning, match='trains none of') as warned:
        sg.live(fn, *args, argnums=(0, 1) if args[1:] else 0)
    assert said in str(warned[0].message)


@pytest.mark.parametrize('how', ['position', 'keyword', 'tree'])
def test_a_weight_of_a_loss_may_be_zero_for_now(how):
    def loss(params, weight=1.0, deep=None):
        weight = weight if deep is None else deep['weights'][0]
        return jnp.sum(params['a'] ** 2) + weight * jnp.sum(params['b'] ** 2)

    params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
    named = {'keyword': {'weight': 0.0}, 'tree': {'deep': {'weights': [0.0]}}}
    live = sg.live(loss, params, *[0.0] * (how == 'position'), **named.get(how, {}))
    grads = sg.grad(loss, wrt=live)(params, 0.5)
    oracle.assert_same(grads, jax.grad(loss)(params, 0.5))


def test_the_step_of_a_state_is_an_int_too():
    """``TrainState.create`` begins with the int 0, beside the parameters."""

    def loss(state):
        return jnp.sum(state['params']['a']) + state['step'] * state['params']['b']

    live = sg.live(loss, {'params': {'a': jnp.ones(2), 'b': 1.0}, 'step': 0})
    assert repr(live) == "<live: 'a', 'b'>"
    with pytest.raises(sg.errors.ArgumentTypeError, match='has no parameters'):
        sg.live(lambda state: 0.0, {'step': 0})


# For each function what it asks for.
ASKS: dict[str, Any] = {
    'a flag': lambda p, n: jnp.sum(p['a' if n < 2 else 'b']),
    'a weight': lambda p, n: jnp.sum(p['a'] + max(0, n - 1) * p['b']),
    'a size': lambda p, n: sum(jnp.sum(p[name]) for name in list(p)[: range(n).stop]),
    'a shape': lambda p, n: jnp.sum(p['a'] + jnp.zeros(n)),
    'a text': lambda p, n: jnp.sum(p[{'1': 'a'}[f'{n}']]),
    'a key': lambda p, n: jnp.sum(p[{1: 'a'}[n]]),
    'a method': lambda p, n: jnp.sum(p['a' if n.bit_length() < 2 else 'b']),
    'a stop': lambda p, n: jnp.sum(lax.stop_gradient(p['b']) if n else p['b']),
}


@pytest.mark.parametrize('name', ASKS)
def test_a_number_is_traced_and_one_that_is_asked_for_raises_with_the_line(name):
    def loss(params, step, weight):
        return weight * params['c'] + ASKS[name](params, step)

    params = {'a': jnp.ones(1), 'b': jnp.ones(1), 'c': 1.0}
    calls = sg.live, sg.gradient_flow, testing.assert_flows
    for call, args in itertools.product(calls, ((1, 0.0), (np.int32(1), 0.0))):
        where = ('c',) if call is testing.assert_flows else ()
        with pytest.raises(sg.errors.ArgumentTypeError) as raised:
            call(loss, *where, params, *args)
        [head, _, write] = str(raised.value).splitlines()
        assert 'asks for the value of step' in head
        assert f'functools.partial(loss, step={args[0]!r}), and give weight' in write
        cause = raised.value.__cause__
        assert isinstance(cause, (TypeError, LookupError, AttributeError))
    # Bound, it is a constant; the weight stays an input, of which nothing is known.
    live = sg.live(functools.partial(loss, step=1), params, weight=0.0)
    grads = sg.grad(loss, wrt=live)(params, 1, 0.5)
    by_hand = jax.grad(loss)(params, 1, 0.5)
    for path, take in leaves_of(sg.mask(params, trained=live)):
        oracle.assert_same(grads[path], by_hand[path]) if take else None
        assert take or not by_hand[path].any()
    assert 'c' in selected(live, params)


def test_a_function_is_traced_once_whatever_numbers_it_is_given():
    traces: list[int] = []

    def loss(params, labels, flag):
        traces.append(1)
        assert flag is True
        return jnp.sum(labels[17] * params['a'])

    assert repr(sg.live(loss, {'a': jnp.ones(2)}, [0] * 256, True)) == "<live: 'a'>"
    assert len(traces) == 1


CLOSE = 'leave it out of the arguments, and let fun close over it'
# What is asked for, as an argument of the loss: what to write, the loss, its arguments.
WRITES: dict[str, tuple[Any, ...]] = {
    'config/n/0': (
        'functools.partial(fun, config=config)',
        *(lambda p, config: p['a'] * range(config['n'][0])[-1], {'n': [2]}),
    ),
    'batch/n': (
        *(CLOSE, lambda p, batch: p['a'] * range(batch['n'])[-1]),
        {'n': 2, 'x': jnp.ones(2)},
    ),
    'argument 2': (CLOSE, lambda p, *rest: p['a'] * range(rest[1])[-1], 1.0, 2),
    'p/scale': (CLOSE, lambda p: p['a'] * (2.0 if p['scale'] > 1 else 1.0)),
    'while': (
        'how often it turns, write functools.partial(fun, n=2)',
        *(lambda p, n: lax.fori_loop(0, n, lambda _, x: x * p['a'], 1.0), 2),
    ),
}


@pytest.mark.parametrize('called', WRITES)
def test_the_line_for_a_number_says_where_it_stands(called):
    write, fun, *args = WRITES[called]
    with pytest.raises(sg.errors.ArgumentTypeError) as raised:
        sg.live(fun, {'a': 2.0, 'scale': 2.0}, *args)
    head, *_, last = str(raised.value).splitlines()
    assert called in head and write in last


def test_errors_that_no_number_of_python_makes_are_those_of_jax():
    params = {'a': jnp.ones(2)}
    with pytest.raises(ZeroDivisionError):
        sg.live(lambda params, x: jnp.sum(params['a']) / (1 // 0), params, 1.0)
    asks = lambda params, x, n: params['a'] * (n if x > 0 else 1.0)  # noqa: E731
    with pytest.raises(jax.errors.TracerBoolConversionError):
        sg.live(asks, params, jnp.ones(()), 1)


def test_a_float_that_wrt_leaves_out_is_what_it_is():
    """The field of a model, which a method asks for; ``sg.grad`` does not mind."""

    def loss(params):
        return jnp.sum(params['a']) * (2.0 if params['scale'] > 1 else 1.0)

    params = {'a': jnp.ones(2), 'scale': 2.0}
    live = sg.live(loss, params, wrt='a')
    assert repr(live) == "<live: 'a'>"
    assert sg.gradient_flow(loss, params, wrt='a').status == (('flows', 'unused'),)
    oracle.assert_same(sg.grad(loss, wrt=live)(params)['a'], 2.0 * jnp.ones(2))


def test_statistics_beside_a_loss_train_nothing():
    """``jax.grad`` raises there without ``has_aux=True``."""
    x = jnp.arange(15.0).reshape(3, 5)

    def loss(params, x):
        h = jnp.dot(x, params['body'])
        value = jnp.mean(jnp.dot(lax.stop_gradient(h), params['head']) ** 2)
        return value, {'mean': h.mean(0)}

    params = {'body': jnp.ones((5, 2)), 'head': jnp.ones(2)}
    with pytest.warns(UserWarning, match='does not train body') as warned:
        sg.live(loss, params, x)
    assert 'has_aux=True' in str(warned[0].message)
    live = sg.live(loss, params, x, has_aux=True)
    assert repr(live) == "<live: 'head'>"
    # Nothing is said where it makes no difference, of losses in a dict, or of a model.
    both = sg.live(lambda p: dict(enumerate(loss(p, x))), params)
    assert repr(both) == "<live: 'body', 'head'>"
    same = sg.live(lambda p: (loss(p, x)[0], p['head'] * 2), params)
    assert same == live


def rows(w, n):
    """The array, of which the first rows are stopped."""
    return jnp.concatenate([lax.stop_gradient(w[:n]), w[n:]])


ONE, TWO = "<live: 'a'>", "<live: 'a', 'b'>"
PART = f'{ONE} & Index(np.s_[1:3])'
# Functions of two arrays that return what stands beside a loss: how many proofs they
# need, and what they train.
MANY: dict[str, tuple[int, str, Any]] = {
    'statistics': (2, TWO, lambda a, b: [(a * b).sum(), *(a * n for n in range(9))]),
    'of nothing': (2, ONE, lambda a, b: [a.sum(), *[lax.stop_gradient(b)] * 9]),
    'integers': (2, ONE, lambda a, b: [a.sum(), *[b.argmax()] * 9]),
    'one output alone': (1, ONE, lambda a, b: a.sum()),
    'another parameter': (5, TWO, lambda a, b: [a.sum(), a, b.sum()]),
    'a gradient and its negative': (5, TWO, lambda a, b: [a.sum(), b.sum(), -b.sum()]),
    # The rows that the first one stops, and the same rows.
    'rows': (8, ONE, lambda a, b: [rows(a, 1).sum(), rows(a, 2).sum(), a[0]]),
    'the same rows': (8, PART, lambda a, b: [rows(a, 1).sum(), *[rows(a, 1)] * 2]),
    'a rule that runs for one of two': (5, TWO, lambda a, b: [a.sum(), *of_both(a, b)]),
}


@jax.custom_vjp
def of_both(a, b):
    return a * 1.0, a * 2.0


of_both.defvjp(lambda a, b: (of_both(a, b), None), lambda _, g: (g[0] + g[1], g[0]))


@pytest.mark.parametrize('name', MANY)
def test_one_proof_stands_for_outputs_that_train_no_more(name, monkeypatch):
    count, found, of_arrays = MANY[name]
    fn = lambda params: of_arrays(**params)  # noqa: E731
    proofs: list[int] = []
    prove = pullback.zero_gradients
    counted = lambda *args: proofs.append(1) or prove(*args)  # noqa: E731
    monkeypatch.setattr(pullback, 'zero_gradients', counted)
    params = {'a': jnp.ones((3, 2)), 'b': jnp.ones((3, 2))}
    live = sg.live(fn, params)
    assert (repr(live), len(proofs)) == (found, count)
    report = sg.gradient_flow(fn, params)
    for n, path in enumerate(report.parameters):
        assert repr(live(path)) == repr(report.trained(n))


@pytest.mark.parametrize(
    'derivative', [jax.grad, jax.value_and_grad, sg.grad, jax.hessian]
)
def test_a_function_that_returns_gradients_is_asked_about(derivative):
    params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
    fn = derivative(lambda params: jnp.sum(jnp.sin(params['a']) * params['b']))
    with warnings.catch_warnings(record=True, action='always') as warned:
        sg.live(fn, params)
    said = any('like its parameters' in str(each.message) for each in warned)
    assert said == (derivative is not jax.hessian)


@pytest.mark.parametrize('how', ['queue', 'number', 'example', 'jitted'])
def test_zeros_that_a_loss_closes_over_may_be_others_later(how):
    zeros = {'number': jnp.array(0.0), 'example': np.zeros(2, np.uint8)}  # A picture.
    rows = [zeros.get(how, jnp.zeros(2))]

    def of_b(b):
        return jnp.sum(jnp.asarray(rows[0], jnp.float32) * b)

    def loss(params):
        fn = jax.jit(lambda b: of_b(b)) if how == 'jitted' else of_b
        return jnp.sum(params['a'] ** 2) + fn(params['b'])

    params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
    live = sg.live(loss, params)
    rows[0] = rows[0] + 1
    grads = sg.grad(loss, wrt=live)(params)
    oracle.assert_same(grads, jax.grad(loss)(params))


def test_a_mask_of_bools_that_a_loss_closes_over_stops_what_it_says():
    """The mask of a leaf may be the same everywhere: that is no choice by data."""
    some = {'a': [True, False], 'b': [False] * 2, 'c': [True] * 2}
    masks = {name: jnp.array(mask) for name, mask in some.items()}

    def loss(params):
        stop = jax.lax.stop_gradient
        params = {n: jnp.where(masks[n], w, stop(w)) for n, w in params.items()}
        return jnp.sum(params['a'] * params['b'] * params['c'])

    params = dict.fromkeys(masks, jnp.ones(2))
    live = sg.live(loss, params)
    assert repr(live) == "(<live: 'a'> & Index(np.s_[0:1])) | <live: 'c'>"
    mask = sg.mask(params, frozen=~live)
    assert (mask['b'], mask['c']) == (True, False)
    assert mask['a'].tolist() == [False, True]
