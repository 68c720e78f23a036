"""What a block covers: every read while it is open, nesting, owners, and other code.

Programs that read in some way are used before, in and after blocks, and compared with
plain Flax on weights that were stopped by hand. The rules by number are the traps that
naive versions of the mechanism fell into.
"""

import asyncio
import collections
import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest
from flax import linen
from flax.core import Scope, freeze

from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.engine import blocks
from tests.helpers import left_over, oracle, tasks
from tests.helpers.described import uses
from tests.helpers.described.language import Program
from tests.helpers.described.modules import Affine, Do, Kid, param
from tests.helpers.described.uses import PROGRAMS, RNGS, Route, X, check
from tests.helpers.left_over import assert_nothing_is_left

ROWS = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(fnn.Module):
    """Three layers of one kernel each, from ``setup``."""

    def setup(self):
        self.a, self.b, self.c = (fnn.Dense(3, use_bias=False) for _ in range(3))

    def __call__(self, x):
        return self.c(jnp.tanh(self.b(jnp.tanh(self.a(x)))))


MODEL = Model()
PARAMS = oracle.init(MODEL, jax.random.key(0), ROWS)['params']


def apply(params: Any) -> Any:
    return MODEL.apply({'params': params}, ROWS)


def frozen(fn: Any = apply, params: Any = PARAMS) -> str:
    """The names of the layers that a function of the parameters gives no gradient."""
    grads = oracle.grads(fn, params)[0][0]
    names = ''.join(name for name in grads if oracle.is_zero(grads[name]))
    # The others are what they are by hand, to the last bit.
    copy = oracle.grads(
        lambda p: apply(oracle.stopped(p, lambda path: path[0] in names)), params
    )
    oracle.assert_same(grads, copy[0][0])
    return names


_clean = pytest.fixture(autouse=True)(left_over.checked_after_a_test)


def test_the_union_of_nested_blocks_stops():
    """One value may be opened again while it is open, and afterwards."""
    where = nn.stop_gradient('a/**')
    for _ in range(2):
        with where:
            with nn.stop_gradient('b/**'):
                with where, nn.stop_gradient('c/**'):
                    assert frozen() == 'abc'
                assert frozen() == 'ab'
            assert frozen() == 'a'
        assert frozen() == ''


# Generators: a block may be held open by code that is not running.


def _directly():
    with nn.stop_gradient('a/**'):
        yield frozen()
        yield frozen()


def test_a_block_is_open_while_its_generator_is_suspended():
    generator = _directly()
    assert next(generator) == 'a'
    assert frozen() == 'a'
    with nn.stop_gradient('b/**'):
        assert frozen() == 'ab'
    assert next(generator) == 'a'
    assert list(generator) == []
    assert_nothing_is_left()
    closed, dropped = _directly(), _directly()
    next(closed)
    closed.close()
    assert_nothing_is_left()
    next(dropped)
    del dropped
    assert_nothing_is_left()
    while_aside = [_directly(), _directly()]
    assert [next(generator) for generator in while_aside] == ['a', 'a']
    with blocks.thread.only(()):  # As where a filter is asked.
        while while_aside:
            while_aside.pop().close()
    assert frozen() == ''


def in_another_thread(fn: Any) -> Any:
    """What a function returns there, or the error that it raises."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(fn)
        return future.exception() or future.result()


def test_a_block_closed_by_another_thread_or_read_there():
    where = nn.stop_gradient('a/**')
    with where:
        assert in_another_thread(frozen) == ''
        error = in_another_thread(lambda: where.__exit__(None, None, None))
        assert isinstance(error, errors.BlockError)
        assert frozen() == 'a'


def test_tasks_in_a_block_are_covered_and_none_closes_a_block_of_another():
    where = nn.stop_gradient('a/**')

    async def reads():
        return frozen()

    async def opens():
        where.__enter__()

    async def main():
        await asyncio.sleep(0)
        return frozen(), await asyncio.create_task(reads())

    with where:
        assert asyncio.run(main()) == ('a', 'a')

    async def closes():
        await asyncio.create_task(opens())
        with pytest.raises(errors.BlockError):
            where.__exit__(None, None, None)
        return frozen()

    assert asyncio.run(closes()) == ''


def test_a_read_by_another_task_while_a_block_is_open():
    def opens():
        with nn.stop_gradient('b/**'):
            frozen()

    def reads():
        init = functools.partial(MODEL.init, jax.random.key(0), ROWS)
        for read in (lambda: apply(PARAMS), frozen, init, opens):
            with pytest.raises(errors.BlockError):
                read()

    waits = nn.stop_gradient('a/**')
    assert tasks.read_while_another_waits(waits, reads, frozen) == 'a'


def test_a_predicate_that_reads_variables_itself():
    bound = MODEL.bind({'params': PARAMS})

    def where(path):
        return jnp.sum(bound.variables['params'][path.parts[0]]['kernel']) > 1e9

    def names(path):
        return path.parts[0] in bound.variables['params'] and path.startswith('a')

    with pytest.raises(errors.FilterTypeError), nn.stop_gradient(where):
        apply(PARAMS)
    assert_nothing_is_left()
    with nn.stop_gradient(names):
        assert frozen() == 'a'
    with nn.stop_gradient(['c/**', names]):
        assert frozen() == 'ac'


def test_a_function_for_values_reads_what_is_outside_of_its_block():
    def read(params):
        bound = MODEL.bind({'params': params})

        def plus_b(path, value):
            return value + bound.variables['params']['b']['kernel']

        with nn.stop_gradient('b/**'), nn.substitute(plus_b, where='[ab]/**'):
            return [bound.variables['params'][name]['kernel'] for name in 'ab']

    def by_hand(params):
        a, b = params['a']['kernel'], jax.lax.stop_gradient(params['b']['kernel'])
        return [a + b, b + b]

    oracle.assert_same_grads(read, by_hand, PARAMS)


def test_a_variable_that_there_is_not_in_a_block():
    bound = MODEL.bind({'params': PARAMS})
    with nn.stop_gradient('a/**'):
        assert bound.a.get_variable('params', 'bias', 3) == 3
        assert frozen() == 'a'


# Opening and closing leave JAX's context and the thread as they were.

DENSE = fnn.Dense(3)
OF_DENSE = oracle.init(DENSE, jax.random.key(0), ROWS)['params']


def dense(params: Any) -> Any:
    return DENSE.apply({'params': params}, ROWS)


def test_a_user_context_of_the_user_is_left_alone():
    mine = jax.make_user_context('none')
    seen: list[Any] = []

    @jax.jit
    def fn(x):
        seen.append(mine.value)
        return x

    with mine('outer'):
        with nn.stop_gradient('kernel', unused='ignore'):
            fn(1.0)
            with mine('inner'):
                fn(1.0)
            fn(1.0)
        fn(1.0)
    fn(1.0)
    assert seen == ['outer', 'inner', 'outer', 'none']


def test_modules_that_are_bound_one_after_the_other_in_a_block():
    """Each is gone with its turn, and what nobody reads of it counts as met."""
    refs = []
    with nn.stop_gradient('bias'):
        for i in range(3):
            params = jax.tree.map(lambda p, i=i: p + i, OF_DENSE)
            refs.append(weakref.ref(params['kernel']))
            bound = DENSE.bind({'params': params})
            assert bound.get_variable('params', 'kernel') is params['kernel']
            del params, bound
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
        # Or the block would say that it had no effect.
        jax.grad(lambda p: jnp.sum(dense(p)))(OF_DENSE)


def test_a_module_that_is_older_than_the_block_and_ends_in_it():
    bound = [DENSE.bind({'params': OF_DENSE})]
    with nn.stop_gradient(lambda path: path == 'bias', unused='ignore'):
        kernel = bound.pop().get_variable('params', 'kernel')
    assert kernel is OF_DENSE['kernel']
    bound = [DENSE.bind({'params': OF_DENSE})]
    with (
        pytest.warns(errors.NothingStoppedWarning),  # The bias is there, and unread.
        nn.stop_gradient('bias'),
    ):
        bound.pop().get_variable('params', 'kernel')


def test_a_module_keeps_the_depth_of_the_apply_that_bound_it():
    """What another ``dense`` is given is no variable of the block's tree."""

    def binds(self, bound):
        if bound is None:
            w = self.param('w', fnn.initializers.ones, (3,))
            return DENSE.bind({'params': {**OF_DENSE, 'bias': w}})
        return bound(ROWS)

    def loss(w, where):
        variables = {'params': {'w': w}}
        bound = Do(binds).apply(variables, None)
        with nn.stop_gradient(where, unused='ignore'):
            return jnp.sum(Do(binds).apply(variables, bound))

    w = jnp.ones(3)
    assert not oracle.is_zero(jax.grad(loss)(w, True))


# Every way to read a variable.


class Calls(nn.Module):
    """Calls the module that it is given, and reads an attribute of it."""

    @nn.compact
    def __call__(self, module, x):
        return module(x) * module.w2 * param(self, 'b')


class Holder(nn.Module):
    held: Any

    def __call__(self, x):
        return self.held(x) * 2.0


def before(parts: Callable[[Any], Callable[[Any], Any]]) -> type[Route]:
    """What is made in a compact method before the program begins; returns the use."""
    return type('Before', (Route,), {'parts': parts})


def kept(make: Callable[[Any], Any], use: Callable[[Any, Any], Any]) -> type[Route]:
    """What ``setup`` keeps, and its use."""

    class Kept(Route):
        def setup(self):
            self.kid = make(self)

        def use(self, x):
            return use(self, x)

    return Kept


def made_at_first_use(module):
    made = []

    def use(x):
        if not made:
            made.append(nn.Dense(3, name='kid'))
        return made[0](x)

    return use


def closure(module):
    kid = Kid(name='kid')

    def inner(self, x):
        return kid(x) * param(self, 'w')

    return Do(inner, name='inner')


def shared_by_two(module):
    shared = Kid(name='shared')
    a, b = Holder(shared, name='a'), Holder(shared, name='b')
    return lambda x: a(x) * b(x)


def variables(module, x):
    y = module.kid(x) * module.variables['params']['kid']['w']
    tree = module.scope.variables()['params']
    first = jax.tree.leaves(module.scope.root.variables()['params'])[0]
    kid = module.scope.get_variable('params', 'kid')
    return y * tree['kid']['w'] * first * kid['b'] + module.kid.variables['params']['b']


def variable_of_a_child(module):
    kid = Kid(name='kid')
    kid(X)
    v = nn.Variable(kid.scope, 'params', 'w', unbox=True)
    return lambda x: x * v.value


def argument(module):
    kid, calls = Kid(name='kid'), Calls(name='calls')
    return lambda x: calls(kid, x)


def boxed_variables(module):
    init = nn.with_partitioning(linen.initializers.normal(), ('in', 'out'))
    kid = nn.Dense(3, kernel_init=init, name='kid')
    return lambda x: kid(x) @ module.variables['params']['kid']['kernel'].value


def dropped(module, x):
    kid, drop = module.kid
    noise = jax.random.bernoulli(module.make_rng('noise'), shape=(3,))
    return drop(kid(x)) * noise.astype(x.dtype)


def raw_transforms(module, x):
    """Modules are read in closures of plain JAX transforms first, and then outside."""
    kid = module.kid
    if module.is_initializing():
        return kid(x)

    def body(carry, x):
        return carry + kid(x) * kid.variables['params']['w'], None

    carry, _ = jax.lax.scan(body, x, jnp.stack([x, x * 2.0]))
    jitted = jax.jit(lambda x: kid(x) * kid.get_variable('params', 'b'))
    mapped = jax.vmap(lambda x: kid(x))(jnp.stack([x, x + 1.0]))
    return carry * jitted(x) + jnp.sum(mapped, axis=0) + kid(x)


class InFields(Route):
    kids: Any = None

    def use(self, x):
        return self.kids['a'](x) * self.kids['b'][0](x) * self.kids['a'].w


class SharedByParent(nn.Module):
    program: Program

    @nn.compact
    def __call__(self, x):
        shared = Kid(name='shared')
        before = shared(x)
        kids = {'a': shared, 'b': [Affine(name='other')]}
        results = InFields(self.program, kids, name='user')(x)
        return *results[:-1], results[-1] + before


class LoraAround(nn.Module):
    """The first form of ``share_scope``: the base module is made by somebody else."""

    base: nn.Dense

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        a = self.param('A', linen.initializers.normal(), (3, 3))
        return self.base(x) + x @ a


def share_scope(module):
    base = nn.Dense(3, name='base')
    lora = LoraAround(base)
    return lambda x: lora(x) + base(x)


class CompactNameScope(Route):
    @nn.compact_name_scope
    def up(self, x):
        return nn.Dense(3, name='up')(x)

    @nn.compact_name_scope
    def down(self, x):
        return Kid(name='down')(x)

    def use(self, x):
        return self.up(x) * self.down(x)


class OwnProperty(Route):
    def setup(self):
        self.kid = Kid()
        self.w = param(self, 'w')

    @property
    def product(self):
        return self.w * self.kid.doubled

    def use(self, x):
        return x * self.product


def a_kid(module):
    return Kid()


def a_dict(module):
    return {'a': Kid(), 'b': {'c': nn.Dense(3)}}


ROUTES: dict[str, Callable[[Program], nn.Module]] = {
    'made at first use': before(made_at_first_use),
    'in dict': kept(a_dict, lambda m, x: m.kid['a'](x) * m.kid['b']['c'](x)),
    'fields': lambda program: InFields(program, {'a': Kid(), 'b': [nn.Dense(3)]}),
    'closure': before(closure),
    'shared by the parent': SharedByParent,
    'shared by two': before(shared_by_two),
    'share_scope': before(share_scope),
    'compact_name_scope': CompactNameScope,
    'property': OwnProperty,
    'variables': kept(a_kid, variables),
    'variable of a child': before(variable_of_a_child),
    'bare attribute': kept(a_kid, lambda m, x: x * m.kid.w * m.kid.w2),
    'argument': before(argument),
    'boxed variables': before(boxed_variables),
    'dropout': kept(lambda m: (Kid(), nn.Dropout(0.5, deterministic=False)), dropped),
    # The attribute of a lifted module is read past its transform.
    'lifted child': kept(lambda m: nn.remat(Kid)(), lambda m, x: m.kid(x) * m.kid.w2),
}

routes = pytest.mark.parametrize('make', ROUTES.values(), ids=list(ROUTES))
# Each kind of owner, scope and draw.
FEW = [
    *('made at first use', 'closure', 'dropout'),
    *('shared by the parent', 'share_scope', 'lifted child'),
]
few_routes = pytest.mark.parametrize('make', [ROUTES[name] for name in FEW], ids=FEW)


@routes
def test_before_in_and_after(make):
    check(make, PROGRAMS['some'], False, uses.staged)


@pytest.mark.parametrize('program', PROGRAMS.values(), ids=list(PROGRAMS))
def test_programs(program):
    check(ROUTES['shared by two'], program, ['params'], uses.eager)


@few_routes
def test_first_used_in_a_block_inside_another_module(make):
    """With everything mutable, and paths that do not begin at the root."""

    def mounted(program):
        return Mount(make(program))

    check(mounted, PROGRAMS['nested, first in it'], True)


def test_closures_of_raw_transforms():
    """Compiled: XLA rounds nothing here, since all numbers are small and whole."""
    make = kept(lambda module: Affine(), raw_transforms)
    check(make, PROGRAMS['around'], False, jax.jit)


@few_routes
def test_initialization_is_that_without_blocks(make):
    uses.initialization_is_that_without_blocks(make)


@pytest.mark.parametrize('name', ['shared by the parent', 'lifted child'])
def test_intermediates_are_those_without_blocks(name):
    capture = {'capture_intermediates': True}
    check(ROUTES[name], PROGRAMS['around'], ['intermediates'], **capture)


def test_a_block_in_a_compact_name_scope_belongs_to_its_module():
    """Flax runs such a method on a helper module; paths begin at ``self``."""

    class Model(nn.Module):
        @nn.compact_name_scope
        def up(self, x):
            with nn.stop_gradient('up/dense/kernel'):
                return nn.Dense(3, name='dense')(x)

        def __call__(self, x):
            return self.up(x)

    x = jnp.ones((2, 3))
    params = oracle.init(Model(), jax.random.key(0), x)['params']

    def by_hand(params, x):
        dense = oracle.stopped(params['up']['dense'], oracle.below('kernel'))
        return nn.Dense(3).apply({'params': dense}, x)

    oracle.assert_same_grads(
        lambda params, x: Model().apply({'params': params}, x), by_hand, params, x
    )


# What readers get.

stop = jax.lax.stop_gradient
PARTS = {'w': jnp.array([1.0, 2.0, 3.0]), 'b': jnp.array([4.0, 1.0, 2.0])}


def read(module: Any, name: str) -> Any:
    return module.get_variable('params', name)


def done(body: Any, params: Any, x: Any, mutable: Any, **state: Any) -> Any:
    out = Do(body).apply({'params': params, **state}, x, mutable=mutable, rngs=RNGS)
    return out if mutable else (out, {})


MUTABLE = ['params', 'state', 'intermediates']


def assert_same_program(
    body: Any, by_hand: Any, params: Any = PARTS, mutable: Any = MUTABLE, **state: Any
) -> None:
    """``body`` computes what ``by_hand`` does: results, writes, and their gradients."""

    def fn(body: Any) -> Any:
        return lambda params, x: done(body, params, x, mutable, **state)

    actual = uses.staged(uses.both(fn(body)))(params, X)
    oracle.assert_same(actual, uses.staged(uses.both(fn(by_hand)))(params, X))


# Values: what readers are given is of the kind that they would have been given.


@pytest.mark.parametrize(
    ('kind', 'mutable'), [(dict, ['params']), (freeze, False), (freeze, True)]
)
def test_trees_have_the_types_that_they_have_outside(kind, mutable):
    types = []

    def body(module, x):
        Kid(name='kid')(x)
        for block in (contextlib.nullcontext(), nn.stop_gradient('kid/w')):
            with block:
                tree = module.variables
                trees = [tree, tree['params'], tree['params']['kid']]
                types.append([type(tree) for tree in trees])
        return x

    Do(body).apply(kind({'params': {'kid': PARTS}}), X, mutable=mutable)
    assert types[0] == types[1]


def test_the_callers_variables_are_never_touched():
    def body(module, x):
        with nn.stop_gradient(True):
            y = module.variables['params']['w'] * Kid(name='kid')(x)
        return y * read(module, 'b')

    def loss(params):
        leaves = jax.tree.leaves(params)
        Do(body).apply({'params': params}, X)
        Do(body).apply({'params': params}, X, mutable=['params'])
        assert all(a is b for a, b in zip(jax.tree.leaves(params), leaves, strict=True))
        return jnp.sum(params['w'] * params['kid']['w'])

    gradient = jax.grad(loss)({**PARTS, 'kid': PARTS})
    oracle.assert_same(gradient['w'], PARTS['w'])


def test_rule_2_reading_the_tree_does_not_stop_a_child_of_a_child_for_good():
    """Flax fills the parents' caches when a child's collection is looked up."""

    def middle(self, x):
        return Kid(name='kid')(x)

    def body(module, x):
        with nn.stop_gradient(True):
            y = module.variables['params']['middle']['kid']['w'] * x
            z = module.scope.root.variables()['params']['middle']['kid']['b']
        return y * z, Do(middle, name='middle')(x)

    def by_hand(module, x):
        kid = stop(module.variables['params']['middle']['kid'])
        return kid['w'] * x * kid['b'], Do(middle, name='middle')(x)

    assert_same_program(body, by_hand, {'middle': {'kid': PARTS}})


def test_rule_8_a_stopped_value_may_be_a_plain_array():
    """Under no derivative nothing is traced, and nothing is changed."""

    def body(module, x):
        with nn.stop_gradient(True):
            assert read(module, 'w') is module.variables['params']['w']
            module.put_variable('params', 'b', read(module, 'w'))
        return read(module, 'w')

    w, written = Do(body).apply({'params': PARTS}, X, mutable=['params'])
    assert w is PARTS['w']
    assert written['params']['b'] is PARTS['w']


def test_rule_10_a_bound_module_keeps_nothing_of_a_closed_block():
    """Its scope is never invalidated."""
    stopped = []
    other = Kid().bind({'params': PARTS})

    def loss(w):
        bound = Kid().bind({'params': {**PARTS, 'w': w}})
        with nn.stop_gradient('w'):
            stopped.append(weakref.ref(bound.w))
            y = jnp.sum(bound(X) * other(X))
        assert bound.w is w and stopped[0]() is not w
        gc.collect()
        assert stopped[0]() is None
        return y + jnp.sum(bound(X))

    oracle.assert_same(jax.vmap(jax.grad(loss))(PARTS['w'][None]), X[None])


# Paths: what a filter is told of a variable.


class Mount(nn.Module):
    enc: Any

    @nn.compact
    def __call__(self, x):
        return self.enc(x)


def mounted(make: Any, collections: Any = 'params') -> Callable[[Any], nn.Module]:
    """A block around the use of a module, in a module that is mounted."""

    def model(where: Any) -> nn.Module:
        def opens(module, x):
            use = make()
            with nn.stop_gradient(where, collections=collections):
                return use(x)

        return Mount(Do(opens))

    return model


class InLifted(nn.Module):
    """Opens the block in the body of a lifted function of a module."""

    where: Any

    def setup(self):
        self.kid = Affine()

    def __call__(self, x):
        def body(kid, x):
            with nn.stop_gradient(self.where):
                return kid(x)

        return nn.jit(body)(self.kid, x)


def in_enc(*paths: str) -> set[tuple[str, str]]:
    """Paths of a module that is mounted as 'enc', there and from the root."""
    return {(path, f'enc/{path}') for path in paths}


PATHS: dict[str, tuple[Callable[[Any], nn.Module], set[tuple[str, str]]]] = {
    'mounted': (mounted(lambda: Kid(name='kid')), in_enc('kid/w', 'kid/b')),
    # What is lifted becomes a method of the module that it is a function of.
    'in a lifted function of a child': (
        lambda where: Mount(InLifted(where)),
        {('w', 'enc/kid/w'), ('b', 'enc/kid/b')},
    ),
    'all collections': (
        mounted(lambda: nn.BatchNorm(use_running_average=True, name='norm'), True),
        in_enc('norm/scale', 'norm/bias', 'norm/mean', 'norm/var'),
    ),
}


@pytest.mark.parametrize('name', PATHS)
def test_paths_and_one_evaluation_for_each(name):
    """Whether read by one way or several, under whatever transforms."""
    make, wanted = PATHS[name]
    variables = oracle.init(make(lambda path: True), RNGS, X)
    seen = []

    class Where:
        """Of a class of its own: a block asks what blocks of one code were asked."""

        def __call__(self, path):
            seen.append(path)
            return True

    def loss(params):
        return jnp.sum(make(Where()).apply({**variables, 'params': params}, X))

    gradient = jax.grad(loss)(variables['params'])
    assert oracle.is_zero(gradient)
    assert collections.Counter((str(p), p.absolute) for p in seen) == dict.fromkeys(
        wanted, 1
    )
    for path in seen:
        own = tuple(path.strip('/').split('/'))
        assert path.parts == own
        assert path.name == own[-1]
        assert path.module == path[: -len(own[-1]) - 1] or path.module == '/'
        statistic = path.name in ('mean', 'var')
        assert path.collection == ('batch_stats' if statistic else 'params')


@pytest.mark.parametrize('steps', ['p[]q[]', '[pq]', '[p]q[]'])
def test_other_code_patches_what_is_hooked(steps, monkeypatch):
    """Before and after a block, in it, and from within it to after it."""
    module, x = nn.Dense(1), jnp.ones((2, 3))
    variables = oracle.init(module, jax.random.key(0), x)
    original, met, block = Scope.get_variable, [], nn.stop_gradient('kernel')

    def patched(self: Scope, *args: Any) -> Any:
        met.append(steps)
        return before(self, *args)

    for number, step in enumerate(steps):
        if step in '[]':
            block.__enter__() if step == '[' else block.__exit__(None, None, None)
        elif step == 'p':
            before = Scope.get_variable
            monkeypatch.setattr(Scope, 'get_variable', patched)
        else:
            monkeypatch.undo()
        grads = jax.grad(lambda v: module.apply(v, x).sum())(variables)['params']
        in_block = steps[: number + 1].count('[') > steps[: number + 1].count(']')
        assert grads['kernel'].any() != in_block, steps[: number + 1]
    assert met
    assert Scope.get_variable is original


class Stop(BaseException):
    """No Exception, as KeyboardInterrupt is none."""


@pytest.mark.parametrize(('error', 'depth'), [(ValueError, 3), (Stop, 1)])
def test_an_exception_leaves_everything_as_it_was(error, depth):
    bound = MODEL.bind({'params': PARAMS})
    raised = error('on purpose')

    def deeper(n):
        if n == 0:
            assert frozen() == 'a'
            bound(ROWS)
            raise raised
        with nn.stop_gradient('a/**'):
            deeper(n - 1)

    with pytest.raises(error) as caught:
        deeper(depth)
    assert caught.value is raised
    assert_nothing_is_left()
    assert frozen(lambda p: MODEL.clone().apply({'params': p}, ROWS)) == ''
    oracle.assert_same(bound(ROWS), apply(PARAMS))


@pytest.mark.usefixtures('leaks')
@pytest.mark.parametrize(
    ('mutable', 'where'), [(False, True), (['params', 'intermediates'], 'kid/w')]
)
def test_rule_9_what_apply_returns_is_what_is_stored(mutable, where):
    """It reads the variables after the scope was invalidated; and keeps no tracer."""

    def body(module, x):
        kid = Kid(name='kid')
        with nn.stop_gradient(where):
            y = kid(x) + jnp.sum(module.variables['params']['kid']['w'])
            kid.sow('intermediates', 'y', y)
        return y

    def fn(params):
        return done(body, {'kid': params}, X, mutable)

    out, pull_back = jax.vjp(jax.jit(fn), PARTS)
    if mutable:
        ones = jax.tree.map(jnp.zeros_like, out)
        ones[1]['params'] = {'kid': PARTS}
        oracle.assert_same(pull_back(ones)[0], PARTS)
