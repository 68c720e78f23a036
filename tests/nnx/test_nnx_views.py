"""What a view of an NNX model is, and what it shares with the model."""

import copy
import functools
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import by_hand
import flax_sg as sg
import oracle
from by_hand import Layer, Net, X, pure, total, zeros
from flax_sg import errors, nnx, testing

# ``total`` does not read them.
REST = ['head/bias', 'head/kernel', 'norm/bias', 'norm/scale']
FIRST = ['body/0/bias', 'body/0/kernel']


def stopped(model: Any, where: Any = 'body/**', fn: Any = total, **how: Any) -> Any:
    return fn(nnx.stop_gradient(model, where, **how))


def test_what_a_view_shares_with_the_model():
    model = Net()
    model.body[0].kernel.set_metadata(note='mine')
    before = pure(model)
    view = nnx.stop_gradient(model, 'body/0/*')
    assert type(view) is Net and type(view.body) is nnx.List
    assert view.body[0] is not model.body[0]
    assert view.body[1].kernel is model.body[1].kernel
    assert view.norm.mean is model.norm.mean
    assert view.drop.rngs.count is model.drop.rngs.count
    mine, theirs = view.body[0].kernel, model.body[0].kernel
    assert mine is not theirs and type(mine) is nnx.Param
    assert mine.get_metadata() == theirs.get_metadata()
    assert mine.get_raw_value() is theirs.get_raw_value()
    mine[...] = jnp.zeros((4, 4))
    view.norm, view.more = None, 1.0
    oracle.assert_same(pure(model), before)
    assert model.norm is not None and not hasattr(model, 'more')


def test_a_view_in_evaluation_leaves_the_model_in_training():
    def loss(model, view):
        frozen = view(model)
        frozen.eval()
        assert not (model.drop.deterministic or model.norm.use_running_average)
        return jnp.sum(frozen(X) * model(X))

    def trained(view):
        model = Net()
        step = nnx.jit(nnx.grad(functools.partial(loss, view=view)))
        return pure(step(model)), pure(model)

    def of_all(model):
        return nnx.stop_gradient(model, True)

    oracle.assert_same(trained(of_all), trained(by_hand.stopped))
    model = Net()  # Of an outer trace.
    value = jax.jit(lambda: (view := of_all(model)).eval() or view(X))()
    model.eval()
    assert jnp.allclose(value, model(X))


def test_three_losses_in_one_pass():
    """Statistics and counts of random keys go on through all views."""

    def loss(model, hold):
        code = jnp.sum(hold(model, 'body/')(X))
        out = jnp.sum(hold(model, 'head/')(X) ** 2)
        return code + out + model.norm(X).sum()

    def trained(hold):
        model = Net()
        step = nnx.jit(nnx.grad(functools.partial(loss, hold=hold)))
        return pure(step(model)), pure(step(model)), pure(model)

    def by_view(model, start):
        return nnx.stop_gradient(model, start + '**')

    oracle.assert_same(trained(by_view), trained(by_hand.stopped))


def test_reads_beside_a_view_are_trained():
    def loss(model):
        return total(model) + 2.0 * stopped(model, 'body/0/**') + 3.0 * total(model)

    def by_copy(model):
        copied = by_hand.stopped(model, 'body/0')
        return total(model) + 2.0 * total(copied) + 3.0 * total(model)

    oracle.assert_same(*(pure(nnx.grad(of)(Net())) for of in (loss, by_copy)))


@pytest.mark.parametrize(
    'read',
    [
        lambda w: w @ X.T,
        lambda w: X @ w,
        lambda w: w[1:, 2],
        lambda w: 2.0 * w,
        lambda w: -w,
        lambda w: w.T,
        lambda w: w.sum(),
        lambda w: w.at[0].set(1.0),
        lambda w: jnp.stack(list(w)),
        jnp.asarray,
        lambda w: w.get_value(),
        lambda w: w.copy()[...],
        lambda w: copy.deepcopy(w)[...],
        lambda w: jax.tree.map(jnp.tanh, w)[...],
        lambda w: optax.tree.norm(w),
        lambda w: ravel_pytree(nnx.State({'w': w}))[0],
    ],
)
@pytest.mark.parametrize('kind', ['plain', 'hook', 'own'])
@pytest.mark.filterwarnings('ignore:Variable hooks are deprecated')
def test_every_way_to_read(read, kind):
    """Of Variables with hooks and with a ``get_value`` of their own, too."""

    class Halved(nnx.Param):
        def get_value(self, **how):
            return 0.5 * super().get_value(**how)

    options = {'on_get_value': lambda _, value: 3.0 * value} if kind == 'hook' else {}
    cls = Halved if kind == 'own' else nnx.Param

    class Model(nnx.Module):
        def __init__(self):
            self.w = cls(jnp.linspace(1.0, 2.0, 16).reshape(4, 4), **options)
            self.v = cls(jnp.full((4, 4), 0.5), **options)

    def loss(model, view=lambda model: model):
        seen = view(model)
        return jnp.sum(read(seen.w)) + jnp.sum(read(seen.v))

    def of_w(model):
        return nnx.stop_gradient(model, 'w')

    model = Model()
    value, grads = nnx.value_and_grad(loss)(model)
    ours, zero = nnx.value_and_grad(functools.partial(loss, view=of_w))(model)
    oracle.assert_same(ours, value)
    assert grads['w'].get_raw_value().any() and not zero['w'].get_raw_value().any()
    oracle.assert_same(*(x['v'].get_raw_value() for x in (zero, grads)))


def test_filters_of_every_kind():
    model = Net()
    for where in (
        'body/0/*',
        ['body/0/kernel', 'body/0/bias'],
        re.compile('body/0/.*'),
        lambda path: path.parts[:2] == ('body', '0'),
        sg.filters.as_filter('body/**') & ~sg.filters.as_filter('body/1/**'),
        sg.mask(nnx.state(model, nnx.Param), trained='body/0/*'),
    ):
        loss = functools.partial(stopped, where=where)
        assert zeros(loss, model) == [*FIRST, *REST]
    assert zeros(lambda model: total(nnx.train_only(model, 'body/1/*')), model) == [
        *FIRST,
        *REST,
    ]
    live = sg.live(total, model)
    assert len(zeros(functools.partial(stopped, where=live), model)) == 8
    assert zeros(functools.partial(stopped, where=False), model) == REST


def test_a_typo_raises_where_the_view_is_made():
    for model in (Net(), Net()):
        with pytest.raises(errors.UnusedFilterError, match="Did you mean 'body/"):
            nnx.stop_gradient(model, 'boddy/**')
        where = ['body/**', 'boddy/**']
        loss = functools.partial(stopped, where=where, unused='ignore')
        assert len(zeros(loss, model)) == 8


def test_tied_weights_by_any_of_their_paths():
    class Tied(nnx.Module):
        def __init__(self):
            self.one = Layer(nnx.Rngs(0))
            self.two = self.one
            self.weights = nnx.List([self.one.kernel])
            self.above = nnx.Dict(tied=self.two)

        def features(self, x):
            return self.above.tied(self.two(self.one(x))) + self.weights[0].sum()

    model = Tied()
    mask = {'above': {'tied': {'kernel': True, 'bias': False}}}
    for where in ('one/kernel', 'two/kernel', 'weights/0', 'above/tied/kernel', mask):
        assert zeros(functools.partial(stopped, where=where), model) == [
            'above/tied/kernel'
        ], where
    view = nnx.stop_gradient(model, 'two/kernel')
    assert view.one is view.two is view.above.tied is not model.one
    assert view.weights[0] is view.one.kernel
    oracle.assert_same(total(view), total(model))
    flat = nnx.to_flat_state(nnx.state(model, nnx.where(model, 'two/kernel')))
    assert [path for path, _ in flat] == [('above', 'tied', 'kernel')]
    live = sg.live(total, model)
    assert nnx.where(model, live) == nnx.where(model, True)
    assert len(zeros(functools.partial(stopped, where=live), model)) == 2


def test_a_module_that_holds_the_one_around_it():
    class Cyclic(nnx.Module):
        def __init__(self):
            self.layer = Layer(nnx.Rngs(0))
            self.layer.above = self

        def features(self, x):
            return self.layer.above.layer(x)

    model = Cyclic()
    assert zeros(functools.partial(stopped, where='layer/kernel'), model) == [
        'layer/kernel'
    ]
    view = nnx.stop_gradient(model, 'layer/kernel')
    assert view.layer.above is view and model.layer.above is model


@pytest.mark.parametrize('pytree', [True, False])
def test_lists_and_dicts_in_a_module_and_around_models(pytree):
    class Model(nnx.Module, pytree=pytree):
        def __init__(self, config):
            self.config, self.w = config, nnx.Param(jnp.ones(2))
            self.items = nnx.data(
                [nnx.Param(jnp.ones(2)), {'w': nnx.Param(jnp.ones(2))}]
            )

        def features(self, x):
            return self.w * self.items[0] * self.items[1]['w']

    config = object()
    model = Model(config)
    loss = functools.partial(stopped, where=['items/0', 'items/1/w'])
    assert zeros(loss, model) == ['items/0', 'items/1/w']
    view = nnx.stop_gradient(model, 'items/1/w')
    assert view.items is not model.items and view.items[0] is model.items[0]
    assert view.config is config
    pair = {'a': Model(config), 'b': [Model(config), 1.0]}
    seen = nnx.stop_gradient(pair, 'b/0/**')
    assert seen['a'].w is pair['a'].w and seen['b'][0].w is not pair['b'][0].w


def test_another_kind_of_variable():
    graph, stats, rest = nnx.split(Net(), nnx.BatchStat, ...)

    def loss(stats):
        inner = nnx.merge(graph, stats, rest)
        view = nnx.stop_gradient(inner, 'norm/mean', kind=nnx.BatchStat)
        return view.norm(X, use_running_average=True).sum()

    grads = jax.grad(loss)(stats)
    assert not grads['norm']['mean'][...].any() and grads['norm']['var'][...].any()
    with pytest.raises(errors.UnusedFilterError):
        nnx.stop_gradient(Net(), 'norm/mean')


def test_a_part_of_a_model_is_frozen_and_a_mirror():
    """A view of a part, beside a part that is trained."""

    class Twice(Net):
        def __call__(self, x):
            return nnx.stop_gradient(self.body[0], True)(x) + 2.0 * self.body[0](x)

    def by_copy(model):
        return by_hand.stopped(model.body[0])(X) + 2.0 * model.body[0](X)

    grads = [
        pure(nnx.grad(lambda model, of=of: jnp.sum(of(model)))(Twice()))
        for of in (lambda model: model(X), by_copy)
    ]
    oracle.assert_same(*grads)


def test_a_replaced_variable_and_copy_from():
    """Nothing of a model that was seen before is found again."""
    step = nnx.jit(nnx.grad(stopped))
    model = Net()
    step(model)
    model.body[0].kernel = nnx.Param(2.0 * model.body[0].kernel[...])
    model.body[1].bias.copy_from(Net(1).body[1].bias)
    loss = functools.partial(by_hand.stopped, selects='body')
    by_copy = nnx.grad(lambda model: total(loss(model)))
    oracle.assert_same(pure(step(model)), pure(by_copy(model)))
    assert stopped(model) == total(model)


def test_a_function_is_compiled_once_for_all_models_of_a_class():
    traced = []

    @nnx.jit
    def run(model):
        traced.append(1)
        return total(model)

    for seed in range(2):
        model = Net(seed)
        run(model)
        for where in ('body/**', True, lambda path: 'k' in path):
            run(nnx.stop_gradient(model, where))
    assert len(traced) == 1


def test_inner_derivatives_are_whole():
    """A model that differentiates in its forward pass has the same outputs."""

    class Fast(nnx.Module):
        def __init__(self):
            self.layer, self.rate = Layer(nnx.Rngs(0)), nnx.Param(jnp.ones(()))

        def __call__(self, x):
            inner = nnx.grad(lambda layer: layer(x).sum())(self.layer)
            graph, state = nnx.split(self.layer)
            pieces = jax.grad(lambda s: nnx.merge(graph, s)(x).sum())(state)
            _, tangent = jax.jvp(
                lambda w: jnp.tanh(x @ w),
                (self.layer.kernel[...],),
                (jnp.ones((4, 4)),),
            )
            moved = self.layer.kernel[...] - self.rate * inner['kernel'][...]
            shift = jnp.broadcast_to(pieces['bias'], x.shape)
            return x @ moved + shift + tangent

    model = Fast()
    plain = jnp.sum(model(X))
    for view, where in [
        (nnx.stop_gradient, True),
        (nnx.stop_gradient, 'layer/**'),
        (functools.partial(nnx.scale_gradient, factor=0.5), 'layer/**'),
    ]:
        value, grads = nnx.value_and_grad(
            lambda model, view=view, where=where: jnp.sum(view(model, where)(X))
        )(model)
        oracle.assert_same(value, plain)
    full = pure(nnx.grad(lambda model: jnp.sum(model(X)))(model))
    assert full['layer']['kernel'].any()
    oracle.assert_same(pure(grads)['layer']['kernel'], 0.5 * full['layer']['kernel'])
    by_copy = pure(nnx.grad(lambda m: jnp.sum(by_hand.stopped(m, 'layer')(X)))(model))
    by_view = nnx.grad(lambda m: jnp.sum(nnx.stop_gradient(m, 'layer/**')(X)))
    oracle.assert_same(pure(by_view(model)), by_copy)


@pytest.mark.parametrize('inside', [True, False])
def test_stacked_layers(inside):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return Layer(rngs)

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = stack(nnx.Rngs(0))

        def features(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def run(layer, x):
                return nnx.stop_gradient(layer, 'kernel' if inside else False)(x)

            return run(self.layers, x)

    def by_hand_scan(params):
        def step(x, layer):
            kernel = jax.lax.stop_gradient(layer['kernel'])
            return jnp.tanh(x @ kernel + jnp.broadcast_to(layer['bias'], x.shape)), None

        return jax.lax.scan(step, X, params)[0].sum()

    model = Stack()
    expected = jax.grad(by_hand_scan)(pure(model)['layers'])
    loss = functools.partial(stopped, where=False if inside else 'layers/kernel')
    oracle.assert_same(pure(nnx.grad(loss)(model))['layers'], expected)
    first = functools.partial(stopped, where=sg.at('layers/kernel', np.s_[:1]))
    if not inside:  # A rule gets the whole array, so parts of it can be meant.
        kernel = pure(nnx.grad(first)(model))['layers']['kernel']
        plain = pure(nnx.grad(total)(model))['layers']['kernel']
        oracle.assert_same(kernel, plain.at[0].set(0.0))


def attention(rngs):
    layer = nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs)
    layer.init_cache((3, 5, 4))
    return layer


KINDS = {
    'attention': (attention, 'value/**', X[:, None]),
    'rnn': (lambda r: nnx.RNN(nnx.GRUCell(4, 4, rngs=r)), 'cell/dense_h/**', X[None]),
    'lora': (lambda r: nnx.LoRALinear(4, 2, lora_rank=2, rngs=r), 'kernel', X),
    'sequential': (
        lambda r: nnx.Sequential(nnx.Linear(4, 3, rngs=r), nnx.relu, Layer_3(r)),
        'layers/0/*',
        X,
    ),
}


def Layer_3(rngs):  # noqa: N802
    return nnx.Linear(3, 2, rngs=rngs)


@pytest.mark.parametrize('kind', KINDS)
def test_layers_of_flax(kind, standard_promotion):
    """Caches of attention are written through the view."""
    make, where, x = KINDS[kind]
    models = make(nnx.Rngs(0)), make(nnx.Rngs(0))

    def loss(model, view):
        return sum(jnp.sum(view(model)(x) ** 2) for _ in range(2))

    views = (
        lambda model: nnx.stop_gradient(model, where),
        lambda model: by_hand.stopped(model, where.rstrip('*')),
    )
    out = [
        pure(nnx.grad(loss)(model, view))
        for model, view in zip(models, views, strict=True)
    ]
    oracle.assert_same(*out)
    oracle.assert_same(*map(pure, models))
    plain = oracle.by_path(
        pure(nnx.grad(lambda m: loss(m, lambda m: m))(make(nnx.Rngs(0))))
    )
    now = oracle.by_path(out[0])
    assert any(plain[name].any() and not now[name].any() for name in plain)


def test_sown_values_reach_what_captures_them():
    class Sower(Layer):
        def __call__(self, x):
            self.sow(nnx.Intermediate, 'seen', x)
            return super().__call__(x)

    class Model(nnx.Module):
        def __init__(self):
            self.layer = Sower(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.stop_gradient(self.layer, True)(x)

    model = Model()
    if hasattr(nnx, 'capture'):
        _, sown = nnx.capture(lambda model: model(X), nnx.Intermediate)(model)
    else:  # What is sown where nothing was is an attribute, which the view has.
        model.layer.seen = nnx.Intermediate(())
        model(X)
        sown = nnx.state(model, nnx.Intermediate)
    oracle.assert_same(sown['layer']['seen'].get_value(), (X,))


def test_copies_pickles_and_tables_of_a_view():
    view = nnx.stop_gradient(Net(), True)
    for one in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), nnx.clone(view)):
        oracle.assert_same(pure(one), pure(view))
        assert type(one.body[0].kernel) is nnx.Param
        one.body[0].kernel[...] = jnp.zeros((4, 4))
    assert view.body[0].kernel[...].any()
    assert str(nnx.tabulate(view, X)) == str(nnx.tabulate(Net(), X))
    assert repr(nnx.stop_gradient(Layer(nnx.Rngs(0)), True)) == repr(Layer(nnx.Rngs(0)))


def test_a_view_that_is_differentiated_itself():
    """Its own values are trained: the stop lies between them and the model."""
    view = nnx.stop_gradient(Net(), 'body/**')
    oracle.assert_same(pure(nnx.grad(total)(view)), pure(nnx.grad(total)(Net())))


def test_same_program_as_by_hand():
    graph, params, rest = nnx.split(Net(dropout=0.0), nnx.Param, ...)

    def grad(view):
        return jax.grad(lambda p, r: total(view(nnx.merge(graph, p, r))))

    ours = grad(lambda model: nnx.stop_gradient(model, 'body/**'))
    hand = grad(lambda model: by_hand.stopped(model, 'body'))
    testing.assert_same_program(ours, hand, params, rest)
