"""NNX modules and states where flax_sg takes a tree, and filters for NNX."""

from typing import Any

import jax
import jax.numpy as jnp
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


def names_where(tree: Any, said: Any = True) -> list[str]:
    return [name for name, leaf in oracle.by_path(tree).items() if leaf == said]


def changed(before: Any, model: Any) -> list[str]:
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, pure(model))
    return names_where(moved)


def trained(
    model: Any, loss: Any, tx: Any, wrt: Any, steps: int, compiled: bool
) -> Any:
    """The state of the optimizer after some steps."""
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    grad = nnx.grad(loss, argnums=nnx.DiffState(0, wrt))

    def step(model, optimizer):
        optimizer.update(model, grad(model))

    step = nnx.jit(step) if compiled else step
    for _ in range(steps):
        step(model, optimizer)
    return nnx.state(optimizer)


def test_a_filter_for_nnx():
    model = Net()
    live = nnx.where(model, sg.live(frozen_body, model, X))
    assert live == nnx.where(Net(1), OTHERS)
    assert hash(live) == hash(nnx.where(Net(1), OTHERS))
    for where in (OTHERS, ['head/**', 'norm/*'], lambda path: path[:4] != 'body'):
        assert nnx.where(model, where) == live
    flat = nnx.to_flat_state(nnx.state(model, live))
    assert ['/'.join(map(str, path)) for path, _ in flat] == OTHERS
    _, some, rest = nnx.split(model, live, ...)
    assert len(jax.tree.leaves(some)) == 4
    assert 'mean' in rest['norm']
    both = nnx.All(live, nnx.PathContains('head'))
    assert len(jax.tree.leaves(nnx.state(model, both))) == 2
    model.table = nnx.data(jnp.ones(3))  # A plain array, which is no Variable.
    assert len(jax.tree.leaves(nnx.state(model, nnx.where(model, OTHERS)))) == 4


def test_a_filter_of_batch_statistics():
    where = nnx.where(Net(), 'norm/mean', kind=nnx.BatchStat)
    assert list(nnx.state(Net(), where)['norm']) == ['mean']
    every = nnx.state(Net(), nnx.where(Net(), 'norm/*', kind=...))
    assert list(every['norm']) == ['bias', 'mean', 'scale', 'var']


def test_names_are_checked():
    with pytest.raises(errors.UnusedFilterError, match="Did you mean 'head/"):
        nnx.where(Net(), 'haed/**')
    with pytest.raises(errors.UnusedFilterError, match='norm/mean'):
        nnx.where(Net(), 'norm/mean')
    with pytest.raises(errors.PartError, match='an NNX filter takes whole leaves'):
        nnx.where(Net(), sg.at('head/kernel', 0))
    said = r"no '0/body/0/bias'.* nnx\.where"
    with pytest.raises(errors.UnknownNameError, match=said):
        nnx.state([Net()], nnx.where(Net(), 'head/**'))


@pytest.mark.parametrize('compiled', [False, True])
def test_gradients_and_an_optimizer_for_what_is_trained(compiled):
    model, other = Net(), Net()
    before = pure(model)
    live = nnx.where(model, sg.live(frozen_body, model, X))
    by_type = nnx.Any(nnx.PathContains('head'), nnx.PathContains('norm'))
    states = [
        trained(model, frozen_body, optax.adamw(0.1), live, 3, compiled),
        trained(
            other, loss_of, optax.adamw(0.1), nnx.All(nnx.Param, by_type), 3, compiled
        ),
    ]
    oracle.assert_same(pure(model), pure(other))
    assert len({len(jax.tree.leaves(state)) for state in states}) == 1
    stats = ['drop/rngs/count', 'norm/mean', 'norm/var']
    assert sorted(changed(before, model)) == sorted(OTHERS + stats)


@pytest.mark.parametrize('compiled', [False, True])
def test_a_frozen_part_in_the_optimizer(compiled):
    model = Net()
    before = pure(model)
    tx = sg.freeze(optax.adamw(0.1), 'body/**')
    state = trained(model, loss_of, tx, nnx.Param, 2, compiled)
    assert not set(BODY) & set(changed(before, model))
    assert set(OTHERS) <= set(changed(before, model))
    assert len(jax.tree.leaves(state['opt_state'])) == 1 + 2 * len(OTHERS)


def test_masks_labels_and_parts_of_states():
    params = nnx.state(Net(), nnx.Param)
    for mask in sg.mask(params, frozen='body/**'), sg.mask(params, trained='body/**'):
        assert names_where(nnx.to_pure_dict(mask)) == BODY
    labels = sg.labels(params, {'slow': 'body/**', 'fast': ['head/*', 'norm/*']})
    assert names_where(nnx.to_pure_dict(labels), 'slow') == BODY
    body, rest = sg.partition(params, 'body/**')
    oracle.assert_same(sg.combine(rest, body), params)

    def kernel(params):
        return sg.stop_gradient(params, 'body/**')['body'][0]['kernel'][...].sum()

    assert oracle.is_zero(jax.grad(kernel)(params))


def test_parts_of_a_module():
    model = Net(dropout=0.0)
    body, rest = sg.partition(model, 'body/**')

    def loss(model):
        return model.head(model.norm(model.features(X), use_running_average=True)).sum()

    def of_rest(rest):
        return loss(sg.combine(body, rest))

    grads = sg.grad(of_rest)(rest)
    expected = pure(nnx.grad(loss)(model))
    oracle.assert_same(grads.head.kernel[...], expected['head']['kernel'])
    assert grads.body[0].kernel.get_raw_value() is sg.ABSENT
    # Batch statistics are differentiated if they are named, as with nnx.grad.
    assert grads.norm.mean.get_raw_value() is sg.ABSENT
    assert sg.grad(of_rest, wrt='norm/mean')(rest).norm.mean[...].any()


def test_reports():
    flow = sg.gradient_flow(frozen_body, Net(), X)
    assert list(map(str, flow.parameters)) == [*BODY, *OTHERS]
    assert flow.status_of('output', 'body/0/kernel') == 'stopped'
    assert flow.status_of('output', 'norm/scale') == 'flows'
    assert repr(sg.live(frozen_body, Net(), X)).startswith("<live: 'head/bias', 'he")
    meant = sg.gradient_flow(loss_of, Net(), X, wrt=['norm/mean', 'head/bias'])
    assert 'norm/mean' in meant.parameters
    testing.assert_trains_only(frozen_body, ['head/**', 'norm/**'], Net(), X)
    testing.assert_stopped(frozen_body, 'body/**', Net(), X)
    testing.assert_flows(frozen_body, 'norm/**', Net(), X)
    with pytest.raises(errors.ExpectationError, match='body/0/bias is stopped by'):
        testing.assert_flows(frozen_body, 'body/0/*', Net(), X)


def test_tables():
    assert repr(sg.paths(Net(), where='body/**')).splitlines()[2:4] == [
        'yes        body/0..1/bias     Layer       float32[4]      params',
        'yes        body/0..1/kernel   Layer       float32[4, 4]   params',
    ]

    class Frozen(Net):
        def __call__(self, x):
            return Net.__call__(nnx.stop_gradient(self, 'body/**'), x)

    table = sg.tabulate(Frozen())(X).splitlines()
    assert table[2:] == [
        '(model)    Frozen              58          18   partly',
        '  body     List                40           0   frozen',
        '    0..1   Layer               40           0   frozen',
        '  head     Linear              10          10   trainable',
        '  norm     BatchNorm            8           8   trainable',
        '',
        'Trainable: 18 (72 B)   Frozen: 40 (160 B)',
    ]
    features = sg.tabulate(Net(), method=Net.features)(X)
    assert features.splitlines()[-1] == 'Trainable: 40 (160 B)   Frozen: 18 (72 B)'


@pytest.mark.parametrize(
    'call',
    [
        lambda tree: sg.stop_gradient(tree, 'body/**'),
        lambda tree: sg.substitute(tree, lambda path, leaf: leaf),
        lambda tree: sg.substitute(tree, {}),
    ],
)
def test_a_copy_of_a_module_is_refused(call):
    """What BatchNorm writes on it would be lost."""
    for tree in (Net(), [{'net': Net()}]):
        with pytest.raises(errors.ArgumentTypeError, match='would copy a Net'):
            call(tree)
