"""``precompute`` beside programs by hand that read stored features.

The program of ``late`` has the products of the program by hand, and no others: so none
of frozen parameters alone. What is kept has the same bytes, and a step the same flops.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_sg as sg
from benchmarks import stored
from benchmarks.stored import Case
from tests.helpers import situations
from tests.helpers.programs import compiled, flops
from tests.helpers.situations import SITUATIONS, Situation

KEYS = situations.KEYS
FEATURES = [make for make in stored.CASES if make is not stored.adapter]
PRODUCTS = 'dot_general', 'conv_general_dilated'


def products(fun: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often a function computes a product of each shape, turns of loops counted."""
    found: Counter[str] = Counter()

    def walk(jaxpr: Any, times: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in PRODUCTS:
                made, *read = (x.aval.str_short() for x in (*eqn.outvars, *eqn.invars))
                found[f'{made} of {", ".join(sorted(read))}'] += times
            for value in jax.tree.leaves(
                eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')
            ):
                if hasattr(value, 'eqns'):
                    body = getattr(value, 'jaxpr', value)
                    walk(body, times * eqn.params.get('length', 1))

    walk(jax.make_jaxpr(fun)(*args).jaxpr, 1)
    return found


def size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def assert_same(ours: Any, right: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(right)
    for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def assert_by_hand(
    late: Callable[..., Any], args: Any, hand: Callable[..., Any], others: Any
) -> Any:
    """A step of ``late`` is the step by hand; returns what it computes."""
    assert products(late, *args) == products(hand, *others)
    ours, right = compiled(late, *args), compiled(hand, *others)
    costs = [program.cost_analysis()['flops'] for program in (ours, right)]
    assert costs[0] <= costs[1]
    assert_same(jax.tree.leaves(ours(*args)), jax.tree.leaves(right(*others)))
    return ours(*args)


def both(case: Case) -> tuple[Any, Any, Any]:
    """A loss in two, what is kept, and the features by hand."""
    ahead = case.precomputed()
    kept = jax.jit(ahead.early)(case.params, *case.data)
    features = jax.jit(case.early)(case.params, *case.data)
    assert size(kept) == size(features)
    return ahead, kept, features


@pytest.mark.parametrize('make', FEATURES, ids=lambda make: make.__name__)
def test_a_step_is_that_on_stored_features(make: Callable[[stored.Sizes], Case]):
    case = make(stored.SMALL)
    assert case.late is not None
    ahead, kept, features = both(case)
    own, others = case.parts
    absent = jax.tree.map(lambda _: sg.ABSENT, others)
    value, grads = assert_by_hand(
        case.step(ahead.late),
        (own, absent, kept, *case.each),
        case.step(case.late),
        (own, {}, features, *case.each),
    )
    early = products(ahead.early, case.params, *case.data)
    assert early == products(case.early, case.params, *case.data)
    step = jax.jit(sg.value_and_grad(ahead.late, wrt=case.live))
    assert_same(step({**own, **absent}, kept, *case.each), (value, {**grads, **absent}))
    whole = sg.value_and_grad(case.loss, wrt=case.live)
    right = jax.jit(whole)(case.params, *case.data, *case.each)
    assert_same((value, {**grads, **absent}), right)


def test_nothing_is_lost_where_nothing_can_be_stored():
    """An adapter in front of the tower: a step is that of the whole loss."""
    case = stored.adapter(stored.SMALL)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.* is computed once')
        ahead, kept, _ = both(case)
    args = *case.parts, *case.data
    assert_by_hand(
        case.step(ahead.late), (*case.parts, kept), case.step(case.loss), args
    )


def assert_no_more_flops(ours: Any, hand: Any) -> None:
    """Each is a function with its arguments."""
    # jax 0.7.2 folds a constant less.
    assert flops(*ours) <= 1.01 * flops(*hand)


def three_steps(late: Callable[..., Any], situation: Situation, kept: Any) -> Any:
    """What three steps of gradient descent compute."""
    params, found = situation.params, []
    step = jax.jit(sg.value_and_grad(late, wrt=situation.wrt))
    for each in situation.each:
        value, grads = step(params, kept, *each)
        found.append((value, grads))
        params = descend(params, grads, situation.wrt)
    return found


def descend(params: Any, grads: Any, wrt: Any) -> Any:
    """The parameters after a step of gradient descent."""
    trained, rest = sg.partition(params, wrt)
    return sg.combine(jax.tree.map(lambda w, g: w - 0.3 * g, trained, grads), rest)


@pytest.mark.parametrize('make', SITUATIONS, ids=lambda make: make.__name__)
def test_a_public_situation(make: Callable[[], Situation]) -> None:
    """Three steps are those by hand; flops and bytes are no more than those."""
    situation = make()
    first = 1 + len(situation.data)
    each = tuple(range(first, first + len(situation.each[0])))
    args = situation.params, *situation.data, *situation.each[0]
    ahead = sg.precompute(situation.loss, *args, wrt=situation.wrt, each=each)
    kept = jax.jit(ahead.early)(situation.params, *situation.data)
    features = jax.jit(situation.early)(situation.params, *situation.data)
    assert size(kept) <= size(features)
    assert 'computed at each step' not in str(ahead)
    needed, _ = sg.partition(situation.params, ahead.reads)
    if situation.wrt is False:
        assert_same(ahead.late(needed, kept), situation.late({}, features))
        assert not jax.make_jaxpr(ahead.late)(needed, kept).eqns
        early = situation.early, situation.params, *situation.data
        assert_no_more_flops((ahead.early, *early[1:]), early)
        return
    ours = three_steps(ahead.late, situation._replace(params=needed), kept)
    hand = three_steps(situation.late, situation, features)
    assert_same(ours, hand)
    step, by_hand = (
        sg.value_and_grad(late, wrt=situation.wrt)
        for late in (ahead.late, situation.late)
    )
    assert_no_more_flops(
        (step, needed, kept, *args[first:]),
        (by_hand, situation.params, features, *args[first:]),
    )
    whole = sg.value_and_grad(situation.loss, wrt=situation.wrt)
    assert_same(ours[0], whole(*args))


def test_a_locked_image_tower() -> None:
    """SigLIP and LiT: all pairs of a batch meet in the loss, in shuffled batches."""
    params: Any = {
        'image': situations.layers(1, 8, 8, 4),
        'embed': situations.normal(2, 11, 8),
        'text': situations.layers(3, 8, 4),
        'scale': jnp.log(10.0),
    }
    x, ids, wrt = situations.X, situations.IDS, ['embed', 'text/*', 'scale']

    def by_hand(params: Any, image: Any, ids: Any) -> Any:
        image = image / jnp.linalg.norm(image, axis=-1, keepdims=True)
        text = situations.tower(params['text'], params['embed'][ids].mean(1))
        scores = jnp.exp(params['scale']) * image @ text.T
        signs = 2 * jnp.eye(len(ids)) - 1
        return -jnp.mean(jax.nn.log_sigmoid(signs * scores))

    def loss(params: Any, x: Any, ids: Any) -> Any:
        return by_hand(params, situations.tower(params['image'], x), ids)

    ahead = sg.precompute(loss, params, x[:2], ids[:2], wrt=wrt, examples=True)
    kept = [ahead.early(params, x[n : n + 2], ids[n : n + 2]) for n in (0, 2, 4)]
    kept = jax.tree.map(lambda *rows: jnp.concatenate(rows), *kept)
    image = situations.tower(params['image'], x)
    assert size(kept) <= size((image, ids))
    step = jax.jit(sg.value_and_grad(ahead.late, wrt=wrt))
    step_by_hand = jax.jit(sg.value_and_grad(by_hand, wrt=wrt))
    for rows in (jnp.array(rows) for rows in ([5, 0], [3, 1], [2, 4])):
        ours = step, params, [k[rows] for k in kept]
        hand = step_by_hand, params, image[rows], ids[rows]
        value, grads = step(*ours[1:])
        assert_same((value, grads), step_by_hand(*hand[1:]))
        assert_no_more_flops(ours, hand)
        params = descend(params, grads, wrt)


@pytest.mark.skipif(not hasattr(nnx.Variable, 'get_value'), reason='flax_sg.nnx')
def test_alignment_in_nnx() -> None:
    """REPA: a denoiser beside a frozen encoder, trained for three steps."""
    models = [situations.Repa(nnx.Rngs(0)) for _ in range(2)]
    x, wrt = situations.X, nnx.Not(nnx.PathContains('encoder'))
    live = sg.live(situations.Repa.__call__, models[0], x, KEYS[0])
    live &= ~sg.where('encoder/**')
    ahead = sg.precompute(
        situations.Repa.__call__, models[0], x, KEYS[0], wrt=live, each=2
    )
    kept, seen = ahead.early(models[0], x), models[1].encoder(x)
    assert size(kept) <= size((x, seen))
    where = nnx.DiffState(0, nnx.All(nnx.Param, wrt))

    graph, state = nnx.split(models[0])

    def step(loss: Callable[..., Any]) -> Callable[..., Any]:
        def of_state(state: Any, *args: Any) -> Any:
            model = nnx.merge(graph, state)
            return nnx.value_and_grad(loss, argnums=where)(model, *args)

        return of_state

    assert_no_more_flops(
        (step(ahead.late), state, kept, KEYS[0]),
        (step(situations.Repa.of_features), state, x, seen, KEYS[0]),
    )
    for key in KEYS:
        ours = nnx.value_and_grad(ahead.late, argnums=where)(models[0], kept, key)
        hand = nnx.value_and_grad(situations.Repa.of_features, argnums=where)
        right = hand(models[1], x, seen, key)
        assert_same(ours, right)
        for model, (_, grads) in zip(models, (ours, right), strict=True):
            moved = jax.tree.map(lambda w, g: w - 0.3 * g, nnx.state(model, wrt), grads)
            nnx.update(model, moved)
