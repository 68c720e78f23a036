"""The hooks on Flax's reads.

The rules by number are the traps that naive versions of the mechanism fell into.
"""

import collections
import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax.core import Scope, freeze

import oracle
import stepwise
from described.modules import Affine, Kid
from described.uses import RNGS, X, both, integers, staged
from flax_sg import linen as nn

stop = jax.lax.stop_gradient
PARAMS = {'w': jnp.array([1.0, 2.0, 3.0]), 'b': jnp.array([4.0, 1.0, 2.0])}


class Do(nn.Module):
    """Does something, given as a function of the module and its input."""

    body: Callable[[Any, Any], Any]

    @nn.compact
    def __call__(self, x):
        return self.body(self, x)


def read(module: Any, name: str) -> Any:
    return module.get_variable('params', name)


def apply(body: Any, params: Any, x: Any, mutable: Any, **state: Any) -> Any:
    out = Do(body).apply({'params': params, **state}, x, mutable=mutable, rngs=RNGS)
    return out if mutable else (out, {})


MUTABLE = ['params', 'state', 'intermediates']


def assert_same_program(
    body: Any, by_hand: Any, params: Any = PARAMS, mutable: Any = MUTABLE, **state: Any
) -> None:
    """``body`` computes what ``by_hand`` does: results, writes, and their gradients."""

    def fn(body: Any) -> Any:
        return lambda params, x: apply(body, params, x, mutable, **state)

    actual = staged(both(fn(body)))(params, X)
    oracle.assert_same(actual, staged(both(fn(by_hand)))(params, X))


# Values: what readers are given is of the kind that they would have been given.


@pytest.mark.parametrize(
    ('kind', 'mutable'), [(dict, ['params']), (freeze, False), (freeze, True)]
)
def test_trees_have_the_types_that_they_have_outside(kind, mutable):
    types = []

    def body(module, x):
        Kid(name='kid')(x)
        for block in (contextlib.nullcontext(), nn.stop_gradient('kid/w')):
            with block:
                tree = module.variables
                trees = [tree, tree['params'], tree['params']['kid']]
                types.append([type(tree) for tree in trees])
        return x

    Do(body).apply(kind({'params': {'kid': PARAMS}}), X, mutable=mutable)
    assert types[0] == types[1]


def test_the_callers_variables_are_never_touched():
    def body(module, x):
        with nn.stop_gradient(True):
            y = module.variables['params']['w'] * Kid(name='kid')(x)
        return y * read(module, 'b')

    def loss(params):
        leaves = jax.tree.leaves(params)
        Do(body).apply({'params': params}, X)
        Do(body).apply({'params': params}, X, mutable=['params'])
        assert all(a is b for a, b in zip(jax.tree.leaves(params), leaves, strict=True))
        return jnp.sum(params['w'] * params['kid']['w'])

    gradient = jax.grad(loss)({**PARAMS, 'kid': PARAMS})
    oracle.assert_same(gradient['w'], PARAMS['w'])


def test_rule_1_a_read_of_one_variable_looks_at_that_one():
    """Rewriting where collections are fetched costs the owner's whole tree per read."""
    asked = []

    def body(module, x):
        kids = [Kid(name=f'kid_{i}') for i in range(30)]
        with nn.stop_gradient(lambda path: asked.append(str(path)) or True):
            return kids[7](x)

    params = {f'kid_{i}': PARAMS for i in range(30)}
    jax.grad(lambda p: jnp.sum(Do(body).apply({'params': p}, X)))(params)
    assert sorted(asked) == ['kid_7/b', 'kid_7/w']


def test_rule_2_reading_the_tree_does_not_stop_a_child_of_a_child_for_good():
    """Flax fills the parents' caches when a child's collection is looked up."""

    class Middle(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Kid(name='kid')(x)

    def body(module, x):
        with nn.stop_gradient(True):
            y = module.variables['params']['middle']['kid']['w'] * x
            z = module.scope.root.variables()['params']['middle']['kid']['b']
        return y * z, Middle(name='middle')(x)

    def by_hand(module, x):
        kid = stop(module.variables['params']['middle']['kid'])
        return kid['w'] * x * kid['b'], Middle(name='middle')(x)

    assert_same_program(body, by_hand, {'middle': {'kid': PARAMS}})


def test_rule_8_a_stopped_value_may_be_a_plain_array():
    """Under no derivative nothing is traced, and nothing is changed."""

    def body(module, x):
        with nn.stop_gradient(True):
            assert read(module, 'w') is module.variables['params']['w']
            module.put_variable('params', 'b', read(module, 'w'))
        return read(module, 'w')

    w, written = Do(body).apply({'params': PARAMS}, X, mutable=['params'])
    assert w is PARAMS['w']
    assert written['params']['b'] is PARAMS['w']


@pytest.mark.usefixtures('leaks')
@pytest.mark.parametrize(
    ('mutable', 'where'), [(False, True), (['params', 'intermediates'], 'kid/w')]
)
def test_rule_9_what_apply_returns_is_what_is_stored(mutable, where):
    """It reads the variables after the scope was invalidated; and keeps no tracer."""

    def body(module, x):
        kid = Kid(name='kid')
        with nn.stop_gradient(where):
            y = kid(x) + jnp.sum(module.variables['params']['kid']['w'])
            kid.sow('intermediates', 'y', y)
        return y

    def fn(params):
        return apply(body, {'kid': params}, X, mutable)

    out, pull_back = jax.vjp(jax.jit(fn), PARAMS)
    if mutable:
        ones = jax.tree.map(jnp.zeros_like, out)
        ones[1]['params'] = {'kid': PARAMS}
        oracle.assert_same(pull_back(ones)[0], PARAMS)


def test_rule_10_a_bound_module_keeps_nothing_of_a_closed_block():
    """Its scope is never invalidated."""
    stopped = []
    other = Kid().bind({'params': PARAMS})

    def loss(w):
        bound = Kid().bind({'params': {**PARAMS, 'w': w}})
        with nn.stop_gradient('w'):
            stopped.append(weakref.ref(bound.w))
            y = jnp.sum(bound(X) * other(X))
        assert bound.w is w and stopped[0]() is not w
        gc.collect()
        assert stopped[0]() is None
        return y + jnp.sum(bound(X))

    oracle.assert_same(jax.vmap(jax.grad(loss))(PARAMS['w'][None]), X[None])


# G1: random numbers and collections are as without the block.


class Everything(nn.Module):
    """Parameters, dropout, other streams, statistics, sown values, perturbations."""

    block: Any = None

    @nn.compact
    def __call__(self, x):
        norm = nn.BatchNorm(use_running_average=False, name='norm')
        drop = nn.Dropout(0.5, deterministic=False, name='drop')
        for i in range(3):
            with nn.stop_gradient(self.block) if i == 1 and self.block else no_block:
                x = nn.Dense(3, name=f'dense_{i}')(norm(x) if i == 1 else x)
                x = drop(x) + jax.random.normal(self.make_rng('noise'), x.shape)
                self.sow('intermediates', 'x', x)
                x = self.perturb(f'x_{i}', x)
                count = self.variable('state', f'count_{i}', lambda: jnp.zeros(()))
                count.value = count.value + 1.0
        return x


no_block = contextlib.nullcontext()
BATCH = jnp.stack([X, X * 2.0, X - 1.0])


def everything(block: Any) -> Any:
    """What initialization gives, and ``apply`` while it is differentiated."""
    made = stepwise.evaluate(Everything(block).init_with_output, RNGS, BATCH)

    def applied(params):
        return Everything(block).apply(
            {**made[1], 'params': params},
            BATCH,
            rngs=RNGS,
            mutable=True,
            capture_intermediates=True,
        )

    return made, stepwise.evaluate(lambda p: jax.vjp(applied, p)[0], made[1]['params'])


def test_values_streams_and_collections_are_those_without_the_block():
    plain = everything(None)
    for block in (True, ['norm/*', 'dense_1/kernel']):
        oracle.assert_same(everything(block), plain)


def test_a_loss_on_what_a_stopped_part_sows_does_not_train_it():
    """Hazard 24: and a penalty on the parameters outside of the block does."""

    def body(module, x):
        with nn.stop_gradient('w'):
            y = read(module, 'w') * read(module, 'b') * x
            module.sow('intermediates', 'y', y)
        return jnp.sum(read(module, 'w') ** 2)

    def loss(params):
        penalty, written = apply(body, params, X, ['intermediates'])
        return penalty + jnp.sum(written['intermediates']['y'][0])

    gradient = jax.grad(loss)(PARAMS)
    oracle.assert_same(gradient['w'], 2 * PARAMS['w'])
    oracle.assert_same(gradient['b'], PARAMS['w'] * X)


def test_a_weight_that_is_tied_is_stopped_in_the_use_that_is_in_the_block():
    """Hazard 23."""

    def body(module, x):
        embed = nn.Embed(4, 3, name='embed')
        y = embed(jnp.array([1, 2])) * x[None, :]
        with nn.stop_gradient('embed/*'):
            return embed.attend(y), y

    def by_hand(module, x):
        table = module.variables['params']['embed']['embedding']
        y = table[jnp.array([1, 2])] * x[None, :]
        return y @ stop(table).T, y

    table = integers({'embed': {'embedding': jnp.ones((4, 3))}})
    assert_same_program(body, by_hand, table)


# Paths: what a filter is told of a variable.


class Named(nn.Module):
    """Makes something, and opens a block around its use."""

    where: Any
    make: Callable[[], Callable[[Any], Any]]
    collections: Any = 'params'

    @nn.compact
    def __call__(self, x):
        use = self.make()
        with nn.stop_gradient(self.where, collections=self.collections):
            return use(x)


class Mount(nn.Module):
    enc: Any

    @nn.compact
    def __call__(self, x):
        return self.enc(x)


class SharedCell(nn.Module):
    """A recurrent layer in ``enc`` whose cell belongs to the root."""

    where: Any

    @nn.compact
    def __call__(self, x):
        rnn = nn.RNN(nn.SimpleCell(3, name='cell'), name='rnn')
        return Named(self.where, lambda: rnn, name='enc')(jnp.stack([x, x]))


def mounted(
    make: Callable[[], Any], collections: Any = 'params'
) -> Callable[[Any], nn.Module]:
    return lambda where: Mount(Named(where, make, collections))


def applies_another() -> Callable[[Any], Any]:
    kid = Kid(name='kid')
    return lambda x: kid(x) * Other().apply({'params': {'other': {'w': x, 'b': x}}}, x)


class Other(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Kid(name='other')(x)


class InLifted(nn.Module):
    """Opens the block in the body of a lifted function of a module."""

    where: Any

    def setup(self):
        self.kid = Affine()

    def __call__(self, x):
        def body(kid, x):
            with nn.stop_gradient(self.where):
                return kid(x)

        return nn.jit(body)(self.kid, x)


def in_enc(*paths: str) -> set[tuple[str, str]]:
    """Paths of a module that is mounted as 'enc', there and from the root."""
    return {(path, f'enc/{path}') for path in paths}


PATHS: dict[str, tuple[Callable[[Any], nn.Module], set[tuple[str, str]]]] = {
    'mounted': (mounted(lambda: Kid(name='kid')), in_enc('kid/w', 'kid/b')),
    'a cell of the parent': (
        SharedCell,
        {
            (f'/cell/{path}', f'cell/{path}')
            for path in ('i/kernel', 'i/bias', 'h/kernel')
        },
    ),
    'another apply': (
        mounted(applies_another),
        # It sees what it is given.
        in_enc('kid/w', 'kid/b'),
    ),
    # What is lifted becomes a method of the module that it is a function of.
    'in a lifted function of a child': (
        lambda where: Mount(InLifted(where)),
        {('w', 'enc/kid/w'), ('b', 'enc/kid/b')},
    ),
    'all collections': (
        mounted(lambda: nn.BatchNorm(use_running_average=True, name='norm'), True),
        in_enc('norm/scale', 'norm/bias', 'norm/mean', 'norm/var'),
    ),
}


@pytest.mark.parametrize('name', PATHS)
def test_paths_and_one_evaluation_for_each(name):
    """Whether read by one way or several, under whatever transforms."""
    make, wanted = PATHS[name]
    variables = make(lambda path: True).init(RNGS, X)
    seen = []

    class Where:
        """Of a class of its own: a block asks what blocks of one code were asked."""

        def __call__(self, path):
            seen.append(path)
            return True

    def loss(params):
        return jnp.sum(make(Where()).apply({**variables, 'params': params}, X))

    gradient = jax.grad(loss)(variables['params'])
    assert oracle.is_zero(gradient)
    assert collections.Counter((str(p), p.absolute) for p in seen) == dict.fromkeys(
        wanted, 1
    )
    for path in seen:
        own = tuple(path.strip('/').split('/'))
        assert path.parts == own
        assert path.name == own[-1]
        assert path.module == path[: -len(own[-1]) - 1] or path.module == '/'
        statistic = path.name in ('mean', 'var')
        assert path.collection == ('batch_stats' if statistic else 'params')


@pytest.mark.parametrize('steps', ['p[]q[]', '[pq]', '[p]q[]'])
def test_other_code_patches_what_is_hooked(steps, monkeypatch):
    """Before and after a block, in it, and from within it to after it."""
    module, x = nn.Dense(1), jnp.ones((2, 3))
    variables = module.init(jax.random.key(0), x)
    original, met, block = Scope.get_variable, [], nn.stop_gradient('kernel')

    def patched(self: Scope, *args: Any) -> Any:
        met.append(steps)
        return before(self, *args)

    for number, step in enumerate(steps):
        if step in '[]':
            block.__enter__() if step == '[' else block.__exit__(None, None, None)
        elif step == 'p':
            before = Scope.get_variable
            monkeypatch.setattr(Scope, 'get_variable', patched)
        else:
            monkeypatch.undo()
        grads = jax.grad(lambda v: module.apply(v, x).sum())(variables)['params']
        in_block = steps[: number + 1].count('[') > steps[: number + 1].count(']')
        assert grads['kernel'].any() != in_block, steps[: number + 1]
    assert met
    assert Scope.get_variable is original
