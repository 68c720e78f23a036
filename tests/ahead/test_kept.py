"""What is kept: all that costs something and does not change, in the fewest bytes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import flax_sg as sg
from flax_sg.ahead.cut import cheapest_cut
from tests.ahead.splits import (
    MOVED,
    PARAMS,
    TRAINED,
    XS,
    assert_same,
    assert_split,
)

X = XS[0]


def torso(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params['torso'])


def test_data_of_a_closure() -> None:
    """A full batch, a graph: it does not change, though it is no argument."""
    fun = lambda params: jnp.mean(torso(params, X) @ params['head'])  # noqa: E731
    ahead = assert_split(fun, once=1, kept=[(3, 4)])
    assert 'computed at each step' not in str(ahead)


def test_frozen_weights_that_read_no_data() -> None:
    """Prompts through a tower, beside a batch: both are computed once."""

    def fun(params: Any, x: Any) -> Any:
        return jnp.mean((x @ params['head']) @ torso(params, jnp.eye(4)[:2]).T)

    assert_split(fun, X, once=1, kept={(3, 4), (4, 2)})


def test_raw_parameters_and_what_is_cheap_of_them() -> None:
    """They are not kept: late has them."""

    def fun(params: Any, x: Any) -> Any:
        table = params['torso'].astype(jnp.bfloat16).astype(jnp.float32).T * 2
        return jnp.mean((x @ params['head']) @ table)

    assert_split(fun, X, once=0, reads=True, kept=[(3, 4)])


def test_no_parameter_is_read_for_what_is_made_again() -> None:
    """A LayerNorm in float32 behind a bfloat16 tower: its scale may be ABSENT."""

    def fun(params: Any, x: Any) -> Any:
        y = (x @ params['torso']).astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.mean((y * params['torso'][:1]) @ params['head'])

    assert_split(fun, X, once=1)


def test_codes_of_weights() -> None:
    """Weights that a table makes of their codes are made again: these are smaller."""
    table = jnp.linspace(-1.0, 1.0, 16)

    def fun(params: Any, x: Any) -> Any:
        return jnp.mean((x @ params['head']) @ table[params['codes'].astype(int)])

    codes = jnp.arange(16, dtype=jnp.uint8).reshape(4, 4)
    params = {'codes': codes, 'head': PARAMS['head']}
    how: Any = {'params': params, 'wrt': 'head', 'reads': True}
    assert_split(fun, X, once=0, kept=[(3, 4)], **how)


def test_what_late_reads() -> None:
    """``reads`` is a filter: late runs on the parameters that it takes."""

    def fun(params: Any, x: Any) -> Any:
        y = torso(params, x) @ params['cell']
        return jnp.mean(y @ params['head'] @ params['tied'])

    params = {**PARAMS, 'tied': PARAMS['torso'] + 1.0}
    ahead = sg.precompute(fun, params, X, wrt=TRAINED)
    kept = ahead.early(params, X)
    needed, frozen = sg.partition(params, ahead.reads)
    assert [k for k in params if frozen[k] is not sg.ABSENT] == ['torso']
    assert_same(ahead.late(needed, kept), fun(params, X))
    assert repr(ahead.reads) == "<ahead.reads: 'cell', 'head', 'tied'>"
    nothing = sg.precompute(lambda p, x: torso(p, x), PARAMS, X, wrt=False)
    assert sg.partition(PARAMS, nothing.reads)[0] == dict.fromkeys(PARAMS, sg.ABSENT)


def test_what_late_reads_of_several_trees() -> None:
    """Positions are those of late, which takes the parameters first."""

    def fun(x: Any, body: Any, head: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ body['w']) @ head['w'])

    args = X, {'w': PARAMS['torso']}, {'w': PARAMS['head']}
    ahead = sg.precompute(fun, *args, argnums=(1, 2), wrt='2/**')
    needed, _ = sg.partition(args[1:], ahead.reads)
    assert needed[0] == {'w': sg.ABSENT}
    assert_same(ahead.late(*needed, ahead.early(*args)), fun(*args))


def test_axes_of_the_loss_of_one_example() -> None:
    """What reads no data is kept once, and not for each example of ``jax.vmap``."""

    def of_one(params: Any, x: Any) -> Any:
        prompts = torso(params, jnp.eye(4)[:2])
        return jnp.mean((torso(params, x[None]) @ params['head']) @ prompts.T)

    one = sg.precompute(of_one, PARAMS, X[0], wrt=TRAINED)
    assert sorted(map(str, one.axes)) == ['0', 'None']
    kept = jax.vmap(one.early, (None, 0), one.axes)(PARAMS, X)
    assert sorted(k.size for k in kept) == [2 * 4, 3 * 4]
    for params in PARAMS, MOVED:
        ours = jax.vmap(one.late, (None, one.axes))(params, kept)
        assert_same(ours, jax.vmap(of_one, (None, 0))(params, X))


# A torso that is called twice.
# A torso that is called twice.
TWICE: dict[str, Any] = {
    'operations': lambda params, x: jax.nn.relu(torso(params, x)),
    'a scan': lambda params, x: lax.scan(
        lambda h, _: (jax.nn.gelu(torso(params, h)), None), x, None, 3
    )[0],
    'a checkpoint': lambda params, x: jax.checkpoint(
        lambda x: jax.nn.relu(torso(params, torso(params, x)))
    )(x),
    'a branch': lambda params, x: lax.cond(
        x.sum() > 0, lambda x: torso(params, x), lambda x: torso(params, -x), x
    ),
}


# Ways to say that a branch trains nothing, of a tree or of a value.
STOPS: dict[str, Any] = {
    'none': lambda tree: tree,
    'lax': lax.stop_gradient,
    'flax_sg': lambda tree: sg.stop_gradient(tree, True),
    'of a filter': lambda x: sg.stop_gradient(x, 'torso') if type(x) is dict else x,
    'under jit': lambda tree: jax.jit(lax.stop_gradient)(tree),
    'twice': lambda tree: lax.stop_gradient(jax.tree.map(lax.stop_gradient, tree)),
    'another size': lambda x: jax.tree.map(partial(scaled_gradient, 0.5), x),
}


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def scaled_gradient(factor: float, x: Any) -> Any:
    return x


@scaled_gradient.defjvp
def _of_scaled_gradient(factor: float, primals: Any, tangents: Any) -> Any:
    return primals[0], factor * tangents[0]


@pytest.mark.parametrize('name', STOPS)
@pytest.mark.parametrize('of', TWICE)
def test_a_stop_on_what_does_not_change(of: str, name: str) -> None:
    """Branches on one frozen torso: it is computed once, and kept once."""
    features, stop = TWICE[of], STOPS[name]

    def fun(params: Any, x: Any) -> Any:
        fixed = stop(params)
        online = features(params, x) @ params['head']
        target = features(fixed, x) @ fixed['cell']
        inside = features(params, stop(x)) @ params['cell']
        return jnp.mean((online - target) ** 2) + jnp.mean(jnp.sin(inside))

    assert_split(fun, X, kept=[(3, 4)])


def test_a_stop_within_a_body_that_does_not_change() -> None:
    """A loop of the same turns, of which each stops what it has made."""

    def fun(params: Any, x: Any) -> Any:
        def of(stop: Any) -> Any:
            turn = lambda h, _: (stop(torso(params, h)), h)  # noqa: E731
            return lax.scan(turn, x, None, 3)[0]

        y = of(lambda h: h) @ params['head'] - of(lax.stop_gradient) @ params['cell']
        return jnp.mean(y**2)

    assert_split(fun, X, kept=[(3, 4)])


def test_a_stop_on_what_changes_stays() -> None:
    """On what is trained, on what reads it, on rows, on ``each=``, on a mean."""

    def fun(params: Any, x: Any, weight: Any) -> Any:
        h = torso(params, x)
        y = h @ params['head']
        rows = jnp.concatenate([lax.stop_gradient(params['torso'][:2]), params['cell']])
        parts = lax.stop_gradient(rows) * rows
        total = jnp.mean(lax.stop_gradient(y) * y) + jnp.sum(parts @ params['head'])
        total += jnp.mean(lax.stop_gradient(params['cell']) @ params['cell'])
        mean = lax.stop_gradient(h.mean(0)) * h.mean(0)
        total += jnp.mean(mean[None] * y)
        return total + lax.stop_gradient(weight) * weight * y.mean()

    weight = jnp.asarray(1.5)
    how: Any = {'argnums': (0, 2), 'wrt': ['0/cell', '0/head', '2']}
    for examples in False, True:
        split: Any = {'wrt': TRAINED, 'each': 2, 'examples': examples}
        ahead = sg.precompute(fun, PARAMS, X, weight, **split)
        kept = ahead.early(PARAMS, X)
        for params in PARAMS, MOVED:
            ours = sg.grad(ahead.late, **how)(params, kept, weight)
            assert_same(ours, sg.grad(fun, **how)(params, X, weight), 1e-4)


def test_steps_that_look_equal() -> None:
    """Zeros of another sign, and numbers of another type, are other values."""

    def fun(params: Any, x: Any) -> Any:
        y = x @ params['torso']
        signs = [jnp.copysign(1.0, (y * 0.0) + zero) for zero in (0.0, -0.0)]
        powers = [lax.integer_pow(y, 2), lax.pow(y, jnp.full_like(y, 3.0))]
        turns = [
            lax.scan(lambda h, _, c=c: (jnp.tanh(h + c), None), y, None, 2)[0]
            for c in (1.0, 2.0)
        ]
        return jnp.mean(sum([*signs, *powers, *turns]) @ params['head'])

    assert_split(fun, X, once=1)


def test_what_is_the_same_in_all_turns() -> None:
    """It is computed once, and kept once, whatever the loop carries."""

    def fun(params: Any, x: Any, words: Any) -> Any:
        def turn(h: Any, word: Any) -> Any:
            keys = jnp.tanh(x @ params['torso'])
            return jnp.tanh((h * keys + word) @ params['cell']), None

        return jnp.mean(lax.scan(turn, jnp.zeros((3, 4)), words)[0])

    ahead = assert_split(fun, X, XS, once=1)
    assert sum(k.size for k in ahead.kept) <= X.size + XS.size


def test_rows_of_a_table() -> None:
    """They are looked up again if late reads the table, and the ids are smaller."""
    ids = jnp.array([[0, 3], [1, 1]])
    table = jax.random.normal(jax.random.key(0), (5, 8))
    params = {'table': table, 'scale': jnp.ones(8)}
    for tied, kept in (True, [(2, 2, 1)]), (False, [(2, 2, 8)]):

        def loss(params: Any, ids: Any, tied: bool = tied) -> Any:
            h = params['table'][ids]
            out = h + jnp.sin(h * params['scale'][None, None])
            return jnp.mean(out @ params['table'].T if tied else out)

        assert_split(loss, ids, params=params, wrt='scale', reads=tied, kept=kept)


def test_much_that_is_kept_for_little() -> None:
    """LoRA in all layers but the first product: rows are kept in place of ids."""

    def fun(params: Any, ids: Any) -> Any:
        h = params['embed'][ids]
        for w in params['layers']:
            h = h + jnp.tanh(h @ w['frozen'] + h @ w['a'] @ w['b'])
        return jnp.mean(h @ params['embed'].T)

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {'frozen': of(32, 32), 'a': of(32, 2), 'b': of(2, 32)}
    params = {'embed': of(50, 32), 'layers': [layer] * 8}
    ids = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    said = '^Much is kept for little: 8,448 bytes for 256'
    with pytest.warns(UserWarning, match=said):
        ahead = sg.precompute(fun, params, ids, wrt=['layers/*/a', 'layers/*/b'])
    assert '8,448 bytes are kept, for 256 bytes of data.' in str(ahead)


def test_a_checkpoint_is_that_of_the_user() -> None:
    """JAX marks halves as differentiated, which adds barriers to each value."""

    def fun(params: Any, x: Any) -> Any:
        @jax.checkpoint
        def body(params: Any, x: Any) -> Any:
            return jnp.sin(torso(params, x) @ params['head'])

        return jnp.mean(body(params, x))

    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    late = jax.jit(ahead.late).lower(PARAMS, ahead.early(PARAMS, X)).as_text()
    assert 'optimization_barrier' not in late


def test_cheap_values_are_made_again() -> None:
    """Of what is broadcast the small array is kept."""

    def loss(params: Any, x: Any) -> Any:
        small = (x @ params['torso']).sum()
        return jnp.sum(jnp.broadcast_to(small, (4, 4)) * params['head'])

    assert_split(loss, X, wrt='head', kept=[()])


def test_cut_takes_the_fewest_bytes() -> None:
    """Two values made of one; one made of two; and one that is not cheap."""
    assert cheapest_cut({1: 8, 2: 8, 3: 8}, {2: [1], 3: [1]}, [2, 3]) == {1}
    assert cheapest_cut({1: 8, 2: 8, 3: 8}, {3: [1, 2]}, [3]) == {3}
    assert cheapest_cut({1: 8, 2: 99}, {}, [2]) == {2}
