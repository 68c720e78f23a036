"""Loops, branches, calls and maps of which a part does not change.

JAX splits them; each stands beside the whole program.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from tests.ahead.splits import (
    PARAMS,
    TRAINED,
    XS,
    assert_rows,
    assert_same,
    assert_split,
    products,
)
from tests.helpers import oracle

X = XS[0]
SQUARE = jax.random.normal(jax.random.key(9), (4, 4))
KEY = jax.random.key(3)
P = PartitionSpec
OF_DATA = P('data')
AXES = ('data', 'model')
MESH = jax.make_mesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2)
ROWS, WHOLE = NamedSharding(MESH, P('data')), NamedSharding(MESH, P())


def split(*args: Any, **options: Any) -> Any:
    """A row of a table: what is compared when it is called."""
    return partial(assert_split, *args, **options)


def over_time(params: Any, xs: Any) -> Any:
    """A frozen torso in a loop: its features are stacked."""

    def body(h: Any, x: Any) -> Any:
        features = jnp.tanh(x @ params['torso'])
        h = jnp.tanh(h @ params['cell'] + features)
        return h, (h @ params['head'], x)

    h, (out, same) = lax.scan(body, jnp.zeros((3, 4)), xs, reverse=True)
    return jnp.sum(h) + jnp.sum(out**2) + jnp.sum(same)


def fixed_carry(params: Any, xs: Any) -> Any:
    """A frozen cell goes on by itself; a trained one reads it, and is read by none."""

    def body(carry: Any, x: Any) -> Any:
        a, b, n = carry
        new = jnp.tanh(a @ params['torso'] + x)
        b = jnp.tanh(b @ params['cell'] + new * n) + a @ params['head']
        return (new, b, n + 1), new.sum()

    start = jnp.zeros((3, 4)), jnp.zeros((3, 4)), 0.0
    (a, b, n), sums = lax.scan(body, start, xs)
    return jnp.sum(a @ params['head']) + jnp.sum(b) * n + jnp.sum(sums)


def nested(params: Any, xs: Any) -> Any:
    """Branches in loops in a checkpoint in a branch."""

    def turn(h: Any, x: Any) -> Any:
        branches = (
            lambda h, x: jnp.tanh(h @ params['cell'] + x @ params['torso']),
            lambda h, x: h + jnp.sin(x @ params['torso']) * params['head'][:1],
        )
        h = lax.cond(x.sum() > 0, *branches, h, x)
        return h, h.sum()

    @jax.checkpoint
    def loop(xs: Any) -> Any:
        h, sums = lax.scan(turn, jnp.ones((3, 4)), xs)
        return h @ params['head'] + sums.sum()

    out = lax.cond(xs.sum() > 0, loop, lambda xs: xs[0] @ params['head'], xs)
    return jnp.sum(out**2)


def checkpoint_in_a_loop(params: Any, xs: Any) -> Any:
    """And a loop in the checkpoint."""

    def inner(h: Any, x: Any) -> Any:
        return jnp.tanh(h @ params['cell'] + x @ params['torso']), None

    @jax.checkpoint
    def body(h: Any, x: Any) -> Any:
        h, _ = lax.scan(inner, h, jnp.stack([x, 2 * x]))
        return h, h @ params['head']

    h, out = lax.scan(body, jnp.ones((3, 4)), xs)
    return jnp.sum(h) + jnp.sum(out)


def frozen_loop_in_a_loop(params: Any, xs: Any) -> Any:
    """It stays one loop: its last state is kept for each turn, and no other."""

    def layer(h: Any, _: None) -> Any:
        return jnp.tanh(h @ params['torso']), None

    def turn(h: Any, x: Any) -> Any:
        features, _ = lax.scan(layer, x, None, 3)
        return jnp.tanh(h @ params['cell'] + features), None

    return jnp.sum(lax.scan(turn, jnp.zeros((3, 4)), xs)[0] @ params['head'])


def branches(params: Any, x: Any, index: Any) -> Any:
    """What each branch keeps has a place of its own; the third one keeps nothing."""

    def first(x: Any) -> Any:
        y = jnp.tanh(x @ params['torso'])
        return jnp.tanh(y @ params['cell']), y

    def second(x: Any) -> Any:
        y = 2 * x @ params['torso']
        return jnp.sin(y) @ params['head'] + y, y[::-1]

    def third(x: Any) -> Any:
        return x * params['head'].sum(), x

    out, same = lax.switch(index, [first, second, third], x)
    return jnp.sum(out**2) + jnp.sum(same @ params['head'])


def keys_in_branches(params: Any, x: Any, key: Any) -> Any:
    """Keys are kept as well."""

    def draw(x: Any) -> Any:
        keys = jax.random.split(key)
        folded = jax.random.fold_in(keys[0], params['head'].sum().astype(int))
        return (x @ params['torso']) * jax.random.normal(folded, x.shape)

    other = lambda x: draw(-x) @ params['head']  # noqa: E731
    return jnp.sum(lax.cond(x.sum() > 0, draw, other, x) ** 2)


def until(x: Any, size: float) -> Any:
    """A condition: as long as the norm is smaller."""
    return jnp.sum(x**2) < size


def fixed_turns(params: Any, x: Any) -> Any:
    """Where the frozen part ends is known, and the rest goes along with it again."""

    def turn(carry: Any) -> Any:
        n, a, b = carry
        a = jnp.sin(a @ params['torso']) + a + 0.1
        return n + 1, a, jnp.tanh(lax.stop_gradient(b @ params['cell'] + a))

    start = 0, x / 9, jnp.zeros((3, 4))
    n, a, b = lax.while_loop(lambda carry: until(carry[1], 40.0), turn, start)
    last = jnp.sin(a @ params['torso']) * n.astype(float)
    return jnp.sum(last @ params['head']) + jnp.sum(b @ params['head'])


def while_in_a_scan(params: Any, xs: Any, key: Any) -> Any:
    """A key goes along."""

    def layer(h: Any, x: Any) -> Any:
        def turn(carry: Any) -> Any:
            key, a, b = carry
            key, new = jax.random.split(key)
            a = jnp.sin(a @ params['torso']) + a + jax.random.uniform(new, a.shape)
            return key, a, lax.stop_gradient(jnp.tanh(b @ params['cell'] + a))

        start = key, x, h
        _, a, b = lax.while_loop(lambda carry: until(carry[1], 99.0), turn, start)
        return b, (a @ params['torso']) @ params['head']

    h, outs = lax.scan(layer, jnp.zeros((3, 4)), xs)
    return jnp.sum((h @ params['head'] + outs.sum(0)) ** 2)


def tower(params: Any, x: Any) -> Any:
    """A frozen tower and a head."""
    return jnp.sin(jnp.tanh(x @ params['torso']) @ params['torso']) @ params['head']


def called(**options: Any) -> Any:
    """A loss of the tower, jitted."""
    jitted = jax.jit(tower, **options)
    return lambda params, x: jnp.sum(jitted(params, x) ** 2)


def mapped(body: Any, data: Any = OF_DATA, out: Any = OF_DATA, **how: Any) -> Any:
    """A loss of a function that is mapped over devices."""
    how = {'mesh': MESH, 'in_specs': (P(), data), 'out_specs': out, **how}
    fun = jax.shard_map(body, **how)
    return lambda params, x: sum(jnp.sum(y**2) for y in jax.tree.leaves(fun(params, x)))


def sums_over_devices(params: Any, x: Any) -> Any:
    """Two axes of the mesh, a place in it, and a sum over devices in each part."""
    place = lax.axis_index('data').astype(float) + 1.0
    y = jnp.tanh(lax.all_gather(x, 'model', axis=1, tiled=True) @ params['torso'])
    out = jnp.sin(place * y) @ params['cell'] + lax.pmean(y, 'data') @ params['head']
    return lax.psum(out.sum(), AXES)


def branch_on_devices(params: Any, x: Any) -> Any:
    """Keys have an axis of devices."""
    key = jax.random.fold_in(jax.random.key(3), x.sum().astype(int))
    scale = jax.random.fold_in(key, params['head'].sum().astype(int))
    first = lambda x: jnp.tanh(x @ params['torso']) @ params['cell']  # noqa: E731
    z = lax.cond(x.sum() > 0, first, lambda x: x @ params['head'], x)
    return x @ params['torso'] + jax.random.normal(scale, x.shape) + z


def inner_map(params: Any, x: Any) -> Any:
    def inner(params: Any, x: Any) -> Any:
        return lax.psum(jnp.tanh(x @ params['torso']) @ params['head'], 'model')

    how: Any = {'axis_names': {'model'}, 'check_vma': False}
    specs = (P(), P(None, None))
    return jax.shard_map(inner, in_specs=specs, out_specs=P(), **how)(params, x)


def carry_that_changes(params: Any, xs: Any) -> Any:
    """What is known before the first turn alone stays in the loop."""

    def body(carry: Any, x: Any) -> Any:
        _, b = carry
        carry = jnp.tanh(b @ params['torso']), x @ params['cell']
        return carry, x @ params['torso']

    (a, b), ys = lax.scan(body, (XS[0], XS[1]), xs)
    return jnp.sum(a + b) + jnp.sum(ys)


def index_that_changes(params: Any, x: Any) -> Any:
    """It is not known which branch runs."""
    which = params['cell'].sum() > 0
    cases = lambda: x @ params['torso'], lambda: jnp.sin(x) @ params['torso']
    return jnp.sum(lax.cond(which, *cases) @ params['head'])


def turns_that_change(params: Any, x: Any) -> Any:
    """It is not known how many turns the frozen part goes."""

    def turn(carry: Any) -> Any:
        a, b = carry
        return lax.stop_gradient((jnp.tanh(a @ params['torso'] + x), b + 1.0))

    start = lax.stop_gradient((x, params['cell'].sum()))
    a, _ = lax.while_loop(lambda carry: carry[1] < 3.0, turn, start)
    return jnp.sum(a @ params['head'])


EXPLICIT = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Explicit,))
MANUAL: Any = {'axis_names': {'data'}, 'check_vma': False}
CASES = {
    'a loop over time': split(over_time, XS, once=1, kept={(6, 3, 4), ()}),
    'a carry that does not change': split(fixed_carry, XS, once=1),
    'branches in a loop': split(nested, XS, once=2, kept={(6, 3, 4), (6,), ()}),
    'the others in a loop': split(nested, -XS, once=2, kept={(6, 3, 4), (6,), ()}),
    'a checkpoint in a loop': split(
        checkpoint_in_a_loop, XS, once=1, kept={(6, 2, 3, 4)}
    ),
    'a frozen loop inside': split(frozen_loop_in_a_loop, XS, once=1, kept={(6, 3, 4)}),
    'keys in branches': split(keys_in_branches, X, KEY, once=2),
    'a while': split(fixed_turns, X, once=2, again=1),
    'a while in a scan': split(while_in_a_scan, abs(XS), KEY, once=2, again=1),
    'a jit that donates': split(
        called(in_shardings=(WHOLE, ROWS), donate_argnums=1), SQUARE, once=2
    ),
    'a jit with shardings in types': split(
        called(out_shardings=NamedSharding(EXPLICIT, P())), SQUARE, once=2
    ),
    # A part of each has to stay.
    'a carry that changes': split(carry_that_changes, XS, once=1, reads=True),
    'an index that changes': split(index_that_changes, X, once=0, reads=True),
    'turns that change': split(turns_that_change, X, once=0, reads=True),
    'two maps': split(mapped(inner_map, **MANUAL), SQUARE, once=1, through=jax.jit),
    # The other axes of the mesh stay with the compiler.
    'an axis that is not mapped': split(
        mapped(tower, **{**MANUAL, 'check_vma': True}), SQUARE, once=2, through=jax.jit
    ),
}
for n in range(3):
    CASES[f'branch {n}'] = split(branches, X, jnp.int32(n), once=2)
for vma in (False, True):
    sums = mapped(sums_over_devices, P(*AXES), P(), check_vma=vma)
    CASES[f'sums over devices, check_vma={vma}'] = split(sums, SQUARE, once=1)
    branch = mapped(branch_on_devices, check_vma=vma)
    CASES[f'a branch on devices, check_vma={vma}'] = split(branch, SQUARE, once=2)


@pytest.mark.parametrize('name', CASES)
def test_a_part_is_computed_once(name: str):
    CASES[name]()


@pytest.mark.parametrize('out', (ROWS, None))
def test_shardings_of_a_jit_are_constraints(out: Any):
    """The tower leaves the call, and what is kept is sharded as in it."""
    fun = called(in_shardings=(WHOLE, ROWS), out_shardings=out)
    ahead = assert_split(fun, SQUARE, once=2)
    [kept] = jax.jit(ahead.early)(PARAMS, SQUARE)
    assert kept.sharding.is_equivalent_to(ROWS, 2)
    program = jax.jit(ahead.late).lower(PARAMS, [kept]).compile()
    assert 'sharding' in program.as_text()


def test_a_call_without_a_known_part_stays_one():
    """Constraints, and what costs nothing, are no reason to take it apart."""

    def fun(params: Any, x: Any) -> Any:
        head = jax.jit(lambda w, x: (x @ w, 2.0 * x), in_shardings=(WHOLE, ROWS))
        y = jnp.tanh(x @ params['torso'])
        return sum(jnp.sum(out**2) for out in head(params['head'], y))

    ahead = assert_split(fun, SQUARE, once=1)
    late = jax.make_jaxpr(ahead.late)(PARAMS, ahead.early(PARAMS, SQUARE))
    for program, count in (jax.make_jaxpr(ahead.early)(PARAMS, SQUARE), 0), (late, 1):
        names = [eqn.primitive.name for eqn in program.eqns]
        assert names.count('jit') + names.count('pjit') == count


@pytest.mark.parametrize('check_vma', (False, True))
def test_a_frozen_tower_over_devices(check_vma: bool):
    """Each device keeps its own features; an output that is known leaves the map."""

    def body(params: Any, x: Any) -> Any:
        y = jnp.tanh(x @ params['torso'])
        total = lax.psum(y.sum(), 'data')
        return jnp.sin(y @ params['torso']) @ params['head'] * total, y

    fun = mapped(body, out=(P('data'), P('data')), check_vma=check_vma)
    ahead = assert_split(fun, SQUARE, once=2)
    # Without types of shards each device of the mesh counts.
    assert (4 if check_vma else 8, 4) in [k.shape for k in ahead.kept]
    assert 'shard_map at test_bodies.py' in str(ahead)


def plain(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ params['torso']) @ params['head'])


def test_a_mesh_of_explicit_axes():
    """What is kept may be stored, and given as arrays of NumPy."""
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(AxisType.Explicit,) * 2)
    fun = mapped(tower, mesh=mesh)
    with jax.set_mesh(mesh):
        x = jax.device_put(SQUARE, NamedSharding(mesh, P('data')))
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        ahead = sg.precompute(fun, params, x, wrt='head')
        kept = jax.jit(ahead.early)(params, x)
        right = sg.value_and_grad(fun, wrt='head')(params, x)
        for given in kept, [*map(np.asarray, kept)]:
            ours = sg.value_and_grad(ahead.late, wrt='head')(params, given)
            assert_same(ours, right)
        # JAX would gather the examples in silence, or raise far from here.
        with pytest.raises(errors.ArgumentTypeError, match=r'\[4@data,4\].*\[4,4\]'):
            sg.precompute(plain, PARAMS, SQUARE, wrt='head').early(params, x)
        with pytest.raises(errors.ArgumentTypeError, match=r'\[4,4\].*\[4@data,4\]'):
            ahead.early(PARAMS, SQUARE)


@pytest.mark.parametrize('policy', (None, jax.checkpoint_policies.dots_saveable))
def test_a_frozen_tower_in_a_checkpoint(policy: Any):
    """It leaves the checkpoint; the rest is recomputed in the backward pass."""

    def top(params: Any, y: Any) -> Any:
        return jnp.sin(jnp.sin(y @ params['cell']) @ params['head'])

    def fun(params: Any, x: Any) -> Any:
        def body(params: Any, x: Any) -> Any:
            return top(params, jnp.sin(jnp.sin(x @ params['torso']) @ params['torso']))

        return jnp.sum(jax.checkpoint(body, policy=policy)(params, x))

    def hand(params: Any, y: Any) -> Any:
        return jnp.sum(jax.checkpoint(top, policy=policy)(params, y))

    ahead = assert_split(fun, X, once=2)
    kept = ahead.early(PARAMS, X)

    def backward(fun: Any) -> int:
        live = {k: PARAMS[k] for k in TRAINED}
        return products(jax.grad(lambda p: fun({**PARAMS, **p}, *kept)), live)

    assert backward(lambda p, *kept: ahead.late(p, [*kept])) == backward(hand)


def test_casts_of_frozen_weights_stay_in_the_checkpoint():
    """Made outside, they would be saved for each layer."""

    def fun(params: Any, x: Any) -> Any:
        @jax.checkpoint
        def body(params: Any, x: Any, y: Any) -> Any:
            cast = 2 * params['torso']
            return jnp.sin(x @ params['torso']), jnp.sin(y @ params['cell'] @ cast)

        return sum(map(jnp.sum, body(params, x, params['head'])))

    ahead = assert_split(fun, X, reads=True)
    assert len(ahead.kept) == 1
    late = jax.make_jaxpr(ahead.late)(PARAMS, ahead.early(PARAMS, X))
    assert 'mul' not in [eqn.primitive.name for eqn in late.eqns]


def test_models_of_linen():
    """``nn.remat`` around a frozen encoder and a head; ``nn.scan`` over time."""

    class Step(nn.Module):
        @nn.compact
        def __call__(self, h: Any, x: Any) -> Any:
            x = nn.Frozen(nn.Dense(4, name='torso'))(x)
            return nn.GRUCell(4, name='cell')(h, jnp.tanh(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, xs: Any) -> Any:
            scan = nn.scan(nn.remat(Step), **oracle.SHARED)
            return scan(name='scan')(jnp.zeros((3, 4)), xs)[1]

    net = Net()
    params = oracle.init(net, jax.random.key(0), XS)['params']

    def loss(params: Any, xs: Any) -> Any:
        return jnp.mean(net.apply({'params': params}, xs) ** 2)

    ahead = assert_split(loss, XS, params=params, wrt=sg.live(loss, params, XS))
    assert 'computed at each step' not in str(ahead)


# Losses of a batch of which single examples are kept.


def known_loop(params: Any, x: Any, mean: Any = jnp.zeros_like) -> Any:
    """What is stacked over time has the examples in front."""

    def turn(h: Any, row: Any) -> Any:
        known = jnp.sin((row - mean(row)) @ params['torso'])
        return jnp.tanh(h @ params['cell'] + known), h

    return jnp.sum(lax.scan(turn, x[:, 0], x.swapaxes(0, 1))[1] ** 2)


def centers(x: Any) -> Any:
    return x.mean(0, keepdims=True)


def known_branch(params: Any, x: Any, mean: Any = jnp.zeros_like) -> Any:
    def first(x: Any) -> Any:
        y = x @ params['torso']
        return jnp.tanh(y - mean(y)) @ params['head']

    def second(x: Any) -> Any:
        return jnp.sin(x @ params['torso']) @ params['cell']

    return jnp.sum(lax.cond(jnp.arange(3).sum() > 1, first, second, x) ** 2)


def known_turns(params: Any, x: Any, bound: Any = lambda a: 3.0) -> Any:
    """A condition that asks all examples mixes them."""

    def turn(carry: Any) -> Any:
        n, a, b = carry
        a = jnp.tanh(a @ params['torso'])
        return n + 1.0, a, lax.stop_gradient(jnp.tanh(b @ params['cell'] + a))

    goes_on = lambda carry: carry[0] < bound(carry[1])  # noqa: E731
    _, a, b = lax.while_loop(goes_on, turn, (0.0, x, x))
    return jnp.sum((((a @ params['torso']) + b) @ params['head']) ** 2)


OF_EXAMPLES: dict[str, Any] = {
    'loop': (known_loop, XS.swapaxes(0, 1), 1),
    'a mean in a loop': (partial(known_loop, mean=centers), XS.swapaxes(0, 1), 0),
    'branch': (known_branch, X, 2),
    'a mean in a branch': (partial(known_branch, mean=centers), X, 2),
    'turns': (known_turns, X, 2),
    'turns by all examples': (partial(known_turns, bound=jnp.sum), X, 0),
    'jit': (called(in_shardings=(WHOLE, ROWS)), SQUARE, 2),
    # What each device keeps is not by example: it runs at each step.
    'shard_map': (mapped(tower), SQUARE, 0),
}


@pytest.mark.parametrize('name', OF_EXAMPLES)
def test_examples(name: str):
    """What mixes examples is made anew, of rows that are kept."""
    fun, x, once = OF_EXAMPLES[name]
    ahead = assert_rows(fun, PARAMS, x, TRAINED, once=once)
    assert products(ahead.early, PARAMS, x) == once
