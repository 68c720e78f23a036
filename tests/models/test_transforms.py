"""Flax's transforms and layers in a block, and a block in the body of each.

Every row of a table is written once, as plain Flax. A row in a block is compared with
plain Flax on copies of the weights that were stopped by hand. A row with a block in its
body is compared with a body that stops the weights by hand at that place.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors
from flax_sg import linen as nn
from oracle import assert_same, grads, is_zero, stopped
from stepwise import evaluate, flat, outputs_and_grads

X = jnp.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
XS = jnp.stack([X, -X, 0.5 * X])  # Something to scan or map over.
KEY = jax.random.key(7)


def block(where: Any, on: bool = True, **kwargs: Any) -> Any:
    return nn.stop_gradient(where, **kwargs) if on else contextlib.nullcontext()


def assert_same_grads(actual: Callable[..., Any], expected: Callable[..., Any], *args):
    """Outputs and the gradient of each output are the same to the last bit.

    The functions return outputs to be differentiated and outputs that are not.
    """
    assert_same(outputs_and_grads(actual, *args), outputs_and_grads(expected, *args))


# The bodies to transform: with a block, without one, or with stops by hand.


def by_hand(module: Any, *args: Any) -> Any:
    """Calls a bound module of plain Flax with stopped copies of its weights."""
    params = module.variables.get('params', {})
    copies = {'params': stopped(params)}
    return module.clone(parent=None, name=None).apply(copies, *args)


class Once(nn.Module):
    """A body without blocks."""

    pair: bool = False  # Whether it is called as scan calls its body.

    @nn.compact
    def __call__(self, x, *unused):
        y = jnp.tanh(nn.Dense(3, name='layer')(x))
        return (y, y) if self.pair else y


class Body(nn.Module):
    """Uses one layer before, inside and after a block, and another one in between."""

    how: str = 'plain'
    pair: bool = False

    @nn.compact
    def __call__(self, x, *unused):
        layer = nn.Dense(3, name='layer')
        y = layer(x)
        if self.how == 'hand' and not self.is_initializing():
            z = by_hand(layer, jnp.tanh(y))
        else:
            with block('layer/**', self.how == 'block'):
                z = layer(jnp.tanh(y))
        y = jnp.tanh(layer(nn.Dense(3, name='other')(z)))
        return (y, y) if self.pair else y


@dataclasses.dataclass(frozen=True)
class Row:
    """One transform or layer.

    Attributes:
        name: what the test is called.
        make: from a maker of bodies, ``(**fields) -> class``, to a Module class, or
            from nothing if the row is a layer that has no body.
        args: what it is called with.
        variables: for a row that cannot make its own: what it is applied to.
        rngs: the streams that it draws from.
        mutable: the collections that it must be able to write.
        has_body: whether ``make`` takes a body.
        kernels: the name of the parameters that are stopped when not all are.
        keeps_params: whether plain Flax leaves the parameters as they are when they
            are mutable. If not they are immutable here; see the tests of writing back.
    """

    name: str
    make: Callable[..., Any]
    args: tuple[Any, ...] = (X,)
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    rngs: tuple[str, ...] = ()
    mutable: tuple[str, ...] = ()
    has_body: bool = True
    kernels: str = 'kernel'
    keeps_params: bool = True

    def module(self, name: str | None = None, body: Any = Once, **fields: Any) -> Any:
        body = (functools.partial(body, **fields),) if self.has_body else ()
        return self.make(*body)(name=name)

    def keys(self, *more: str) -> dict[str, Any]:
        return {
            s: jax.random.fold_in(KEY, i) for i, s in enumerate((*more, *self.rngs))
        }


def calls(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    """A module that calls ``fn(module, body, *args)`` with a body of its own."""

    def make(body: Any) -> Any:
        class Calls(nn.Module):
            @nn.compact
            def __call__(self, *args):
                inner = body(name='body')
                if self.is_initializing():
                    inner(*args)  # Branches and loops must not create variables.
                return fn(self, inner, *args)

        return Calls

    return make


def lifts(transform: Callable[..., Any], **kwargs: Any) -> Callable[[Any], Any]:
    return lambda body: transform(body, **kwargs)


def scans(
    transform: Callable[..., Any] = nn.scan, **kwargs: Any
) -> Callable[[Any], Any]:
    """Scans the body; kwargs are those of scan."""
    kwargs = {'length': 2, **kwargs}
    return lambda body: transform(functools.partial(body, pair=True), **kwargs)


STACKED = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
SHARED = {'variable_broadcast': 'params', 'split_rngs': {'params': False}}


def nested_scan(body: Any) -> Any:
    inner = nn.scan(functools.partial(body, pair=True), length=2, **STACKED)
    return nn.scan(inner, length=2, **STACKED)


def custom_vjp(module: Any, body: Any, x: Any) -> Any:
    def fn(inner, x):
        return inner(x)

    def forward(inner, x):
        return nn.vjp(fn, inner, x)

    def backward(pull_back, ct):
        params, x = pull_back(ct)
        return jax.tree.map(jnp.cos, params), 3 * x

    return nn.custom_vjp(fn, forward, backward)(body, x)


def renamed(old: str, new: str) -> Callable[[Any], Any]:
    def walk(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {new if k == old else k: walk(v) for k, v in tree.items()}

    return walk


def swapped(tree: Any) -> Any:
    return {'params': tree.get('ema', {}), 'ema': tree.get('params', {})}


DENSES = {
    name: {'kernel': 0.1 * jnp.arange(9.0).reshape(3, 3), 'bias': jnp.arange(3.0)}
    for name in ('layer', 'other')
}

TRANSFORMS = [
    Row('none', lambda body: body),
    Row('jit', lifts(nn.jit)),
    Row('remat', lifts(nn.remat)),
    Row('scan_stacked', scans(**STACKED), (X, None)),
    Row('scan_broadcast', scans(**SHARED), (X, None)),
    Row(
        'scan_of_remat',
        scans(lambda b, **kw: nn.scan(nn.remat(b), **kw), **STACKED),
        (X, None),
    ),
    Row('scan_nested', nested_scan, (X, None)),
    Row('remat_scan', lifts(nn.remat_scan, lengths=(2, 2))),
    Row(
        'vmap_each',
        lifts(nn.vmap, variable_axes={'params': 0}, split_rngs={'params': True}),
        (XS,),
    ),
    Row(
        'vmap_shared',
        lifts(nn.vmap, variable_axes={'params': None}, split_rngs={'params': False}),
        (XS,),
    ),
    Row(
        'vmap_of_scan',
        scans(
            lambda b, **kw: nn.vmap(
                nn.scan(b, **kw),
                in_axes=(0, None),
                variable_axes={'params': 1},
                split_rngs={'params': True},
            ),
            **STACKED,
        ),
        (XS, None),
    ),
    Row(
        'cond',
        calls(
            lambda _, body, x: nn.cond(
                jnp.sum(x) > 0, lambda m, x: m(x), lambda m, x: 2 * m(x), body, x
            )
        ),
    ),
    Row('custom_vjp', calls(custom_vjp), keeps_params=False),
    Row(
        'map_variables',
        lifts(nn.map_variables, mapped_collections='params'),
        variables={'params': DENSES},
    ),
    Row(
        'map_variables_mutable',
        lifts(nn.map_variables, mapped_collections='params', mutable=True),
    ),
    Row(
        'map_variables_renamed',
        lifts(
            nn.map_variables,
            mapped_collections='params',
            trans_in_fn=renamed('core', 'kernel'),
            trans_out_fn=renamed('kernel', 'core'),
            mutable=True,
        ),
        kernels='core',
    ),
    Row(
        'swap_collections',
        lifts(
            nn.map_variables,
            mapped_collections=('params', 'ema'),
            trans_in_fn=swapped,
            trans_out_fn=swapped,
            mutable=True,
        ),
        variables={'params': DENSES, 'ema': jax.tree.map(jnp.cos, DENSES)},
    ),
]


def layer(make: Callable[[], Any], name: str, *args: Any, **kwargs: Any) -> Row:
    return Row(name, make, args or (X,), has_body=False, **kwargs)


def boxed(annotate: Any, *names: Any) -> Any:
    init = annotate(nn.initializers.lecun_normal(), names)
    return functools.partial(nn.Dense, 3, kernel_init=init)


LAYERS = [
    layer(
        lambda: functools.partial(nn.BatchNorm, use_running_average=False),
        'batch_norm',
        kernels='scale',
        mutable=('batch_stats',),
    ),
    layer(
        lambda: SpectralDense,
        'spectral_norm',
        mutable=('batch_stats',),
        keeps_params=False,
    ),
    layer(
        lambda: nn.vmap(
            boxed(nn.with_partitioning, 'in', 'out'),
            variable_axes={'params': 0},
            split_rngs={'params': True},
            metadata_params={nn.PARTITION_NAME: 'each'},
        ),
        'partitioned_vmap',
        XS,
    ),
]


class SpectralDense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(nn.Dense(3))(x, update_stats=True)


ROWS = [*TRANSFORMS, *LAYERS]


def named(rows: list[Row]) -> Any:
    return pytest.mark.parametrize('row', rows, ids=lambda row: row.name)


def only(*names: str) -> Any:
    return named([row for row in ROWS if row.name in names])


# A row used before, inside and after a block.


class Around(nn.Module):
    row: Row
    where: Any = None
    made_inside: bool = False

    @nn.compact
    def __call__(self, *args):
        uses = {}
        if not self.made_inside:
            part = self.row.module('part')
            uses['before'] = part(*args)
        with block(self.where, self.where is not None):
            if self.made_inside:
                part = self.row.module('part')
            uses['inside'] = part(*args)
        uses['after'] = part(*args)
        return uses


@functools.cache
def variables_of(row_name: str) -> Any:
    row = next(row for row in ROWS if row.name == row_name)
    if row.variables:
        return {col: {'part': tree} for col, tree in row.variables.items()}
    return evaluate(Around(row).init, row.keys('params'), *row.args)


def applied(row: Row, model: nn.Module, mutable: Any) -> Callable[..., Any]:
    """A function of variables and input to vectors of outputs and of what was written.

    Of the written variables, only parameters are differentiated. The values of the
    others are compared.
    """
    if not mutable or not row.keeps_params:
        mutable = row.mutable or False

    def fn(variables: Any, x: Any) -> Any:
        out = model.apply(variables, x, *row.args[1:], mutable=mutable, rngs=row.keys())
        out, written = out if mutable else (out, {})
        params = written.pop('params', {})
        out = out if isinstance(out, dict) else {'out': out}
        uses = {use: flat(tree) for use, tree in out.items()}
        return {**uses, 'params': flat(params)}, written

    return fn


@pytest.mark.parametrize(
    ('row', 'made_inside'),
    [
        pytest.param(row, made_inside, id=f'{row.name}-{made_inside}')
        for names, made_inside in (
            (('jit', 'vmap_each'), False),
            (('remat_scan', 'partitioned_vmap'), True),
        )
        for row in ROWS
        if row.name in names
    ],
)
def test_init_values_are_those_of_plain_flax(row, made_inside):
    keys = row.keys('params')
    plain = Around(row, None, made_inside)
    blocked = Around(row, '**', made_inside)
    assert_same(
        evaluate(blocked.init_with_output, keys, *row.args),
        evaluate(plain.init_with_output, keys, *row.args),
    )


def check_in_a_block(
    row: Row, mutable: bool, kernels_only: bool = False, made_inside: bool = False
) -> None:
    where = f'**/{row.kernels}' if kernels_only else '**'

    def halted(path):
        return path.endswith(f'/{row.kernels}') or not kernels_only

    actual = applied(row, Around(row, where, made_inside), mutable)
    plain = applied(row, Around(row, None, made_inside), mutable)

    def expected(variables, x):
        live, written = plain(variables, x)
        copies = stopped(variables['params'], halted)
        halted_out, _ = plain({**variables, 'params': copies}, x)
        return {**live, 'inside': halted_out['inside']}, written

    assert_same_grads(actual, expected, variables_of(row.name), row.args[0])


@only('scan_stacked', 'vmap_shared', 'map_variables')
def test_in_a_block(row):
    check_in_a_block(row, mutable=False)


@named(ROWS)
def test_in_a_block_with_mutable_parameters(row):
    check_in_a_block(row, mutable=True, kernels_only=True)


@only('jit', 'scan_broadcast', 'map_variables_renamed')
def test_first_use_in_a_block_with_mutable_parameters(row):
    check_in_a_block(row, mutable=True, made_inside=True)


# A block in the body.


@only('scan_stacked')
def test_init_values_with_a_block_in_the_body(row):
    keys = row.keys('params')
    assert_same(
        evaluate(row.module(None, Body, how='block').init, keys, *row.args),
        evaluate(row.module(None, Body, how='plain').init, keys, *row.args),
    )


@named(TRANSFORMS)
def test_in_the_body(row):
    model = row.module(None, Body)
    variables = row.variables or evaluate(model.init, row.keys('params'), *row.args)
    assert_same_grads(
        applied(row, row.module(None, Body, how='block'), True),
        applied(row, row.module(None, Body, how='hand'), True),
        variables,
        row.args[0],
    )


class Bodies(nn.Module):
    """Two transformed bodies under one block, each with a block of its own in it."""

    row: Row
    how: str

    @nn.compact
    def __call__(self, *args):
        one = self.row.module('one', Body, how=self.how)
        two = self.row.module('two', Body, how=self.how)
        y = two(*args)
        with block('one/**/other/*', self.how == 'block'):
            z = flat(one(*args)) + flat(two(*args))
        return {'before': y, 'inside': z, 'after': one(*args)}


@only('jit')
def test_blocks_in_the_body_and_around_it(row):
    variables = evaluate(Bodies(row, 'plain').init, row.keys('params'), *row.args)
    plain = applied(row, Bodies(row, 'hand'), True)

    def expected(variables, x):
        live, written = plain(variables, x)
        copies = stopped(
            variables['params'], re.compile('one/(.*/)?other/.*').fullmatch
        )
        inside, _ = plain({**variables, 'params': copies}, x)
        return {**live, 'inside': inside['inside']}, written

    actual = applied(row, Bodies(row, 'block'), True)
    assert_same_grads(actual, expected, variables, row.args[0])


# A block in a lifted function. The owner is the module that the function gets.


def in_cond(use, part, x):
    return nn.cond(jnp.sum(x) > 0, use, lambda m, x: 2 * m(x), part, x)


def in_switch(use, part, x):
    branches = [lambda m, x: m(x), use, lambda m, x: x]
    return nn.switch(jnp.int32(jnp.sum(x) > 0), branches, part, x)


def in_vjp(use, part, x):
    y, pull_back = nn.vjp(use, part, x)
    return y, flat(pull_back(jnp.sin(y)))


def in_jvp(use, part, x):
    tangents = jax.tree.map(jnp.cos, jax.lax.stop_gradient(part.variables['params']))
    return nn.jvp(use, part, (x,), (jnp.sin(x),), {'params': tangents})


def in_value_and_grad(use, part, x):
    return nn.value_and_grad(lambda m, x: jnp.sum(use(m, x)), part, x)


def in_custom_vjp(use, part, x):
    def forward(m, x):
        return nn.vjp(use, m, x)

    def backward(pull_back, ct):
        params, x = pull_back(ct)
        return jax.tree.map(jnp.cos, params), x

    return nn.custom_vjp(use, forward, backward)(part, x)


def in_scan(use, part, x):
    def step(m, x, _):
        return use(m, x) + m(x), x

    return nn.scan(step, length=2, **SHARED)(part, x, None)


def in_vmap(use, part, x):
    axes = {'variable_axes': {'params': None}, 'split_rngs': {'params': False}}
    return nn.vmap(use, **axes)(part, x)


def in_map_variables(use, part, x):
    return nn.map_variables(
        use, 'params', trans_in_fn=lambda t: jax.tree.map(jnp.sin, t)
    )(part, x)


class Uses(nn.Module):
    lifted: Any
    how: str

    @nn.compact
    def __call__(self, x):
        part = nn.Dense(3, name='part')

        def use(m, x):
            if self.how == 'hand' and not self.is_initializing():
                return by_hand(m, x)
            with block('**', self.how == 'block'):
                return m(x)

        y = part(x)
        if self.is_initializing():
            return y
        return {'before': y, 'inside': self.lifted(use, part, y), 'after': part(y)}


@pytest.mark.parametrize(
    'lifted',
    [
        lambda use, part, x: nn.remat(use)(part, x),
        lambda use, part, x: nn.jit(use)(part, x),
        in_cond,
        in_switch,
        in_vjp,
        in_jvp,
        in_value_and_grad,
        in_custom_vjp,
        in_scan,
        in_vmap,
        in_map_variables,
    ],
    ids=[
        'remat',
        'jit',
        'cond',
        'switch',
        'vjp',
        'jvp',
        'value_and_grad',
        'custom_vjp',
        'scan',
        'vmap',
        'map',
    ],
)
def test_in_a_lifted_function(lifted):
    row = Row('', lambda: None)
    variables = {'params': {'part': DENSES['layer']}}
    assert_same_grads(
        applied(row, Uses(lifted, 'block'), True),
        applied(row, Uses(lifted, 'hand'), True),
        variables,
        X,
    )


# while_loop has no reverse mode.


class Loop(nn.Module):
    """A loop in a block, and a block in the body of a loop."""

    how: str
    inner: bool

    @nn.compact
    def __call__(self, x):
        part = nn.Dense(3, name='part')
        y = part(x)

        def below(m, carry):
            return (carry[0] < 3) & (jnp.sum(m.variables['params']['kernel']) > 0)

        def step(m, carry):
            use = m if self.how == 'plain' or not self.inner else self.use(m)
            return carry[0] + 1, jnp.tanh(use(carry[1]) + m(carry[1]))

        if self.inner:
            _, z = nn.while_loop(below, step, part, (0, x))
        else:
            with block('part/*', self.how == 'block'):
                _, z = nn.while_loop(below, step, part, (0, x))
        return {'before': y, 'inside': z, 'after': part(y)}

    def use(self, m):
        def call(x):
            if self.how == 'hand':
                return by_hand(m, x)
            with nn.stop_gradient('**'):
                return m(x)

        return call


@pytest.mark.parametrize('inner', [False, True], ids=['in a block', 'block in it'])
def test_while_loop(inner):
    params = {'part': DENSES['layer']}
    model, plain = Loop('block', inner), Loop('hand' if inner else 'plain', inner)

    def actual(params, x):
        return model.apply({'params': params}, x)

    def expected(params, x):
        live = plain.apply({'params': params}, x)
        if inner:
            return live
        halted = plain.apply({'params': stopped(params)}, x)
        return {**live, 'inside': halted['inside']}

    tangents = jax.tree.map(jnp.cos, (params, X))
    assert_same(
        evaluate(lambda *args: jax.jvp(actual, *args), (params, X), tangents),
        evaluate(lambda *args: jax.jvp(expected, *args), (params, X), tangents),
    )


# Not traced as a whole, so values are concrete where no derivative needs them.


def test_in_a_block_eagerly():
    name = 'custom_vjp'
    row = next(row for row in ROWS if row.name == name)
    variables = variables_of(name)
    mutable = ['params'] if row.keeps_params else False
    actual = applied(row, Around(row, '**'), mutable)
    plain = applied(row, Around(row), mutable)

    def expected(variables, x):
        live, written = plain(variables, x)
        halted, _ = plain({'params': stopped(variables['params'])}, x)
        return {**live, 'inside': halted['inside']}, written

    def differentiated(fn):
        return lambda variables: fn(variables, row.args[0])[0]

    assert_same(
        grads(differentiated(actual), variables),
        grads(differentiated(expected), variables),
    )
    assert_same(actual(variables, row.args[0]), plain(variables, row.args[0]))


@pytest.mark.usefixtures('leaks')
def test_no_tracer_is_kept():
    name = 'cond'
    row = next(row for row in ROWS if row.name == name)
    fn = applied(row, Around(row, '**'), True)
    variables = variables_of(name)

    def loss(variables):
        return sum(jnp.sum(y) for y in fn(variables, row.args[0])[0].values())

    jax.eval_shape(jax.grad(loss), variables)


@pytest.mark.usefixtures('leaks')
def test_no_tracer_is_kept_by_a_block_in_the_body():
    row = next(row for row in ROWS if row.name == 'vmap_of_scan')
    model = row.module(None, Body, how='block')

    def loss(x):
        return jnp.sum(
            flat(model.init_with_output(row.keys('params'), x, *row.args[1:]))
        )

    jax.eval_shape(jax.grad(loss), row.args[0])


# A filter sees the names outside of nn.map_variables.


def renamed_kernel_is_stopped(where: Any) -> bool:
    variables = variables_of('map_variables_renamed')

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            row = next(row for row in ROWS if row.name == 'map_variables_renamed')
            part = row.module('part')
            with nn.stop_gradient(where):
                return jnp.sum(part(x))

    grad = jax.grad(Model().apply)(variables, X)['params']['part']['layer']
    assert not is_zero(grad['bias'])
    return is_zero(grad['core'])


def test_a_filter_takes_names_outside_of_map_variables():
    assert renamed_kernel_is_stopped('part/*/core')
    with pytest.raises(errors.UnusedFilterError):
        renamed_kernel_is_stopped('part/*/kernel')


# Boxes.


def test_a_gradient_keeps_its_box():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            part = boxed(nn.with_partitioning, 'in', 'out')(name='part')
            y = part(x)
            with nn.stop_gradient('part/kernel'):
                return y, part(x)

    params = Model().init(KEY, X)['params']
    inside = jax.grad(lambda p: jnp.sum(Model().apply({'params': p}, X)[1]))(params)
    before = jax.grad(lambda p: jnp.sum(Model().apply({'params': p}, X)[0]))(params)
    for grad in (inside, before):
        assert jax.tree.structure(grad) == jax.tree.structure(params)
        assert grad['part']['kernel'].names == ('in', 'out')
    assert is_zero(inside['part']['kernel']) and not is_zero(before['part']['kernel'])
    assert not is_zero(inside['part']['bias'])
