"""``wrt=`` on what gets no gradient: one warning, which names who tells why."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle

X = jnp.ones((2, 3))


class Halves(nn.Module):
    """A model that stops the gradient of its first half."""

    @nn.compact
    def __call__(self, x):
        with nn.stop_gradient('half_a/**'):
            h = nn.Dense(4, name='half_a')(x)
        return nn.Dense(1, name='half_b')(h)


MODEL = Halves()
PARAMS = oracle.init(MODEL, jax.random.key(0), X)['params']


def loss(params):
    return jnp.sum(MODEL.apply({'params': params}, X) ** 2)


def told(fun, wrt, *args, **options) -> list[str]:
    """The warnings of one gradient, which is that of the whole tree."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        grads = sg.grad(fun, wrt=wrt, absent='none', **options)(*args)
    some = jax.tree.leaves(grads, is_leaf=lambda leaf: leaf is None)
    for one, whole in zip(some, jax.tree.leaves(jax.grad(fun)(*args)), strict=True):
        assert one is None or (one == whole).all()
    assert all(w.category is errors.NothingStoppedWarning for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize('jitted', [False, True])
def test_a_part_of_the_filter_that_the_model_stops_is_told(jitted):
    def fresh(params):  # JAX knows no program of it.
        return loss(params)

    [text] = told(jax.jit(fresh) if jitted else fresh, ['half_a/*', 'half_b/*'], PARAMS)
    assert text.startswith("wrt=Glob('half_a/*') gives zeros alone: in ")
    assert "no gradient flows to 'half_a/bias' and the others." in text
    # And where that happens, in the words of the warning.
    assert ".why('output', 'half_a/bias') tells where" in text
    why = sg.gradient_flow(loss, PARAMS).why('output', 'half_a/bias')
    assert "stop_gradient(Glob('half_a/**'))" in str(why)


def test_a_block_around_the_call_and_a_function_of_something_else():
    with nn.stop_gradient('half_b/**'):
        [text] = told(loss, 'half_b/bias', PARAMS)
    assert "to 'half_b/bias'.\n" in text

    def scanned(p):
        step = lambda c, _: (c * p['a'], c + 0 * p['b'])  # noqa: E731
        return jax.lax.scan(step, 1.0, None, length=3)[0]

    [text] = told(scanned, 'b', {'a': 2.0, 'b': 3.0})
    assert "no gradient flows to 'b'.\nThe function does not depend on it" in text


def test_everything_is_stopped():
    with nn.stop_gradient(True):
        [text] = told(loss, True, PARAMS)
    assert text.startswith('wrt=Constant(True) gives zeros alone')


# What is trained in part, or meant: nothing is said.
FINE = {
    'a part of it is trained': '**/bias',
    'everything': True,
    'a filter that was derived': sg.live(loss, PARAMS),
    'rows': sg.at('half_b/kernel', 0),
    'what the model trains': 'half_b/**',
}


@pytest.mark.parametrize('wrt', FINE.values(), ids=list(FINE))
def test_nothing_is_said_where_something_is_trained(wrt):
    sg.grad(loss, wrt=wrt)(PARAMS)  # Where no test expects a warning, it is an error.


def test_nothing_is_said_if_that_is_meant():
    assert not told(loss, 'half_a/**', PARAMS, unused='ignore')


OFF = {
    'a number': lambda p: 0.0,
    'an integer': lambda p: 0.0 * len(p),
    'of numpy': lambda p: np.float32(0.0),
}


@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.parametrize('wrt', ['w', True])
@pytest.mark.parametrize('name', OFF)
def test_a_loss_that_is_switched_off_is_no_mistake_of_a_filter(name, wrt, jitted):
    params = {'w': jnp.ones(3), 'b': jnp.ones(2)}
    run = jax.jit if jitted else lambda fun: fun
    grads = run(sg.grad(OFF[name], wrt=wrt))(params)
    assert not grads['w'].any()
    loss = lambda p: (OFF[name](p), jnp.sum(p['w']))  # noqa: E731
    assert not run(sg.grad(loss, has_aux=True, wrt=wrt))(params)[0]['w'].any()


# Of what JAX has computed nobody can tell, without another run, what it was made of.
NOT_OFF = {
    'an array': lambda p: jnp.zeros(()),
    'jitted': jax.jit(lambda p: 0.0),
    'beside what it computes': lambda p: (jnp.sum(p['w'] ** 2), jnp.zeros(()))[1],
    'of what is stopped': lambda p: jnp.sum(jax.lax.stop_gradient(p['w'])),
    'of others': lambda p: jnp.sum(p['b']),
    'of the batch': lambda p: jnp.sum(X) * 2.0,
    'of a jitted batch': jax.jit(lambda p: jnp.sum(X)),
    'of what is stopped, jitted': jax.jit(
        lambda p: jnp.sum(jax.lax.stop_gradient(p['w']))
    ),
}


@pytest.mark.parametrize('name', NOT_OFF)
def test_a_loss_of_something_else_is_told(name):
    params = {'w': jnp.ones(3), 'b': jnp.ones(2)}
    fun = lambda p: NOT_OFF[name](p)  # noqa: E731
    assert len(told(fun, 'w', params)) == 1


def test_the_gradient_can_be_differentiated_again():
    gradient = sg.grad(lambda p: jnp.sum(p['w'] ** 3 * p['v']), wrt='w')

    def slope(w):
        return gradient({'w': w, 'v': jnp.array([2.0, 5.0])})['w']

    w, t = jnp.array([1.0, 3.0]), jnp.array([1.0, 10.0])
    by_hand = 6 * w * jnp.array([2.0, 5.0])
    assert (jax.jvp(slope, (w,), (t,))[1] == by_hand * t).all()
    assert (jax.vjp(slope, w)[1](t)[0] == by_hand * t).all()
    assert (jax.jit(jax.jacfwd(slope))(w) == jnp.diag(by_hand)).all()
    many = jax.vmap(slope)(jnp.stack([w, t]))
    assert (many[0] == slope(w)).all()


@pytest.mark.parametrize('jitted', [False, True])
def test_the_loss_runs_once(jitted):
    """It may read its batch from an iterator, or count random keys."""
    batches = iter([jnp.ones(3), 2 * jnp.ones(3)])

    def loss(p):
        return jnp.sum(jax.lax.stop_gradient(p['w']) * next(batches)) + jnp.sum(p['b'])

    params = {'w': jnp.ones(3), 'b': jnp.ones(2)}
    gradient = sg.value_and_grad(loss, wrt='w', absent='zeros')
    with pytest.warns(errors.NothingStoppedWarning, match='gives zeros alone'):
        value, _ = (jax.jit(gradient) if jitted else gradient)(params)
    assert value == 5.0
    assert next(batches)[0] == 2.0
