"""Where a rule maps cotangents: which are added up before the rule.

Each program is compared, to the last bit, with plain Flax on parameters that went
through an identity by hand. The rules are not linear, so that a cotangent that is
mapped twice, or before it is complete, is another one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import backward, oracle, stepwise
from tests.helpers.described.modules import Cell, Do
from tests.helpers.turns import in_turn

X = jnp.array([[1.0, -2.0, 0.5], [-1.0, 0.75, 2.0]])
Extent = Callable[[], contextlib.AbstractContextManager[Any]]
none: Extent = contextlib.nullcontext


def square(path: str, ct: jax.Array) -> jax.Array:
    del path
    return ct * ct


# What a rule is by hand, for all parameters that are selected.
RULES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    'each': (lambda where: nn.map_cotangent(where, square), backward.squared),
    'together': (
        lambda where: nn.clip_gradient(where, global_norm=0.5),
        functools.partial(backward.clipped_together, 0.5),
    ),
}
every_rule = pytest.mark.parametrize(('rule', 'hand'), RULES.values(), ids=list(RULES))
ROW = {'w': jnp.array([[0.5, -1.5, 2.0]])}


class Loops(fnn.Module):
    """A cell in transforms, in a block around them."""

    around: Extent = none

    @fnn.compact
    def __call__(self, x):
        cell = Cell(name='cell')

        def step(cell, x):
            return cell(x)

        with self.around():
            if self.is_initializing():
                return cell(x)
            scan = fnn.scan(
                lambda cell, x, _: (cell(x), None), length=3, **oracle.SHARED
            )
            y = scan(cell, x, None)[0]
            y = y + fnn.remat(step)(cell, x)
            y = y + fnn.jit(step)(cell, x)
            y = y + fnn.cond(jnp.sum(x) > 0, step, lambda _, x: x, cell, x)
            return y + fnn.vmap(step, **oracle.MAPPED)(cell, x)


def variables(model: fnn.Module) -> Any:
    return model.init(jax.random.key(0), X)['params']


def both(fn: Any, *args: Any) -> Any:
    """The value of a function, and its gradient."""

    def run(*args: Any) -> Any:
        y, pull_back = jax.vjp(fn, *args)
        return y, pull_back(jnp.arange(1.0, 1.0 + y.size).reshape(y.shape))

    return stepwise.evaluate(run, *args)


def assert_same_both(actual: Any, expected: Any, *args: Any) -> None:
    oracle.assert_same(both(actual, *args), both(expected, *args))


def applied(
    model: fnn.Module, hand: Callable[[Any], Any] = lambda params: params
) -> Callable[..., Any]:
    """``apply``, of parameters that went through an identity by hand."""
    return lambda params, x: model.apply({'params': hand(params)}, x)


@every_rule
def test_transforms_in_a_block_add_up_before_the_rule(rule, hand):
    model = Loops(around=lambda: rule(True))
    assert_same_both(applied(model), applied(Loops(), hand), variables(Loops()), X)


@every_rule
def test_an_apply_in_the_body_of_a_scan_maps_each_step(rule, hand):
    def scanned(apply, around):
        def fn(p, x):
            with around:
                return jax.lax.scan(lambda x, _: (apply(p, x), None), x, length=3)[0]

        return fn

    cell = Cell()
    assert_same_both(
        scanned(applied(cell), rule(True)),
        scanned(applied(cell, hand), none()),
        variables(cell),
        X,
    )


@every_rule
def test_two_blocks_in_one_apply_are_mapped_each_alone(rule, hand):
    def two(self, x):
        cell = Cell(name='cell')
        with rule('cell/**'):
            x = cell(x)
        with rule('cell/**'):
            return cell(x)

    def by_hand(p, x):
        cell = applied(Cell(), hand)
        return cell(p['cell'], cell(p['cell'], x))

    assert_same_both(applied(Do(two)), by_hand, {'cell': variables(Cell())}, X)


@every_rule
def test_values_read_in_a_block_and_applied_there_are_mapped_once(rule, hand):
    def use(cell, x):
        return Cell(parent=None).apply(cell.variables, x)

    def unbound(cell, x):
        module, variables = cell.unbind()
        return jax.jit(module.apply)(variables, x)

    def outer(use):
        def call(self, x):
            with rule(True):  # for both applies
                return use(Cell(name='cell'), x)

        return applied(Do(call))

    def by_hand(p, x):
        return applied(Cell(), hand)(p['cell'], x)

    params = {'cell': variables(Cell())}
    for way in use, unbound, fnn.remat(use):
        assert_same_both(outer(way), by_hand, params, X)


@every_rule
def test_reads_in_raw_transforms_share_it(rule, hand):
    def raw(self, x):
        self.param('w', fnn.initializers.normal(), (1, 3))
        with rule(True):

            def step(x, _):
                return x * self.get_variable('params', 'w'), None

            y = jax.lax.scan(step, x, None, length=2)[0]
            z = jax.jit(lambda x: x * self.variables['params']['w'])(x)
            return y + z + x * self.get_variable('params', 'w')

    def by_hand(p, x):
        w = hand(p)['w']
        y = jax.lax.scan(lambda x, _: (x * w, None), x, None, length=2)[0]
        return y + jax.jit(lambda x: x * w)(x) + x * w

    assert_same_both(applied(Do(raw)), by_hand, ROW, X)


@every_rule
def test_a_jitted_closure_in_two_blocks_is_mapped_in_each_alone(rule, hand):
    def holds(self):
        return self.get_variable('params', 'w')

    def ruled(p, x):
        bound = Do(holds).bind({'params': p})
        fn = jax.jit(lambda x: x * bound())
        with rule(True):
            y = fn(x)
        with rule(True):
            return y + jnp.sin(fn(x))

    def by_hand(p, x):
        one, two = (hand(p)['w'] for _ in range(2))
        return jax.jit(lambda x: x * one)(x) + jnp.sin(jax.jit(lambda x: x * two)(x))

    assert_same_both(ruled, by_hand, ROW, X)


@every_rule
def test_values_kept_by_setup_share_the_identity(rule, hand):
    class Kept(fnn.Module):
        def setup(self):
            self.w = self.param('w', fnn.initializers.normal(), (1, 3))
            self.w2 = 2.0 * self.w

        def __call__(self, x):
            y = x * self.w2
            with rule(True):
                return y + x * self.w2 + self.w + self.get_variable('params', 'w')

    def by_hand(p, x):
        w = hand(p)['w']
        return x * (2.0 * p['w']) + x * (2.0 * w) + w + w

    assert_same_both(applied(Kept()), by_hand, ROW, X)


def test_what_is_created_or_written_in_the_extent_is_left_alone_by_joint_rules():
    def writes(self, x):
        w = self.param('w', fnn.initializers.normal(), (1, 3))
        if self.is_mutable_collection('params'):
            self.put_variable('params', 'w', 2.0 * w)
        return x * self.get_variable('params', 'w')

    def loss(p, x):
        with nn.clip_gradient(True, global_norm=0.5):
            return Do(writes).apply({'params': p}, x, mutable=['params'])[0]

    def by_hand(p, x):
        return x * (2.0 * backward.clipped_together(0.5, p)['w'])

    assert_same_both(loss, by_hand, ROW, X)
    fresh = Do(writes).init(jax.random.key(0), X)
    with nn.clip_gradient(True, global_norm=0.5):
        oracle.assert_same(Do(writes).init(jax.random.key(0), X), fresh)
        jax.eval_shape(Do(writes).init, jax.random.key(0), X)


def test_leaves_that_are_not_differentiated_do_not_count():
    rule, hand = RULES['together']
    params = variables(Cell())

    def run(around, hand):
        def loss(a, p):
            with around:
                return jnp.sum(applied(Cell())({**p, 'a': hand(a)}, X))

        return stepwise.evaluate(jax.grad(loss), params['a'], params)

    oracle.assert_same(run(rule(True), lambda a: a), run(none(), hand))


def test_examples_under_vmap_are_mapped_each_alone_where_weights_are_mapped_over():
    weights = {'w': jnp.array([[[0.5, -1.5, 2.0]], [[1.0, 2.0, 3.0]]])}

    def scale(self, x):
        return x * self.param('w', fnn.initializers.normal(), (1, 3))

    for name, (rule, hand) in RULES.items():

        def ruled(p, x, rule=rule):
            with rule(True):
                return Do(scale).apply({'params': p}, x)

        for p, axes in (weights, (0, 0)), ({'w': weights['w'][0]}, (None, 0)):
            actual, expected = (
                both(jax.vmap(fn, axes), p, X[:, None])
                for fn in (ruled, applied(Do(scale), hand))
            )
            oracle.assert_same(actual, expected)
            assert np.all(np.isfinite(actual[0])), name


Bounded = Callable[[Any, Any], Any]


def clipped(grads: Any, bound: Any) -> Any:
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, bound / norm), grads)


def each(fn: Bounded) -> Bounded:
    return lambda grads, s: jax.tree.map(lambda g: fn(g, s), grads)


# Rules with a number of the example, and what they make of the example's gradient.
OF_EXAMPLES: dict[str, tuple[Callable[[Any], Any], Bounded]] = {
    'map': (
        lambda s: nn.map_cotangent(True, lambda _, ct, s: s * ct**2, s),
        each(lambda g, s: s * g**2),
    ),
    'scale': (lambda s: nn.scale_gradient(True, s), each(lambda g, s: s * g)),
    'replace': (
        lambda s: nn.replace_cotangent(True, s),
        each(lambda g, s: jnp.full_like(g, s)),
    ),
    'value': (
        lambda s: nn.clip_gradient(True, value=s),
        each(lambda g, s: jnp.clip(g, -s, s)),
    ),
    'norm': (lambda s: nn.clip_gradient(True, norm=s), each(clipped)),
    'global_norm': (lambda s: nn.clip_gradient(True, global_norm=s), clipped),
}


DENSE = fnn.Dense(5)


def squares(params: Any, x: Any) -> Any:
    return jnp.sum(DENSE.apply({'params': params}, x) ** 2)


def of_each_example(hand: Bounded, params: Any, xs: Any) -> Any:
    """The sum of the examples' gradients, each of which went through a rule."""
    alone = [hand(jax.grad(squares)(params, x), jnp.sum(x**2)) for x in xs]
    return jax.tree.map(lambda *g: sum(g), *alone)


BODIES = {
    'remat': fnn.remat,
    'jit': fnn.jit,
    'vmap': lambda cls: fnn.vmap(cls, **oracle.MAPPED),
    'scan': lambda cls: fnn.scan(cls, length=2, **oracle.SHARED),
}


@pytest.mark.parametrize('name', BODIES)
def test_rules_together_in_a_body_raise_and_around_it_are_those_by_hand(name):
    nothing: Any = lambda where: contextlib.nullcontext()  # noqa: E731

    def model(rule: Any = nothing, around: Any = nothing) -> Any:
        def body(self, x, *_):
            with rule('Dense_0/**'):
                return jnp.tanh(fnn.Dense(3)(x)), None

        def call(self, x):
            with around('body/**'):
                return BODIES[name](Do)(body, name='body')(x, None)[0]

        return Do(call)

    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    if name == 'scan':
        x = x[0]
    params = oracle.init(model(), jax.random.key(0), x)['params']
    clip = lambda where: nn.clip_gradient(where, global_norm=0.1)  # noqa: E731
    for rule in (clip, lambda _: nn.copy_cotangent({'Dense_0/bias': 'Dense_0/bias'})):
        with pytest.raises(errors.BlockError, match='in the body of a transform'):
            jax.grad(lambda p: jnp.sum(applied(model(rule))(p, x)))(params)  # noqa: B023
    hand = functools.partial(backward.clipped_together, 0.1)
    ours = model(around=clip)
    assert_same_both(applied(ours), applied(model(), hand), params, x)


def test_what_is_written_in_the_body_of_a_scan_is_mapped_in_each_step():
    def writes(factor):
        def call(self, x, c):
            def step(module, x, _):
                module.put_variable('cache', 'c', c if factor is None else factor * c)
                return x * module.get_variable('cache', 'c'), None

            scan = fnn.scan(step, variable_axes={'cache': 0}, length=3)
            with nn.map_cotangent('c', square, collections='cache'):
                return scan(self, x, None)[0]

        return lambda x, c: Do(call).apply({}, x, c, mutable=['cache'])[0]

    def by_hand(x, c):
        def step(x, _):
            return x * backward.squared({'c': c})['c'], None

        return jax.lax.scan(step, x, None, length=3)[0]

    for factor in None, 1.0:
        assert_same_both(writes(factor), by_hand, X, ROW['w'])


def of_module(lift: Any) -> Any:
    """JAX traces the identity once for a body, and batches its rule later."""

    def loss(rule: Any, params: Any, xs: Any) -> Any:
        def example(self, x):
            with rule(jnp.sum(x**2)):
                return fnn.Dense(5)(x)

        def batch(self, xs):
            return fnn.vmap(Do, **oracle.MAPPED)(example, name='example')(xs)

        params = {'example': {'Dense_0': params}}
        return jnp.sum(lift(Do)(batch).apply({'params': params}, xs) ** 2)

    return loss


def batches(rule: Any, params: Any, xs: Any) -> Any:
    """In a block around each example of each batch."""

    def ruled(x: Any) -> Any:
        with rule(jnp.sum(x**2)):
            return squares(params, x)

    one = jax.vmap(jax.vmap(ruled))
    return jnp.sum(jax.checkpoint(one)(xs.reshape(2, 4, 2, 3)))


LIFTS = {'none': lambda cls: cls, 'remat': fnn.remat, 'jit': fnn.jit}
LOSSES = {name: of_module(lift) for name, lift in LIFTS.items()}
EXAMPLES = in_turn([name for name in OF_EXAMPLES if name != 'global_norm'], LOSSES)


@pytest.mark.parametrize(
    ('name', 'loss'), [*EXAMPLES, *((name, 'batches') for name in OF_EXAMPLES)]
)
def test_a_rule_with_a_number_of_each_example(name, loss):
    rule, hand = OF_EXAMPLES[name]
    xs = jnp.linspace(-0.5, 1.0, 48).reshape(8, 2, 3)
    params = oracle.init(DENSE, jax.random.key(0), xs)['params']
    loss = {**LOSSES, 'batches': batches}[loss]
    found = jax.grad(functools.partial(loss, rule))(params, xs)
    expected = of_each_example(hand, params, xs)
    rtol = 1e-5 if loss is batches else 1e-6
    chex.assert_trees_all_close(found, expected, rtol=rtol)


@pytest.mark.parametrize('around', [lambda fn: fn, jax.checkpoint, jax.jit])
def test_a_norm_of_weights_of_which_some_belong_to_an_example(around):
    def example(self, x):
        w = self.param('w', fnn.initializers.ones, (3,))
        own = self.variable('own', 'w', jnp.ones, (3,))
        return jnp.sum(x * w * own.value)

    @around
    def batch(variables: Any) -> Any:
        def one(own: Any, x: Any) -> Any:
            with nn.clip_gradient(True, global_norm=0.5, collections=True):
                return Do(example).apply({**variables, 'own': own}, x)

        return jnp.sum(jax.vmap(one)(variables['own'], xs))

    xs = jnp.linspace(0.5, 1.0, 12).reshape(4, 3)
    variables = {'params': {'w': jnp.ones(3)}, 'own': {'w': jnp.ones((4, 3))}}
    found = jax.grad(batch)(variables)
    alone = [clipped([x, x], 0.5)[0] for x in xs]
    chex.assert_trees_all_close(found['params']['w'], sum(alone))
    chex.assert_trees_all_close(found['own']['w'], jnp.stack(alone))
