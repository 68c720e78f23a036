"""Expected gradients, from stops by hand, and exact comparison.

This file does not import flax_sg. An expected gradient comes from plain Flax. The
chosen leaves of its tree went through ``jax.lax.stop_gradient``.
"""

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The options of a lifted scan or vmap that gives each layer parameters of its own, and
# those of a lifted scan and a lifted vmap of which all turns share the parameters.
STACKED: Any = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
SHARED: Any = {'variable_broadcast': 'params', 'split_rngs': {'params': False}}
MAPPED: Any = {'variable_axes': {'params': None}, 'split_rngs': {'params': False}}


def init(module: Any, *args: Any, **options: Any) -> Any:
    """Variables as ``module.init`` makes them, but of other numbers, none of them 0.0.

    Nothing is computed. What initializers draw would take a quarter of all tests.
    """
    shapes = jax.eval_shape(lambda: module.init(*args, **options))
    numbers = np.random.default_rng(0)

    def leaf(path: Any, like: Any) -> jax.Array:
        if not jnp.issubdtype(like.dtype, np.number):
            return jnp.zeros(like.shape, like.dtype)
        values = numbers.uniform(0.25, 1.0, like.shape)
        if path[0].key == 'params':  # Others may be variances.
            values *= numbers.choice([-1.0, 1.0], like.shape)
        return jnp.asarray(np.asarray(values, like.dtype))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def names_of(keys: Any) -> str:
    """The names of a key path, joined by '/'."""
    return jax.tree_util.keystr(keys, simple=True, separator='/')


def by_path(tree: Any, **options: Any) -> dict[str, Any]:
    """The leaves of a tree, each by its path."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, **options)
    return {names_of(keys): leaf for keys, leaf in pairs}


def below(*paths: str) -> Callable[[str], bool]:
    """Selects what has one of these paths, or lies below one."""
    return lambda path: any(path == p or path.startswith(p + '/') for p in paths)


def stopped(tree: Any, selects: Callable[[str], bool] = lambda path: True) -> Any:
    """A copy of a tree of parameters with the selected ones stopped by hand.

    Args:
        tree: nested dicts of parameters, without the collection.
        selects: whether a parameter, by its '/'-joined names, is stopped.
    """

    def walk(tree: Any, path: tuple[str, ...]) -> Any:
        if isinstance(tree, Mapping):
            return {key: walk(value, (*path, key)) for key, value in tree.items()}
        return jax.lax.stop_gradient(tree) if selects('/'.join(path)) else tree

    return walk(tree, ())


def assert_same(actual: Any, expected: Any) -> None:
    """Both trees have one structure and the same leaves to the last bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    )
    for (path, a), b in pairs:
        if jnp.issubdtype(getattr(a, 'dtype', np.float32), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        where = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), f'{where}:\n{a}\nis not\n{b}'


def grads(fn: Callable[..., Any], *args: Any) -> Any:
    """The gradient of each leaf of ``fn(*args)`` with respect to all arguments.

    Each output leaf gets its own backward pass, with a fixed, uneven cotangent. A sum
    over outputs could hide or round the gradient of one of them.
    """
    out, vjp = jax.vjp(fn, *args)
    leaves, treedef = jax.tree.flatten(out)

    def cotangent(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.zeros(leaf.shape, jax.dtypes.float0)
        ramp = jnp.arange(leaf.size, dtype=leaf.real.dtype).reshape(leaf.shape)
        return (1 + ramp % 7).astype(leaf.dtype)

    def pull_back(which: int) -> Any:
        seeds = [
            cotangent(leaf)
            if i == which or not jnp.issubdtype(leaf.dtype, jnp.inexact)
            else jnp.zeros_like(leaf)
            for i, leaf in enumerate(leaves)
        ]
        return vjp(treedef.unflatten(seeds))

    return [pull_back(i) for i in range(len(leaves))]


def assert_same_grads(
    actual: Callable[..., Any], expected: Callable[..., Any], *args: Any
) -> None:
    """Both functions have the same gradients, to the last bit."""
    assert_same(grads(actual, *args), grads(expected, *args))


def assert_same_function(actual: Any, expected: Any, *args: Any) -> None:
    """Both functions have the same values and gradients, to the last bit."""
    assert_same(actual(*args), expected(*args))
    assert_same_grads(actual, expected, *args)


def copies(value: Any) -> list[Any]:
    """Copies of every kind that Python makes."""
    pickled = pickle.loads(pickle.dumps(value))
    return [copy.copy(value), copy.deepcopy(value), pickled]


def is_zero(tree: Any) -> bool:
    """Whether every leaf of a tree of gradients is exactly zero."""
    return all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(tree))
