"""What a block on an NNX model covers, and what it leaves as it was."""

import asyncio
import contextlib
import copy
import functools
import gc
import pickle
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
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
from by_hand import Layer, Net, X, loss_of, pure
from flax_sg import errors, nnx, testing


def counted(fn: Any) -> Any:
    """A function that counts how often JAX traces it."""

    def counts(*args: Any) -> Any:
        counts.traced += 1
        return fn(*args)

    counts.traced = 0
    return counts


def total(model: Any) -> Any:
    return model.features(X).sum()


def zeros(model: Any, loss: Any = total) -> list[str]:
    """The parameters whose gradient is zero."""
    grads = oracle.by_path(pure(nnx.grad(loss)(model)))
    return [name for name, leaf in grads.items() if not leaf.any()]


@contextlib.contextmanager
def block(model: Any, where: str = 'body/**') -> Any:
    """A block that gives its model."""
    with nnx.stop_gradient(model, where):
        yield model


def copied(model: Any, where: str = 'body/**') -> Any:
    """The same by hand: gives a copy that is stopped."""
    return contextlib.nullcontext(by_hand.stopped(model, where.rstrip('*')))


def assert_as_by_hand(loss: Any, make: Any = Net) -> None:
    """The gradients of ``loss(model, hold)`` in blocks are those of stopped copies."""
    oracle.assert_same(*(pure(nnx.grad(loss)(make(), h)) for h in (block, copied)))


# ``total`` does not read them.
REST = ['head/bias', 'head/kernel', 'norm/bias', 'norm/scale']
FIRST = ['body/0/bias', 'body/0/kernel']


def test_reads_beside_the_lines_of_a_block_are_trained():
    def loss(model, hold=block):
        before = total(model)
        with hold(model, 'body/0/**') as seen:
            inside = total(seen)
        return before + 2.0 * inside + 3.0 * total(model)

    assert_as_by_hand(loss)
    assert zeros(Net(), loss) == REST


def test_three_losses_in_one_pass():
    def loss(model, hold):
        with hold(model, 'body/**') as seen:
            code = jnp.sum(seen.head(seen.features(X)))
        with hold(model, 'head/**') as seen:
            out = jnp.sum(seen.head(seen.features(X)) ** 2)
        return code + out + model.norm(X).sum()

    def trained(hold):
        model = Net()
        step = nnx.jit(nnx.grad(functools.partial(loss, hold=hold)))
        return pure(step(model)), pure(model)

    oracle.assert_same(trained(block), trained(copied))


@pytest.mark.parametrize(
    'read',
    [
        lambda w: w @ X.T,
        lambda w: X @ w,
        lambda w: w[...],
        lambda w: w[0],
        lambda w: w[1:, 2],
        lambda w: w + 1.0,
        lambda w: 2.0 * w,
        lambda w: -w,
        lambda w: w.T,
        lambda w: w.sum(),
        lambda w: w.reshape(-1),
        lambda w: w.astype(jnp.bfloat16),
        lambda w: w.at[0].set(1.0),
        lambda w: jnp.sum(jnp.stack(list(w))),
        jnp.tanh,
        jnp.asarray,
        lambda w: w.get_value(),
        lambda w: w.copy()[...],
        lambda w: copy.copy(w)[...],
        lambda w: copy.deepcopy(w)[...],
    ],
)
def test_every_way_to_read(read):
    def loss(layer):
        return jnp.sum(read(layer.kernel)).astype(jnp.float32)

    layer = Layer(nnx.Rngs(0))
    value, grads = nnx.value_and_grad(loss)(layer)
    assert grads['kernel'][...].any()
    with nnx.stop_gradient(layer, 'kernel'):
        stopped, zero = nnx.value_and_grad(loss)(layer)
    oracle.assert_same(stopped, value)
    assert not zero['kernel'][...].any()


@pytest.mark.parametrize(
    'read',
    [
        optax.tree.norm,
        lambda state: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(state)),
        lambda state: sum(jax.tree.leaves(jax.tree.map(jnp.sum, state))),
        lambda state: jax.tree.reduce(lambda a, b: a + b.sum(), state, 0.0),
        lambda state: jnp.sum(ravel_pytree(state)[0] ** 2),
        lambda state: optax.tree.norm(sg.partition(state, 'body/**')),
    ],
)
@pytest.mark.parametrize('levels', [None, 1])
@pytest.mark.parametrize('compiled', [False, True])
def test_a_penalty_of_the_leaves_of_a_state(read, compiled, levels):
    """A penalty on weights takes the state apart, and reads no Variable."""

    def of_state(model):
        return read(nnx.state(model, nnx.Param))

    def in_a_block(model):
        with nnx.stop_gradient(model, 'body/**', levels=levels):
            return run(model)

    def by_copy(model):
        return of_state(by_hand.stopped(model, 'body'))

    run = jax.jit(of_state) if compiled else of_state
    expected = pure(nnx.grad(by_copy)(Net()))
    oracle.assert_same(pure(nnx.grad(in_a_block)(Net())), expected)
    model = Net()
    with nnx.stop_gradient(model, 'body/**', levels=levels):
        oracle.assert_same(pure(nnx.grad(run)(model)), expected)


def test_metadata_and_what_is_stored_stay_as_they_are():
    layer = Layer(nnx.Rngs(0))
    layer.kernel.set_metadata(out_sharding=None, note='mine')
    raw, metadata = layer.kernel.get_raw_value(), layer.kernel.get_metadata()
    with nnx.stop_gradient(layer, 'kernel'):
        assert isinstance(layer.kernel, nnx.Param)
        assert layer.kernel.note == 'mine'
        assert layer.kernel.get_metadata('note') == 'mine'
        assert layer.kernel.get_raw_value() is raw
        assert layer.kernel.shape == (4, 4)
        assert nnx.state(layer, nnx.Param)['kernel'].get_raw_value() is raw
    assert type(layer.kernel) is nnx.Param
    assert layer.kernel.get_metadata() == metadata


def test_a_typo_raises_at_the_with_line_for_each_model():
    for model in (Net(), Net()):
        with pytest.raises(errors.UnusedFilterError, match="Did you mean 'body/"):
            nnx.stop_gradient(model, 'boddy/**').__enter__()
        assert by_hand.is_plain(model)
        with nnx.stop_gradient(model, ['body/**', 'boddy/**'], unused='ignore'):
            assert len(zeros(model)) == 8


def test_filters_of_every_kind():
    model = Net()
    for where in (
        'body/0/*',
        ['body/0/kernel', 'body/0/bias'],
        re.compile('body/0/.*'),
        lambda path: path.parts[:2] == ('body', '0'),
        sg.filters.as_filter('body/**') & ~sg.filters.as_filter('body/1/**'),
    ):
        with nnx.stop_gradient(model, where):
            assert zeros(model) == [*FIRST, *REST]
    with nnx.train_only(model, 'body/0/*'):
        assert zeros(model) == ['body/1/bias', 'body/1/kernel', *REST]
    live = sg.live(total, model)
    assert repr(live) == "<live: 'body/0/bias', 'body/0/kernel', 'body/1/bias', ...>"
    with nnx.stop_gradient(model, live):
        assert len(zeros(model)) == 8
    with nnx.stop_gradient(model, False):
        assert zeros(model) == REST


def test_tied_weights_by_any_of_their_paths():
    class Tied(nnx.Module):
        def __init__(self):
            self.one = Layer(nnx.Rngs(0))
            self.two = self.one
            self.out = nnx.Param(jnp.ones(3))
            self.weights = nnx.List([self.one.kernel])
            self.above = nnx.Dict(tied=self.two)

        def features(self, x):
            return self.two(self.one(x))

    model = Tied()
    for where in ('one/kernel', 'two/kernel', 'weights/0', 'above/tied/kernel'):
        with nnx.stop_gradient(model, where):
            assert zeros(model) == ['above/tied/kernel', 'out'], where
    flat = nnx.to_flat_state(nnx.state(model, nnx.where(model, 'two/kernel')))
    assert [path for path, _ in flat] == [('above', 'tied', 'kernel')]


def test_a_module_that_holds_the_one_around_it():
    class Cyclic(nnx.Module):
        def __init__(self):
            self.layer = Layer(nnx.Rngs(0))
            self.layer.above = self

        def features(self, x):
            return self.layer(x)

    model = Cyclic()
    with nnx.stop_gradient(model, 'layer/kernel'):
        assert zeros(model) == ['layer/kernel']


def test_another_kind_of_variable():
    model = Net()

    graph, stats, rest = nnx.split(model, nnx.BatchStat, ...)

    def stopped(stats):
        inner = nnx.merge(graph, stats, rest)
        with nnx.stop_gradient(inner, 'norm/mean', kind=nnx.BatchStat):
            return inner.norm(X, use_running_average=True).sum()

    grads = jax.grad(stopped)(stats)
    assert not grads['norm']['mean'][...].any()
    assert grads['norm']['var'][...].any()
    with pytest.raises(errors.UnusedFilterError):
        nnx.stop_gradient(model, 'norm/mean').__enter__()


def test_a_type_of_the_users_own():
    class Halved(nnx.Param):
        def get_value(self, **how):
            return 0.5 * super().get_value(**how)

    class Model(nnx.Module):
        def __init__(self):
            self.w, self.v = Halved(jnp.ones(3)), Halved(jnp.ones(3))

        def features(self, x):
            return jnp.tanh(self.w[...]) * self.v

    model = Model()
    value, grads = nnx.value_and_grad(total)(model)
    with nnx.stop_gradient(model, 'w'):
        twice = [jax.jit(lambda: total(model))() for _ in range(2)]
        oracle.assert_same(*twice)
        stopped, others = nnx.value_and_grad(total)(model)
    oracle.assert_same(stopped, value)
    assert not others['w'].get_raw_value().any()
    oracle.assert_same(others['v'].get_raw_value(), grads['v'].get_raw_value())
    assert type(model.w) is Halved


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
                with nnx.stop_gradient(layer, 'kernel' if inside else False):
                    return layer(x)

            return run(self.layers, x)

    def by_hand_scan(params):
        def step(x, layer):
            kernel = jax.lax.stop_gradient(layer['kernel'])
            return jnp.tanh(x @ kernel + jnp.broadcast_to(layer['bias'], x.shape)), None

        return jax.lax.scan(step, X, params)[0].sum()

    model = Stack()
    expected = jax.grad(by_hand_scan)(pure(model)['layers'])
    with nnx.stop_gradient(model, False if inside else 'layers/kernel'):
        grads = pure(nnx.grad(total)(model))['layers']
    oracle.assert_same(grads, expected)
    # Rows of the stack are not those of a layer.
    if not inside:
        first = nnx.stop_gradient(model, sg.at('layers/kernel', 0))
        with pytest.raises(errors.PartError, match='has another shape here'), first:
            total(model)


def test_rows():
    def grads(model):
        return pure(nnx.jit(nnx.grad(total))(model))['body'][0]['kernel']

    model = Net()
    with nnx.stop_gradient(model, sg.at('body/0/kernel', np.s_[:1])):
        stopped = grads(model)
    plain = grads(model)
    oracle.assert_same(stopped, plain.at[0].set(0.0))
    assert plain[0].any()


# Caches


def test_a_compiled_step_outside_inside_and_outside_again():
    model = Net()
    loss = counted(total)
    step = nnx.jit(nnx.grad(loss))
    plain = pure(step(model))
    for _ in range(2):
        with nnx.stop_gradient(model, 'body/0/**'):
            stopped = pure(step(model))
        assert not stopped['body'][0]['kernel'].any()
        with nnx.stop_gradient(model, lambda path: path.startswith('body/0')):
            oracle.assert_same(pure(step(model)), stopped)
        oracle.assert_same(pure(step(model)), plain)
        with nnx.stop_gradient(model, 'body/1/**'):
            assert pure(step(model))['body'][0]['kernel'].any()
    assert loss.traced == 3


def test_inside_first():
    model = Net()
    step = jax.jit(jax.grad(total, allow_int=True))
    with nnx.stop_gradient(model, 'body/**'):
        stopped = step(model)
    assert not stopped.body[0].kernel.get_raw_value().any()
    assert step(model).body[0].kernel.get_raw_value().any()
    assert step.lower(model)


def test_an_equal_model_after_it_finds_the_program_again():
    loss = counted(total)
    step = nnx.jit(nnx.grad(loss))
    for _ in range(3):
        model = Net()
        with nnx.stop_gradient(model, 'body/**'):
            step(model)
        del model
        gc.collect()
    assert loss.traced == 1


def test_a_helper_is_traced_once_in_a_loop_of_eager_steps():
    helper = counted(jnp.tanh)
    jitted = jax.jit(helper)

    def loss(model):
        with nnx.stop_gradient(model, 'body/0/**'):
            return jitted(model.features(X)).sum()

    model = Net()
    for _ in range(4):
        nnx.grad(loss)(model)
    assert helper.traced == 1


@pytest.mark.parametrize('jit', [jax.jit, jax.checkpoint])
def test_one_closure_over_two_models_in_blocks_of_each(jit):
    """Both blocks select the same paths of one class."""

    def of(one, two):
        return jit(lambda x: two.features(one.features(x)))

    def loss(both, hold):
        one, two = both
        f = of(one, two)
        with hold(one) as seen:
            a = f(X) if seen is one else of(seen, two)(X)
        with hold(two) as seen:
            b = f(X) if seen is two else of(one, seen)(X)
        return (a + 2.0 * b).sum()

    assert_as_by_hand(loss, lambda: [Net(0), Net(1)])


def test_the_same_closure_in_blocks_of_other_paths():
    def loss(model, hold):
        f = jax.jit(lambda x: model.features(x))
        outs = []
        for where in ('body/0/**', 'body/1/**'):
            with hold(model, where) as seen:
                outs.append(f(X) if seen is model else jax.jit(seen.features)(X))
        a, b = outs
        return (a + 2.0 * b + 3.0 * f(X)).sum()

    assert_as_by_hand(loss)


def test_a_graph_that_was_split_in_a_block():
    model = Net()
    state = nnx.State(nnx.to_pure_dict(nnx.state(Net())))
    with nnx.stop_gradient(model, 'body/0/**'):
        graph, _ = nnx.split(model)
        assert zeros(nnx.merge(graph, state)) == [*FIRST, *REST]
    after = nnx.merge(graph, state)
    assert by_hand.is_plain((after, state))
    assert zeros(after) == REST
    with nnx.stop_gradient(model, 'body/1/**', unused='ignore'):
        assert zeros(nnx.merge(graph, state)) == REST
    other = Net()
    with nnx.stop_gradient(other, 'body/0/**', unused='ignore'):
        assert zeros(nnx.merge(graph, state)) == REST


# What outlives a block


def test_what_is_made_in_a_block_is_trained_after_it():
    model = Net()
    with nnx.stop_gradient(model, 'body/**'):
        made = [
            nnx.clone(model),
            copy.deepcopy(model),
            nnx.merge(*nnx.split(model)),
            jax.tree.map(lambda leaf: leaf, model),
            nnx.jit(nnx.clone)(model),
        ]
        for one in made:
            assert len(zeros(one)) == 8
        grads = jax.grad(total, allow_int=True)(model)
    for one in made:
        assert by_hand.is_plain(one)
        assert zeros(one) == REST
    jax.tree.map(lambda a, b: None, grads, model)  # Their structures fit.
    assert by_hand.is_plain(model)


def test_a_state_that_is_pickled_in_a_block():
    model = Layer(nnx.Rngs(0))
    with nnx.stop_gradient(model, 'kernel'):
        text = pickle.dumps((nnx.state(model), model.kernel))
    state, kernel = pickle.loads(text)
    assert by_hand.is_plain((state, kernel))
    oracle.assert_same(pure(state), pure(model))


def test_an_optimizer_that_is_made_in_a_block():
    def trained(hold):
        model = Net(dropout=0.0)
        with hold(model):
            optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
        for _ in range(2):
            optimizer.update(model, nnx.grad(total)(model))
        state = pickle.loads(pickle.dumps(nnx.state(optimizer)))
        oracle.assert_same(pure(state), pure(nnx.state(optimizer)))
        return pure(model)

    def block(model):
        return nnx.stop_gradient(model, 'body/**', unused='ignore')

    oracle.assert_same(trained(block), trained(contextlib.nullcontext))


def test_an_exception_closes_the_block():
    model = Net()
    with pytest.raises(KeyError), nnx.stop_gradient(model, 'body/**'):
        raise KeyError
    assert by_hand.is_plain(model)
    assert zeros(model) == REST


def test_nothing_is_kept_alive():
    model = Net()
    with nnx.stop_gradient(model, 'body/**'):
        nnx.jit(nnx.grad(total))(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_long_block_keeps_no_old_values_alive():
    model = Net(dropout=0.0)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(total)(model))

    kept = []
    with nnx.stop_gradient(model, 'body/**'):
        for _ in range(40):
            step(model, optimizer)
            optimizer.update(model, nnx.grad(total)(model))
            nnx.clone(model)
            kept.append(weakref.ref(model.body[0].kernel.get_raw_value()))
            model.body[0].kernel[...] = model.body[0].kernel[...] + 1.0
        gc.collect()
        assert sum(ref() is not None for ref in kept) < 10


def test_an_inner_block_of_a_long_one_keeps_no_old_values_alive():
    model, kept = Net(dropout=0.0), []
    with nnx.stop_gradient(model, 'body/**'):
        for _ in range(20):
            with nnx.scale_gradient(model, 'body/0/kernel', 0.5):
                model.features(X)
            kept.append(weakref.ref(model.body[0].kernel.get_raw_value()))
            model.body[0].kernel[...] = model.body[0].kernel[...] + 1.0
        gc.collect()
        assert sum(ref() is not None for ref in kept) < 3


def test_metadata_that_are_written_in_a_block():
    model = Net()
    with nnx.stop_gradient(model, 'body/0/**'):
        bias = model.body[0].bias
        bias.set_metadata({**bias.get_metadata(), 'note': 'mine'})
        assert zeros(model) == [*FIRST, *REST]
    assert by_hand.is_plain(model)
    assert model.body[0].bias.get_metadata('note') == 'mine'
    assert zeros(model) == REST


# Blocks in blocks, and beside


def test_blocks_in_blocks():
    model = Net()
    with nnx.stop_gradient(model, 'body/0/**'):
        with nnx.stop_gradient(model, 'body/1/kernel'):
            assert zeros(model) == [*FIRST, 'body/1/kernel', *REST]
        again = nnx.stop_gradient(model, 'body/0/**')
        with nnx.stop_gradient(model.body[1], 'bias'), again:
            assert zeros(model) == [*FIRST, 'body/1/bias', *REST]
        assert zeros(model) == [*FIRST, *REST]
    assert by_hand.is_plain(model)


def test_a_block_of_each_call_and_one_around():
    def loss(model):
        for where in ('body/0/kernel', 'body/0/bias'):
            with nnx.stop_gradient(model, where, unused='ignore'):
                model = nnx.clone(model)
        with nnx.stop_gradient(model, 'body/1/bias'):
            nnx.jit(total)(model)
            return nnx.jit(total)(model)

    model = Net()
    with nnx.stop_gradient(model, 'body/1/kernel'):
        assert zeros(model, loss) == ['body/1/bias', 'body/1/kernel', *REST]
        assert zeros(model) == ['body/1/kernel', *REST]


def test_a_block_is_used_many_times():
    model = Net()
    block = nnx.stop_gradient(model, 'body/0/**')
    for _ in range(2):
        with block, block:
            assert zeros(model) == [*FIRST, *REST]
        assert zeros(model) == REST


def test_threads():
    model, opened, done = Net(), threading.Barrier(2), threading.Barrier(2)
    found: dict[str, Any] = {}

    def work(name, where):
        with nnx.stop_gradient(model, where):
            opened.wait(60)
            found[name] = zeros(nnx.clone(model)), zeros(model)
            done.wait(60)

    of_b = ['body/0/bias', 'body/1/bias']
    with ThreadPoolExecutor() as pool:
        list(pool.map(work, ('a', 'b'), ('body/0/**', of_b)))
    a, b = [*FIRST, *REST], [*of_b, *REST]
    assert found == {'a': (a, a), 'b': (b, b)}
    assert by_hand.is_plain(model)


def test_another_thread_reads_what_is_stored():
    model = Net()
    with nnx.stop_gradient(model, 'body/**', unused='ignore'):
        for work in (lambda: zeros(model), lambda: zeros(nnx.clone(model))):
            with ThreadPoolExecutor() as pool:
                assert pool.submit(work).result() == REST
    assert by_hand.is_plain(model)


def test_a_closure_in_another_trace_is_not_written_to():
    """A block on a model of an outer trace leaves it as it was."""

    def loss(model):
        @jax.vmap
        def each(x):
            with nnx.stop_gradient(model, 'body/0/**'):
                return model.features(x)

        return each(X).sum()

    model = Net()
    assert zeros(model, loss) == [*FIRST, *REST]


# Writes


def test_what_is_written_in_a_block_is_stored():
    model = Net()
    with nnx.stop_gradient(model, 'body/**'):
        model.body[0].bias[...] = jnp.full(4, 2.0)
        model.body[1].kernel[0] = jnp.full(4, 3.0)
        nnx.update(model, {'head': {'bias': jnp.full(2, 4.0)}})
        state = nnx.state(model)
    nnx.update(model, state)
    assert model.body[0].bias[...].tolist() == [2.0] * 4
    assert model.body[1].kernel[0].tolist() == [3.0] * 4
    assert model.head.bias[...].tolist() == [4.0] * 2
    assert by_hand.is_plain(model)


def test_an_update_in_a_block_and_after_it():
    def trained(hold, loss):
        model = Net(dropout=0.0)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        for _ in range(2):
            with hold(model):
                grads = nnx.grad(loss)(model)
                optimizer.update(model, grads)
            optimizer.update(model, grads)
        return pure(model)

    def by_copy(model):
        return loss_of(by_hand.stopped(model, 'body'))

    expected = trained(contextlib.nullcontext, by_copy)
    oracle.assert_same(trained(block, loss_of), expected)


# Refused, or said


def test_a_copy_that_was_made_before_warns():
    model = Net()
    step = nnx.cached_partial(nnx.jit(total), model)
    block = nnx.stop_gradient(model, 'body/**')
    with pytest.warns(errors.NothingStoppedWarning, match='none of its 4'), block:
        step()
    with nnx.stop_gradient(model, 'body/**', unused='ignore'):
        step()


def test_a_compiled_program_does_not_warn():
    model = Net()
    step = nnx.jit(nnx.grad(total))
    for _ in range(2):
        with nnx.stop_gradient(model, 'body/**'):
            step(model)


def ones(tree: Any) -> Any:
    return jax.tree.map(jnp.ones_like, tree)


def run(layer: Any) -> Any:
    return layer(X).sum()


# Functions of a model whose derivatives send 1 to each of its arrays.
JVP, VJP, OF_NNX = jax.custom_jvp(run), jax.custom_vjp(run), nnx.custom_vjp(run)
JVP.defjvp(lambda xs, ts: (JVP(*xs), sum(t.sum() for t in jax.tree.leaves(ts))))
VJP.defvjp(lambda layer: (VJP(layer), layer), lambda kept, ct: (ones(kept),))
OF_NNX.defvjp(lambda layer: (OF_NNX(layer), None), lambda _, g: (ones(g[0][0]),))


@pytest.mark.every_case
@pytest.mark.parametrize('own', [VJP, JVP, OF_NNX], ids=['VJP', 'JVP', 'NNX'])
def test_a_function_with_a_derivative_of_its_own(own):
    layer, fn = Layer(nnx.Rngs(0)), lambda layer: own(layer)
    for gradient in nnx.grad(fn), nnx.jit(nnx.grad(fn)), jax.grad(fn):
        plain = pure(gradient(layer))
        for _ in range(2):
            with nnx.stop_gradient(layer, 'kernel'):
                stopped = pure(gradient(layer))
            assert not stopped['kernel'].any()
            assert (stopped['bias'] == plain['bias']).all() and plain['bias'].all()
        assert (pure(gradient(layer))['kernel'] == plain['kernel']).all()
        assert plain['kernel'].all()
    with nnx.stop_gradient(layer, 'kernel'):
        report = sg.gradient_flow(fn, layer)
    assert report.status_of('output', 'kernel') == 'stopped'
    # Another rule would be applied twice: outside of the function, and in it.
    with nnx.scale_gradient(layer, 'kernel', 0.5):
        with pytest.raises(errors.BlockError, match='a derivative of its own'):
            nnx.grad(fn)(layer)
        assert nnx.grad(lambda layer: layer(X).sum())(layer)['kernel'][...].any()


def test_a_hijax_variable_is_refused():
    class Model(nnx.Module):
        def __init__(self):
            self.w = by_hand.hijax_param()

    with pytest.raises(errors.ArgumentTypeError, match="'w' is a hijax Variable"):
        nnx.stop_gradient(Model(), 'w').__enter__()


def test_same_program_as_by_hand():
    graph, params, rest = nnx.split(Net(dropout=0.0), nnx.Param, ...)

    def loss(params, rest, hold):
        with hold(nnx.merge(graph, params, rest)) as seen:
            return total(seen)

    ours, hand = (
        jax.grad(functools.partial(loss, hold=hold)) for hold in (block, copied)
    )
    testing.assert_same_program(ours, hand, params, rest)


READS = {
    'grad': zeros,
    'jit': lambda model: nnx.jit(total)(model),
    'value': total,
    'split': nnx.split,
}


@pytest.mark.parametrize('name', READS)
def test_another_task_reads_in_the_block(name):
    model, other = Net(0), Net(1)

    async def holds():
        with nnx.stop_gradient(model, 'body/0/**'):
            opened.set()
            await done.wait()
            return zeros(model)

    async def reads():
        await opened.wait()
        try:
            assert zeros(other) == REST
            with pytest.raises(errors.BlockError, match='another asyncio task'):
                READS[name](model)
        finally:
            done.set()

    async def main():
        return await asyncio.gather(holds(), reads())

    opened, done = asyncio.Event(), asyncio.Event()
    assert asyncio.run(main())[0] == sorted(FIRST + REST)
    assert zeros(model) == REST
