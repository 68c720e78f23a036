"""NNX modules and states where flax_sg takes a tree, and filters for NNX."""

from typing import Any

import jax
import optax
import pytest

import flax_sg as sg
import oracle
from by_hand import Net, X, loss_of, pure
from flax_sg import errors, nnx, testing

# ``adam`` counts its steps in another dtype.
pytestmark = pytest.mark.usefixtures('standard_promotion')

BODY = ['body/0/bias', 'body/0/kernel', 'body/1/bias', 'body/1/kernel']
OTHERS = ['head/bias', 'head/kernel', 'norm/bias', 'norm/scale']


def frozen_body(model: Any, x: Any = X) -> Any:
    return loss_of(nnx.stop_gradient(model, 'body/**'), x)


def test_a_filter_for_nnx():
    model = Net()
    live = nnx.where(model, sg.live(frozen_body, model, X))
    for where in (OTHERS, ['head/**', 'norm/*'], lambda path: path[:4] != 'body'):
        assert nnx.where(Net(1), where) == live
    _, some, _ = nnx.split(model, live, ...)
    assert ['/'.join(map(str, path)) for path, _ in nnx.to_flat_state(some)] == OTHERS
    both = nnx.All(live, nnx.PathContains('head'))
    assert len(jax.tree.leaves(nnx.state(model, both))) == 2
    stats = nnx.where(model, 'norm/mean', kind=nnx.BatchStat)
    assert list(nnx.state(model, stats)['norm']) == ['mean']
    every = nnx.state(model, nnx.where(model, 'norm/*', kind=...))
    assert list(every['norm']) == ['bias', 'mean', 'scale', 'var']
    with pytest.raises(errors.UnusedFilterError, match="Did you mean 'head/"):
        nnx.where(model, 'haed/**')


@pytest.mark.parametrize('jit', [nnx.jit, lambda fn: fn])
def test_gradients_and_an_optimizer_for_what_is_trained(jit):
    """Frozen by hand in gradients and optimizer, by ``sg.live``, by ``sg.freeze``."""

    def trained(loss, tx, wrt):
        model = Net()
        optimizer = nnx.Optimizer(model, tx, wrt=wrt)
        grad = nnx.grad(loss, argnums=nnx.DiffState(0, wrt))
        step = jit(lambda model, optimizer: optimizer.update(model, grad(model)))
        for _ in range(3):
            step(model, optimizer)
        return pure(model), len(jax.tree.leaves(nnx.state(optimizer)['opt_state']))

    tx, live = optax.adamw(0.1), nnx.where(Net(), sg.live(frozen_body, Net(), X))
    names = nnx.Any(nnx.PathContains('head'), nnx.PathContains('norm'))
    by_hand = trained(loss_of, tx, nnx.All(nnx.Param, names))
    oracle.assert_same(trained(frozen_body, tx, live), by_hand)
    frozen = trained(loss_of, sg.freeze(tx, 'body/**'), nnx.Param)
    oracle.assert_same(frozen, by_hand)


def test_masks_labels_and_parts_of_states():
    params = nnx.state(Net(), nnx.Param)
    mask = nnx.to_pure_dict(sg.mask(params, frozen=['body/1/*', 'norm/*', 'head/*']))
    labels = sg.labels(params, {'slow': 'body/**', 'fast': ['head/*', 'norm/*']})
    assert mask['body'][0] == dict.fromkeys(['bias', 'kernel'], False), mask
    assert nnx.to_pure_dict(labels)['norm'] == {'bias': 'fast', 'scale': 'fast'}
    oracle.assert_same(sg.combine(*sg.partition(params, 'body/**')), params)


def test_what_a_model_writes_in_a_gradient_of_a_tree_is_told():
    def with_state(model):
        return loss_of(model), nnx.state(model, nnx.BatchStat)

    model, where = Net(), 'head/**'
    for gradient in (
        lambda: sg.grad(loss_of, wrt=where)(model),
        lambda: sg.vjp(loss_of, model, wrt=where),
    ):
        with pytest.warns(UserWarning, match='batch statistics, counts of random keys'):
            gradient()
    sg.grad(with_state, has_aux=True, wrt=where)(model)  # Here nothing is lost.
    model.eval()
    oracle.assert_same(
        sg.grad(loss_of, wrt=where)(model).head.bias[...],
        nnx.grad(loss_of)(model).head.bias[...],
    )


def test_parts_of_a_module():
    model = Net(dropout=0.0)
    model.eval()
    body, rest = sg.partition(model, 'body/**')

    def of_rest(rest):
        return loss_of(sg.combine(body, rest))

    grads, expected = sg.grad(of_rest)(rest), pure(nnx.grad(loss_of)(model))
    oracle.assert_same(grads.head.kernel[...], expected['head']['kernel'])
    # Batch statistics are differentiated if they are named, as with nnx.grad.
    for absent in grads.body[0].kernel, grads.norm.mean:
        assert absent.get_raw_value() is sg.ABSENT
    assert sg.grad(of_rest, wrt='norm/mean')(rest).norm.mean[...].any()


def test_reports():
    flow = sg.gradient_flow(frozen_body, Net(), X)
    assert list(map(str, flow.parameters)) == [*BODY, *OTHERS]
    assert flow.status_of('output', 'body/0/kernel') == 'stopped'
    meant = sg.gradient_flow(loss_of, Net(), X, wrt=['norm/mean', 'head/bias'])
    assert 'norm/mean' in meant.parameters
    testing.assert_trains_only(frozen_body, ['head/**', 'norm/**'], Net(), X)
    testing.assert_stopped(frozen_body, 'body/**', Net(), X)
    with pytest.raises(errors.ExpectationError, match='body/0/bias is used at'):
        testing.assert_flows(frozen_body, 'body/0/*', Net(), X)


def test_tables():
    """Of a module, a view of it, and a module in a tuple."""
    table = sg.tabulate(Net(), method=lambda model, x: frozen_body(model, x))(X)
    assert table.splitlines()[-1] == 'Trainable: 18 (72 B)   Frozen: 40 (160 B)'
    for tree, start in (Net(), ''), ((Net(), 1.0), '0/'):
        row = repr(sg.paths(tree, where=start + 'body/**')).splitlines()[2]
        assert row.split()[:2] == ['yes', start + 'body/[0-1]/bias']


@pytest.mark.parametrize('tree', [Net(), [{'net': Net()}]])
def test_a_copy_of_a_module_is_refused(tree):
    """What BatchNorm writes on it would be lost."""
    for fn in sg.stop_gradient, sg.substitute:
        with pytest.raises(errors.ArgumentTypeError, match='would copy a Net'):
            fn(tree, {})
