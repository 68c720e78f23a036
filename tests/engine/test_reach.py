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
from described.language import Program
from described.modules import Affine, Kid, param
from described.uses import (
    PROGRAMS,
    Route,
    X,
    check,
    eager,
    initialization_is_that_without_blocks,
    staged,
)
from flax_sg import linen as nn


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


def own_params(module):
    made = []

    def use(x):
        made.append(None)
        own = module.param(f'w{len(made)}', linen.initializers.normal(), (3,))
        return x * own * own

    return use


def closure(module):
    kid = Kid(name='kid')

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return kid(x) * param(self, 'w')

    return Inner(name='inner')


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


def lifted_function(module, x):
    """One that closes over the module, and one that does not."""
    x = module.kid(x)
    closed = nn.remat(lambda kid, x: module.kid.w2 * x)(module.kid, x)
    return closed * nn.remat(lambda module, x: module.kid(x))(module, x)


def another_apply(module, x):
    module.kid(x)
    return Kid(parent=None).apply(module.kid.variables, x)


def core_function(module):
    """A function of a scope, as modules of ``flax.core`` are."""

    def dense(scope, x):
        w = scope.param('w', linen.initializers.normal(), (3,))
        return x * w + scope.variable('params', 'b', lambda: jnp.ones(3)).value

    scope = module.scope.push('lifted')
    child = module.scope.child(dense, 'child')
    return lambda x: child(x) * lift.checkpoint(dense)(scope.rewound(), x)


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
    'own params': before(own_params),
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
    'lifted function': kept(a_kid, lifted_function),
    'another apply': kept(a_kid, another_apply),
    'core function': before(core_function),
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
    check(make, PROGRAMS['some'], False, staged)


@pytest.mark.parametrize('program', PROGRAMS.values(), ids=list(PROGRAMS))
def test_programs(program):
    check(ROUTES['shared by two'], program, ['params'], eager)


class Mount(nn.Module):
    inner: Any

    @nn.compact
    def __call__(self, x):
        return self.inner(x)


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
    initialization_is_that_without_blocks(make)


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
    params = Model().init(jax.random.key(0), x)['params']

    def by_hand(params, x):
        dense = oracle.stopped(params['up']['dense'], oracle.below('kernel'))
        return nn.Dense(3).apply({'params': dense}, x)

    oracle.assert_same_grads(
        lambda params, x: Model().apply({'params': params}, x), by_hand, params, x
    )
