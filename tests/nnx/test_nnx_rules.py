"""The other rules as blocks on NNX models, against programs by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import by_hand
import oracle
from by_hand import Net, X, loss_of, pure
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


def grad_of_w(block: Any, model: Any, loss: Any = apply) -> Any:
    with block:
        return pure(nnx.grad(loss)(model))['w'].tolist()


def test_rules_for_cotangents():
    """The cotangent of ``w`` is the sum over all three reads."""
    model = Scale()
    for block, expected in [
        (nnx.scale_gradient(model, 'w', 0.5), [2.5, 4.5, 6.5]),
        (nnx.reverse_gradient(model, 'w'), [-5.0, -9.0, -13.0]),
        (nnx.clip_gradient(model, 'w', value=8.0), [5.0, 8.0, 8.0]),
        (nnx.replace_cotangent(model, 'w', 7.0), [7.0, 7.0, 7.0]),
        (nnx.map_cotangent(model, 'w', lambda path, ct: ct**2), [25.0, 81.0, 169.0]),
        (nnx.map_cotangent(model, '*', lambda path, ct: ct * len(path)), [5, 9, 13]),
    ]:
        value, grads = nnx.value_and_grad(apply)(model)
        oracle.assert_same(pure(grads)['w'], PLAIN)
        with block:
            inside = nnx.value_and_grad(apply)(model)[0]
        oracle.assert_same(inside, value)
        for fn in apply, nnx.jit(apply), nnx.remat(apply):
            assert grad_of_w(block, model, fn) == expected
    assert by_hand.is_plain(model)


def test_norms():
    model = Scale()
    norm = (5.0**2 + 9.0**2 + 13.0**2) ** 0.5
    with nnx.clip_gradient(model, 'w', norm=1.0):
        grads = pure(nnx.grad(apply)(model))['w']
    assert jnp.allclose(grads * norm, PLAIN)
    with pytest.raises(errors.ArgumentTypeError, match='takes them together'):
        nnx.clip_gradient(model, 'w', global_norm=1.0)


def test_a_printed_cotangent(capfd):
    model = Scale()
    with nnx.print_cotangent(model, 'w'):
        nnx.grad(apply)(model)
    jax.effects_barrier()
    assert 'cotangent of w: [ 5.  9. 13.]' in capfd.readouterr().out


def test_a_rule_is_applied_once_for_all_lines_of_a_block():
    """Reads in a closure, a loop and beside are summed before the rule."""

    def loss(model):
        with nnx.map_cotangent(model, 'w', lambda path, ct: ct**2):
            first = jnp.sum(model.w * ONES)
            inner = jax.jit(lambda x: jnp.sum(model.w * x))(ONES)
            with nnx.scale_gradient(model, 'w', 2.0):
                scaled = jnp.sum(model.w * ONES)
            looped, _ = jax.lax.scan(
                lambda x, _: (x + jnp.sum(model.w * ONES), None), 0.0, None, length=3
            )
        return first + inner + scaled + looped + jnp.sum(model.w[...])

    # 1 + 1 + 2 + 3, squared, and 1 outside of the block.
    assert pure(nnx.grad(loss)(Scale()))['w'].tolist() == [50.0] * 3


def test_rules_meet_as_those_of_linen():
    model = Scale()
    twice = nnx.scale_gradient(model, 'w', 2.0)
    with twice, twice:
        assert pure(nnx.grad(apply)(model))['w'].tolist() == [20.0, 36.0, 52.0]
    with nnx.map_cotangent(model, 'w', lambda path, ct: ct**2), twice:
        assert pure(nnx.grad(apply)(model))['w'].tolist() == [100.0, 324.0, 676.0]
    with nnx.stop_gradient(model, 'w'), twice:
        assert pure(nnx.grad(apply)(model))['w'].tolist() == [0.0] * 3


def test_forward_mode():
    graph, state = nnx.split(Scale())

    def value(state):
        model = nnx.merge(graph, state)
        with nnx.scale_gradient(model, 'w', 3.0):
            return apply(model)

    tangent = jax.tree.map(jnp.zeros_like, state)
    tangent['w'] = nnx.Param(ONES)
    assert float(jax.jvp(value, (state,), (tangent,))[1]) == 3.0 * 27.0


def test_a_traced_factor_around_a_compiled_function():
    model, compiled = Scale(), nnx.jit(nnx.grad(apply))

    @jax.jit
    def scaled(factor):
        graph, state = nnx.split(model)

        def loss(state):
            inner = nnx.merge(graph, state)
            with nnx.scale_gradient(inner, 'w', factor):
                return apply(inner)

        return pure(jax.grad(loss)(state))['w']

    for factor in (1.0, 2.0, 3.0):
        oracle.assert_same(scaled(factor), factor * PLAIN)
        with nnx.scale_gradient(model, 'w', factor):
            oracle.assert_same(pure(compiled(model))['w'], factor * PLAIN)


def test_maml_stops_one_level():
    def inner(model):
        with nnx.stop_gradient(model, 'v', levels=1):
            return nnx.grad(apply)(model)

    def outer(model):
        return jnp.sum(inner(model)['w'][...] + inner(model)['v'][...])

    grads = pure(nnx.grad(outer)(Scale()))
    assert grads['v'].tolist() == [4.0] * 3  # Of 1 + 2 w v.
    assert not pure(inner(Scale()))['v'].any()


# Other values


def by_substitution(model: Any, values: Any) -> Any:
    graph, _ = nnx.split(model)
    return nnx.merge(graph, nnx.state(values))


@pytest.mark.parametrize('form', ['model', 'state', 'tree', 'function'])
@pytest.mark.parametrize('transform', [lambda fn: fn, nnx.jit, nnx.remat])
def test_other_values(form, transform):
    model, other = Scale(), Scale(5.0)
    values: Any = {
        'model': other,
        'state': nnx.state(other),
        'tree': {'w': other.w[...], 'v': other.v[...]},
        'function': lambda path, value: value + (3.0 if path == 'w' else 0.0),
    }[form]
    plain = apply(model)
    run = transform(apply)
    for _ in range(2):
        with nnx.substitute(model, values):
            oracle.assert_same(run(model), apply(other))
        oracle.assert_same(run(model), plain)
    assert model.w[...].tolist() == [2.0] * 3
    assert by_hand.is_plain(model)


def test_gradients_flow_to_other_values():
    model = Scale()

    def loss(target, model):
        with nnx.substitute(model, target, where='w'):
            return nnx.jit(apply)(model)

    of_target, of_model = nnx.grad(loss, argnums=(0, 1))(Scale(5.0), model)
    assert pure(of_target)['w'].tolist() == [11.0, 21.0, 31.0]
    assert pure(of_model)['w'].tolist() == [0.0] * 3
    assert pure(of_model)['v'].tolist() == [25.0] * 3
    assert not pure(of_target)['v'].any()


def test_other_values_are_never_stale():
    model, run = Scale(), nnx.jit(apply)
    for value in (1.0, 2.0):
        with nnx.substitute(model, {'w': jnp.full(3, value)}):
            oracle.assert_same(run(model), apply(Scale(value)))

    @jax.jit
    def of(w):
        with nnx.substitute(model, {'w': w}):
            return apply(model)

    for value in (1.0, 2.0):
        oracle.assert_same(of(jnp.full(3, value)), apply(Scale(value)))


def test_a_function_may_read_the_model():
    model = Scale()
    with nnx.substitute(model, lambda path, value: model.v + value, where='w'):
        assert model.w[...].tolist() == [3.0, 4.0, 5.0]


def test_values_that_do_not_fit():
    model = Scale()
    short = nnx.substitute(model, {'w': jnp.ones(2)})
    with pytest.raises(errors.StructureError, match=r"'w'.*\n.*float32\[3\]"), short:
        apply(model)
    with pytest.raises(errors.UnusedFilterError, match="'u'"):
        nnx.substitute(model, {'u': ONES}).__enter__()
    some = nnx.substitute(model, {'w': ONES}, where='*')
    with pytest.raises(errors.StructureError, match='no value'), some:
        apply(model)


def test_a_target_network():
    model, target = Net(dropout=0.0), Net(1, dropout=0.0)

    def in_block(model):
        with nnx.substitute(model, target):
            goal = model.features(X)
        return jnp.mean((model.features(X) - goal) ** 2)

    def by_copy(model):
        return jnp.mean((model.features(X) - target.features(X)) ** 2)

    actual = pure(nnx.grad(in_block)(Net(dropout=0.0)))
    oracle.assert_same(actual, pure(nnx.grad(by_copy)(model)))


# Reading alone


def test_read_only():
    model = Net()
    with nnx.read_only(model, ['norm/mean', 'norm/var']):
        model.norm(X, use_running_average=True)
        for write in lambda: model.norm(X), lambda: nnx.jit(loss_of)(model):
            with pytest.raises(errors.BlockError, match="'norm/mean' is written"):
                write()
    model.norm(X)
    assert model.norm.mean[...].any()
