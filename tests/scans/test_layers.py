"""Layers of a stack: gradients as by a mask, programs as by hand with two scans."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from flax_sg import errors, testing
from flax_sg import linen as nn
from tests.helpers import oracle, programs, stepwise

DEPTH, WIDTH = 5, 4
X = jax.random.normal(jax.random.key(0), (3, WIDTH))
EACH = jax.random.normal(jax.random.key(1), (DEPTH, 1, WIDTH))
RNGS = {'params': jax.random.key(2), 'dropout': jax.random.key(3)}


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, each, both):
        h = linen.Dense(WIDTH)(x) + each
        h = linen.BatchNorm(use_running_average=False, momentum=0.5)(h)
        h = linen.Dropout(0.5, deterministic=False)(h * both)
        self.sow('intermediates', 'h', h)
        return x + jnp.tanh(h), jnp.sum(h, axis=-1)


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, x, each, both):
        init = linen.with_partitioning(linen.initializers.normal(), ('a', 'b'))
        w = self.param('w', init, (WIDTH, WIDTH))
        return jnp.tanh(x @ w + each * both), None


class Nested(linen.Module):
    @linen.compact
    def __call__(self, x, each, both):
        inner = linen.scan(
            Boxed,
            variable_axes={'params': 1},
            split_rngs={'params': True},
            in_axes=linen.broadcast,
            length=2,
            metadata_params={linen.PARTITION_NAME: None},
        )
        return inner(name='inner')(x, each, both)


class Counting(linen.Module):
    @linen.compact
    def __call__(self, x, each, both):
        count = self.variable('count', 'n', lambda: jnp.float32(0))
        count.value += 1
        w = self.param('w', linen.initializers.normal(), (WIDTH, WIDTH))
        return jnp.tanh(x @ w + each * both) + count.value, None


STACKED = {'params': 0, 'batch_stats': 0, 'intermediates': 0}
METADATA = {linen.PARTITION_NAME: 'layers'}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    'backwards': (Layer, {'reverse': True}),
    'layer': (Layer, {'check_constancy_invariants': False}),
    'other axes': (
        Layer,
        {'variable_axes': {**STACKED, 'params': 1}, 'out_axes': 1, 'unroll': 2},
    ),
    'remat policy': (
        linen.remat(Boxed, policy=jax.checkpoint_policies.dots_saveable),
        {'metadata_params': METADATA},
    ),
    'boxes': (Boxed, {'metadata_params': METADATA}),
    'nested': (Nested, {'metadata_params': METADATA}),
    'carried': (Counting, {'variable_carry': 'count'}),
}


class Net(linen.Module):
    case: str = 'layer'
    frozen: Any = None
    below: bool = True

    @linen.compact
    def __call__(self, x):
        target, options = CASES[self.case]
        given = {
            'variable_axes': STACKED,
            'split_rngs': {'params': True, 'dropout': True},
            'in_axes': (0, linen.broadcast),
            **options,
        }
        if self.frozen is None:
            stack = linen.scan(target, **given)
        else:
            stack = nn.scan(target, **given, frozen_layers=self.frozen)
        x = linen.Dense(WIDTH, name='below')(x) if self.below else x
        x, out = stack(name='layers')(x, EACH, jnp.float32(0.9))
        return linen.Dense(2, name='above')(x), out


def axis_of(case: str) -> int:
    return CASES[case][1].get('variable_axes', STACKED)['params']


def masked(params: Any, layers: Any, axis: int = 0, depth: int = DEPTH) -> Any:
    """Parameters of which some layers are stopped by hand."""
    mask = np.zeros(depth, bool)
    mask[layers] = True

    def stop(leaf):
        shape = [1] * leaf.ndim
        shape[axis] = depth
        return jnp.where(mask.reshape(shape), jax.lax.stop_gradient(leaf), leaf)

    return {**params, 'layers': jax.tree.map(stop, params['layers'])}


MUTABLE = ['batch_stats', 'intermediates', 'count']


@functools.cache
def variables_of(case: str, frozen: Any = None) -> Any:
    # Flax carries collections only that there are.
    given = {'count': {'layers': {'n': jnp.float32(0)}}} if case == 'carried' else {}
    init = functools.partial(Net(case, frozen).apply, mutable=True, rngs=RNGS)
    _, variables = jax.jit(init)(given, X)
    return {k: v for k, v in variables.items() if k != 'intermediates'}


def results(net: Net, variables: Any, stop: Callable[[Any], Any] = lambda p: p) -> Any:
    """Outputs, new state, and the gradient of all parameters and of the input."""

    def loss(params, x):
        given = {**variables, 'params': stop(params)}
        rngs = {'dropout': RNGS['dropout']}
        out, state = net.apply(given, x, rngs=rngs, mutable=MUTABLE)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out)), (out, state)

    # Step by step: XLA may round what it fuses in two runs of layers in another way.
    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return stepwise.evaluate(grad, variables['params'], X)


# Of the others see test_layers.
@pytest.mark.parametrize('case', ['other axes', 'remat policy', 'nested', 'carried'])
def test_gradients_are_those_of_a_mask(case):
    variables = variables_of(case)
    oracle.assert_same(variables_of(case, range(3)), variables)
    stop = functools.partial(masked, layers=slice(0, 3), axis=axis_of(case))
    expected = results(Net(case), variables, stop)
    actual = results(Net(case, range(3)), variables)
    oracle.assert_same(actual, expected)
    for leaf in jax.tree.leaves(actual[1][0]['layers']):
        assert not np.moveaxis(np.asarray(leaf), axis_of(case), 0)[:3].any()


LAYERS = {
    'the last': (-1, [4]),
    'a suffix': (slice(3, None), [3, 4]),
    'all': (slice(None), [0, 1, 2, 3, 4]),
    'here and there': ([0, 2, -1], [0, 2, 4]),
    'bools': ([True, False, True, False, False], [0, 2]),
}


@pytest.mark.parametrize('name', LAYERS)
def test_layers(name):
    frozen, numbers = LAYERS[name]
    case = 'backwards' if name in ('a suffix', 'here and there') else 'layer'
    stop = functools.partial(masked, layers=numbers)
    expected = results(Net(case), variables_of(case), stop)
    oracle.assert_same(results(Net(case, frozen), variables_of(case)), expected)


def penalty(params: Any, net: Net) -> Any:
    """Of the parameters that `apply` returns: hazard 11."""
    _, new = net.apply({'params': params}, X, mutable=['params'])
    assert jax.tree.structure(new['params']) == jax.tree.structure(params)
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(new['params']['layers']))


def test_parameters_that_are_handed_through_keep_their_gradient():
    params = variables_of('boxes')['params']
    expected = jax.grad(penalty)(params, Net('boxes'))
    for frozen in ([0, 2, 4], slice(0, 3)):
        oracle.assert_same(jax.grad(penalty)(params, Net('boxes', frozen)), expected)
    # Those that may be written are refused.
    params = variables_of('nested')['params']
    penalty(params, Net('nested'))
    with pytest.raises(errors.PartError, match=r"'inner/w.*\n.*mutable="):
        penalty(params, Net('nested', slice(0, 3)))


class Shows(linen.Module):
    """Gives out its parameter as it is, in two ways."""

    @linen.compact
    def __call__(self, x, _):
        w = self.param('w', linen.initializers.ones, (3,))
        self.sow('seen', 'w', w)
        return x * w, w


@pytest.mark.parametrize('frozen', [slice(0, 2), [0, 2, 4, 6, 8], {'w': [0, 1]}])
def test_a_parameter_that_a_layer_gives_out_is_what_it_sees(frozen):
    options = {'variable_axes': {'params': 0, 'seen': 0}, 'length': 10}
    stack = nn.scan(
        Shows, split_rngs={'params': True}, frozen_layers=frozen, **options
    )()
    params = stack.init(jax.random.key(0), jnp.ones(3), None)['params']
    frozen = frozen['w'] if isinstance(frozen, dict) else frozen
    expected = jnp.full((10, 3), 4.0).at[np.arange(10)[frozen]].set(0.0)

    def loss(params):
        (_, given), written = stack.apply(
            {'params': params}, jnp.ones(3), None, mutable='seen'
        )
        return jnp.sum(given**2) + jnp.sum(written['seen']['w'][0] ** 2)

    oracle.assert_same(jax.grad(loss)(params)['w'], expected)


# What it costs.

WIDE, DEEP, FROZEN = 64, 8, 6


def masked_as_attention(h: Any) -> Any:
    """With a constant, which a loop must not hold for all of its turns."""
    return jnp.where(jnp.tri(*h.shape, dtype=bool), h, 0.0)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        h = linen.gelu(linen.Dense(4 * WIDE, use_bias=False, name='grow')(x))
        h = masked_as_attention(h)
        return x + linen.Dense(WIDE, use_bias=False, name='shrink')(h), None


def block_by_hand(params: Any, x: Any) -> Any:
    h = masked_as_attention(linen.gelu(x @ params['grow']['kernel']))
    return x + h @ params['shrink']['kernel'], None


LAYERS_OF_BLOCKS = {
    'grow': {'kernel': jnp.ones((DEEP, WIDE, 4 * WIDE))},
    'shrink': {'kernel': jnp.ones((DEEP, 4 * WIDE, WIDE))},
}
# Of parameters and input the shapes alone count.
ARGS: Any = (
    {'layers': LAYERS_OF_BLOCKS, 'below': jnp.ones((1, WIDE))},
    jnp.ones((256, WIDE)),
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The loss of a stack with something trained below it, or nothing."""

    below: bool = False
    remat: bool = False

    def ours(self, params: Any, x: Any, frozen: Any = slice(0, FROZEN)) -> Any:
        cls = linen.remat(Block, prevent_cse=False) if self.remat else Block
        stack = nn.scan(cls, length=DEEP, frozen_layers=frozen, **oracle.STACKED)
        x = x * params['below'] if self.below else x
        x, _ = stack().apply({'params': params['layers']}, x, None)
        return jnp.mean(x**2)

    def masked(self, params: Any, x: Any) -> Any:
        stopped = masked(params, slice(FROZEN), depth=DEEP)
        return self.ours(stopped, x, frozen=None)

    def by_hand(self, params: Any, x: Any) -> Any:
        """Two scans, the first reading the whole stack by index."""
        block = jax.checkpoint(block_by_hand, prevent_cse=False)
        block = block if self.remat else block_by_hand
        x = x * params['below'] if self.below else x
        stopped = jax.lax.stop_gradient(params['layers'])

        def frozen(x, number):
            def layer(leaf):
                return jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)

            return block(jax.tree.map(layer, stopped), x)

        numbers = jnp.arange(FROZEN, dtype=jnp.uint32)
        x, _ = jax.lax.scan(frozen, x, numbers)
        live = jax.tree.map(lambda leaf: leaf[FROZEN:], params['layers'])
        x, _ = jax.lax.scan(lambda x, p: block(p, x), x, live)
        return jnp.mean(x**2)


@pytest.mark.parametrize('remat', [False, True])
def test_the_program_is_that_of_two_scans_by_hand(remat):
    costs = Costs(remat=remat)
    ours, hand, masked = (
        programs.compiled(jax.value_and_grad(fn), *ARGS)
        for fn in (costs.ours, costs.by_hand, costs.masked)
    )
    try:
        testing.assert_same_program(ours, hand)
    except errors.ExpectationError:
        # With jax 0.12 a loop under remat takes the two stacks in another order.
        assert remat and jax.__version_info__ >= (0, 12)
    costs_of = [
        (c.cost_analysis()['flops'], c.memory_analysis().temp_size_in_bytes)
        for c in (ours, hand)
    ]
    assert costs_of[0] == costs_of[1]
    # The mask makes a second stack; the prefix is read from the one there is.
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (ours, masked)]
    stack = sum(leaf.nbytes for leaf in jax.tree.leaves(LAYERS_OF_BLOCKS))
    assert sizes[0] < sizes[1] - stack // 8


@pytest.mark.parametrize('remat', [False, True])
def test_the_way_back_through_frozen_layers_keeps_no_copy_of_them(remat):
    costs = Costs(below=True, remat=remat)
    fns = (costs.ours, costs.by_hand)
    ours, hand = (programs.temporary_bytes(jax.value_and_grad(fn), *ARGS) for fn in fns)
    stack = sum(leaf.nbytes for leaf in jax.tree.leaves(LAYERS_OF_BLOCKS))
    prefix = stack * FROZEN // DEEP
    assert ours < hand - 0.9 * (prefix if not remat else stack - prefix)


# Where the plain scan is meant, or raises.


def stack_of(layer: Any = Boxed, **options: Any) -> Any:
    given = {'in_axes': (0, linen.broadcast), 'metadata_params': METADATA}
    return nn.scan(layer, **(oracle.STACKED | given | options))()


@pytest.mark.parametrize('none', [slice(0, 0), slice(0), [False] * DEPTH, range(0)])
def test_no_frozen_layer_is_the_plain_scan(none):
    plain = stack_of()
    variables = plain.init(RNGS, X, EACH, 1.0)

    def grads(stack: Any) -> Any:
        return jax.grad(lambda v: jnp.sum(stack.apply(v, X, EACH, 1.0)[0]))(variables)

    frozen = stack_of(frozen_layers=none)
    oracle.assert_same(frozen.init(RNGS, X, EACH, 1.0), variables)
    oracle.assert_same(grads(frozen), grads(plain))


def test_another_length_than_the_stack_raises_as_in_flax():
    variables = oracle.init(stack_of(), RNGS, X, EACH, 1.0)
    for length, count in ((3, DEPTH), (DEPTH + 2, DEPTH), (None, DEPTH + 1), (2, 2)):
        each = jnp.zeros((count, 1, WIDTH))
        for frozen in (slice(0, 1), slice(None)):
            for options in ({}, {'frozen_layers': frozen}):
                with pytest.raises(ValueError) as caught:
                    stack_of(length=length, **options).apply(variables, X, each, 1.0)
                found = {int(n) for n in re.findall(r'\d+', str(caught.value))}
                assert {length or count, DEPTH} & found, caught.value


# Some parameters of a layer.


def test_a_box_adds_nothing_to_the_path_of_a_frozen_parameter():
    variables = stack_of().init(RNGS, X, EACH, 1.0)

    def grads(frozen: Any, given: Any) -> Any:
        stack = stack_of(frozen_layers=frozen)
        return jax.grad(lambda v: jnp.sum(stack.apply(v, X, EACH, 1.0)[0]))(given)

    expected = grads(slice(0, 2), variables)
    oracle.assert_same(grads({'w': slice(0, 2)}, variables), expected)
    plain, of_plain = linen.unbox(variables), linen.unbox(expected)
    oracle.assert_same(grads({'w': slice(0, 2)}, plain), of_plain)


class Biased(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        x = jnp.tanh(linen.Dense(WIDTH, name='in_')(x))
        return x + linen.Dense(WIDTH, name='out')(x), None


def biased(frozen: Any, length: int = 12) -> Any:
    return nn.scan(Biased, length=length, frozen_layers=frozen, **oracle.STACKED)()


def loss_of(model: Any, stop: Callable[[Any], Any] = lambda p: p) -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(model.apply({'params': stop(params)}, x, None)[0] ** 2)

    return loss


@pytest.mark.parametrize(
    'frozen',
    [
        {'**/kernel': slice(0, 8)},
        {'**/kernel': slice(0, 8), 'in_/**': slice(0, 4)},
        {'out/kernel': [0, 2, 4, 6], 'in_/bias': [11]},  # So many runs are masked.
    ],
)
def test_some_parameters_of_some_layers(frozen: Any) -> None:
    model = biased(frozen)
    params = oracle.init(model, jax.random.key(0), X, None)['params']

    def by_hand(params: Any) -> Any:
        def stop(keys: Any, leaf: Any) -> Any:
            module, name = (key.key for key in keys)
            for where, layers in frozen.items():
                start, end = where.split('/')
                if start in ('**', module) and end in ('**', name):
                    rows = jnp.asarray(np.r_[layers])
                    leaf = leaf.at[rows].set(jax.lax.stop_gradient(leaf[rows]))
            return leaf

        return jax.tree_util.tree_map_with_path(stop, params)

    actual = oracle.grads(loss_of(model), params, X)
    oracle.assert_same(actual, oracle.grads(loss_of(biased(None), by_hand), params, X))


def test_frozen_kernels_cost_no_flops_beside_live_biases() -> None:
    """Of three products of a kernel, that of its gradient is gone."""
    frozen, plain = biased({'**/kernel': slice(0, 8)}), biased(None)
    params = oracle.init(frozen, jax.random.key(0), X, None)['params']

    def two_scans(params: Any, x: Any) -> Any:
        stopped = oracle.stopped(params, lambda path: path.endswith('kernel'))
        first = jax.tree.map(lambda p: p[:8], stopped)
        rest = jax.tree.map(lambda p: p[8:], params)
        x, _ = biased(None, 8).apply({'params': first}, x, None)
        return jnp.sum(biased(None, 4).apply({'params': rest}, x, None)[0] ** 2)

    fns = loss_of(frozen), two_scans
    flops = [programs.flops(jax.grad(fn), params, X) for fn in fns]
    assert flops[0] == flops[1]
    # XLA counts the body of a loop once, so one loop is compared with one loop.
    fns = loss_of(biased({'**/kernel': slice(0, 12)})), loss_of(plain)
    flops = [programs.flops(jax.grad(fn), params, X) for fn in fns]
    assert flops[0] < 0.9 * flops[1], flops


class Low(linen.Module):
    """A layer whose parameters are of low precision."""

    @linen.compact
    def __call__(self, x, _):
        w = self.param('w', linen.initializers.ones, (), jnp.bfloat16)
        return x + w, None


@pytest.mark.usefixtures('standard_promotion')
def test_a_number_of_python_is_carried_in_the_dtype_of_the_layers():
    def of(**options: Any) -> Any:
        return stack_of(Low, length=4, in_axes=0, **options)

    plain, frozen = of(), of(frozen_layers=slice(0, 2))
    variables = oracle.init(plain, RNGS, 0.0, None)

    def grad(stack: Any) -> Any:
        return jax.value_and_grad(lambda v: stack.apply(v, 0.0, None)[0])(variables)

    value, grads = grad(frozen)
    oracle.assert_same(value, grad(plain)[0])
    expected = grad(plain)[1]['params']['w'].at[:2].set(0)
    oracle.assert_same(grads['params']['w'], expected)


@pytest.mark.parametrize(
    'other', [lambda y: (y, y), lambda y: None, lambda y: jnp.stack([y, y])]
)
def test_another_carry_than_it_was_given_raises_as_in_flax(other):
    class Carries(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return other(x * self.param('w', linen.initializers.ones, ())), None

    variables = {'params': {'w': jnp.ones(DEPTH)}}
    for options in ({}, {'frozen_layers': slice(0, 1)}):
        stack = nn.scan(Carries, length=DEPTH, **oracle.STACKED, **options)()
        with pytest.raises(TypeError, match='carry input and carry output'):
            stack.apply(variables, jnp.ones(()), None)
