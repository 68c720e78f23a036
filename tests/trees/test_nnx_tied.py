"""Tied Variables of NNX are one leaf in whatever takes trees apart."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import flax_sg as sg
from flax_sg import nnx as sg_nnx
from flax_sg import testing
from flax_sg.filters import as_filter
from flax_sg.trees.leaves import Leaves
from flax_sg.trees.nnx_tied import each_once
from tests.helpers import oracle


class Layer(nnx.Module):
    def __init__(self, seed):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (3, 3)))

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel[...])


class Tied(nnx.Module):
    """One kernel at two places, with a Param between them."""

    def __init__(self, seed=0):
        self.encoder, self.layer = Layer(seed), Layer(seed + 1)
        self.zero = Layer(seed)
        self.zero.kernel = self.encoder.kernel

    def __call__(self, x):
        return self.zero(self.layer(self.encoder(x)))


X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
PATHS = ['encoder/kernel', 'layer/kernel']


def stopped(model):
    """It trains the layer alone."""
    kernel = jax.lax.stop_gradient(model.encoder.kernel[...])
    return jnp.tanh(model.layer(X @ kernel) @ kernel).sum()


def is_tied(model):
    return model.encoder.kernel is model.zero.kernel


@pytest.mark.parametrize('within', ['alone', 'tuple', 'dict', 'collections'])
def test_paths_anywhere_in_a_tree(within):
    model = Tied()
    tree, outer = {
        'alone': (model, ''),
        'tuple': ((model, 1.0), '0/'),
        'dict': ({'net': model}, 'net/'),
        'collections': ({'params': {'net': model}}, 'net/'),
    }[within]
    paths = [path for path in Leaves(tree).paths if path != '1']
    assert paths == [outer + path for path in PATHS]
    if within != 'tuple':
        assert [path.name for path in paths] == ['kernel', 'kernel']
        assert paths[0].module == outer + 'encoder'


@pytest.mark.parametrize(
    'where', ['zero/**', 'zero/kernel', re.compile('z.*'), lambda path: path[0] == 'z']
)
def test_tied_weights_are_selected_by_any_of_their_paths(where):
    model = Tied()
    for chosen, expected in (where, [True, False]), (~as_filter(where), [False, True]):
        assert [one.selected for one in sg.paths(model, where=chosen)] == expected
    sg.testing.assert_stopped(stopped, where, model)
    sg.testing.assert_trains_only(stopped, ~as_filter(where), model)
    with pytest.raises(sg.errors.ExpectationError):
        sg.testing.assert_stopped(lambda model: model(X).sum(), where, model)
    # What is derived, or a tree of bools, knows one path.
    live = sg.live(stopped, model)
    for chosen in live, sg.mask(model, trained=live), live & ~as_filter(where):
        assert [one.selected for one in sg.paths(model, where=chosen)] == [False, True]


def test_parts_are_tied_again():
    model = Tied()
    parts = sg.partition(model, 'encoder/*')
    assert list(map(is_tied, parts)) == [True, True]
    assert parts[1].encoder.kernel.get_raw_value() is sg.ABSENT
    for both in parts, parts[::-1]:
        again = sg.combine(*both)
        assert is_tied(again)
        oracle.assert_same(nnx.state(again), nnx.state(model))
    assert is_tied(sg.mask(model, trained='layer/*'))


def test_what_is_not_tied_is_the_tree_itself():
    for tree in {'a': 1.0}, Layer(0), (Layer(0), Layer(0)), nnx.state(Tied()):
        assert each_once(tree)[0] is tree


def test_other_ties_are_another_structure():
    def tied(a, b):
        w, v = nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))
        return Leaves(nnx.List([w, v, (w, v)[a], (w, v)[b]])).treedef

    assert tied(0, 1) == tied(0, 1)
    assert len({tied(0, 1), tied(1, 0), tied(0, 0)}) == 3


@pytest.mark.parametrize('make', ['state', 'variables', 'pure', 'list', 'beside'])
def test_one_state_at_two_places_is_two_leaves(make):
    """As for JAX and optax; of models that share a Variable it stays one."""
    model = Tied()
    state, layer = nnx.state(model), model.layer.kernel
    tree = {
        'state': {'online': state, 'target': state},
        'variables': {'online': {'w': layer}, 'target': {'w': layer}},
        'pure': {'online': nnx.state(model), 'target': nnx.state(model)},
        'list': {'online': [layer], 'target': (layer,)},
        'beside': {'tied': model, 'target': {'w': layer}, 'online': [layer]},
    }[make]
    copy = {'tied': nnx.clone(model), 'target': {'w': 1.0}, 'online': [1.0]}
    if make != 'beside':
        copy = jax.tree.map(jnp.copy, tree)
    for where in 'target/**', 'online/**', ['target/**', 'online/**']:
        takes = [one.selected for one in sg.paths(tree, where=where)]
        assert takes == [one.selected for one in sg.paths(copy, where=where)]
        mask, wanted = (sg.mask(one, trained=where) for one in (tree, copy))
        assert jax.tree.leaves(mask) == jax.tree.leaves(wanted)
    part, rest = sg.partition(tree, 'target/**')
    oracle.assert_same(sg.combine(part, rest), tree)
    count = lambda some: len(jax.tree.leaves(some))  # noqa: E731
    if make == 'beside':
        return  # A view is what stops a model.
    assert count(part['target']) == count(tree['target']) == count(part)

    def loss(stop):
        return lambda tree: sum(x.sum() for x in jax.tree.leaves(stop(tree)))

    stop = jax.lax.stop_gradient
    by_hand = loss(lambda tree: {**tree, 'target': stop(tree['target'])})
    ours = loss(lambda tree: sg.stop_gradient(tree, 'target/**'))
    for name in 'target', 'online':
        oracle.assert_same(jax.grad(ours)(tree)[name], jax.grad(by_hand)(tree)[name])


def test_views_of_a_model_beside_its_own_variable_tie_them():
    """As ``nnx.split`` does: Flax asks a filter for one of the paths alone."""
    model = Tied()
    tree = [model, model.layer.kernel]
    view = sg_nnx.stop_gradient(tree, '1')
    assert view[1] is view[0].layer.kernel is not tree[1]
    assert sg_nnx.where(tree, '1').selected == {('params', ('0', 'layer', 'kernel'))}


def test_marked_leaves_and_declared_classes_in_a_module():
    """``nnx.split`` would take both apart."""

    @sg.trainable('scale')
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Whitened:
        scale: jax.Array
        mean: jax.Array

    class Model(Tied):
        def __init__(self):
            super().__init__()
            self.fixed = nnx.data(sg.NonDifferentiable(jnp.ones(3)))
            self.whitened = nnx.data(Whitened(jnp.ones(3), jnp.ones(3)))

    model = Model()
    trained = sg.mask(model, trained=sg.DECLARED)
    assert trained.fixed is False
    assert (trained.whitened.scale, trained.whitened.mean) == (True, False)
    assert isinstance(sg.combine(*sg.partition(model, True)).fixed, type(model.fixed))


def test_reports_of_tied_weights():
    """A Variable between two places of another one keeps its verdict."""

    def loss(model):
        return model.zero(model.encoder(X)).sum()  # It does not read the layer.

    model = Tied()
    assert repr(sg.live(loss, model)) == "<live: 'encoder/kernel'>"
    assert repr(sg.live(stopped, model)) == "<live: 'layer/kernel'>"
    sg.testing.assert_stopped(stopped, 'encoder/*', model)
    with pytest.raises(sg.errors.ExpectationError):
        sg.testing.assert_stopped(loss, 'encoder/*', model)
    both = sg.live(lambda a, b: loss(a) + loss(b[0]), model, (model,), argnums=(0, 1))
    assert repr(both) == "<live: '0/encoder/kernel', '1/0/encoder/kernel'>"


class Child(nnx.Module):
    """It knows its parent, directly and in a tuple within a list."""

    def __init__(self, parent):
        self.layer, self.parent = Layer(1), parent
        self.around = nnx.data([(parent, 1.0), self])

    def __call__(self, x):
        return self.layer(x) * self.around[0][0].scale


class Parent(nnx.Module):
    def __init__(self):
        self.scale, self.child = nnx.Param(jnp.ones((2, 3))), Child(self)
        self.tied = nnx.data({'again': self.scale})

    def __call__(self, x):
        return self.child(x)


KERNEL = 'child/layer/kernel'


def holds_itself(model):
    child = model.child
    assert child.parent is model is child.around[0][0] and child.around[1] is child
    return model.tied['again'] is model.scale


def test_reports_of_children_that_know_their_parent():
    """JAX finds no end in such a module, and fails for good."""

    def frozen(model):
        return (model(X) * jax.lax.stop_gradient(model.child.layer(X))).sum()

    model = Parent()
    paths = [one.path for one in sg.paths(model)]
    assert paths == ['child/around/0/1', KERNEL, 'scale']
    stopping = lambda m: m.child(jax.lax.stop_gradient(X)).sum()  # noqa: E731
    sg.testing.assert_trains_only(stopping, [KERNEL, 'scale'], model)
    only = lambda m: jnp.sum(m.scale[...] * m.child(X))  # noqa: E731
    assert sg.gradient_flow(only, model).status_of('output', 'scale') == 'flows'
    assert repr(sg.live(lambda m: m.scale.sum(), model)) == "<live: 'scale'>"
    assert 'Trainable: 15' in sg.tabulate(model, X)
    for tree in model, {'net': [model]}:
        part, rest = sg.partition(tree, '**/kernel')
        both = sg.combine(part, rest)
        for one in part, rest, both:
            assert holds_itself(one if tree is model else one['net'][0])
    grads = sg.grad(lambda m: m(X).sum(), wrt='scale')(model)
    assert holds_itself(grads)
    expected = nnx.grad(lambda m: m(X).sum())(model)
    oracle.assert_same(grads.scale[...], expected['scale'][...])
    sg.paths({'a': 1.0})  # Later programs are as before.


# Modules that share modules, level by level


class Level(nnx.Module):
    def __init__(self, below):
        self.one = self.two = below

    def __call__(self, x):
        return self.two(x)


def levels(depth):
    model = Layer(0)
    model.bias = nnx.Param(jnp.ones(3))
    for _ in range(depth):
        model = Level(model)
    return model


def test_reports_of_modules_that_share_modules_in_levels():
    """Weights have two to the power of the depth paths."""
    depth = 5
    model, first = levels(depth), '/'.join(['one'] * depth)
    loss = lambda m: m(X).sum()  # noqa: E731
    takes = {
        '**/kernel': [False, True],
        'two/**': [True, True],
        '**/two/bias': [True, False],
        f'one/{"two/" * (depth - 1)}bias': [True, False],
        sg.arrays(lambda a: a.ndim == 2): [False, True],
        sg.live(loss, model): [False, True],
        ~sg.live(loss, model): [True, False],
    }
    for where, expected in takes.items():
        assert [one.selected for one in sg.paths(model, where=where)] == expected
    tree = [{'net': (model,)}, model.two]
    for where in '0/net/0/two/**/bias', '1/**/two/bias', '*/*/*/one/two/*/**/bias':
        assert [one.selected for one in sg.paths(tree, where=where)] == [True, False]
    assert [one.path for one in sg.paths(model)] == [f'{first}/bias', f'{first}/kernel']
    sg.testing.assert_trains_only(loss, 'two/one/**/kernel', model)
    sg.testing.assert_stopped(loss, '**/bias', model)
    assert 'Trainable: 9' in sg.tabulate(model, X)
    typo = r"none of the 2 variables\.\nNearest: '(one|two)/.*two/kernel'"
    with pytest.raises(sg.errors.UnusedFilterError, match=typo):
        sg.paths(model, where='two/**/kernle')
    part, rest = sg.partition(model, '**/two/bias')
    both = sg.combine(rest, part)
    for one in part, rest, both, sg.grad(loss, wrt='**/kernel')(model):
        assert one.one is one.two and one.one.one is one.one.two
    oracle.assert_same(nnx.state(both), nnx.state(model))
    assert not any(sg.testing.moves(model, nnx.clone(model)).moved)


def test_more_paths_than_a_filter_is_asked_for():
    model = levels(40)
    for where in '**/kernel', lambda path: path.name == 'kernel', re.compile('.*l'):
        with pytest.raises(sg.errors.FilterTypeError, match='share modules so often'):
            sg.paths(model, where=where)
        assert [x.selected for x in sg.paths(levels(8), where=where)] == [False, True]
    # Where no filter is asked, nothing has to be listed.
    first = '/'.join(['one'] * 40)
    assert [one.path for one in sg.paths(model)] == [f'{first}/bias', f'{first}/kernel']
    assert not any(sg.testing.moves(model, nnx.clone(model)).moved)


# Modules that JAX does not know


def classes_of(**how):
    """A module, and one around it, which JAX knows or not."""

    class Inner(nnx.Module, **how):
        def __init__(self, rngs):
            self.a, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
            self.table = nnx.data([jnp.ones(3), nnx.Param(jnp.ones(3)), nnx.relu])
            self.name, self.count = 'inner', 3

        def __call__(self, x):
            x = self.table[2](self.norm(self.a(x)))
            return x * (self.table[0] * self.table[1][...] * self.count)[None]

    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.head = Inner(rngs), nnx.Linear(3, 3, rngs=rngs)
            self.again, self.tied = self.inner, self.inner.a.kernel
            self.more = nnx.List([Inner(rngs)])

        def __call__(self, x):
            return self.head(self.more[0](self.again(x))) @ self.tied[...]

    return {'inner': Inner, 'outer': Outer, 'dict': lambda rngs: {'m': Outer(rngs)}}


def reports(make):
    """What all that takes a tree tells of a model, or makes of it."""
    tree = make(nnx.Rngs(0))
    of = lambda tree: tree['m'] if isinstance(tree, dict) else tree  # noqa: E731

    def loss(tree):
        return (sg_nnx.stop_gradient(of(tree), '**/a/bias')(X) ** 2).sum()

    before = jax.tree.map(jnp.copy, nnx.state(of(tree)))
    with warnings.catch_warnings(action='ignore'):  # It writes batch statistics.
        grads = sg.grad(loss, wrt='**/kernel', absent='zeros')(tree)
    part, rest = sg.partition(tree, '**/kernel')
    joined = sg.combine(rest, part)
    testing.assert_trains_only(loss, ~sg.filters.as_filter('**/a/bias'), tree)
    return [
        *(repr(sg.live(loss, tree)), str(sg.gradient_flow(loss, tree))),
        *(str(sg.paths(tree, where='**/kernel')), str(sg.tabulate(of(tree), X))),
        *map(nnx.to_pure_dict, map(nnx.state, map(of, (grads, joined)))),
        *(nnx.to_pure_dict(before), of(joined)(X), sorted(vars(of(joined)))),
        jax.tree.leaves(nnx.state(of(sg.mask(tree, trained='**/kernel')))),
    ]


@pytest.mark.parametrize('name', ['outer', 'inner', 'dict'])
def test_modules_that_jax_does_not_know_are_as_others(name):
    known, unknown = (classes_of(**how)[name] for how in ({}, {'pytree': False}))
    for one, other in zip(reports(known), reports(unknown), strict=True):
        if isinstance(one, dict):
            oracle.assert_same(one, other)
        assert str(one) == str(other)


def test_the_structure_of_what_jax_does_not_know():
    inner = classes_of(pytree=False)['inner']
    one, same, other = (Leaves(inner(nnx.Rngs(n))).treedef for n in range(3))
    assert one == same == other and len({one, same}) == 1
    model = inner(nnx.Rngs(0))
    model.name = 'other'
    assert Leaves(model).treedef != one
    assert Leaves(classes_of(pytree=False)['inner'](nnx.Rngs(0))).treedef != one
