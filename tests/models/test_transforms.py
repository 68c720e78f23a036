"""Transforms of Flax in a block, and blocks in the bodies of some.

Those that random models have, too, come once for sure in one of these. Others are
written as plain Flax. A row in a block is compared with plain Flax on copies of the
weights that were stopped by hand. A block in a body is compared with a body that stops
the weights by hand at that place.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import specs
from flax_sg import errors
from flax_sg import linen as nn
from oracle import assert_same, is_zero, stopped
from stepwise import evaluate, flat, outputs_and_grads
from test_random_models import check

X = jnp.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
INIT = {'params': jax.random.key(7)}


def block(where: Any, on: bool = True, **kwargs: Any) -> Any:
    return nn.stop_gradient(where, **kwargs) if on else contextlib.nullcontext()


def assert_same_grads(actual: Callable[..., Any], expected: Callable[..., Any], *args):
    """Outputs and the gradient of each output are the same to the last bit.

    The functions return outputs to be differentiated and outputs that are not.
    """
    assert_same(outputs_and_grads(actual, *args), outputs_and_grads(expected, *args))


# What is transformed.


def by_hand(module: Any, *args: Any) -> Any:
    """Calls a bound module of plain Flax with stopped copies of its weights."""
    params = module.variables.get('params', {})
    copies = {'params': stopped(params)}
    return module.clone(parent=None, name=None).apply(copies, *args)


class Once(nn.Module):
    """A body without blocks."""

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(3, name='layer')(x))


@dataclasses.dataclass(frozen=True)
class Row:
    """One transform.

    Attributes:
        name: what the test is called.
        make: from a class to a lifted one.
        variables: for a row that cannot make its own: what it is applied to.
        kernels: the name of the parameters that are stopped when not all are.
    """

    name: str
    make: Callable[..., Any]
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: str = 'kernel'

    def module(self) -> Any:
        return self.make(Once)(name='part')


def renamed(old: str, new: str) -> Callable[[Any], Any]:
    def walk(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {new if k == old else k: walk(v) for k, v in tree.items()}

    return walk


def swapped(tree: Any) -> Any:
    return {'params': tree.get('ema', {}), 'ema': tree.get('params', {})}


DENSES = {
    'layer': {'kernel': 0.1 * jnp.arange(9.0).reshape(3, 3), 'bias': jnp.arange(3.0)}
}

RENAMED = Row(
    'map_variables_renamed',
    lambda body: nn.map_variables(
        body,
        mapped_collections='params',
        trans_in_fn=renamed('core', 'kernel'),
        trans_out_fn=renamed('kernel', 'core'),
        mutable=True,
    ),
    kernels='core',
)
ROWS = [
    Row('remat_scan', lambda body: nn.remat_scan(body, lengths=(2, 2))),
    RENAMED,
    Row(
        'swap_collections',
        lambda body: nn.map_variables(
            body,
            mapped_collections=('params', 'ema'),
            trans_in_fn=swapped,
            trans_out_fn=swapped,
            mutable=True,
        ),
        variables={'params': DENSES, 'ema': jax.tree.map(jnp.cos, DENSES)},
    ),
]


# A row used before, inside and after a block.


class Around(nn.Module):
    row: Row
    where: Any = None
    made_inside: bool = False

    @nn.compact
    def __call__(self, x):
        uses = {}
        if not self.made_inside:
            part = self.row.module()
            uses['before'] = part(x)
        with block(self.where, self.where is not None):
            if self.made_inside:
                part = self.row.module()
            uses['inside'] = part(x)
        uses['after'] = part(x)
        return uses


def variables_of(row: Row) -> Any:
    if row.variables:
        return {col: {'part': tree} for col, tree in row.variables.items()}
    return evaluate(Around(row).init, INIT, X)


def applied(model: nn.Module) -> Callable[..., Any]:
    """A function of variables and input to vectors of outputs and of what was written.

    Of the written variables, only parameters are differentiated. The values of the
    others are compared.
    """

    def fn(variables: Any, x: Any) -> Any:
        out, written = model.apply(variables, x, mutable=True)
        params = written.pop('params', {})
        out = out if isinstance(out, dict) else {'out': out}
        uses = {use: flat(tree) for use, tree in out.items()}
        return {**uses, 'params': flat(params)}, written

    return fn


@pytest.mark.parametrize(
    ('row', 'made_inside'),
    [*((row, False) for row in ROWS), (RENAMED, True)],
    ids=lambda value: getattr(value, 'name', value),
)
def test_in_a_block(row, made_inside):
    where = '**' if made_inside else f'**/{row.kernels}'

    def halted(path):
        return made_inside or path.endswith(f'/{row.kernels}')

    blocked, plain = Around(row, where, made_inside), Around(row, None, made_inside)

    def expected(variables, x):
        live, written = applied(plain)(variables, x)
        copies = stopped(variables['params'], halted)
        halted_out, _ = applied(plain)({**variables, 'params': copies}, x)
        return {**live, 'inside': halted_out['inside']}, written

    assert_same_grads(applied(blocked), expected, variables_of(row), X)
    if made_inside:
        assert_same(*(evaluate(m.init_with_output, INIT, X) for m in (blocked, plain)))


# Those that random models have.


@pytest.mark.parametrize('lift', specs.LIFTS)
def test_a_lifted_function_around_blocks_and_in_them(lift):
    some = specs.Where('names', ('w', 'kernel'))
    use, other = specs.Use(0, lift), specs.Use(1, lift, mirror=specs.Where())
    body = (
        specs.Block(some, (use, other), raises=True, rule='scale'),
        specs.Use(0),
        specs.Block(
            specs.Where(), (specs.Block(some, (use,), rule='collection'),), rule='stop'
        ),
    )
    inner = specs.Composite(
        'setup',
        (specs.Kid(specs.Leaf('kept')),),
        (specs.Block(some, (specs.Use(0), specs.Use(0))), specs.Use(0)),
    )
    kids = specs.Kid(inner), specs.Kid(specs.Leaf('lora'))
    check(specs.Composite('compact', kids, body))


@pytest.mark.parametrize(
    'wraps',
    [
        *(('remat',), ('jit',), ('scan',), ('vmap',), ('scan', 'vmap')),
        *(('scan', 'scan'), ('remat', 'scan'), ('stop', 'scan'), ('jit', 'stop')),
    ],
    ids=' of '.join,
)
def test_a_lifted_class_around_blocks_and_in_them(wraps):
    some = specs.Where('names', ('w', 'kernel'))
    leaf = specs.Kid(specs.Leaf('dense'))
    inside = specs.Use(0), specs.Block(some, (specs.Use(0),)), specs.Use(0)
    kid = specs.Kid(specs.Composite('compact', (leaf,), inside), wraps, some)
    body = specs.Use(0), specs.Block(specs.Where(), (specs.Use(0),)), specs.Use(0)
    check(specs.Composite('compact', (kid,), body))


# A block in a lifted function. The owner is the module that the function gets.


def in_switch(use, part, x):
    branches = [lambda m, x: m(x), use, lambda m, x: x]
    return nn.switch(jnp.int32(jnp.sum(x) > 0), branches, part, x)


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


@pytest.mark.parametrize(
    'lifted',
    [in_switch, in_jvp, in_value_and_grad],
    ids=lambda fn: fn.__name__,
)
def test_in_a_lifted_function(lifted):
    variables = {'params': {'part': DENSES['layer']}}
    actual, expected = (applied(Uses(lifted, how)) for how in ('block', 'hand'))
    assert_same_grads(actual, expected, variables, X)


# A filter sees the names outside of nn.map_variables.


def renamed_kernel_is_stopped(where: Any) -> bool:
    variables = variables_of(RENAMED)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            part = RENAMED.module()
            with nn.stop_gradient(where):
                return jnp.sum(part(x))

    grad = jax.grad(Model().apply)(variables, X)['params']['part']['layer']
    assert not is_zero(grad['bias'])
    return is_zero(grad['core'])


def test_a_filter_takes_names_outside_of_map_variables():
    assert renamed_kernel_is_stopped('part/*/core')
    with pytest.raises(errors.UnusedFilterError):
        renamed_kernel_is_stopped('part/*/kernel')
