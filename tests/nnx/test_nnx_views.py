"""What a view of an NNX model is, and what it shares with the model."""

import copy
import functools
import gc
import pickle
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx as flax_nnx

import flax_sg as sg
from flax_sg import errors, nnx, testing
from flax_sg.nnx.views import VIEWS
from tests.helpers import nnx_by_hand as by_hand
from tests.helpers import oracle
from tests.helpers.nnx_by_hand import Layer, Net, X, pure, total, zeros
from tests.helpers.turns import in_turn

# ``total`` does not read them.
REST = ['head/bias', 'head/kernel', 'norm/bias', 'norm/scale']
FIRST = ['body/0/bias', 'body/0/kernel']


def test_all_names_of_flax_and_ours():
    theirs = {name for name in dir(flax_nnx) if name[0].isalpha()}
    ours = {name for name in dir(nnx) if name[0].isalpha()} - theirs
    differ = {x for x in theirs if getattr(nnx, x) is not getattr(flax_nnx, x)}
    assert differ == {'DiffState', 'ModelAndOptimizer', 'Optimizer'}
    assert all(issubclass(getattr(nnx, x), getattr(flax_nnx, x)) for x in differ)
    assert all(getattr(nnx, name).__doc__ for name in ours)


def stopping(where: Any, **how: Any) -> Any:
    return lambda model: total(nnx.stop_gradient(model, where, **how))


def test_what_a_view_shares_with_the_model():
    model = Net()
    model.body[0].kernel.set_metadata(note='mine')
    before = pure(model)
    view = nnx.stop_gradient(model, 'body/0/*')
    assert type(view) is Net and view.body[0] is not model.body[0]
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
    # A view of a model of an outer trace belongs to the inner one.
    value = jax.jit(lambda: (seen := view_of(model)).eval() or seen(X))()
    model.eval()
    assert jnp.allclose(value, model(X))


def view_of(model: Any) -> Any:
    return nnx.stop_gradient(model, True)


READS = [
    *(lambda w: w @ X.T, lambda w: w[0], lambda w: w.T, lambda w: w.at[0].set(1.0)),
    lambda w: copy.deepcopy(w)[...],
    lambda w: jax.tree.map(jnp.tanh, w)[...],
    optax.tree.norm,
]


class Halved(nnx.Param):
    def get_value(self, **how):
        return 0.5 * super().get_value(**how)


@pytest.mark.parametrize(('read', 'kind'), in_turn(READS, ('plain', 'hook', 'own')))
@pytest.mark.filterwarnings('ignore:Variable hooks are deprecated')
def test_every_way_to_read(read, kind):
    """Of Variables with hooks and with a ``get_value`` of their own, too."""
    options = {'on_get_value': lambda _, value: 3.0 * value} if kind == 'hook' else {}
    make = functools.partial(Halved if kind == 'own' else nnx.Param, **options)
    value = jnp.linspace(1.0, 2.0, 16).reshape(4, 4)
    model = nnx.Dict(w=make(value), v=make(value + 1.0))

    def loss(model):
        return jnp.sum(read(model.w)) + jnp.sum(read(model.v))

    full, grads = nnx.value_and_grad(loss)(model)
    of_view = nnx.value_and_grad(lambda m: loss(nnx.stop_gradient(m, 'w')))(model)
    oracle.assert_same(of_view[0], full)
    raw, ours = ({k: x[k].get_raw_value() for k in 'wv'} for x in (grads, of_view[1]))
    assert raw['w'].any()
    oracle.assert_same(ours, {'w': jnp.zeros((4, 4)), 'v': raw['v']})


def test_filters_of_every_kind():
    model, as_filter = Net(), sg.filters.as_filter
    for where in (
        'body/0/*',
        ['body/0/kernel', 'body/0/bias'],
        re.compile('body/0/.*'),
        lambda path: path.parts[:2] == ('body', '0'),
        as_filter('body/**') & ~as_filter('body/1/**'),
        sg.mask(nnx.state(model, nnx.Param), trained='body/0/*'),
        sg.live(lambda model: model.body[0](X), model) & True,
    ):
        assert zeros(stopping(where), model) == [*FIRST, *REST]
        only = zeros(lambda m, w=where: total(nnx.train_only(m, w)), model)
        assert only == ['body/1/bias', 'body/1/kernel', *REST]
    assert zeros(stopping(False), model) == REST
    for kernels in sg.arrays(lambda a: a.ndim > 1), lambda path: path.array.ndim > 1:
        assert zeros(stopping(kernels), model) == zeros(stopping('**/kernel'), model)
        assert nnx.where(model, kernels) == nnx.where(model, '**/kernel')
    assert len(zeros(stopping(['body/**', 'boddy'], unused='ignore'), model)) == 8


def test_leaves_of_a_variable_by_shape():
    model = nnx.Dict(w=nnx.Param((jnp.ones((2, 2)), jnp.ones(2))))
    matrices = sg.arrays(lambda a: a.ndim > 1)

    def loss(view):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(view.w.get_value()))

    def by_tree(tree):
        return loss(nnx.Dict(w=nnx.Param(sg.stop_gradient(tree, matrices))))

    expected = jax.grad(by_tree)(model.w.get_value())
    stopped = nnx.grad(lambda model: loss(nnx.stop_gradient(model, matrices)))(model)
    oracle.assert_same(stopped['w'].get_value(), expected)
    other = {'w': jax.tree.map(jnp.zeros_like, model.w.get_value())}
    assert loss(nnx.substitute(model, other, where=matrices)) == 2.0
    assert loss(nnx.substitute(model, other)) == 0.0
    assert nnx.where(model, 'w') == nnx.where(model, sg.arrays(lambda a: a.ndim > 0))
    # A value without leaves has a path all the same.
    nothing = nnx.Dict(w=nnx.Param(None))
    assert nnx.stop_gradient(nothing, 'w').w.get_value() is None


class Tied(nnx.Module):
    """A module at three places, and its kernel at a fourth."""

    def __init__(self):
        self.one = Layer(nnx.Rngs(0))
        self.two = self.one
        self.weights = nnx.List([self.one.kernel])
        self.above = nnx.Dict(tied=self.two)

    def features(self, x):
        return self.above.tied(self.two(self.one(x))) + self.weights[0].sum()


MASK = {'above': {'tied': {'kernel': True, 'bias': False}}}
TWO_PATHS = sg.filters.as_filter('two/*') & 'weights/*'
KERNEL = ['one/kernel', 'two/kernel', 'weights/0', 'above/tied/kernel', MASK, TWO_PATHS]


@pytest.mark.parametrize('where', KERNEL)
def test_tied_weights_by_any_of_their_paths(where):
    model = Tied()
    assert zeros(stopping(where), model) == ['above/tied/kernel']
    only = zeros(lambda model: total(nnx.train_only(model, where)), model)
    assert only == ['above/tied/bias']
    view = nnx.stop_gradient(model, where)
    assert view.one is view.two is view.above.tied is not model.one
    assert view.weights[0] is view.one.kernel is not model.one.kernel
    flat = nnx.to_flat_state(nnx.state(model, nnx.where(model, where)))
    assert [path for path, _ in flat] == [('above', 'tied', 'kernel')]
    live = sg.live(total, model)
    assert nnx.where(model, live) == nnx.where(model, True)
    assert len(zeros(stopping(live & True), model)) == 2
    paths = []  # A rule gets the first path that the filter takes.
    nnx.substitute(model, lambda path, x: paths.append(path) or x, where='[at]*/**')
    assert paths == ['above/tied/bias', 'above/tied/kernel']


@pytest.mark.parametrize('pytree', [True, False])
def test_lists_and_dicts_in_a_module_and_around_models(pytree):
    class Model(nnx.Module, pytree=pytree):
        def __init__(self):
            w, u, v = (nnx.Param(jnp.ones(2)) for _ in range(3))
            self.config, self.w, self.items = object(), w, nnx.data([u, {'v': v}])

        def features(self, x):
            return self.w * self.items[0] * self.items[1]['v']

    model, where = Model(), ['items/0', 'items/1/v']
    assert zeros(stopping(where), model) == where
    view = nnx.stop_gradient({'a': [model, 1.0], 'b': Model()}, 'a/0/items/1/v')['a'][0]
    assert view.items is not model.items and view.items[0] is model.items[0]
    assert view.items[1]['v'] is not model.items[1]['v'] and view.w is model.w
    assert view.config is model.config and list(vars(view)) == list(vars(model))


def test_an_empty_list_is_a_module():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)), layers=nnx.List([]))
    model.again = model.layers
    view = nnx.stop_gradient(model, 'w')
    assert view.layers is view.again is not model.layers
    oracle.assert_same(pure(sg.partition(model, 'w')[0]), pure(model))


def test_another_kind_of_variable():
    def loss(model):
        view = nnx.stop_gradient(model, 'norm/mean', kind=nnx.BatchStat)
        return view.norm(X, use_running_average=True).sum()

    grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.BatchStat))(Net())['norm']
    assert not grads['mean'][...].any() and grads['var'][...].any()


def test_nothing_is_remembered():
    """A function has one program for all models of a class, and none is stale."""
    traced = []

    def loss(model):
        traced.append(1)
        return total(nnx.stop_gradient(model, 'body/1/*'))

    step = nnx.jit(nnx.grad(loss))
    by_copy = nnx.jit(nnx.grad(lambda m: total(by_hand.stopped(m, 'body/1'))))
    for seed in range(2):
        model = Net(seed)
        for seen in (model, nnx.stop_gradient(model, 'body/0/*'), view_of(model)):
            step(seen)
        model.body[0].kernel = nnx.Param(2.0 * model.body[0].kernel[...])
        model.body[1].bias.copy_from(Net(2).body[1].bias)
        oracle.assert_same(pure(step(model)), pure(by_copy(model)))
    assert len(traced) == 1


def test_a_traced_condition():
    """While it holds, the gradient is that of a stopped copy; one program for both."""

    @nnx.jit
    def step(model, step):
        return nnx.grad(stopping(sg.where('body/1/*') & (step < 2)))(model)

    by_copy = nnx.jit(nnx.grad(lambda m: total(by_hand.stopped(m, 'body/1'))))
    for n in range(4):
        expected = (by_copy if n < 2 else nnx.jit(nnx.grad(total)))(Net())
        oracle.assert_same(pure(step(Net(), n)), pure(expected))


def test_copies_pickles_and_tables_of_a_view():
    view = view_of(Net())
    for one in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), nnx.clone(view)):
        oracle.assert_same(pure(one), pure(view))
        one.body[0].kernel[...] = jnp.zeros((4, 4))
    assert view.body[0].kernel[...].any()
    assert str(nnx.tabulate(view, X)) == str(nnx.tabulate(Net(), X))
    assert repr(view_of(Layer(nnx.Rngs(0)))) == repr(Layer(nnx.Rngs(0)))


def test_a_view_that_is_differentiated_itself():
    """Its own values are trained: the stop lies between them and the model."""
    oracle.assert_same(*(pure(nnx.grad(total)(m)) for m in (view_of(Net()), Net())))


class Keeps(nnx.Module):
    """The mistake that an assertion sees: a view in an attribute."""

    def __init__(self):
        self.body, self.head = Layer(nnx.Rngs(0)), Layer(nnx.Rngs(1))
        self.frozen = nnx.stop_gradient(self.body, True)

    def __call__(self, x):
        return self.head(self.frozen(x))


def test_mistakes_that_an_assertion_sees():
    loss = lambda model: model(X).sum()  # noqa: E731
    with pytest.raises(errors.ExpectationError, match='frozen/bias'):
        testing.assert_trains_only(loss, 'head/*', Keeps())
    view = nnx.stop_gradient(Net(), 'body/**')
    with pytest.raises(errors.ExpectationError, match='body/0/bias'):
        testing.assert_trains_only(total, [], view)
    for model in Keeps(), view:
        with pytest.warns(UserWarning, match='is given a view'):
            nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    # A clone is a model of its own, and so is what Flax makes of a view.
    nnx.Optimizer(nnx.clone(view), optax.sgd(0.1), wrt=nnx.Param)


def test_a_view_is_forgotten():
    view = nnx.stop_gradient(Net(), 'body/**')
    kept = weakref.ref(view)
    assert VIEWS.get(view) == 'stop_gradient'
    number, view = id(view), None
    gc.collect()
    assert kept() is None and number not in VIEWS.known
