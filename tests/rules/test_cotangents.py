"""Every rule for cotangents at every extent, against identities written by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from flax_sg.forms import blocks
from tests.helpers import backward, extents, oracle, stepwise
from tests.helpers.described.modules import Cell, Do

X = jnp.array([[1.0, -2.0, 0.5], [-1.0, 0.75, 2.0]])
RAMP = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


PARAMS = oracle.init(Cell(), jax.random.key(0), X)['params']


def per_leaf(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tree: backward.each(lambda _, ct: fn(ct), tree)


def handed_on(tree: Any, add: bool) -> Any:
    def fn(cts: Any) -> Any:
        a, b = cts['a'], cts['b']
        own = {name: ct if add else jnp.zeros_like(ct) for name, ct in a.items()}
        return {'a': {**a, 'bias': b['bias'] + own['bias']}, 'b': b}

    return backward.identity(fn, tree)


def weighted(path: str, ct: jax.Array, weight: jax.Array) -> jax.Array:
    # Paths are relative to the extent.
    return ct * ct * weight * (2.0 if path.endswith('a/bias') else 1.0)


def below(make: Any, *args: Any, **options: Any) -> Callable[[str], Any]:
    """The rule of what is below a path."""
    return lambda at: make(f'{at}**', *args, **options)


def of_biases(add: bool) -> Callable[[str], Any]:
    return lambda at: nn.copy_cotangent({f'{at}a/bias': f'{at}b/bias'}, add=add)


def ramp_of_biases(path: str, ct: jax.Array) -> jax.Array:
    return jnp.array([1.0, 2, 3]) if 'bias' in path else ct


def clipped(bound: float) -> Callable[[Any], Any]:
    return functools.partial(backward.clipped_together, bound)


def scaled(factor: float) -> Callable[[Any], Any]:
    return functools.partial(backward.scaled, factor)


# Each rule: how it is written for what is below a path, and by hand.
Rule = tuple[Callable[[str], Any], Callable[[Any], Any]]
RULES: dict[str, Rule] = {
    'map_cotangent': (
        below(nn.map_cotangent, weighted, np.float32(0.5)),
        lambda tree: backward.each(lambda p, ct: weighted(p, ct, 0.5), tree),
    ),
    'scale_gradient': (below(nn.scale_gradient, 0.3), scaled(0.3)),
    'clip_gradient, global_norm': (
        below(nn.clip_gradient, global_norm=0.5),
        clipped(0.5),
    ),
    'copy_cotangent': (of_biases(False), lambda tree: handed_on(tree, add=False)),
    'reverse_gradient': (below(nn.reverse_gradient, np.float32(2.0)), scaled(-2.0)),
    'clip_gradient, value': (
        below(nn.clip_gradient, value=1.0),
        per_leaf(lambda ct: jnp.clip(ct, -1.0, 1.0)),
    ),
    'clip_gradient, norm': (
        below(nn.clip_gradient, norm=2.0),
        lambda tree: jax.tree.map(clipped(2.0), tree),
    ),
    'replace_cotangent, number': (
        below(nn.replace_cotangent, 7.0),
        per_leaf(lambda ct: jnp.full_like(ct, 7.0)),
    ),
    'replace_cotangent, array': (
        lambda at: nn.replace_cotangent(f'{at}*/bias', np.float32([1, 2, 3])),
        functools.partial(backward.each, ramp_of_biases),
    ),
    'copy_cotangent, add': (of_biases(True), lambda tree: handed_on(tree, add=True)),
    'print_cotangent': (lambda at: nn.print_cotangent(at + 'a/bias'), lambda t: t),
}


def in_a_parent(rule: Any, params: Any, x: Any) -> Any:
    def model(self, x):
        cell = Cell(name='cell')
        with rule('cell/'):
            return cell(x)

    return Do(model).apply({'params': {'cell': params}}, x)


def on_a_tree(rule: Any, params: Any, x: Any) -> Any:
    variables = sg.rewrite({'params': {'cell': params}}, rule('cell/'))
    return Cell().apply({'params': variables['params']['cell']}, x)


def of_cell(extent: Any) -> Callable[..., Any]:
    return lambda rule, params, x: extent(rule(''), Cell(), {'params': params}, x)


around_apply = of_cell(extents.block)
EXTENTS = {
    **{name: of_cell(extent) for name, extent in extents.EXTENTS.items()},
    'in a parent': in_a_parent,
    'a tree': on_a_tree,
}


def gradients(fn: Any, *args: Any) -> Any:
    def run(*args: Any) -> Any:
        y, pull_back = jax.vjp(fn, *args)
        return y, pull_back(RAMP)

    return stepwise.evaluate(run, *args)


def test_every_rule_for_gradients_has_a_row():
    made = {name for name in vars(blocks) if name.endswith(('_gradient', '_cotangent'))}
    ours = made - {'stop_gradient'}
    assert ours - {name.partition(',')[0] for name in RULES} == set()


@pytest.mark.parametrize('extent', EXTENTS)
def test_every_extent(extent, capfd):
    # In a block all of them; elsewhere they take turns.
    rows, first = [*RULES.values()], [*EXTENTS].index(extent)
    for rule, hand in rows if extent == 'block' else rows[first % 3 :: 3]:
        oracle.assert_same(
            gradients(functools.partial(EXTENTS[extent], rule), PARAMS, X),
            gradients(lambda p, x: Cell().apply({'params': hand(p)}, x), PARAMS, X),  # noqa: B023
        )
    capfd.readouterr()


# What a class or a module in front of the arguments is the same as.
TARGET_FIRST = [
    lambda *m: nn.scale_gradient(*m, '*/bias', 0.3),
    lambda *m: nn.reverse_gradient(*m, '*/bias'),
    lambda *m: nn.map_cotangent(*m, True, weighted, jnp.array(0.5)),
    lambda *m: nn.clip_gradient(*m, True, global_norm=0.5),
    lambda *m: nn.replace_cotangent(*m, '*/bias', 7.0),
    lambda *m: nn.copy_cotangent(*m, {'a/bias': 'b/bias'}),
    lambda *m: nn.print_cotangent(*m, 'a/bias'),
]


@pytest.mark.parametrize('make', TARGET_FIRST)
def test_a_class_or_a_module_may_come_first(make, capfd):
    def gradient(model: Any) -> Any:
        return gradients(lambda p, x: model.apply({'params': p}, x), PARAMS, X)

    expected = gradient(make()(Cell)())
    oracle.assert_same(gradient(make(Cell)()), expected)
    oracle.assert_same(gradient(make(Cell())), expected)
    capfd.readouterr()


def loss_of(fn: Any) -> Callable[[Any], jax.Array]:
    return lambda params: jnp.sum(fn(params, X) * RAMP)


@pytest.mark.parametrize('name', RULES)
def test_second_order_is_the_derivative_of_the_gradient(name):
    rule, hand = RULES[name]
    names = ('a', 'b')

    def by_hand(p, x):
        return Cell().apply({'params': hand(p)}, x)

    def hessians(fn: Any, *modes: Any) -> Any:
        def run(biases: Any) -> Any:
            def gradient(biases: Any) -> Any:
                params = {n: {**PARAMS[n], 'bias': biases[n]} for n in names}
                return jax.grad(loss_of(fn))(params)

            return [mode(gradient)(biases) for mode in modes]

        return stepwise.evaluate(run, {n: PARAMS[n]['bias'] + 0.1 for n in names})

    ours = functools.partial(around_apply, rule)
    [expected] = hessians(by_hand, jax.jacrev)
    backwards, forwards = hessians(ours, jax.jacrev, jax.jacfwd)
    oracle.assert_same(backwards, expected)
    chex.assert_trees_all_close(forwards, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', RULES)
def test_forward_mode_is_right_or_raises(name):
    rule, _ = RULES[name]
    ours = functools.partial(around_apply, rule)
    direction = jax.tree.map(jnp.ones_like, PARAMS)
    runs = [
        lambda: jax.jvp(lambda p: ours(p, X), (PARAMS,), (direction,)),
        lambda: jax.jvp(jax.jit(lambda p: ours(p, X)), (PARAMS,), (direction,)),
        lambda: jax.jacfwd(lambda p: ours(p, X))(PARAMS),
        lambda: jax.jit(jax.linearize(lambda p: ours(p, X), PARAMS)[1])(direction),
    ]
    factor = {'scale_gradient': 0.3, 'reverse_gradient': -2.0}.get(name)
    if factor is not None:
        scaled = jax.tree.map(lambda t: t * jnp.float32(factor), direction)
        plain = lambda p: Cell().apply({'params': p}, X)  # noqa: E731
        expected = jax.jvp(plain, (PARAMS,), (scaled,))
        oracle.assert_same(runs[0](), expected)
        return
    for run in runs:
        with pytest.raises(TypeError, match='forward-mode'):
            run()
    # The input is no parameter.
    jax.jvp(lambda x: ours(PARAMS, x), (X,), (X,))
    jax.jvp(functools.partial(jax.jit(ours), PARAMS), (X,), (X,))


class Scanned(fnn.Module):
    rule: Any = None

    @fnn.compact
    def __call__(self, x):
        step = fnn.remat(lambda cell, x, _: (cell(x), None), prevent_cse=False)
        scan = fnn.scan(step, length=4, **oracle.SHARED)
        cell = Cell(name='cell')
        if self.rule is None or self.is_initializing():
            return scan(cell, x, None)[0]
        with self.rule('cell/'):
            return scan(cell, x, None)[0]


@pytest.mark.parametrize('name', ['map_cotangent', 'scale_gradient'])
def test_the_program_is_the_one_written_by_hand(name):
    rule, hand = RULES[name]

    def ours(p):
        return loss_of(lambda p, x: Scanned(rule).apply({'params': p}, x))(p)

    def by_hand(p):
        p = {'cell': hand(p['cell'])}
        return loss_of(lambda p, x: Scanned().apply({'params': p}, x))(p)

    params = {'cell': PARAMS}
    assert testing.optimized_hlo(jax.grad(ours), params) == testing.optimized_hlo(
        jax.grad(by_hand), params
    )
    # Forwards nothing is left of it.
    assert testing.optimized_hlo(ours, params) == testing.optimized_hlo(
        lambda p: loss_of(lambda p, x: Scanned().apply({'params': p}, x))(p), params
    )


def test_values_pass_a_number_of_each_example_bit_by_bit():
    odd = jnp.array([jnp.nan, -0.0, jnp.inf, -jnp.inf])

    @jax.jit
    def read(w, number):
        return sg.rewrite({'w': w}, nn.replace_cotangent('w', number))['w']

    for number in (jnp.nan, jnp.inf, 0.0):
        found = jax.vmap(read, (None, 0))(odd, jnp.full(2, number))
        oracle.assert_same(found, jnp.stack([odd, odd]))


def test_printing_says_the_path_compiled_and_not(capfd):
    def loss(p):
        with nn.print_cotangent('a/bias'):
            return jnp.sum(Cell().apply({'params': p}, X))

    expected = jax.grad(lambda p: jnp.sum(Cell().apply({'params': p}, X)))(PARAMS)
    capfd.readouterr()
    for grad in jax.grad(loss), jax.jit(jax.grad(loss)):
        ct = jax.block_until_ready(grad(PARAMS))['a']['bias']
        jax.effects_barrier()
        assert capfd.readouterr().out == f'cotangent of a/bias: {np.asarray(ct)}\n'
        np.testing.assert_allclose(ct, expected['a']['bias'], rtol=1e-5)
    braces = {'{w}': jnp.ones(2)}
    printed = lambda p: jnp.sum(sg.rewrite(p, nn.print_cotangent(True))['{w}'])  # noqa: E731
    jax.grad(printed)(braces)
    jax.effects_barrier()
    assert capfd.readouterr().out == 'cotangent of {w}: [1. 1.]\n'


# Cache keys.


def counted(loss: Callable[..., Any]) -> tuple[Any, list[None]]:
    traces: list[None] = []

    def wrapper(*args: Any) -> Any:
        traces.append(None)
        return loss(*args)

    return jax.jit(jax.grad(wrapper)), traces


@pytest.mark.parametrize('by', ['norm', 'global_norm'])
def test_a_norm_that_is_a_little_larger_than_its_bound_is_clipped(by):
    def loss(w):
        with nn.clip_gradient('w', **{by: 0.5}):
            return jnp.sum(0.6 * Scale().apply({'params': {'w': w}}))

    assert jax.grad(loss)(jnp.ones(1)) == pytest.approx(0.5)


def test_equal_rules_do_not_trace_again_and_others_do():
    grad, traces = counted(lambda w: 3.0 * Scale().apply({'params': {'w': w}}))
    array = jnp.array([2.0])
    twice, thrice = (lambda path, ct, n=n: ct * n for n in (2, 3))
    scaled = lambda path, ct, n: ct * n  # noqa: E731

    class Bounds:
        def __init__(self, bound):
            self.bound = bound

        def clip(self, path, ct):
            return jnp.minimum(ct, self.bound)

    assert nn.scale_gradient('w', 0.1) != nn.scale_gradient('w', 0.1 + 1e-15)
    one, two = Bounds(1.0), Bounds(2.0)
    makers: list[Callable[[], Any]] = [
        lambda: nn.map_cotangent('w', twice),
        lambda: nn.map_cotangent('w', thrice),
        lambda: nn.map_cotangent('w', scaled, 2.0),
        lambda: nn.map_cotangent('w', scaled, 3.0),
        lambda: nn.scale_gradient('w', 2),
        lambda: nn.scale_gradient('w', jnp.float32(4)),
        lambda: nn.reverse_gradient('w', 2),
        lambda: nn.clip_gradient('w', value=2.0),
        lambda: nn.clip_gradient('w', norm=2.0),
        lambda: nn.clip_gradient('w', global_norm=1.0),
        lambda: nn.replace_cotangent('w', np.float32([8.0])),
        lambda: nn.replace_cotangent('w', array),
        lambda: nn.print_cotangent('w'),
        lambda: nn.stop_gradient('w', levels=1),
        lambda: nn.stop_gradient('w'),
        lambda: nn.map_cotangent('w', one.clip),
        lambda: nn.map_cotangent('w', two.clip),
    ]
    values = []
    for number, make in enumerate(makers, start=1):
        for _ in range(2):
            with make():
                values.append(float(grad(jnp.array([1.0]))[0]))
        assert len(traces) == number
    expected = [6, 9, 6, 9, 6, 12, -6, 2, 2, 1, 8, 2, 3, 0, 0, 1, 2]
    assert values == [float(e) for e in expected for _ in '12']


class Scale(fnn.Module):
    @fnn.compact
    def __call__(self):
        return self.param('w', fnn.initializers.ones, (1,))[0]


def test_a_traced_factor():
    @jax.jit
    def step(w, factor):
        def loss(w):
            with nn.reverse_gradient('w', factor):
                return Scale().apply({'params': {'w': w}})

        return jax.grad(loss)(w)

    with jax.checking_leaks():
        assert step(jnp.array([1.0]), 3.0) == -3.0
        assert step(jnp.array([1.0]), 4.0) == -4.0
    slopes = jax.vmap(step, (None, 0))(jnp.array([1.0]), jnp.array([1.0, 2.0]))
    assert slopes.tolist() == [[-1.0], [-2.0]]
    # The gradient is a function of the factor.
    assert jax.grad(lambda f: step(jnp.array([1.0]), f)[0])(3.0) == -1.0


@pytest.mark.usefixtures('leaks')
@pytest.mark.parametrize(
    'rule',
    [
        *(nn.reverse_gradient, nn.replace_cotangent),
        lambda where, bound: nn.clip_gradient(where, value=bound),
        lambda where, bound: nn.clip_gradient(where, norm=bound),
        lambda where, bound: nn.clip_gradient(where, global_norm=bound),
        lambda where, x: nn.map_cotangent(where, lambda path, ct, x: ct * x, x),
    ],
    ids=['scale', 'replace', 'clip', 'clip norm', 'clip global norm', 'map'],
)
def test_a_value_does_not_depend_on_what_its_cotangent_does(rule):
    """And what JAX keeps of the program does not keep the operand."""

    @jax.jit
    def loss(w, operand):
        with rule('w', operand):
            return Scale().apply({'params': {'w': w}})

    assert loss(jnp.array([1.0]), 3.0) == 1.0
    assert jax.grad(loss, 1)(jnp.array([1.0]), 3.0) == 0.0


def test_a_random_key_is_an_operand_compiled_and_not():
    def noise(path, cotangent, key):
        return cotangent + jax.random.normal(key, cotangent.shape)

    def loss(w, key):
        with nn.map_cotangent('w', noise, key):
            return Scale().apply({'params': {'w': w}})

    keys, ones = jax.random.split(jax.random.key(0)), jnp.ones(1)
    for key in keys:
        expected = 1.0 + jax.random.normal(key, (1,))
        for grad in (
            jax.grad(loss),
            jax.jit(jax.grad(loss)),
            lambda w, key: jax.jit(lambda w: jax.grad(loss)(w, key))(w),
        ):
            oracle.assert_same(grad(ones, key), expected)


def test_what_is_not_traced_is_read_in_a_lifted_body_as_it_is():
    lifted = fnn.map_variables(Scale, 'params', lambda tree: tree)
    with nn.reverse_gradient('w'):
        assert lifted().apply({'params': {'w': jnp.array([3.0])}}) == 3.0


# Numbers.


NUMBERS: list[tuple[Any, Any, Any]] = [
    (nn.scale_gradient(True, 0.5), [3, -4], [1.5, -2]),
    (nn.scale_gradient(True, jnp.float32(0.5)), [3, -4], [1.5, -2]),
    (nn.clip_gradient(True, value=2.0), [3, -4], [2, -2]),
    (nn.clip_gradient(True, norm=2.5), [3, -4], [1.5, -2]),
    (nn.clip_gradient(True, global_norm=jnp.float32(2.5)), [3, -4], [1.5, -2]),
    (nn.replace_cotangent(True, 1.0), [3, -4], [1, 1]),
    # A complex number is clipped by its parts or by its length.
    (nn.clip_gradient(True, value=1.0), [3 - 4j], [1 - 1j]),
    (nn.clip_gradient(True, norm=2.5), [3 - 4j], [1.5 - 2j]),
]


def test_numbers_and_dtypes():
    for rule, cotangent, expected in NUMBERS:
        is_complex = isinstance(cotangent[0], complex)
        for dtype in (jnp.complex64,) if is_complex else (jnp.bfloat16, jnp.complex64):
            tree = {'w': jnp.array(cotangent, dtype)}
            _, pull_back = jax.vjp(lambda t: sg.rewrite(t, rule), tree)  # noqa: B023
            [ct] = pull_back(tree)
            assert ct['w'].dtype == dtype
            np.testing.assert_array_equal(ct['w'], jnp.array(expected, dtype))
    # A sum in half precision does not overflow.
    tree = {'w': jnp.full(300, 30.0, jnp.float16)}
    clip = nn.clip_gradient(True, global_norm=30.0)
    [ct] = jax.vjp(lambda t: sg.rewrite(t, clip), tree)[1](tree)
    np.testing.assert_allclose(ct['w'].astype(np.float32), np.sqrt(3.0), rtol=1e-2)


def test_small_cotangents_pass_a_clip_to_the_last_bit_and_zero_has_derivatives():
    def gradient(s):
        tree = {'w': jnp.array([1e-3, 0.7])}
        clip = nn.clip_gradient(True, global_norm=1.0)
        return jax.grad(lambda t: jnp.sum(sg.rewrite(t, clip)['w'] * s))(tree)['w']

    s = jnp.array([0.1, 0.2])
    assert gradient(s).tolist() == s.tolist()
    np.testing.assert_array_equal(jax.jacrev(gradient)(jnp.zeros(2)), jnp.eye(2))


def test_a_leaf_that_is_never_read():
    tree = {'a': jnp.ones(2), 'b': jnp.full(2, 3.0)}

    def reads(self):
        self.param('a', fnn.initializers.ones, (2,))
        return jnp.sum(self.get_variable('params', 'a') ** 2)

    def grads(rule: Any) -> Any:
        def loss(tree: Any) -> Any:
            with rule:
                return Do(reads).apply({'params': tree})

        return jax.tree.map(lambda g: g.tolist(), jax.grad(loss)(tree))

    # Nothing depends on it, so there is no cotangent to replace ...
    replaced = grads(nn.replace_cotangent(True, 5.0))
    assert replaced == {'a': [5.0, 5.0], 'b': [0.0, 0.0]}
    # ... but it can be handed another one.
    copied = grads(nn.copy_cotangent({'b': 'a'}))
    assert copied == {'a': [2.0, 2.0], 'b': [2.0, 2.0]}
    assert grads(nn.copy_cotangent({'a': 'b'}))['a'] == [0.0, 0.0]


def test_copies_do_not_follow_one_another():
    tree = {name: jnp.full(2, 1.0) for name in 'abcd'}
    sources = {'a': 'b', 'b': 'a', 'c': 'b', 'd': 'c'}

    def grads(**options: Any) -> Any:
        def loss(tree: Any) -> Any:
            tree = sg.rewrite(tree, nn.copy_cotangent(sources, **options))
            return sum(n * jnp.sum(x) for n, x in enumerate(tree.values(), start=1))

        return {name: float(g[0]) for name, g in jax.grad(loss)(tree).items()}

    assert grads() == {'a': 2.0, 'b': 1.0, 'c': 2.0, 'd': 3.0}
    assert grads(add=True) == {'a': 3.0, 'b': 3.0, 'c': 5.0, 'd': 7.0}


# Plain trees.


def test_collections_and_boxes_in_a_tree():
    box = fnn.Partitioned(jnp.ones(2), names=('x',))
    tree = {'params': {'w': box}, 'state': {'w': jnp.ones(2)}}

    def grads(rule: Any) -> Any:
        def loss(tree: Any) -> Any:
            return sum(map(jnp.sum, jax.tree.leaves(sg.rewrite(tree, rule))))

        out = jax.grad(loss)(tree)
        return out['params']['w'].value.tolist(), out['state']['w'].tolist()

    half = functools.partial(nn.scale_gradient, 'w', 0.5)
    assert grads(half()) == ([0.5, 0.5], [1.0, 1.0])
    assert grads(half(collections='state')) == ([1.0, 1.0], [0.5, 0.5])
    assert grads(half(collections=True)) == ([0.5, 0.5], [0.5, 0.5])
    assert grads(nn.stop_gradient('w', levels=1)) == ([0.0, 0.0], [1.0, 1.0])
    stopped = jax.grad(lambda t: jnp.sum(sg.stop_gradient(t, 'w')['state']['w']))(tree)
    assert stopped['state']['w'].tolist() == [0.0, 0.0]
    # What is not selected, or has no gradient, stays as it is.
    others = {
        'n': 3,
        's': 'name',
        'rest': sg.ABSENT,
        'fixed': sg.NonDifferentiable(1.0),
    }
    for rule in nn.scale_gradient(True, 0.5), nn.clip_gradient(True, norm=1.0):
        out = sg.rewrite({**others, 'w': jnp.ones(2)}, rule)
        assert all(
            out[name] is leaf for name, leaf in others.items() if name != 'fixed'
        )
