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
from tests.helpers.programs import compiled

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
    flops = [program.cost_analysis()['flops'] for program in (ours, right)]
    assert flops[0] <= flops[1]
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
        warnings.filterwarnings('ignore', 'Nothing is computed once')
        ahead, kept, _ = both(case)
    args = *case.parts, *case.data
    assert_by_hand(
        case.step(ahead.late), (*case.parts, kept), case.step(case.loss), args
    )


def test_several_heads_by_vmap():
    """One ``kept`` serves heads of several seeds."""
    case = stored.encoder(stored.SMALL)
    ahead, kept, features = both(case)
    heads = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), case.params['head'])
    axes = {'head': 0, 'encoder': None}
    assert case.late is not None

    def step(late: Callable[..., Any]) -> Callable[..., Any]:
        def total(heads: Any, others: Any, kept: Any) -> Any:
            params = {**others, 'head': heads}
            return jnp.sum(jax.vmap(late, (axes, None))(params, kept))

        return jax.value_and_grad(total)

    absent = {'encoder': sg.ABSENT}
    assert_by_hand(
        step(ahead.late),
        (heads, absent, kept),
        step(case.late),
        (heads, absent, features),
    )


class Probe(nnx.Module):
    """A head on a backbone with batch normalization and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        norm, noise = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        layers = nnx.Linear(4, 6, rngs=rngs), norm, nnx.relu, noise
        self.backbone = nnx.Sequential(*layers, nnx.Linear(6, 5, rngs=rngs))
        self.head = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jax.lax.stop_gradient(self.backbone(x)))


def test_a_model_of_nnx():
    """A backbone in evaluation mode; by hand, its outputs are stored."""
    model, x = Probe(nnx.Rngs(0)), jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
    model.backbone.eval()

    def loss(model: Probe, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    live = sg.live(loss, model, x)
    ahead = sg.precompute(loss, model, x, wrt=live)
    kept, features = ahead.early(model, x), model.backbone(x)
    assert size(kept) == size(features)
    assert products(lambda x: ahead.early(model, x), x) == products(model.backbone, x)
    graph, own, others = nnx.split(model, nnx.PathContains('head'), ...)

    def ours(own: Any, kept: Any) -> Any:
        model = nnx.merge(graph, own, others)
        return sg.value_and_grad(ahead.late, wrt=live)(model, kept)

    def hand(own: Any, features: Any) -> Any:
        def loss(own: Any) -> jax.Array:
            head = nnx.merge(graph, own, others).head
            return jnp.mean(head(features) ** 2)

        return jax.value_and_grad(loss)(own)

    assert_by_hand(ours, (own, kept), hand, (own, features))
