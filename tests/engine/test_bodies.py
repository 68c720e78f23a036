"""Lifted transforms in a block, and blocks in their bodies: how they reach a module.

Each program is compared with one by hand: the same model without blocks, applied to
parameters that are stopped, or replaced, for what is read in the block, and to all of
them for what is read beside it.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.described import language, uses
from tests.helpers.lifts import DERIVATIVES, LIFTS

X = jnp.array([[1.0, 2.0, 3.0], [3.0, -1.0, 2.0]])
BODIES = [lift for lift in LIFTS if lift != 'while_loop']  # It has no gradient.

# What a body reads, given the module of the closure and that of its argument. It is
# lifted over the module itself, or over another one.
REACHES: dict[str, Callable[[Any, Any, Any], Any]] = {
    'argument': lambda outer, inner, x: inner.enc(x),
    'closure': lambda outer, inner, x: outer.enc(x),
    'kept, by closure': lambda outer, inner, x: x * outer.square,
    'kept, by argument': lambda outer, inner, x: x * inner.square,
    'field': lambda outer, inner, x: outer.part(x),
    'another module': lambda outer, inner, x: outer.enc(inner(x)),
}

# Whether a block opens in the body, and around the transform.
PLACES = [(1, 0), (0, 1), (1, 1)]


def takes(path: Any) -> bool:
    return path.parts[-2:-1] in (('enc',), ('part',)) or path.name == 'w'


# A block, and what it does to what it takes.
BLOCKS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    'stop': (lambda: nn.stop_gradient(takes), jax.lax.stop_gradient),
    'substitute': (
        lambda: nn.substitute(lambda path, leaf: 2.0 * leaf, where=takes),
        lambda leaf: 2.0 * leaf,
    ),
}


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param('s', nn.initializers.constant(3.0), ())


class Net(nn.Module):
    """Reads beside a block, and then in the block of a body."""

    lift: str
    reach: str
    part: Any
    inside: Any = None
    outside: Any = None

    def setup(self):
        self.enc, self.other = Scaled(), Scaled()
        self.w = self.param('w', nn.initializers.constant(2.0), ())
        self.square = self.w**2

    def read(self, x):
        def body(inner, x):
            with self.inside() if self.inside else contextlib.nullcontext():
                return REACHES[self.reach](self, inner, x)

        over = self.other if self.reach == 'another module' else self
        with self.outside() if self.outside else contextlib.nullcontext():
            return LIFTS[self.lift](body, over, x)

    def beside(self, x):
        return self.part(self.other(self.enc(x))) * self.square

    def __call__(self, x):
        beside = self.beside(x)  # In a body Flax would make parameters as tracers.
        return self.read(x), beside


class Mount(nn.Module):
    """Holds a ``Net``, or is one whose part is made outside of it."""

    lift: str
    reach: str
    inside: Any = None
    outside: Any = None

    def setup(self):
        self.part = Scaled()
        self.net = Net(self.lift, self.reach, self.part, self.inside, self.outside)

    def __call__(self, x):
        return self.net(x)

    def read(self, x):
        return self.net.read(x)

    def beside(self, x):
        return self.net.beside(x)


def at_root(*args: Any) -> Any:
    lift, reach, *blocks = args
    return Net(lift, reach, Scaled(name='part'), *blocks)


def variables_of(make: Any) -> Any:
    """Parameters that are all different."""
    shapes = jax.eval_shape(make('none', 'argument').init, jax.random.key(0), X)
    leaves, treedef = jax.tree.flatten(shapes)
    values = [jnp.float32(2.0 + n) for n, _ in enumerate(leaves)]
    return treedef.unflatten(values)


def called(model: Any, variables: Any, method: str) -> Any:
    return getattr(model.bind(variables), method)(X)


def applied(model: Any, variables: Any, method: str) -> Any:
    return model.apply(variables, X, method=method)


jitted = jax.jit(applied, static_argnames=('model', 'method'))


def selected(path: Any) -> bool:
    names = [key.key for key in path]
    return names[-2] in ('enc', 'part') or names[-1] == 'w'


@pytest.mark.parametrize('lift', BODIES)
@pytest.mark.parametrize('make', [at_root, Mount], ids=['root', 'submodule'])
def test_a_body_reads_what_the_block_shows(make, lift):
    """Eager and jitted, by ``apply`` and ``bind``, however the body gets at it."""
    variables = variables_of(make)
    row, kinds = BODIES.index(lift) + (make is Mount), [*BLOCKS]
    for n, reach in [*enumerate(REACHES)][row % 2 :: 2]:
        # The kinds, the places and the uses take turns.
        block, by_hand = BLOCKS[kinds[(n + row // 2) % len(kinds)]]
        places = PLACES[(n + row // 3) % 3]
        use = (applied, called, jitted)[(n + n // 3 + row) % 3]
        act = by_hand if sum(places) == 1 else lambda leaf, f=by_hand: f(f(leaf))

        def changed(path: Any, leaf: Any, act: Any = act) -> Any:
            return act(leaf) if selected(path) else leaf

        plain = make(lift, reach)
        model = make(lift, reach, *(block if is_in else None for is_in in places))

        def hand(variables, plain=plain, changed=changed):
            inside = jax.tree_util.tree_map_with_path(changed, variables)
            read = applied(plain, inside, 'read')
            return read, applied(plain, variables, 'beside')

        expected = oracle.grads(hand, variables)
        ours = functools.partial(use, model, method='__call__')
        oracle.assert_same(oracle.grads(ours, variables), expected)


@pytest.mark.parametrize('lift', BODIES)
@pytest.mark.parametrize('make', [at_root, Mount], ids=['root', 'submodule'])
def test_init_makes_what_it_makes_without_blocks(make, lift):
    """And each name of the block is found when the tree is complete."""
    row = BODIES.index(lift) + (make is Mount)
    for n, reach in [*enumerate(REACHES)][row % 2 :: 2]:
        block, places = BLOCKS['stop'][0], PLACES[(n + BODIES.index(lift)) % 3]
        model = make(lift, reach, *(block if is_in else None for is_in in places))
        oracle.assert_same(
            model.init(jax.random.key(0), X),
            make(lift, reach).init(jax.random.key(0), X),
        )


# Transforms of classes in a program, and blocks in their bodies.


class Once(nn.Module):
    """A body without blocks."""

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(3, name='layer')(x))


def renamed(old: str, new: str) -> Callable[[Any], Any]:
    def walk(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {new if k == old else k: walk(v) for k, v in tree.items()}

    return walk


def swapped(tree: Any) -> Any:
    return {'params': tree.get('ema', {}), 'ema': tree.get('params', {})}


names = renamed('core', 'kernel'), renamed('kernel', 'core')
renames = functools.partial(nn.map_variables, mutable=True)
CLASSES = {
    'remat_scan': lambda cls: nn.remat_scan(cls, lengths=(2, 2)),
    'renames': lambda cls: renames(cls, 'params', *names),
    'swaps': lambda cls: renames(cls, ('params', 'ema'), swapped, swapped),
}
KERNEL = 0.1 * jnp.arange(9.0).reshape(3, 3)
PART = {'part': {'layer': {'kernel': KERNEL, 'bias': jnp.arange(3.0)}}}
# It cannot make its own.
OF_BOTH = {'params': PART, 'ema': jax.tree.map(jnp.cos, PART)}


class Around(uses.Route):
    """A lifted class in a program; ``late``: it is made at its first use."""

    lift: str = 'renames'
    late: bool = False

    def parts(self):
        make = functools.cache(lambda: CLASSES[self.lift](Once)(name='part'))
        if not self.late:
            make()
        return lambda x: make()(x)


@pytest.mark.parametrize(
    ('lift', 'kernel', 'variables'),
    [
        ('remat_scan', 'kernel', None),
        ('renames', 'core', None),
        ('swaps', 'kernel', OF_BOTH),
    ],
)
def test_in_a_block(lift, kernel, variables):
    kernels = language.Block(
        language.Where('name', (kernel,), 'glob'), (uses.USE,), judged=True
    )

    def make(program):
        return Around(program, lift)

    uses.check(make, (uses.USE, kernels, uses.USE), True, variables=variables)


def test_made_in_a_block():
    def make(program):
        return Around(program, late=True)

    uses.check(make, (language.Block(language.EVERYTHING, (uses.USE,)), uses.USE), True)
    uses.initialization_is_that_without_blocks(make)


# A block in a lifted function, and around it. The owner of one in it is the module that
# the function gets.


class Lends(nn.Module):
    lifted: Any
    use: Any
    around: Any = contextlib.nullcontext

    @nn.compact
    def __call__(self, x):
        part = Once(name='part')
        y = part(x)
        with self.around():
            z = self.lifted(self.use, part, y)
        return y, z, part(y)


def call(module, x):
    return module(x)


def in_a_block(module, x):
    with nn.stop_gradient('**'):
        return module(x)


def by_hand(module, x):
    params = oracle.stopped(module.variables['params'])
    return module.clone(parent=None, name=None).apply({'params': params}, x)


def forward(fn):
    """What a loop has, of which there is no reverse mode."""
    return lambda params, x: jax.jvp(
        fn, (params, x), (jax.tree.map(jnp.cos, params), x)
    )


@pytest.mark.parametrize(
    'lifted',
    ['while_loop', *DERIVATIVES],
)
def test_in_a_lifted_function(lifted):
    derivatives = forward if lifted == 'while_loop' else uses.both

    def run(*how):
        return uses.staged(
            derivatives(uses.fn_of(Lends((LIFTS | DERIVATIVES)[lifted], *how)))
        )(PART, uses.X)

    expected = run(by_hand)
    oracle.assert_same(run(in_a_block), expected)
    if lifted != 'jvp':  # The tangents that it is given begin in the block.
        oracle.assert_same(run(call, lambda: nn.stop_gradient('part/**')), expected)


class Layer(nn.Module):
    """A body of a lifted class, in which a module is used before, in and after."""

    use: Any

    @nn.compact
    def __call__(self, x, _):
        part = Once(name='part')
        return part(self.use(part, part(x))), None


scan = functools.partial(nn.scan, length=2, **oracle.STACKED)
MAPPED: Any = {'in_axes': (0, None), 'axis_size': 2, **oracle.STACKED}


@pytest.mark.parametrize(
    'lift',
    [
        lambda cls: nn.vmap(scan(cls), **MAPPED),
        lambda cls: scan(nn.vmap(cls, **MAPPED)),
        lambda cls: scan(nn.remat(cls)),
        lambda cls: nn.remat(scan(cls)),
    ],
    ids=['vmap of scan', 'scan of vmap', 'scan of remat', 'remat of scan'],
)
def test_in_a_lifted_class(lift):
    xs = jnp.stack([uses.X, -uses.X])
    variables = oracle.init(lift(Layer)(call), jax.random.key(0), xs, None)

    def run(use, around=contextlib.nullcontext, selects=lambda path: False):
        def fn(params, x):
            params = oracle.stopped(params, selects)
            with around():
                return lift(Layer)(use).apply({'params': params}, x, None)[0], {}

        return uses.staged(uses.both(fn))(variables['params'], xs)

    oracle.assert_same(run(in_a_block), run(by_hand))
    kernels = run(call, lambda: nn.stop_gradient('**/kernel'))
    is_kernel = lambda path: path.endswith('kernel')  # noqa: E731
    oracle.assert_same(kernels, run(call, selects=is_kernel))
