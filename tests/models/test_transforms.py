"""Flax's transforms and layers in a block, and a block in the body of each.

Every row of a table is written once, as plain Flax. A row in a block is compared with
plain Flax on copies of the weights that were stopped by hand. A row with a block in its
body is compared with a body that stops the weights by hand at that place.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors
from flax_sg import linen as nn
from oracle import assert_same, is_zero, stopped
from stepwise import evaluate, flat, outputs_and_grads

X = jnp.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
XS = jnp.stack([X, -X, 0.5 * X])  # Something to scan or map over.
INIT = {'params': jax.random.key(7)}


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
    """One transform.

    Attributes:
        name: what the test is called.
        make: from a maker of bodies, ``(**fields) -> class``, to a Module class.
        args: what it is called with.
        variables: for a row that cannot make its own: what it is applied to.
        kernels: the name of the parameters that are stopped when not all are.
        keeps_params: whether plain Flax leaves the parameters as they are when they
            are mutable. If not they are immutable here; see the tests of writing back.
    """

    name: str
    make: Callable[..., Any]
    args: tuple[Any, ...] = (X,)
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: str = 'kernel'
    keeps_params: bool = True

    def module(self, name: str | None = None, body: Any = Once, **fields: Any) -> Any:
        return self.make(functools.partial(body, **fields))(name=name)


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

WITH_WRITES = (
    *('none', 'jit', 'remat', 'scan_stacked', 'scan_broadcast', 'vmap_each'),
    *('vmap_shared', 'cond', 'map_variables', 'custom_vjp'),
)


def named(rows: list[Row]) -> Any:
    return pytest.mark.parametrize('row', rows, ids=lambda row: row.name)


def only(*names: str) -> Any:
    return named([row for row in TRANSFORMS if row.name in names])


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
    row = next(row for row in TRANSFORMS if row.name == row_name)
    if row.variables:
        return {col: {'part': tree} for col, tree in row.variables.items()}
    return evaluate(Around(row).init, INIT, *row.args)


def applied(row: Row, model: nn.Module) -> Callable[..., Any]:
    """A function of variables and input to vectors of outputs and of what was written.

    Of the written variables, only parameters are differentiated. The values of the
    others are compared.
    """
    mutable = row.keeps_params

    def fn(variables: Any, x: Any) -> Any:
        out = model.apply(variables, x, *row.args[1:], mutable=mutable)
        out, written = out if mutable else (out, {})
        params = written.pop('params', {})
        out = out if isinstance(out, dict) else {'out': out}
        uses = {use: flat(tree) for use, tree in out.items()}
        return {**uses, 'params': flat(params)}, written

    return fn


def check_in_a_block(row: Row, where: str = '**', made_inside: bool = False) -> None:
    """With mutable parameters: immutable ones take the shorter way of these."""

    def halted(path):
        return where == '**' or path.endswith(where.removeprefix('**'))

    actual = applied(row, Around(row, where, made_inside))
    plain = applied(row, Around(row, None, made_inside))

    def expected(variables, x):
        live, written = plain(variables, x)
        copies = stopped(variables['params'], halted)
        halted_out, _ = plain({**variables, 'params': copies}, x)
        return {**live, 'inside': halted_out['inside']}, written

    assert_same_grads(actual, expected, variables_of(row.name), row.args[0])


# Those that ``test_writeback`` has not, with a body that writes.
@named([row for row in TRANSFORMS if row.name not in WITH_WRITES])
def test_in_a_block(row):
    check_in_a_block(row, f'**/{row.kernels}')


@only('remat_scan', 'map_variables_renamed')
def test_first_use_in_a_block(row):
    check_in_a_block(row, made_inside=True)
    assert_same(
        evaluate(Around(row, '**', True).init_with_output, INIT, *row.args),
        evaluate(Around(row, None, True).init_with_output, INIT, *row.args),
    )


# A block in the body.


@named(TRANSFORMS)
def test_in_the_body(row):
    variables = row.variables
    if not variables:
        variables, plain = (
            evaluate(row.module(None, Body, how=how).init, INIT, *row.args)
            for how in ('block', 'plain')
        )
        assert_same(variables, plain)
    assert_same_grads(
        applied(row, row.module(None, Body, how='block')),
        applied(row, row.module(None, Body, how='hand')),
        variables,
        row.args[0],
    )


# A block in a lifted function. The owner is the module that the function gets.


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


def in_remat(use, part, x):
    return nn.remat(use)(part, x)


@pytest.mark.parametrize(
    'lifted',
    [in_remat, in_switch, in_vjp, in_jvp, in_value_and_grad],
    ids=lambda fn: fn.__name__,
)
def test_in_a_lifted_function(lifted):
    row = Row('', lambda: None)
    variables = {'params': {'part': DENSES['layer']}}
    assert_same_grads(
        applied(row, Uses(lifted, 'block')),
        applied(row, Uses(lifted, 'hand')),
        variables,
        X,
    )


# while_loop has no reverse mode.


class Loop(nn.Module):
    """A block in the body of a loop."""

    how: str

    @nn.compact
    def __call__(self, x):
        part = nn.Dense(3, name='part')
        y = part(x)

        def below(m, carry):
            return (carry[0] < 3) & (jnp.sum(m.variables['params']['kernel']) > 0)

        def step(m, carry):
            if self.how == 'hand':
                used = by_hand(m, carry[1])
            else:
                with nn.stop_gradient('**'):
                    used = m(carry[1])
            return carry[0] + 1, jnp.tanh(used + m(carry[1]))

        _, z = nn.while_loop(below, step, part, (0, x))
        return {'before': y, 'inside': z, 'after': part(y)}


def test_while_loop():
    args = {'params': {'part': DENSES['layer']}}, X
    tangents = jax.tree.map(jnp.cos, args)

    def run(how):
        return evaluate(lambda *args: jax.jvp(Loop(how).apply, *args), args, tangents)

    assert_same(run('block'), run('hand'))


# A filter sees the names outside of nn.map_variables.


def renamed_kernel_is_stopped(where: Any) -> bool:
    variables = variables_of('map_variables_renamed')

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            row = next(row for row in TRANSFORMS if row.name == 'map_variables_renamed')
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
