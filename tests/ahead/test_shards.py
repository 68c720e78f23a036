"""A ``jax.shard_map`` of which a part does not change, beside the whole one."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flax_sg as sg
from tests.helpers.splits import PARAMS, TRAINED, assert_same, assert_split, products

MESH = jax.make_mesh((2, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
X = jax.random.normal(jax.random.key(9), (4, 4))
P = PartitionSpec


def assert_mapped(body: Any, specs: Any, out: Any, check_vma: bool, once: int) -> Any:
    """A loss of a mapped function is split."""
    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=(P(), specs), out_specs=out, check_vma=check_vma
    )

    def fun(params: Any, x: Any) -> Any:
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(mapped(params, x)))

    return assert_split(fun, X, once=once)


@pytest.mark.parametrize('check_vma', (False, True))
def test_a_frozen_tower_over_devices(check_vma: bool):
    """Each device keeps its own features; an output that is known leaves the map."""

    def body(params: Any, x: Any) -> Any:
        y = jnp.tanh(x @ params['torso'])
        total = lax.psum(y.sum(), 'data')
        out = jnp.sin(y @ params['torso']) @ params['head'] * total
        return out, y

    spec = P('data')
    ahead = assert_mapped(body, spec, (spec, spec), check_vma, once=2)
    # Without types of shards each device of the mesh counts.
    assert (4 if check_vma else 8, 4) in [k.shape for k in ahead.kept]
    assert 'shard_map at test_shards.py' in str(ahead)


@pytest.mark.parametrize('check_vma', (False, True))
def test_other_axes_and_places(check_vma: bool):
    """Two axes of the mesh, a place in it, and a sum over devices in each part."""

    def body(params: Any, x: Any) -> Any:
        place = lax.axis_index('data').astype(float) + 1.0
        y = jnp.tanh(lax.all_gather(x, 'model', axis=1, tiled=True) @ params['torso'])
        mean = lax.pmean(y, 'data')
        out = jnp.sin(place * y) @ params['cell'] + mean @ params['head']
        return lax.psum(out.sum(), ('data', 'model'))

    assert_mapped(body, P('data', 'model'), P(), check_vma, once=1)


@pytest.mark.parametrize('check_vma', (False, True))
def test_keys_and_branches(check_vma: bool):
    """Keys have an axis of devices; a branch in the map is split, too."""

    def body(params: Any, x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(3), x.sum().astype(int))
        scale = jax.random.fold_in(key, params['head'].sum().astype(int))
        y = x @ params['torso'] + jax.random.normal(scale, x.shape)

        def first(y: Any) -> Any:
            return jnp.tanh(x @ params['torso']) @ params['cell']

        z = lax.cond(x.sum() > 0, first, lambda x: x @ params['head'], x)
        return y + z

    spec = P('data')
    assert_mapped(body, spec, spec, check_vma, once=2)


def test_axes_that_are_not_mapped():
    """The other axes of the mesh stay with the compiler."""

    def fun(params: Any, x: Any) -> Any:
        def body(params: Any, x: Any) -> Any:
            return (
                jnp.sin(jnp.tanh(x @ params['torso']) @ params['torso'])
                @ params['head']
            )

        spec, names = P('data'), {'data'}
        mapped = jax.shard_map(
            body, mesh=MESH, in_specs=(P(), spec), out_specs=spec, axis_names=names
        )
        return jnp.sum(mapped(params, x) ** 2)

    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    kept = jax.jit(ahead.early)(PARAMS, X)
    assert [k.shape for k in kept] == [(4, 4)]
    how: Any = {'wrt': TRAINED, 'unused': 'ignore'}
    ours = jax.jit(sg.value_and_grad(ahead.late, **how))(PARAMS, kept)
    assert_same(ours, jax.jit(sg.value_and_grad(fun, **how))(PARAMS, X))


def test_a_mesh_of_explicit_axes():
    """What is kept may be stored, and given as arrays of NumPy."""
    mesh = jax.make_mesh((2, 2), ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)

    def fun(params: Any, x: Any) -> Any:
        def body(params: Any, x: Any) -> Any:
            return jnp.sin(jnp.tanh(x @ params['torso'])) @ params['head']

        spec = P('data')
        mapped = jax.shard_map(body, in_specs=(P(), spec), out_specs=spec)
        return jnp.sum(mapped(params, x) ** 2)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P('data')))
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        ahead = sg.precompute(fun, params, x, wrt='head')
        kept = jax.jit(ahead.early)(params, x)
        right = sg.value_and_grad(fun, wrt='head')(params, x)
        for given in kept, [*map(np.asarray, kept)]:
            ours = sg.value_and_grad(ahead.late, wrt='head')(params, given)
            assert_same(ours, right)


def test_maps_within_maps_stay_whole():
    """The inner one is right, and runs at each step."""

    def fun(params: Any, x: Any) -> Any:
        def outer(params: Any, x: Any) -> Any:
            def inner(params: Any, x: Any) -> Any:
                y = jnp.tanh(x @ params['torso']) @ params['head']
                return lax.psum(y, 'model')

            return jax.shard_map(
                inner,
                in_specs=(P(), P(None, None)),
                out_specs=P(),
                axis_names={'model'},
                check_vma=False,
            )(params, x)

        mapped = jax.shard_map(
            outer,
            mesh=MESH,
            in_specs=(P(), P('data')),
            out_specs=P('data'),
            axis_names={'data'},
            check_vma=False,
        )
        return jnp.sum(mapped(params, x) ** 2)

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    kept = jax.jit(ahead.early)(PARAMS, X)
    how: Any = {'wrt': TRAINED, 'unused': 'ignore'}
    ours = jax.jit(sg.value_and_grad(ahead.late, **how))(PARAMS, kept)
    assert_same(ours, jax.jit(sg.value_and_grad(fun, **how))(PARAMS, X))


def test_examples_are_refused_or_right():
    """What each device keeps is not by example: it runs at each step."""

    def fun(params: Any, x: Any) -> Any:
        def body(params: Any, x: Any) -> Any:
            return jnp.tanh(x @ params['torso']) @ params['head']

        mapped = jax.shard_map(
            body, mesh=MESH, in_specs=(P(), P('data')), out_specs=P('data')
        )
        return jnp.sum(mapped(params, x) ** 2)

    with pytest.warns(UserWarning, match='Nothing is computed once'):
        ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED, examples=True)
    kept, order = ahead.early(PARAMS, X), jnp.array([2, 0, 3, 1])
    how: Any = {'wrt': TRAINED, 'unused': 'ignore'}
    ours = sg.value_and_grad(ahead.late, **how)(PARAMS, [x[order] for x in kept])
    assert_same(ours, sg.value_and_grad(fun, **how)(PARAMS, X[order]))
    assert products(ahead.late, PARAMS, kept) == 2
