"""The other rules as views of NNX models, against programs by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import oracle
from by_hand import Net, X, pure
from flax_sg import errors, nnx


class Scale(nnx.Module):
    def __init__(self, value: float = 2.0):
        self.w = nnx.Param(jnp.full(3, value))
        self.v = nnx.Param(jnp.arange(1.0, 4.0))

    def __call__(self, x):
        return jnp.sum(self.w * x + self.w * self.w * self.v)


ONES = jnp.ones(3)
# The gradient of ``w``: 1 + 4 v.
PLAIN = jnp.array([5.0, 9.0, 13.0])


def apply(model: Any) -> Any:
    return model(ONES)


def grad_of_w(loss: Any, model: Any = None) -> Any:
    return pure(nnx.grad(loss)(model or Scale()))['w'].tolist()


NORM = (5.0**2 + 9.0**2 + 13.0**2) ** 0.5
RULES: list[tuple[Any, list[float]]] = [
    (lambda m: nnx.scale_gradient(m, 'w', 0.5), [2.5, 4.5, 6.5]),
    (lambda m: nnx.reverse_gradient(m, 'w'), [-5.0, -9.0, -13.0]),
    (lambda m: nnx.reverse_gradient(m, 'w', 2.0), [-10.0, -18.0, -26.0]),
    (lambda m: nnx.clip_gradient(m, 'w', value=8.0), [5.0, 8.0, 8.0]),
    (lambda m: nnx.clip_gradient(m, 'w', norm=NORM), [5.0, 9.0, 13.0]),
    (lambda m: nnx.replace_cotangent(m, 'w', 7.0), [7.0, 7.0, 7.0]),
    (lambda m: nnx.map_cotangent(m, 'w', lambda _, ct: ct**2), [25.0, 81.0, 169.0]),
    (lambda m: nnx.map_cotangent(m, '*', lambda p, ct: ct * len(p)), [5.0, 9.0, 13.0]),
    (lambda m: nnx.map_cotangent(m, 'w', lambda _, ct, k: ct * k, 2.0), [10.0, 18, 26]),
]


@pytest.mark.every_case
@pytest.mark.parametrize('number', range(len(RULES)))
def test_rules_for_gradients(number):
    """The gradient of ``w`` is the sum over all three reads."""
    view, expected = RULES[number]
    model = Scale()
    oracle.assert_same(apply(view(model)), apply(model))
    for fn in apply, nnx.jit(apply), nnx.remat(apply):
        assert grad_of_w(lambda model, fn=fn: fn(view(model))) == pytest.approx(
            expected
        )
    assert grad_of_w(apply) == PLAIN.tolist()


def test_a_norm_of_all_variables_together():
    """A view has all of them, so the norm is that of ``optax.clip_by_global_norm``."""
    full = pure(nnx.grad(apply)(Scale()))
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in full.values()))
    view = functools.partial(nnx.clip_gradient, where=True, global_norm=1.0)
    ours = pure(nnx.grad(lambda model: apply(view(model)))(Scale()))
    for name, leaf in ours.items():
        assert jnp.allclose(leaf * norm, full[name])


def test_a_printed_gradient(capfd):
    nnx.grad(lambda model: apply(nnx.print_cotangent(model, 'w')))(Scale())
    jax.effects_barrier()
    assert 'cotangent of w: [ 5.  9. 13.]' in capfd.readouterr().out


def test_a_rule_acts_once_for_all_reads_through_a_view():
    """Reads in a closure, a loop and beside are summed before the rule."""

    def loss(model):
        view = nnx.map_cotangent(model, 'w', lambda path, ct: ct**2)
        scaled = nnx.scale_gradient(view, 'w', 2.0)
        inner = jax.jit(lambda x: jnp.sum(view.w * x))(ONES)
        looped, _ = jax.lax.scan(
            lambda x, _: (x + jnp.sum(view.w * ONES), None), 0.0, None, length=3
        )
        reads = jnp.sum(view.w * ONES) + inner + jnp.sum(scaled.w * ONES) + looped
        return reads + jnp.sum(model.w[...])

    # 1 + 1 + 2 + 3, squared, and 1 beside the view.
    assert grad_of_w(loss) == [50.0] * 3


def test_rules_meet_as_those_of_linen():
    twice = functools.partial(nnx.scale_gradient, where='w', factor=2.0)
    square = functools.partial(
        nnx.map_cotangent, where='w', fn=lambda path, cotangent: cotangent**2
    )
    stop = functools.partial(nnx.stop_gradient, where='w')
    for views, expected in [
        ((twice, twice), [20.0, 36.0, 52.0]),
        ((square, twice), [100.0, 324.0, 676.0]),
        ((twice, square), [50.0, 162.0, 338.0]),
        ((stop, twice), [0.0] * 3),
        ((twice, stop), [0.0] * 3),
    ]:
        # The outer view first, as blocks nest.
        of = functools.partial(functools.reduce, lambda model, view: view(model), views)
        assert grad_of_w(lambda model, of=of: apply(of(model))) == expected


def test_forward_mode():
    graph, state = nnx.split(Scale())

    def value(state):
        return apply(nnx.scale_gradient(nnx.merge(graph, state), 'w', 3.0))

    tangent = jax.tree.map(jnp.zeros_like, state)
    tangent['w'] = nnx.Param(ONES)
    assert float(jax.jvp(value, (state,), (tangent,))[1]) == 3.0 * 27.0


def test_a_traced_factor():
    @jax.jit
    def scaled(factor):
        loss = nnx.grad(lambda model: apply(nnx.scale_gradient(model, 'w', factor)))
        return pure(loss(Scale()))['w']

    for factor in (1.0, 2.0):
        oracle.assert_same(scaled(factor), factor * PLAIN)


def test_maml_stops_one_level():
    def inner(model):
        return nnx.grad(lambda m: apply(nnx.stop_gradient(m, 'v', levels=1)))(model)

    def outer(model):
        return jnp.sum(inner(model)['w'][...] + inner(model)['v'][...])

    assert pure(nnx.grad(outer)(Scale()))['v'].tolist() == [4.0] * 3  # Of 1 + 2 w v.
    assert not pure(inner(Scale()))['v'].any()


# Other values


@pytest.mark.parametrize('form', ['model', 'state', 'tree', 'mixed', 'function'])
@pytest.mark.parametrize('transform', [lambda fn: fn, nnx.jit, nnx.remat])
def test_other_values(form, transform):
    pair, other = nnx.Dict(a=Scale(), b=Scale()), nnx.Dict(a=Scale(5.0), b=Scale(3.0))
    values: Any = {
        'model': other,
        'state': nnx.state(other),
        'tree': nnx.to_pure_dict(nnx.state(other)),
        'mixed': {'a': other.a, 'b': {'w': other.b.w, 'v': other.b.v[...]}},
        'function': lambda path, value: value + {'a/w': 3.0, 'b/w': 1.0}.get(path, 0.0),
    }[form]

    def run(pair):
        return apply(pair.a) + 2.0 * apply(pair.b)

    view = nnx.substitute(pair, values)
    oracle.assert_same(transform(run)(view), transform(run)(other))
    assert pair.a.w[...].tolist() == [2.0] * 3


def test_gradients_flow_to_other_values():
    def loss(target, model):
        return nnx.jit(apply)(nnx.substitute(model, target, where='w'))

    of_target, of_model = nnx.grad(loss, argnums=(0, 1))(Scale(5.0), Scale())
    assert pure(of_target)['w'].tolist() == [11.0, 21.0, 31.0]
    assert pure(of_model)['w'].tolist() == [0.0] * 3
    assert pure(of_model)['v'].tolist() == [25.0] * 3
    assert not pure(of_target)['v'].any()


def test_values_that_do_not_fit():
    model = Scale()
    with pytest.raises(errors.StructureError, match=r"'w'.*\n.*float32\[3\]"):
        nnx.substitute(model, {'w': jnp.ones(2)})
    with pytest.raises(errors.UnusedFilterError, match="'u'"):
        nnx.substitute(model, {'u': ONES})
    with pytest.raises(errors.StructureError, match='no value'):
        nnx.substitute(model, {'w': ONES}, where='*')


def test_a_target_network():
    """Averages that were kept of it; the statistics are those of the model."""
    target = nnx.state(Net(1, dropout=0.0), nnx.Param)

    def loss(model):
        view = nnx.stop_gradient(nnx.substitute(model, target), True)
        return jnp.mean((model(X) - view(X)) ** 2)

    def by_copy(model):
        graph, _, rest = nnx.split(model, nnx.Param, ...)
        out = model(X)
        graph, _, rest = nnx.split(model, nnx.Param, ...)
        other = nnx.merge(graph, target, rest)
        goal = other(X)
        nnx.update(model, nnx.state(other, nnx.Not(nnx.Param)))
        return jnp.mean((out - goal) ** 2)

    models = Net(dropout=0.0), Net(dropout=0.0)
    pairs = zip((loss, by_copy), models, strict=True)
    oracle.assert_same(*(pure(nnx.grad(of)(model)) for of, model in pairs))
    oracle.assert_same(*map(pure, models))
