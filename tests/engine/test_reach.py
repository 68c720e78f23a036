"""A block covers every variable read while it is open, however the read comes about.

Each route is used before, in and after blocks in one ``apply``. Values, and the
gradient of each use, are compared with plain Flax on weights that were stopped by hand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from flax.core import lift

import oracle
from flax_sg import linen as nn
from uses import (
    PROGRAMS,
    RNGS,
    USE,
    Block,
    Kid,
    Program,
    Route,
    Wrapped,
    X,
    check,
    eager,
    everything,
    others,
    param,
    plain,
    run,
    staged,
    variables_of,
    weights,
)


class Calls(nn.Module):
    """Calls the module that it is given."""

    @nn.compact
    def __call__(self, module, x):
        return module(x) * param(self, 'b')


class Helper:
    """A plain object that holds something."""

    def __init__(self, held: Any):
        self.held = held

    def __call__(self, x):
        return self.held(x)


class MadeBefore(Route):
    def parts(self):
        kid = nn.Dense(3, name='kid')
        return lambda x: kid(x)


class MadeAtFirstUse(Route):
    def parts(self):
        made = []

        def use(x):
            if not made:
                made.append(nn.Dense(3, name='kid'))
            return made[0](x)

        return use


class OwnParams(Route):
    def parts(self):
        made = []

        def use(x):
            made.append(None)
            own = self.param(f'w{len(made)}', linen.initializers.normal(), (3,))
            return x * own * own

        return use


class InSetup(Route):
    def setup(self):
        self.kid = Kid()

    def use(self, x):
        return self.kid(x)


class Grandchild(Route):
    def setup(self):
        self.top = Holder(Holder(Kid()))

    def use(self, x):
        return self.top(x)


class Holder(nn.Module):
    held: Any

    def __call__(self, x):
        return self.held(x) * 2.0


class InList(InSetup):
    def setup(self):
        self.kids = [Kid(), (nn.Dense(3), Kid())]

    def use(self, x):
        return self.kids[0](x) + self.kids[1][0](x) * self.kids[1][1].other(x)


class InDict(InSetup):
    def setup(self):
        self.kids = {'a': Kid(), 'b': {'c': nn.Dense(3)}}

    def use(self, x):
        return self.kids['a'](x) * self.kids['b']['c'](x)


class InFields(Route):
    kids: Any = None

    def use(self, x):
        return self.kids['a'](x) * self.kids['b'][0](x)


class Argument(Route):
    def parts(self):
        kid, calls = Kid(name='kid'), Calls(name='calls')
        return lambda x: calls(kid, x)


class Closure(Route):
    def parts(self):
        kid = Kid(name='kid')

        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x):
                return kid(x) * param(self, 'w')

        return Inner(name='inner')


class BoundMethod(Route):
    def parts(self):
        return Kid(name='kid').other


class PlainHelperInSetup(InSetup):
    def setup(self):
        self.helper = Helper(Kid(name='kid'))

    def use(self, x):
        return self.helper(x)


class Uses(Route):
    """Runs the program itself with a module that belongs to its parent."""

    kid: Any = None

    def use(self, x):
        return self.kid(x) * self.kid.w


class SharedByParent(nn.Module):
    program: Program

    @nn.compact
    def __call__(self, x):
        shared = Kid(name='shared')
        before = shared(x)
        results = Uses(self.program, shared, name='user')(x)
        return *results[:-1], results[-1] + before

    fails = Route.fails


class SharedByTwo(Route):
    def parts(self):
        shared = Kid(name='shared')
        a, b = Holder(shared, name='a'), Holder(shared, name='b')
        return lambda x: a(x) * b(x)


class LoraAround(nn.Module):
    """The first form of ``share_scope``: the base module is made by somebody else."""

    base: nn.Dense

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        a = self.param('A', linen.initializers.normal(), (3, 3))
        return self.base(x) + x @ a


class ShareScope(Route):
    def parts(self):
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


class ProgramInNameScope(nn.Module):
    program: Program

    @nn.compact_name_scope
    def scoped(self, x):
        kid = Kid(name='kid')
        return run(self.program, lambda: kid(x) * kid.w2)

    def __call__(self, x):
        return self.scoped(x)

    fails = Route.fails


class OwnProperty(Route):
    def setup(self):
        self.kid = Kid()
        self.w = param(self, 'w')

    @property
    def product(self):
        return self.w * self.kid.doubled

    def use(self, x):
        return x * self.product


class Variables(InSetup):
    def use(self, x):
        y = self.kid(x)
        kid = self.kid.variables['params']
        return y * self.variables['params']['kid']['w'] + kid['b']


class ScopeVariables(InSetup):
    def use(self, x):
        y = self.kid(x)
        tree = self.scope.variables()['params']
        root = self.scope.root.variables()['params']
        first = jax.tree.leaves(root)[0]
        kid = self.scope.get_variable('params', 'kid')
        return y * tree['kid']['w'] * first * kid['b']


class VariableOfScope(Route):
    def parts(self):
        v = self.scope.variable('params', 'w', lambda: jnp.ones(3))
        return lambda x: x * v.value


class VariableOfKid(Route):
    def parts(self):
        kid = Kid(name='kid')
        kid(X)
        v = nn.Variable(kid.scope, 'params', 'w', unbox=True)
        return lambda x: x * v.value


class EmbeddingAttribute(Route):
    def setup(self):
        self.embed = nn.Embed(4, 3)

    def use(self, x):
        return self.embed.embedding @ x


class BareAttribute(InSetup):
    def use(self, x):
        return x * self.kid.w * self.kid.w2


class BareAttributeOfArgument(Route):
    def parts(self):
        kid = Kid(name='kid')

        class Reader(nn.Module):
            @nn.compact
            def __call__(self, other, x):
                return x * other.w2 * param(self, 'w')

        reader = Reader(name='reader')
        return lambda x: reader(kid, x)


class Boxed(Route):
    def parts(self):
        init = nn.with_partitioning(linen.initializers.normal(), ('in', 'out'))
        return nn.Dense(3, kernel_init=init, name='kid')


class BoxedVariables(Boxed):
    def parts(self):
        kid = super().parts()

        def use(x):
            y = kid(x)
            return y @ self.variables['params']['kid']['kernel'].value

        return use


class Dropped(InSetup):
    def setup(self):
        self.kid = Kid()
        self.drop = nn.Dropout(0.5, deterministic=False)

    def use(self, x):
        noise = jax.random.bernoulli(self.make_rng('noise'), shape=(3,))
        return self.drop(self.kid(x)) * noise.astype(x.dtype)


class LiftedChild(Route):
    """The attribute of a lifted module is read past its transform."""

    def setup(self):
        self.kid = nn.remat(Kid)()

    def use(self, x):
        return self.kid(x) * self.kid.w2


class LiftedFunction(InSetup):
    """A lifted function that closes over ``self``, and one that does not."""

    def use(self, x):
        x = self.kid(x)
        closed = nn.remat(lambda kid, x: self.kid.w2 * x)(self.kid, x)
        return closed * nn.remat(lambda module, x: module.kid(x))(self, x)


class RawTransforms(InSetup):
    """Modules are read in closures of plain JAX transforms."""

    def use(self, x):
        x = self.kid(x)

        def body(carry, x):
            return carry + x * self.kid.w2 * self.kid.variables['params']['w'], None

        carry, _ = jax.lax.scan(body, x, jnp.stack([x, x * 2.0]))
        jitted = jax.jit(lambda x: self.kid(x) * self.kid.get_variable('params', 'b'))
        mapped = jax.vmap(lambda x: self.kid.other(x))(jnp.stack([x, x + 1.0]))
        return carry * jitted(x) + jnp.sum(mapped, axis=0)


class Scratch(Route):
    """Another ``apply`` of the same weights, read in the block."""

    def setup(self):
        self.kid = Kid()

    def use(self, x):
        self.kid(x)
        return Kid(parent=None).apply(self.kid.variables, x)


class CoreFunction(Route):
    """A function of a scope, as modules of ``flax.core`` are."""

    def parts(self):
        def dense(scope, x):
            w = scope.param('w', linen.initializers.normal(), (3,))
            return x * w + scope.variable('params', 'b', lambda: jnp.ones(3)).value

        scope = self.scope.push('lifted')
        child = self.scope.child(dense, 'child')
        return lambda x: child(x) * lift.checkpoint(dense)(scope.rewound(), x)


class Reader:
    """A descriptor that nothing of Flax knows."""

    def __get__(self, module, cls=None):
        return self if module is None else module.get_variable('params', 'w') * module.b


class WithSpecialMethods(Kid):
    product = Reader()

    @nn.nowrap
    def unwrapped(self, x):
        return x * self.w2 * self.product

    @staticmethod
    def static(module, x):
        return module.w * x

    def __getitem__(self, i):
        return self.w[i]


class SpecialMethods(InSetup):
    def setup(self):
        self.kid = WithSpecialMethods()

    def use(self, x):
        y = self.kid.unwrapped(x) * self.kid.static(self.kid, x)
        return y * self.kid[1] * Kid.other(self.kid, x)


class PullBack(InSetup):
    """A derivative with respect to the input, taken inside."""

    def use(self, x):
        y, pull_back = jax.vjp(lambda x: self.kid(x) * self.kid.w2, x)
        return y * pull_back(x)[0]


ROUTES: dict[str, Callable[[Program], nn.Module]] = {
    'made before': MadeBefore,
    'made at first use': MadeAtFirstUse,
    'own params': OwnParams,
    'in setup': InSetup,
    'grandchild': Grandchild,
    'in list': InList,
    'in dict': InDict,
    'fields': lambda program: InFields(program, {'a': Kid(), 'b': [nn.Dense(3)]}),
    'argument': Argument,
    'closure': Closure,
    'bound method': BoundMethod,
    'plain helper in setup': PlainHelperInSetup,
    'shared by the parent': SharedByParent,
    'shared by two': SharedByTwo,
    'share_scope': ShareScope,
    'compact_name_scope': CompactNameScope,
    'in a compact_name_scope': ProgramInNameScope,
    'property': OwnProperty,
    'variables': Variables,
    'variables of the scope': ScopeVariables,
    'variable of the scope': VariableOfScope,
    'variable of a child': VariableOfKid,
    'embedding': EmbeddingAttribute,
    'bare attribute': BareAttribute,
    'bare attribute of an argument': BareAttributeOfArgument,
    'boxed variables': BoxedVariables,
    'dropout': Dropped,
    'lifted child': LiftedChild,
    'lifted function': LiftedFunction,
    'another apply': Scratch,
    'core function': CoreFunction,
    'special methods': SpecialMethods,
    'pull-back': PullBack,
}

routes = pytest.mark.parametrize('make', ROUTES.values(), ids=list(ROUTES))
# Each kind of owner, scope and draw.
FEW = [
    *('made at first use', 'own params', 'in setup', 'in dict', 'fields', 'closure'),
    *('shared by the parent', 'share_scope', 'in a compact_name_scope', 'dropout'),
    *('lifted child', 'another apply', 'core function', 'boxed variables'),
]
few_routes = pytest.mark.parametrize('make', [ROUTES[name] for name in FEW], ids=FEW)
# Each of two by turns: around the other one, alone, and inside it.
TURNS: Program = (
    USE,
    Block(weights, (USE, Block(others, (USE,), raises=True))),
    Block(everything, (USE,)),
    Block(weights, (Block(others, (USE,)),)),
    USE,
)


@routes
def test_before_in_and_after(make):
    check(make, PROGRAMS['all'], False, staged)


@few_routes
def test_wrappers_in_the_place_of_blocks(make):
    """``Frozen`` and ``mirror`` by turns, around the whole of each use."""

    def wrapped(program):
        return Wrapped(program, make)

    check(wrapped, TURNS, False, staged)


@pytest.mark.parametrize('program', PROGRAMS.values(), ids=list(PROGRAMS))
@pytest.mark.parametrize('route', ['made at first use', 'shared by two', 'in dict'])
def test_programs(program, route):
    check(ROUTES[route], program, ['params'], eager)


class Mount(nn.Module):
    inner: Any

    @nn.compact
    def __call__(self, x):
        return self.inner(x)


@routes
def test_first_used_in_a_block_inside_another_module(make):
    """With everything mutable, and paths that do not begin at the root."""

    def mounted(program):
        return Mount(make(program))

    check(mounted, PROGRAMS['nested, first in it'], True)


@pytest.mark.parametrize('make', [InSetup, SharedByParent, RawTransforms])
def test_compiled(make):
    """XLA rounds nothing here: all numbers are small and whole."""
    check(make, PROGRAMS['around'], False, jax.jit)


@few_routes
def test_initialization_is_that_without_blocks(make):
    """Under ``jit``, where parameters are tracers when they are created."""

    def init(program):
        def fn(key, x):
            return make(program).init_with_output({**RNGS, 'params': key}, x)

        return fn

    program, args = PROGRAMS['nested, first in it'], (RNGS['params'], X)
    actual = staged(init(program))(*args)
    oracle.assert_same(actual, staged(init(plain(program)))(*args))


@few_routes
def test_intermediates_are_those_without_blocks(make):
    def captured(program):
        def fn(params, x):
            return make(program).apply(
                {**variables, 'params': params},
                x,
                rngs=RNGS,
                mutable=['intermediates'],
                capture_intermediates=True,
            )

        return jax.vjp(fn, variables['params'], X)[0]

    program = PROGRAMS['around']
    variables = variables_of(make, program)
    oracle.assert_same(captured(program), captured(plain(program)))
