"""A block covers one tree: an ``apply`` inside of another one sees what it is given.

By hand: the variables of the model are stopped where they are stored, and the model
runs without blocks. What it has read is stopped already, what it has computed is no
variable of it, and what it differentiates is as without a block.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest
from flax.core.scope import Scope

from flax_sg import errors, filters
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.described.modules import Do

X = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)
PLAIN = fnn.Dense(2, parent=None)


class Model(fnn.Module):
    """A layer of its own, before a layer that is called in some way."""

    way: str
    inside: Any = None  # A block that it opens around the call.
    given: Any = None  # A module in a field.

    @fnn.compact
    def __call__(self, x):
        x = jnp.tanh(fnn.Dense(2, name='own')(x))
        dense = fnn.Dense(2, name='dense')
        dense(x)
        if self.inside is None:
            return WAYS[self.way](self, dense, x)
        with self.inside(unused='ignore'):  # Some ways read nothing there.
            return WAYS[self.way](self, dense, x)


def weights(x: Any) -> Any:
    """Weights that are computed from an input: a hypernetwork, a mixer."""
    return {'params': {'kernel': jnp.tanh(x.T @ x), 'bias': jnp.mean(x, 0)}}


def applied(module: Any, variables: Any, x: Any) -> Any:
    return module.apply(variables, x)


def adapted(variables: Any, x: Any) -> Any:
    """Fast weights: one step of an inner loss."""
    grads = jax.grad(lambda v: jnp.mean(PLAIN.apply(v, x) ** 2))(variables)
    return PLAIN.apply(jax.tree.map(lambda w, g: w - 0.1 * g, variables, grads), x)


def merged(model: Any, dense: Any, x: Any) -> Any:
    """An adapter that is merged into the weights before they are applied."""
    down = model.param('down', fnn.initializers.ones, (2, 1))
    kernel = dense.variables['params']['kernel'] + down @ down.T
    return PLAIN.apply({'params': {'kernel': kernel, 'bias': x[0]}}, x)


@jax.jit
def jitted(variables: Any, x: Any) -> Any:
    return PLAIN.apply(variables, x)


@jax.jit
def jitted_on_scope(variables: Any, x: Any) -> Any:
    return on_scope(Scope(variables), x)


@jax.custom_vjp
def with_rule(variables, x):
    return PLAIN.apply(variables, x)


with_rule.defvjp(
    lambda variables, x: (PLAIN.apply(variables, x), (variables, x)),
    lambda kept, ct: jax.vjp(PLAIN.apply, *kept)[1](ct),
)


def on_scope(scope: Any, x: Any) -> Any:
    return PLAIN.clone(parent=scope)(x)


def on_temporary_scope(variables: Any, x: Any) -> Any:
    with Scope(variables).temporary() as scope:
        return on_scope(scope, x)


def below(variables: Any, x: Any) -> Any:
    """A scope under one that nobody has read from."""
    return on_scope(Scope({'params': {'layer': variables['params']}}).push('layer'), x)


class OnScope(fnn.Module):
    """Hands the weights that it is given to a layer."""

    def __call__(self, variables, x):
        return on_scope(Scope(variables), x)


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    'read': lambda m, d, x: applied(PLAIN, d.variables, x),
    'unbound': lambda m, d, x: applied(*d.unbind(), x),
    'computed from the input': lambda m, d, x: applied(PLAIN, weights(x), x),
    'a field': lambda m, d, x: applied(m.given, weights(x), x),
    'bound inside': lambda m, d, x: PLAIN.bind(weights(x))(x),
    'a scope': lambda m, d, x: on_scope(Scope(weights(x)), x),
    'a scope with the flags of the model': lambda m, d, x: on_scope(
        Scope(weights(x), flags=m.scope.flags), x
    ),
    'a scope of what was read': lambda m, d, x: on_scope(Scope({**d.variables}), x),
    'a scope for a while': lambda m, d, x: on_temporary_scope(weights(x), x),
    'a scope below another': lambda m, d, x: below(weights(x), x),
    'a scope in an apply': lambda m, d, x: OnScope(parent=None).apply(
        {}, weights(x), x
    ),
    'a scope under jit': lambda m, d, x: jitted_on_scope(weights(x), x),
    'a scope in a lifted transform': lambda m, d, x: fnn.remat(fnn.Dense)(
        2, parent=Scope(weights(x))
    )(x),
    'transposed': lambda m, d, x: applied(
        PLAIN, jax.tree.map(jnp.transpose, d.variables), x
    ),
    'merged': merged,
    'fast weights': lambda m, d, x: adapted(d.variables, x),
    'fast weights of the input': lambda m, d, x: adapted(weights(x), x),
    'linearised': lambda m, d, x: jax.jvp(
        lambda v: PLAIN.apply(v, x), (d.variables,), (weights(x),)
    )[1],
    'gradient features': lambda m, d, x: jax.grad(
        lambda x: jnp.sum(jnp.tanh(PLAIN.apply(d.variables, x)))
    )(x),
    'jitted': lambda m, d, x: jitted(d.variables, x) + jitted(weights(x), x),
    'checkpoint': lambda m, d, x: jax.checkpoint(PLAIN.apply)(weights(x), x),
    'vmap': lambda m, d, x: jax.vmap(PLAIN.apply, (None, 0))(weights(x), x),
    'a rule of its own': lambda m, d, x: with_rule(weights(x), x),
    'initialized': lambda m, d, x: applied(
        PLAIN, fnn.Dense(2, parent=None).init(jax.random.key(0), x), x
    ),
    'twice': lambda m, d, x: applied(
        fnn.Sequential([PLAIN.clone()], parent=None),
        {'params': {'layers_0': weights(x)['params']}},
        x,
    ),
}


def named(path: Any) -> bool:
    return path.name in ('kernel', 'down')


# How a filter is written, and which variables of the model it stops.
stop, not_bias = nn.stop_gradient, ~filters.as_filter('**/bias')
BLOCKS: dict[str, tuple[Callable[..., Any], Callable[[str], bool]]] = {
    'glob': (functools.partial(stop, '**/kernel'), lambda p: p.endswith('kernel')),
    'True': (functools.partial(stop, True), lambda p: True),
    'train_only': (
        functools.partial(nn.train_only, 'own/**'),
        lambda p: not p.startswith('own'),
    ),
    'function': (
        functools.partial(stop, named),
        lambda p: p.endswith(('kernel', 'down')),
    ),
    'not': (functools.partial(stop, not_bias), lambda p: 'bias' not in p),
}


RUNS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    'eager': lambda f: jax.grad(f, (0, 1)),
    'jit': lambda f: jax.jit(jax.grad(f, (0, 1))),
    'checkpoint': lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    'vmap': lambda f: jax.grad(
        lambda v, x: jnp.sum(jax.vmap(f, (None, 0))(v, jnp.stack([x, x * 2]))), (0, 1)
    ),
    'scan': lambda f: jax.grad(
        lambda v, x: jax.lax.scan(lambda c, y: (c + f(v, y), None), 0.0, x[None])[0],
        (0, 1),
    ),
    'grad of grad': lambda f: jax.grad(
        lambda v, x: jnp.sum(jax.grad(f, 1)(v, x) ** 2), (0, 1)
    ),
}


def loss_of(model: Any) -> Callable[[Any, Any], Any]:
    return lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)


def in_block(fn: Callable[..., Any], make: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with make():
            return fn(*args)

    return run


FORMS: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
    'block': lambda model, make: in_block(loss_of(model), make),
    'wrapper': lambda model, make: loss_of(nn.Frozen(model, make().where)),
    'own block': lambda model, make: loss_of(model.clone(inside=make)),
}
MADE = fnn.Dense(2, parent=None)
VARIABLES = {way: Model(way, given=MADE).init(jax.random.key(0), X) for way in WAYS}


@functools.cache
def value(way: str) -> Any:
    return loss_of(Model(way, given=MADE))(VARIABLES[way], X)


@functools.cache
def by_hand(way: str, block: str, run: str, is_own: bool) -> Any:
    _, stops = BLOCKS[block]

    def selects(path: str) -> bool:
        path = path.removeprefix('params/')
        # What the module reads before it opens its own block is not in the block.
        return stops(path) and not (is_own and path.startswith('own'))

    def loss(variables: Any, x: Any) -> Any:
        stopped = oracle.stopped(variables, selects)
        return loss_of(Model(way, given=MADE))(stopped, x)

    return RUNS[run](loss)(VARIABLES[way], X)


@pytest.mark.parametrize('way', WAYS)
def test_an_apply_inside_sees_what_it_is_given(way):
    """In a block; each second way in another form, too. Filters and runs take turns."""
    variables, row = VARIABLES[way], [*WAYS].index(way)
    others = [] if row % 2 else [('wrapper', 'own block')[row // 2 % 2]]
    for turn, form in enumerate(['block', *others]):
        name = [*BLOCKS][(row + turn) % len(BLOCKS)]
        run = [*RUNS][(row + turn + row // len(RUNS)) % len(RUNS)]
        fn = FORMS[form](Model(way, given=MADE), BLOCKS[name][0])
        assert fn(variables, X) == value(way), form
        expected = by_hand(way, name, run, form == 'own block')
        oracle.assert_same(RUNS[run](fn)(variables, X), expected)


@pytest.mark.parametrize('order', [(True, False), (False, True)])
def test_one_jitted_function_at_block_level_and_in_a_module(order):
    """Covered where it begins in the block, and not inside of a running module."""

    def outer(self, variables, x):
        return jitted(variables, fnn.Dense(2, name='own')(x))

    own = oracle.init(Do(outer), jax.random.key(0), VARIABLES_OF_PLAIN, X)
    jitted.clear_cache()

    def loss(variables: Any, inside: bool) -> Any:
        with nn.stop_gradient('kernel' if not inside else 'own/kernel'):
            call = Do(outer).apply if inside else lambda _, *args: jitted(*args)
            return jnp.sum(call(own, variables, X))

    for _ in range(2):
        for inside in order:
            grads = jax.grad(loss)(VARIABLES_OF_PLAIN, inside)['params']
            assert oracle.is_zero(grads['kernel']) != inside
            assert not oracle.is_zero(grads['bias'])


def assert_stops_the_kernel(loss: Any) -> None:
    grads = jax.grad(loss)(VARIABLES_OF_PLAIN)['params']
    assert oracle.is_zero(grads['kernel'])
    assert not oracle.is_zero(grads['bias'])


def test_a_block_of_a_module_shares_no_program_with_one_at_top_level():
    jitted.clear_cache()

    def calls(self, variables, x):
        """In a block of its own, which covers nothing that is in it."""
        with nn.stop_gradient('kernel', unused='ignore'):
            return jitted(variables, x)

    def loss(variables):
        Do(calls).apply({}, variables, X)
        with nn.stop_gradient('kernel'):
            return jnp.sum(jitted(variables, X))

    assert_stops_the_kernel(loss)


def test_a_rule_that_runs_late_leaves_the_depth_as_it_was():
    """JAX's keys depend on it: a function would find the program of the module."""
    jitted.clear_cache()

    def outer(self, *args):
        return jax.jit(with_rule)(*args) + jitted(*args)

    with nn.stop_gradient('kernel', unused='ignore'):
        jax.grad(lambda v: jnp.sum(Do(outer).apply({}, v, X)))(VARIABLES_OF_PLAIN)
        assert_stops_the_kernel(lambda v: jnp.sum(jitted(v, X)))


def test_an_apply_that_changes_nothing_else_changes_the_key():
    """Most reads set it again; this one does not."""

    class Reads(fnn.Module):
        def __call__(self):
            return self.get_variable('params', 'kernel')

    def outer(self, variables):
        return reads(variables)

    model = Reads(parent=None)
    reads = jax.jit(lambda variables: jnp.sum(model.apply(variables)))
    with nn.stop_gradient('kernel'):
        Do(outer).apply({}, VARIABLES_OF_PLAIN)
        found = jax.grad(reads)(VARIABLES_OF_PLAIN)
    assert oracle.is_zero(found)


class Target(fnn.Module):
    """A random network that ``setup`` makes, and a network as one parameter."""

    def setup(self):
        self.fixed = oracle.init(fnn.Dense(2, parent=None), jax.random.key(1), X)
        self.network = self.param('network', fnn.Dense(2, parent=None).init, X)
        self.made = PLAIN.apply(self.network, X)
        self.head = fnn.Dense(2)

    def __call__(self, x):
        given = PLAIN.apply(self.fixed, x) + PLAIN.apply(self.network, x)
        return self.head(x) + given + self.made


@pytest.mark.parametrize('where', [True, 'head/**', lambda path: path.name == 'kernel'])
@pytest.mark.parametrize('form', ['block', 'wrapper'])
def test_setup_that_initializes_and_applies_other_modules(form, where):
    variables = Target().init(jax.random.key(0), X)
    fn = FORMS[form](Target(), lambda: nn.stop_gradient(where))
    grads = jax.grad(fn)(variables, X)['params']
    plain = jax.grad(loss_of(Target()))(variables, X)['params']
    assert fn(variables, X) == loss_of(Target())(variables, X)
    assert oracle.is_zero(grads['head']['kernel'])
    is_stopped = oracle.is_zero(grads['network'])
    assert is_stopped if where is True else not is_stopped
    if where == 'head/**':
        oracle.assert_same(grads['network'], plain['network'])


VARIABLES_OF_PLAIN = oracle.init(PLAIN, jax.random.key(3), X)


def test_a_block_of_everything_around_an_inner_tree_alone_warns():
    def outer(self, variables, x):
        with nn.stop_gradient(True):
            return PLAIN.apply(variables, x)

    with pytest.warns(errors.NothingStoppedWarning, match=r'sg\.stop_gradient\(tree'):
        Do(outer).apply({}, VARIABLES_OF_PLAIN, X)


def test_what_was_bound_before_or_outside_is_covered_inside_of_an_apply():
    def outer(self, bound, x):
        return bound(fnn.Dense(2, name='own')(x))

    own = oracle.init(Do(outer), jax.random.key(0), PLAIN.bind(VARIABLES_OF_PLAIN), X)
    for before in (True, False):

        def loss(variables: Any, before: bool = before) -> Any:
            bound = PLAIN.bind(variables) if before else None
            with nn.stop_gradient('kernel'):
                bound = bound or PLAIN.bind(variables)
                with nn.stop_gradient('own/**'):
                    return jnp.sum(Do(outer).apply(own, bound, X))

        grads = jax.grad(loss)(VARIABLES_OF_PLAIN)['params']
        assert oracle.is_zero(grads['kernel'])
        assert not oracle.is_zero(grads['bias'])


@pytest.mark.parametrize('way', ['a scope', 'for a while', 'in the block', 'jit'])
def test_a_scope_that_was_made_at_top_level_is_covered(way):
    """In an apply of others, too: what is at top level there is no part of it."""

    def outer(self, call, x):
        return call(x)

    def loss(variables: Any) -> Any:
        before = Scope(variables)
        with nn.stop_gradient('kernel'):
            if way == 'for a while':
                return jnp.sum(on_temporary_scope(variables, X))
            if way == 'jit':
                return jnp.sum(jitted_on_scope(variables, X))
            scope = before if way == 'a scope' else Scope(variables)
            return jnp.sum(Do(outer).apply({}, lambda x: on_scope(scope, x), X))

    assert_stops_the_kernel(loss)
    if way != 'a scope':  # Flax refuses a scope in the trace of others.
        assert_stops_the_kernel(jax.jit(loss))


def test_a_read_of_another_tree_traces_no_helper_again():
    """It is no part of a program that JAX keeps, so helpers share their traces."""
    traces: list[int] = []

    @jax.jit
    def helper(x: Any) -> Any:
        traces.append(1)
        return jnp.sin(x)

    def applies(self, x):
        dense = fnn.Dense(2, name='dense')
        with nn.stop_gradient('dense/kernel'):
            return helper(dense(x) + PLAIN.apply(weights(x), x))

    model = Do(applies)
    variables = oracle.init(model, jax.random.key(0), X)
    counts = []
    for _ in range(3):
        model.apply(variables, X)
        counts.append(len(traces))
    assert counts[1:] == counts[:1] * 2


class Calls(fnn.Module):
    """Calls a function of other variables, beside a parameter of its own."""

    fun: Any
    own: str = 'kernel'

    @fnn.compact
    def __call__(self, x):
        own = self.param(self.own, fnn.initializers.ones, (2,))
        return jnp.sum(own * x[0]) + self.fun(VARIABLES_OF_PLAIN, x)


class Holds(fnn.Module):
    model: Any

    def __call__(self, x):
        return self.model(x)


def applied_in_block(where: Any, variables: Any, x: Any) -> Any:
    with nn.stop_gradient(where):
        return jnp.sum(PLAIN.apply(variables, x))


def bound_before_block(where: Any, variables: Any, x: Any) -> Any:
    bound = PLAIN.bind(variables)
    with nn.stop_gradient(where):
        return jnp.sum(bound(x))


@pytest.mark.parametrize('where', ['kernel', True, lambda path: path == 'kernel'])
@pytest.mark.parametrize(
    ('fun', 'model', 'begin'),
    [
        (applied_in_block, Calls, 'init'),
        (applied_in_block, Calls, 'apply'),
        (bound_before_block, Calls, 'apply'),
        # In a module below, and with no name that the pattern fits.
        (applied_in_block, lambda fun: Holds(Calls(fun)), 'init'),
        (bound_before_block, lambda fun: Holds(Calls(fun)), 'init'),
        (applied_in_block, lambda fun: Holds(Calls(fun, 'scale')), 'init'),
    ],
)
def test_a_jitted_block_for_an_inner_apply_raises_in_a_module(fun, model, begin, where):
    """JAX would keep the program, and a call at top level get it without the stop."""
    helper = jax.jit(functools.partial(fun, where))
    calls, own = model(helper), {'params': {'kernel': jnp.ones(2)}}
    with pytest.raises(errors.UnusedFilterError, match='inside of another'):
        if begin == 'init':
            calls.init(jax.random.key(0), X)
        else:
            calls.apply(own, X)
    grads = jax.grad(helper)(VARIABLES_OF_PLAIN, X)['params']
    assert oracle.is_zero(grads['kernel'])
    assert oracle.is_zero(grads['bias']) == (where is True)
    Calls(helper).apply(own, X)  # It gets the program of the call at top level.


@pytest.mark.parametrize('known', ['kernel', 'bias'])
def test_a_filter_that_raises_for_another_inner_variable_is_asked_on(known):
    helper = jax.jit(functools.partial(applied_in_block, lambda p: {known: True}[p]))
    with pytest.raises(errors.UnusedFilterError, match='inside of another'):
        Calls(helper).init(jax.random.key(0), X)
