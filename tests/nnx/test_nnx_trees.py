"""NNX modules and states where flax_sg takes a tree, and filters for NNX."""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx as flax_nnx

import flax_sg as sg
from flax_sg import errors, nnx, testing
from tests.helpers import oracle
from tests.helpers.nnx_by_hand import Layer, Net, X, loss_of, pure, stopped

# ``adam`` counts its steps in another dtype.
pytestmark = pytest.mark.usefixtures('standard_promotion')

BODY = ['body/0/bias', 'body/0/kernel', 'body/1/bias', 'body/1/kernel']
OTHERS = ['head/bias', 'head/kernel', 'norm/bias', 'norm/scale']


def frozen_body(model: Any, x: Any = X) -> Any:
    return loss_of(nnx.stop_gradient(model, 'body/**'), x)


def test_a_filter_for_nnx():
    model = Net()
    live = nnx.where(model, sg.live(frozen_body, model, X))
    for where in (OTHERS, ['head/**', 'norm/*'], lambda path: path[:4] != 'body'):
        assert nnx.where(Net(1), where) == live
    _, some, _ = nnx.split(model, live, ...)
    assert ['/'.join(map(str, path)) for path, _ in nnx.to_flat_state(some)] == OTHERS
    both = nnx.All(live, nnx.PathContains('head'))
    assert len(jax.tree.leaves(nnx.state(model, both))) == 2
    stats = nnx.where(model, 'norm/mean', kind=nnx.BatchStat)
    assert list(nnx.state(model, stats)['norm']) == ['mean']
    every = nnx.state(model, nnx.where(model, 'norm/*', kind=...))
    assert list(every['norm']) == ['bias', 'mean', 'scale', 'var']


ADAMW = optax.adamw(0.1)


def trained(loss: Any, wrt: Any, tx: Any = ADAMW, **mode: Any) -> Any:
    """A model after three steps, and the arrays in its optimizer."""
    model = Net()
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    argnums = 0 if mode else nnx.DiffState(0, wrt)
    grad = nnx.grad(loss, argnums=argnums, allow_int=bool(mode), **mode)
    step = nnx.jit(lambda m, optimizer: optimizer.update(m, grad(m)), **mode)
    for _ in range(3):
        step(model, optimizer)
    return pure(model), jax.tree.leaves(nnx.state(optimizer)['opt_state'])


@functools.cache
def trained_by_hand() -> Any:
    names = nnx.Any(nnx.PathContains('head'), nnx.PathContains('norm'))
    return trained(loss_of, nnx.All(nnx.Param, names))


def test_gradients_and_an_optimizer_for_what_is_trained():
    """Frozen by hand in gradients and optimizer, by ``sg.live``, by ``sg.freeze``."""
    live = nnx.where(Net(), sg.live(frozen_body, Net(), X))
    by_hand = trained_by_hand()
    oracle.assert_same(trained(frozen_body, live), by_hand)
    for where in 'body/**', ~live, nnx.where(Net(), ~live):
        frozen = trained(loss_of, nnx.Param, sg.freeze(ADAMW, where))
        oracle.assert_same(frozen, by_hand)
    stopped = lambda model: loss_of(nnx.stop_gradient(model, ~live))  # noqa: E731
    oracle.assert_same(trained(stopped, live), by_hand)


HAS_TREE_MODE = 'graph_updates' in inspect.signature(flax_nnx.grad).parameters


@pytest.mark.skipif(not HAS_TREE_MODE, reason='this Flax has graph mode alone')
@pytest.mark.parametrize('mode', [{'graph': False}, {'graph_updates': False}], ids=str)
def test_a_step_in_tree_mode_is_that_of_graph_mode(mode: dict[str, Any]):
    live = nnx.where(Net(), sg.live(frozen_body, Net(), X))
    frozen = trained(frozen_body, nnx.Param, sg.freeze(ADAMW, ~live), **mode)
    oracle.assert_same(frozen, trained(frozen_body, live))
    with pytest.raises(ValueError, match='cannot contain `DiffState` objects'):
        nnx.grad(frozen_body, argnums=nnx.DiffState(0, live), **mode)(Net())


@pytest.mark.skipif(not HAS_TREE_MODE, reason='this Flax has graph mode alone')
def test_a_model_beside_its_view_is_for_graph_mode():
    model = Net()
    view = nnx.stop_gradient(model, 'body/**')
    both = lambda model, view: model(X) + view(X)  # noqa: E731
    nnx.jit(both)(model, view)
    with pytest.raises(ValueError, match='Duplicate'):
        nnx.jit(both, graph=False)(model, view)


def test_masks_labels_and_parts_of_states():
    params = nnx.state(Net(), nnx.Param)
    mask = nnx.to_pure_dict(sg.mask(params, frozen=['body/1/*', 'norm/*', 'head/*']))
    labels = sg.labels(params, {'slow': 'body/**', 'fast': ['head/*', 'norm/*']})
    assert mask['body'][0] == dict.fromkeys(['bias', 'kernel'], False), mask
    assert nnx.to_pure_dict(labels)['norm'] == {'bias': 'fast', 'scale': 'fast'}
    oracle.assert_same(sg.combine(*sg.partition(params, 'body/**')), params)


def test_what_a_model_writes_in_a_gradient_of_a_tree_is_told():
    def with_state(model):
        return loss_of(model), nnx.state(model, nnx.BatchStat)

    model, where = Net(), 'head/**'
    of_vjp = lambda model: sg.vjp(loss_of, model, wrt=where)  # noqa: E731
    for gradient in sg.grad(loss_of, wrt=where), of_vjp:
        with pytest.warns(UserWarning, match='counts of random keys') as told:
            gradient(model)
        assert 'With graph=False' in str(told[0].message)
    sg.grad(with_state, has_aux=True, wrt=where)(model)  # Here nothing is lost.
    model.eval()
    ours, hand = sg.grad(loss_of, wrt=where)(model), nnx.grad(loss_of)(model)
    oracle.assert_same(ours.head.bias[...], hand.head.bias[...])


def test_parts_of_a_module():
    model = Net(dropout=0.0)
    model.eval()
    body, rest = sg.partition(model, 'body/**')

    def of_rest(rest):
        return loss_of(sg.combine(body, rest))

    grads, expected = sg.grad(of_rest)(rest), pure(nnx.grad(loss_of)(model))
    oracle.assert_same(grads.head.kernel[...], expected['head']['kernel'])
    # Batch statistics are differentiated if they are named, as with nnx.grad.
    for absent in grads.body[0].kernel, grads.norm.mean:
        assert absent.get_raw_value() is sg.ABSENT
    assert sg.grad(of_rest, wrt='norm/mean')(rest).norm.mean[...].any()


def test_reports():
    flow = sg.gradient_flow(frozen_body, Net(), X)
    assert list(map(str, flow.parameters)) == [*BODY, *OTHERS]
    assert flow.status_of('output', 'body/0/kernel') == 'stopped'
    meant = sg.gradient_flow(loss_of, Net(), X, wrt=['norm/mean', 'head/bias'])
    assert 'norm/mean' in meant.parameters
    testing.assert_trains_only(frozen_body, ['head/**', 'norm/**'], Net(), X)
    testing.assert_stopped(frozen_body, 'body/**', Net(), X)
    with pytest.raises(errors.ExpectationError, match='body/0/bias is used at'):
        testing.assert_flows(frozen_body, 'body/0/*', Net(), X)


def test_tables():
    """Of a module, a view of it, and a module in a tuple."""
    table = sg.tabulate(Net(), X, method=lambda model, x: frozen_body(model, x))
    assert table.splitlines()[-1] == 'Trainable: 18 (72 B)   Frozen: 40 (160 B)'
    for tree, start in (Net(), ''), ((Net(), 1.0), '0/'):
        row = repr(sg.paths(tree, where=start + 'body/**')).splitlines()[2]
        assert row.split()[:2] == ['yes', start + 'body/[0-1]/bias']


def test_variables_by_the_class_of_their_module():
    model = Net()
    linear = sg.filters.of_type((nnx.Linear, Layer), model)
    assert nnx.where(model, linear) == nnx.where(model, ['body/**', 'head/*'])
    norms = sg.filters.of_type(nnx.BatchNorm, model)
    frozen = lambda m: loss_of(nnx.stop_gradient(m, norms))  # noqa: E731
    testing.assert_stopped(frozen, 'norm/*', model)
    model.tied = nnx.data([model.norm.scale])
    norms = nnx.where(model, sg.filters.of_type(nnx.BatchNorm, model))
    assert norms == nnx.where(model, ['tied/0', 'norm/bias'])
    several = sg.filters.of_type(nnx.Linear, {'a': (model,), 'b': (nnx.Dict(c=Net()),)})
    assert repr(several).startswith("<of_type(Linear): 'a/head/bias', 'a/head/kernel'")
    with pytest.raises(errors.UnusedFilterError, match='of_type'):
        nnx.where(model, sg.filters.of_type(nnx.Conv, model))


def test_of_type_in_trees_and_of_children_that_know_their_parent():
    class Child(nnx.Module):
        def __init__(self, parent):
            self.parent, self.w = parent, nnx.Param(jnp.ones(2))

    class Bag(nnx.Pytree):
        def __init__(self):
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    class Model(nnx.Module, pytree=False):
        def __init__(self):
            self.bag, self.child, self.head = Bag(), Child(self), nnx.Param(jnp.ones(2))

    def taken(cls, tree):
        paths = sg.paths(tree, where=sg.filters.of_type(cls, tree))
        return [str(one.path) for one in paths if one.selected]

    model, layer = Model(), ['bag/layer/bias', 'bag/layer/kernel']
    assert taken(Child, model) == ['child/w']
    assert taken(Bag, model) == taken(nnx.Linear, model) == layer
    assert taken(Model, model) == [*layer, 'child/w', 'head']
    assert taken(nnx.Linear, Bag()) == ['layer/bias', 'layer/kernel']
    for tree in [model, Model()], (model, Model()), {'0': model, '1': Model()}:
        assert taken(Bag, tree) == [f'{n}/{path}' for n in (0, 1) for path in layer]


def test_programs_of_functions_of_nnx_jit():
    def by_hand(model, x):
        return loss_of(stopped(model), x)

    def grad(loss):
        return nnx.jit(nnx.grad(loss))

    testing.assert_same_program(grad(frozen_body), grad(by_hand), Net(), X)
    with pytest.raises(errors.ExpectationError):
        testing.assert_same_program(grad(frozen_body), grad(loss_of), Net(), X)
    compiled = grad(frozen_body).lower(Net(), X).compile()
    testing.assert_same_program(compiled, grad(by_hand), Net(), X)


# Filters of paths where NNX takes a filter


def live_of(model: Any) -> Any:
    return sg.live(frozen_body, model, X)


CHOICES: dict[str, Any] = {
    'globs': lambda model: ['head/**', 'norm/**'],
    'a glob': lambda model: '[hn]*/*',
    'live': live_of,
    'an expression': lambda model: live_of(model) & ~sg.where('body/**'),
    'a function': lambda model: lambda path: path[:4] != 'body',
    'a regular expression': lambda model: re.compile('(head|norm)/.*'),
    'a mask': lambda model: sg.mask(nnx.state(model, nnx.Param), trained=OTHERS),
    'where': lambda model: nnx.where(model, ['head/**', 'norm/**']),
    'not the others': lambda m: ~(~nnx.where(m, '[hn]*/*') | sg.where('body/**')),
    'live, in one of NNX': lambda model: nnx.All(nnx.Param, live_of(model)),
    'of NNX': lambda model: nnx.All(nnx.Param, nnx.Not(nnx.PathContains('body'))),
    'both': lambda model: ('head/**', nnx.All(nnx.Param, nnx.PathContains('norm'))),
}


@pytest.mark.parametrize('name', CHOICES)
def test_filters_of_paths_where_nnx_takes_filters(name):
    oracle.assert_same(trained(loss_of, CHOICES[name](Net())), trained_by_hand())


def test_a_filter_answers_as_one_of_nnx():
    """``sg.live`` returns one that Flax's own functions take."""
    model = Net()
    live = live_of(model)
    for some in nnx.state(model, live), nnx.split(model, live, ...)[1]:
        paths = ['/'.join(map(str, path)) for path, _ in nnx.to_flat_state(some)]
        assert paths == OTHERS
    grads = nnx.grad(loss_of, argnums=flax_nnx.DiffState(0, live))(model)
    assert list(grads) == ['head', 'norm']
    rest = nnx.state(model, ~live)
    assert list(rest) == ['body']
    assert {type(x) for _, x in nnx.to_flat_state(rest)} == {nnx.Param}
    # Variables of other kinds are none of its business, new ones too.
    model.seen = nnx.BatchStat(jnp.ones(2))
    assert len(nnx.to_flat_state(nnx.state(model, live))) == len(OTHERS)
    part = sg.at('head/kernel', 0)
    with pytest.raises(errors.PartError, match='head/kernel'):
        nnx.state(model, sg.filters.as_filter(part))


class Tagged(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2), tag='scale')
        self.scale = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        return self.kernel.sum() + self.scale.sum() + x.sum()


def test_a_tag_of_flax_stays_a_tag():
    model = Tagged()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt='scale')
    assert list(optimizer.opt_state[0].trace) == ['kernel']
    model.kernel.set_metadata(tag='other')
    for wrt in 'scale', 'scal*':
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=wrt)
        assert list(optimizer.opt_state[0].trace) == ['scale']
    # Where there is no model yet, a text may be both.
    grads = nnx.grad(loss_of, argnums=nnx.DiffState(0, 'scale'))
    assert list(grads(model)) == ['scale']
    assert list(grads(Tagged())) == ['kernel', 'scale']
    assert nnx.DiffState(0, 'scale') == nnx.DiffState(0, 'scale')
    # A typo is found where there is a model.
    for typo in 'scael', 'kern/*', ['scale', 'kern/*']:
        with pytest.raises(errors.UnusedFilterError):
            nnx.Optimizer(model, optax.sgd(0.1), wrt=typo)
    with pytest.raises(errors.FilterTypeError, match="text 'kern/"):
        nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Not(nnx.Any('kern/*')))
