"""What ``early`` and ``late`` take and go through: arguments, models, transforms."""

import dataclasses
import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_sg as sg
from flax_sg import linen as nn
from tests.ahead.splits import assert_same, bits, products
from tests.helpers import oracle

PARAMS: Any = {
    'body': {'w': jax.random.normal(jax.random.key(0), (4, 4)) / 2},
    'head': {'w': jax.random.normal(jax.random.key(1), (4, 2)) / 2},
}
X = jax.random.normal(jax.random.key(2), (3, 4))
KEY = jax.random.key(3)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params['body']['w']) @ params['head']['w'])


def refused(said: str) -> Any:
    return pytest.raises(sg.errors.ArgumentTypeError, match=said)


def split(fun: Any, *data: Any, **how: Any) -> tuple[Any, Any]:
    """A function in two programs for the head, and what is kept of its data."""
    ahead = sg.precompute(fun, PARAMS, *data, wrt='head/**', **how)
    return ahead, ahead.early(PARAMS, *data)


def test_several_trees_of_parameters():
    """``argnums=`` and ``wrt=`` name them as they do for ``sg.grad``."""

    def fun(x: Any, body: Any, head: Any) -> Any:
        return loss({'body': body, 'head': head}, x)

    args = X, PARAMS['body'], PARAMS['head']
    ahead = sg.precompute(fun, *args, argnums=(1, 2), wrt='2/**')
    assert [k.shape for k in ahead.kept] == [(3, 4)]
    kept = ahead.early(*args)
    grad = sg.grad(ahead.late, argnums=(0, 1), wrt='1/**')
    right = sg.grad(fun, argnums=(1, 2), wrt='2/**')(*args)
    for body in args[1], sg.ABSENT:
        found = grad(body, PARAMS['head'], kept)
        assert_same(found, (sg.ABSENT if body is sg.ABSENT else right[0], right[1]))


def test_auxiliary_outputs():
    """They come back in the pair, computed once or not."""

    def fun(params: Any, x: Any) -> Any:
        features = x @ params['body']['w']
        return jnp.sum(features @ params['head']['w']), {'f': features, 'n': 3, 'x': x}

    ahead, kept = split(fun, X)
    how: Any = {'wrt': 'head/**', 'has_aux': True}
    right = sg.value_and_grad(fun, **how)(PARAMS, X)
    assert_same(sg.value_and_grad(ahead.late, **how)(PARAMS, kept), right)


def test_a_function_with_a_parameter_has_aux():
    """The keyword is its own, or one of any that it takes; gradient calls have it."""

    def named(params: Any, x: Any, has_aux: bool) -> Any:
        return loss(params, x @ params['body']['w']) * (2.0 if has_aux else 1.0)

    def any_names(params: Any, x: Any, **options: bool) -> Any:
        return named(params, x, **options)

    for fun in (named, any_names):
        ahead = sg.precompute(fun, PARAMS, X, wrt='head/**', has_aux=True)
        kept = ahead.early(PARAMS, X, has_aux=True)
        assert_same(ahead.late(PARAMS, kept), fun(PARAMS, X, has_aux=True))
    with pytest.raises(TypeError, match='has_aux'):
        sg.precompute(loss, PARAMS, X, wrt='head/**', has_aux=True)


def test_keyword_arguments_are_given_by_name():
    """Those in ``each=`` to ``late``, the others to ``early``; flags are constants."""

    def fun(params: Any, x: Any, *, train: bool, mask: Any, key: Any) -> Any:
        y = (x @ params['body']['w']) * mask
        return loss(params, y + jax.random.normal(key, y.shape) if train else y)

    words = {'train': True, 'mask': jnp.ones((3, 4)).at[1].set(0), 'key': KEY}
    ahead = sg.precompute(fun, PARAMS, X, wrt='head/**', each='key', **words)
    key = words.pop('key')
    kept = ahead.early(PARAMS, X, **words)
    assert_same(ahead.late(PARAMS, kept, key=key), fun(PARAMS, X, key=key, **words))
    with refused('train= is False, and was True'):
        ahead.early(PARAMS, X, train=False, mask=words['mask'])
    with pytest.raises(TypeError, match=r'ahead.early\(params, x, train=train'):
        ahead.early(PARAMS, X, train=True)
    with pytest.raises(TypeError, match=r'ahead.late\(params, kept, key=key'):
        ahead.late(PARAMS, kept)


def test_an_argument_by_position_has_a_name_too():
    """As for ``static_argnames`` of ``jax.jit``."""

    def fun(params: Any, x: Any, key: Any) -> Any:
        return loss(params, x @ params['body']['w']) * jax.random.normal(key)

    ahead = sg.precompute(fun, PARAMS, X, KEY, wrt='head/**', each='key')
    out = jax.eval_shape(ahead.late, PARAMS, ahead.kept, KEY)
    assert out == jax.eval_shape(fun, PARAMS, X, KEY)
    late = ahead.late(PARAMS, ahead.early(PARAMS, X), KEY)
    assert_same(late, fun(PARAMS, X, KEY))


class Model(nn.Module):
    """A frozen tower with dropout and a normalization, behind it a head."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        with nn.stop_gradient('tower/**'):
            x = nn.Dense(4, name='tower')(x)
        x = nn.Frozen(nn.BatchNorm(use_running_average=False), state='eval')(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(2, name='head')(nn.mirror(nn.Dense(4, name='second'))(x) + x)


@pytest.mark.parametrize('train', (True, False))
def test_a_model_of_linen(train: bool):
    """Blocks, ``Frozen``, a mirror, dropout of a key that changes."""
    model = Model()
    variables = oracle.init(model, {'params': KEY, 'dropout': KEY}, X)

    def fun(params: Any, x: Any, key: Any) -> Any:
        rest = {**variables, 'params': params}
        return jnp.mean(model.apply(rest, x, train, rngs={'dropout': key}) ** 2)

    params = variables['params']
    live = sg.live(fun, params, X, KEY)
    ahead = sg.precompute(fun, params, X, KEY, wrt=live, each=2)
    kept = ahead.early(params, X)
    ours, right = (sg.value_and_grad(f, wrt=live) for f in (ahead.late, fun))
    for key in KEY, jax.random.key(17):
        assert_same(ours(params, kept, key), right(params, X, key))
    if not train:  # The second tower reads what dropout leaves.
        away = sg.partition(params, live)[0]
        assert_same(ours(away, kept, KEY), right(params, X, KEY))


def test_a_module_in_place_of_a_function():
    """Its ``apply`` is split, as ``sg.live`` takes it."""
    model = nn.Sequential([nn.Frozen(nn.Dense(4)), nn.Dense(2)])
    variables = oracle.init(model, KEY, X)
    live = sg.live(model, variables, X)
    ahead = sg.precompute(model, variables, X, wrt=live)
    kept = ahead.early(variables, X)
    assert_same(ahead.late(variables, kept), model.apply(variables, X))
    assert products(ahead.late, variables, kept) == 1


class Net(nnx.Module):
    """A body, a head, and statistics that nothing trains."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(jnp.tanh(self.norm(self.body(x))))


def test_a_model_of_nnx():
    """It stands in the place of parameters, in ``early`` and in ``late``."""
    model = Net(nnx.Rngs(0))
    fun = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    ahead = sg.precompute(fun, model, X, wrt='head/**')
    assert [k.shape for k in ahead.kept] == [(3, 4)]
    kept = ahead.early(model, X)
    right = sg.value_and_grad(fun, wrt='head/**')(model, X)
    assert_same(sg.value_and_grad(ahead.late, wrt='head/**')(model, kept), right)
    assert products(lambda kernel: ahead.late(model, kept), 1.0) == 1
    jitted = nnx.jit(lambda model, kept: ahead.late(model, kept))
    assert_same(jitted(model, kept), right[0])


def test_transforms():
    """``jit``, ``vmap`` over heads, ``scan`` over batches and second derivatives."""
    ahead = sg.precompute(loss, PARAMS, X, wrt='head/**')
    batches = jnp.stack([X, 2 * X, -X])
    kept = jax.jit(jax.vmap(ahead.early, (None, 0)))(PARAMS, batches)
    right = jax.vmap(loss, (None, 0))(PARAMS, batches)
    assert_same(jax.vmap(ahead.late, (None, 0))(PARAMS, kept), right)
    assert_same(jax.lax.map(lambda k: ahead.late(PARAMS, k), kept), right)
    one = ahead.early(PARAMS, X)
    heads = jnp.stack([PARAMS['head']['w'], 3 * PARAMS['head']['w']])

    def ours(w: Any) -> Any:
        return jnp.sin(ahead.late({'body': sg.ABSENT, 'head': {'w': w}}, one))

    def hand(w: Any) -> Any:
        return jnp.sin(loss({**PARAMS, 'head': {'w': w}}, X))

    mapped = [jax.jit(jax.vmap(jax.grad(fn)))(heads) for fn in (ours, hand)]
    assert_same(*mapped)
    assert_same(*(jax.hessian(fn)(heads[0]) for fn in (ours, hand)))


def test_shard_map_and_shardings():
    """Features of a batch over devices stay where they were computed."""
    mesh = jax.make_mesh((2,), ('data',))
    spec = jax.sharding.PartitionSpec('data')
    x = jax.device_put(jnp.ones((4, 4)), jax.sharding.NamedSharding(mesh, spec))
    ahead = sg.precompute(loss, PARAMS, x, wrt='head/**')
    [kept] = jax.jit(ahead.early)(PARAMS, x)
    assert kept.sharding.is_equivalent_to(x.sharding, 2)
    assert_same(jax.jit(ahead.late)(PARAMS, [kept]), loss(PARAMS, x))
    part = sg.precompute(loss, PARAMS, jnp.ones((2, 4)), wrt='head/**')

    def each(params: Any, kept: Any) -> Any:
        return jax.lax.pmean(part.late(params, kept), 'data')

    none = jax.sharding.PartitionSpec()
    mapped = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(none, spec), out_specs=none
    )
    assert_same(mapped(each, check_vma=False)(PARAMS, [kept]), loss(PARAMS, x))
    with refused('check_vma=False'):
        mapped(each)(PARAMS, [kept])

    def whole(params: Any, x: Any) -> Any:
        ahead = sg.precompute(loss, params, x, wrt='head/**')
        return jax.lax.pmean(ahead.late(params, ahead.early(params, x)), 'data')

    assert_same(mapped(whole)(PARAMS, x), loss(PARAMS, x))


def test_types_of_arrays():
    """bfloat16, numpy arrays, integers, and typed keys as data."""

    def fun(params: Any, ids: Any, key: Any) -> Any:
        table = params['body']['w'].astype(jnp.bfloat16)
        x = table[ids] + jax.random.normal(key, (len(ids), 4), jnp.bfloat16)
        return jnp.sum(x @ params['head']['w'].astype(jnp.bfloat16))

    ids = np.array([1, 0, 3])
    ahead, kept = split(fun, ids, KEY)
    assert [(k.shape, k.dtype) for k in ahead.kept] == [((3, 4), jnp.bfloat16)]
    right = sg.grad(fun, wrt='head/**')(PARAMS, ids, KEY)
    assert_same(sg.grad(ahead.late, wrt='head/**')(PARAMS, kept), right)
    changing = sg.precompute(fun, PARAMS, ids, KEY, wrt='head/**', each=[2])
    kept = changing.early(PARAMS, ids)
    assert_same(changing.late(PARAMS, kept, KEY), fun(PARAMS, ids, KEY))


def test_keys_are_kept():
    """A typed key that is split once is as good as its bits."""

    def fun(params: Any, key: Any) -> Any:
        keys = jax.random.split(key, 3)
        noise = jax.random.normal(keys[0], (2,)) * params['head']['w'][0]
        return jnp.sum(noise), keys

    ahead, kept = split(fun, KEY)
    assert_same(*(bits(f(PARAMS, x)) for f, x in ((ahead.late, kept), (fun, KEY))))


def test_a_subtree_may_be_absent():
    """Frozen weights need not be on the device; those that are read, have to be."""
    ahead = sg.precompute(loss, PARAMS, X, wrt='head/**')
    kept = ahead.early({**PARAMS, 'head': sg.ABSENT}, X)
    away = {**PARAMS, 'body': sg.ABSENT}
    assert_same(ahead.late(away, kept), loss(PARAMS, X))
    said = r'body/w in argument 0 \(params\) is ABSENT, and early'
    with pytest.raises(sg.errors.AbsentLeafError, match=said):
        ahead.early(away, X)


class Broken:
    """A value that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    __hash__ = object.__hash__


def test_constants_of_the_split():
    """Values without arrays and holes of the data have to be those of the trace."""

    def fun(params: Any, data: Any) -> Any:
        return loss(params, data['x']), {'count': 3, 'x': data['x']}

    data = {'x': X, 'none': sg.ABSENT, 'tool': Broken()}
    ahead, kept = split(fun, data)
    assert_same(ahead.late(PARAMS, kept)[0], loss(PARAMS, X))
    assert 'float32[3,4]' in str(ahead)
    with refused('tool in argument 1'):
        ahead.early(PARAMS, {**data, 'tool': Broken()})


def scaled(params: Any, x: Any, factor: Any) -> Any:
    return loss(params, x @ params['body']['w']) * factor


# What was another program in each trace, or another one for a tracer.
OF_NUMBERS: dict[str, Any] = {
    'a product': scaled,
    'jnp.std, which has a NaN': lambda p, x, n: scaled(p, x, n + jnp.std(x)),
    'a median': lambda p, x, n: scaled(p, x, n * jnp.median(x, 0)[0]),
    'a callback': lambda p, x, n: (
        jax.debug.callback(lambda x: None, x),
        scaled(p, x, n),
    )[1],
    'its type': lambda p, x, n: scaled(p, x, n if isinstance(n, float) else 0.0),
    'its text': lambda p, x, n: scaled(p, x, {'3.0': 5.0}.get(f'{n}', 1.0)),
    'its value': lambda p, x, n: scaled(p, x, 1.0 if n > 2 else 2.0),
    'many bits': lambda p, x, n: scaled(p, x, (1 - n / 3) * 1e9),
    'a default': lambda p, x, n=2.0: scaled(p, x, n),
}


@pytest.mark.parametrize('name', OF_NUMBERS)
def test_numbers_of_python_are_constants(name: str) -> None:
    """The same number is right, and another one raises and names the cure."""
    ahead, kept = split(OF_NUMBERS[name], X, 3.0)
    assert_same(ahead.late(PARAMS, kept), OF_NUMBERS[name](PARAMS, X, 3.0))
    with refused(r'2 \(\w+\) is 4\.0, and was 3\.0.*\nGive an array\. .*each='):
        ahead.early(PARAMS, X, 4.0)


def test_many_numbers_cost_one_trace() -> None:
    """Labels in a list, a config of numbers: nothing is tried."""
    traces: list[int] = []

    def fun(params: Any, batch: Any) -> Any:
        traces.append(1)
        return scaled(params, batch['x'], batch['labels'][2] * jnp.std(batch['x']))

    batch = {'x': X, 'labels': [*range(64)], 'rate': 0.1}
    ahead = sg.precompute(fun, PARAMS, batch, wrt='head/**')
    assert len(traces) == 1
    assert_same(ahead.late(PARAMS, ahead.early(PARAMS, batch)), fun(PARAMS, batch))
    batch = {**batch, 'labels': [0, 1, 7, *range(3, 64)]}
    with refused('labels/2 in argument 1'):
        ahead.early(PARAMS, batch)


def test_numbers_that_may_change() -> None:
    """Arrays among the data, and numbers in ``each=``: 0 is no constant there."""

    def fun(params: Any, x: Any, scale: Any, step: int, *, bias: float) -> Any:
        y = jnp.tanh(x @ params['body']['w']) * scale
        y = jax.nn.relu(y) + optax.cosine_decay_schedule(1.0, 10)(step)
        y = jnp.where(step < 3, y, -y)
        return jnp.mean(y @ params['head']['w'] + bias)

    how: Any = {'wrt': 'head/**', 'each': (3, 'bias')}
    ahead = sg.precompute(fun, PARAMS, X, jnp.zeros(()), 0, bias=0.0, **how)
    for scale, step, bias in (0.0, 0, 0.0), (2.0, 2, 1.0), (0.5, 7, -1.0):
        kept = ahead.early(PARAMS, X, jnp.asarray(scale))
        right = fun(PARAMS, X, scale, step, bias=bias)
        assert_same(ahead.late(PARAMS, kept, step, bias=bias), right)
    # An int is a float, as in min(1, step / k); a float is no int.
    right = fun(PARAMS, X, 0.5, 0, bias=1.0)
    assert_same(ahead.late(PARAMS, kept, 0, bias=1), right)
    with refused(r'int32.*\n.*with a float'):
        ahead.late(PARAMS, kept, 0.5, bias=0.0)


def test_turns_of_a_loop_are_those_that_were_traced() -> None:
    """JAX cannot differentiate a loop of so many turns as a tracer says."""

    def fun(params: Any, x: Any, turns: int) -> Any:
        x = jnp.tanh(x @ params['body']['w'])
        turn = lambda _, x: jnp.tanh(x * params['head']['w'].sum())  # noqa: E731
        return jnp.mean(jax.lax.fori_loop(0, turns, turn, x))

    ahead, kept = split(fun, X, 3)
    grads = sg.grad(ahead.late, wrt='head/**')(PARAMS, kept)
    assert_same(grads, sg.grad(fun, wrt='head/**')(PARAMS, X, 3))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['w', 'scale'], meta_fields=[]
)
@dataclasses.dataclass
class Scaled:
    """A model as those of equinox: a number among its parameters."""

    w: Any
    scale: Any

    def __call__(self, x: Any) -> Any:
        y = jnp.tanh(x @ self.w)
        return jnp.mean(y * self.scale if self.scale > 1 else y)


def test_a_number_among_the_parameters() -> None:
    """It is a constant if nothing trains it; otherwise the error names the field."""
    model = Scaled(PARAMS['body']['w'], 2.0)
    call = lambda model, x: model(jnp.tanh(x @ PARAMS['body']['w']))  # noqa: E731
    for scale in 2.0, 2:  # Nobody can train a whole number.
        model = dataclasses.replace(model, scale=scale)
        wrt = 'w' if isinstance(scale, float) else sg.DECLARED
        ahead = sg.precompute(call, model, X, wrt=wrt)
        kept = ahead.early(model, X)
        right = sg.grad(call, wrt='w')(model, X).w
        assert_same(sg.grad(ahead.late, wrt='w')(model, kept).w, right)
        with refused(r'scale in .* is 3\.0'):
            ahead.late(dataclasses.replace(model, scale=3.0), kept)
    model = dataclasses.replace(model, scale=2.0)
    with pytest.raises(jax.errors.TracerBoolConversionError, match='scale in argument'):
        sg.precompute(call, model, X)

    def weighed(model: Any, x: Any) -> Any:  # It does not ask for the value.
        return jnp.sum(jnp.tanh(x @ PARAMS['body']['w']) @ model.w) * model.scale

    ahead = sg.precompute(weighed, model, X)
    kept = ahead.early(model, X)
    for scale in 2.0, 3.0:
        model = dataclasses.replace(model, scale=scale)
        assert_same(sg.grad(ahead.late)(model, kept), sg.grad(weighed)(model, X))


def test_an_error_of_jax_names_the_function_of_the_user() -> None:
    """A step in ``each=`` whose value is asked for, and its argument."""

    def asks(params: Any, x: Any, step: Any) -> Any:
        return loss(params, x if step < 3 else 2 * x)

    said = r'the function asks at .*test_precomputed.py.*Argument 2 \(step\)'
    with pytest.raises(jax.errors.TracerBoolConversionError, match=said):
        sg.precompute(asks, PARAMS, X, 0, wrt='head/**', each=2)


def passed_through(params: Any, batch: Any) -> Any:
    """Labels are kept as they are, and some of them on a device."""
    y = jax.device_put(batch['y'])
    labels = jnp.sum(jax.lax.stop_gradient(batch['z'][0]))
    return loss(params, batch['x']) * jnp.sum(y) + labels


@pytest.mark.parametrize('how', ('examples', 'batch', 'jit', 'donated'))
def test_what_is_kept_is_no_buffer_of_the_caller(how: str) -> None:
    """A loader that fills its arrays again, and one that donates them."""
    z = (np.ones((3, 256), 'f'),)
    big = {'x': np.array(X), 'y': np.arange(3.0, dtype='f'), 'z': z}
    ahead, _ = split(passed_through, big, examples=how == 'examples')
    right = passed_through(PARAMS, jax.tree.map(jnp.array, big))
    given = jax.tree.map(jnp.array, big) if how == 'donated' else big
    kept = (jax.jit(ahead.early) if how == 'jit' else ahead.early)(PARAMS, given)
    jax.tree.map(lambda a: a.delete() if how == 'donated' else a.fill(7.0), given)
    assert all(isinstance(k, jax.Array) for k in kept)
    assert_same(ahead.late(PARAMS, kept), right)


# What a loss takes, of the shape of what is kept.
DATA: dict[str, Any] = {
    'an array': X,
    'a tuple': (X,),
    'a dict': {'x': X},
    'two arrays': [X, X],
    'a list in a list': [[X]],
    'nothing': None,
}


@pytest.mark.parametrize('name', DATA)
def test_the_data_are_not_what_was_kept(name: str) -> None:
    """Shapes may agree: a list is asked for, as early returns it."""

    def residual(params: Any, x: Any) -> Any:
        return loss(params, x + jnp.tanh(x @ params['body']['w']))

    ahead = sg.precompute(residual, PARAMS, X, wrt='head/**')
    assert [k.shape for k in ahead.kept] == [X.shape]
    cure = r'Write kept = ahead\.early\(params, x\) and ahead\.late\(params, kept\)\.'
    with refused(r'early returns a list of 1\.\n' + cure):
        ahead.late(PARAMS, DATA[name])


def test_what_is_trained_while_a_condition_holds():
    """A traced condition: what it may train changes."""

    def grads(flag: Any) -> Any:
        wrt = sg.where('head/**') & flag
        ahead = sg.precompute(loss, PARAMS, X, wrt=wrt)
        return sg.grad(ahead.late, wrt=wrt)(PARAMS, ahead.early(PARAMS, X))

    for flag in (True, False):
        right = sg.grad(loss, wrt='head/**')(PARAMS, X)
        right = jax.tree.map(lambda g, flag=flag: g * float(flag), right)
        assert_same(jax.jit(grads)(flag), right)


def test_no_array_is_held():
    """A split keeps shapes: 8 billion frozen weights can leave the device."""
    params = jax.tree.map(lambda x: x + 1, PARAMS)
    ahead = sg.precompute(loss, params, X, wrt='head/**')
    refs = [weakref.ref(x) for x in jax.tree.leaves(params)]
    del params
    gc.collect()
    assert ahead.kept and not any(ref() is not None for ref in refs)


def test_fixed_parameters_have_no_gradient():
    """What goes through the kept values would be missing from it."""

    def twice(params, x):
        w = params['body']['w']
        return jnp.sum(jnp.tanh(x @ w) @ params['head']['w'] @ w[:2])

    ahead, kept = split(twice, X)
    grads = jax.grad(ahead.late)(PARAMS, kept)
    assert not grads['body']['w'].any()
    assert_same(grads['head'], jax.grad(twice)(PARAMS, X)['head'])
    with pytest.warns(sg.errors.NothingStoppedWarning, match='body'):
        sg.grad(ahead.late, wrt=['head/**', 'body/**'])(PARAMS, kept)
