"""``sg.freeze`` and ``sg.adopt`` in ``nnx.Optimizer``: the optimizer of the rest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_sg as sg
from flax_sg import nnx as ours
from tests.helpers import oracle
from tests.helpers.nnx_by_hand import loss_of, pure
from tests.helpers.optimizers import OPTIMIZERS
from tests.helpers.turns import in_turn

pytestmark = pytest.mark.usefixtures('standard_promotion')

X = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(2, 3, rngs=rngs)
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(jnp.tanh(self.body(x)))


ROWS = sg.at('body/kernel', np.s_[:1])
FROZEN = {'rows': ROWS, 'a layer': 'body/**', 'all but rows': ~ROWS}


def stepped(model: Any, optimizer: Any, jitted: bool, steps: int = 3) -> None:
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss_of)(model, x))

    run = nnx.jit(step) if jitted else step
    for number in range(steps):
        run(model, optimizer, X * (number + 1))


@pytest.mark.parametrize(
    ('name', 'frozen', 'jitted'),
    in_turn(('adamw', 'momentum', 'adafactor'), FROZEN, (False, True), times=2),
)
def test_an_optimizer_updates_several_times(name, frozen, jitted):
    """By hand: plain dicts of arrays in the place of modules."""
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    tx = sg.freeze(OPTIMIZERS[name](), FROZEN[frozen])
    stepped(model, nnx.Optimizer(model, tx, wrt=nnx.Param), jitted)
    params, graph = pure(other), nnx.graphdef(other)

    def step(params, state, x):
        grads = jax.grad(lambda p: loss_of(nnx.merge(graph, nnx.State(p)), x))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for number in range(3):
        run = jax.jit(step) if jitted else step
        params, state = run(params, state, X * (number + 1))
    oracle.assert_same(pure(model), params)


def test_a_state_of_an_optimizer_is_adopted():
    model = Model(nnx.Rngs(0))
    adam = optax.adam(0.1)
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    stepped(model, optimizer, False)
    params, found = nnx.state(model, nnx.Param), {}
    expected = nnx.to_pure_dict(nnx.state(optimizer.opt_state))
    for state in optimizer.opt_state, nnx.state(optimizer.opt_state):
        adopted = sg.adopt(adam, params, state, report=found.update)
        assert (found['fresh'], found['in part'], found['dropped']) == ([], [], [])
        assert jax.tree.structure(adopted) == jax.tree.structure(adam.init(params))
        oracle.assert_same(*map(jax.tree.leaves, (adopted, expected)))
    tx = sg.freeze(adam, ['body/bias', ROWS])
    later = nnx.Optimizer(model, tx, wrt=nnx.Param)
    adopted = sg.adopt(tx, params, optimizer.opt_state, old=adam, report=found.update)
    assert (found['in part'], found['dropped']) == (['body/kernel'], ['body/bias'])
    nnx.update(later.opt_state, nnx.state(adopted))
    moments = later.opt_state[0].mu['body']['kernel'][...]
    oracle.assert_same(moments, optimizer.opt_state[0].mu['body']['kernel'][1:])
    before = pure(model)
    stepped(model, later, True)
    oracle.assert_same(pure(model)['body']['bias'], before['body']['bias'])
    # And back.
    thawed = sg.adopt(adam, params, later.opt_state, old=tx, report=found.update)
    assert (found['in part'], found['fresh']) == (['body/kernel'], ['body/bias'])
    assert int(thawed[0].count) == 6


def test_what_is_live_in_a_variable_of_several_arrays():
    """``nnx.Optimizer`` shows a Variable first, and what is in it later."""

    class Model(nnx.Module):
        def __init__(self):
            self.p = nnx.Param((jnp.ones(2), jnp.zeros(2)))
            self.q = nnx.Param(jnp.ones(2))

    def loss(model):
        return sum(map(jnp.sum, model.p.get_value()))

    model = Model()
    tx = sg.freeze(optax.adamw(0.1), ~sg.live(loss, model))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    # Flax itself cannot do it twice with such a value.
    optimizer.update(model, nnx.grad(loss)(model))
    assert model.q[...].tolist() == [1.0, 1.0]
    one, zero = model.p.get_value()
    assert (one < 1.0).all() and (zero < 0.0).all()


def test_a_model_and_an_optimizer_in_one_take_paths():
    """Flax takes a text for a tag, and trains nothing."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    before = nnx.state(nnx.clone(model))
    both = ours.ModelAndOptimizer(model, optax.sgd(0.1), wrt='**/kernel')
    loss = lambda model: jnp.sum(model(jnp.ones((4, 2))))  # noqa: E731
    both.update(nnx.grad(loss, argnums=ours.DiffState(0, both.wrt))(both.model))
    layer, old = model.layers[0], before['layers'][0]
    assert both.model is model
    assert (layer.kernel[...] != old['kernel'][...]).any()
    assert (layer.bias[...] == old['bias'][...]).all()
    with pytest.raises(sg.errors.UnusedFilterError, match='kernle'):
        ours.ModelAndOptimizer(model, optax.sgd(0.1), wrt='**/kernle')


def test_an_optimizer_of_a_view_names_what_made_it():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match='nnx.train_only made this Linear'):
        ours.Optimizer(ours.train_only(model, 'bias'), optax.sgd(0.1), wrt=nnx.Param)
