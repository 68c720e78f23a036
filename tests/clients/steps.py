"""One step of fine-tuning, with flax_sg and by hand, and whether both are equal.

The client's loss is differentiated three times: with a block around it, with
``sg.grad(wrt=)`` and by hand, with ``jax.lax.stop_gradient`` on the weights before they
are handed to the client. AdamW then makes a step: behind ``sg.freeze``, and by hand on
the trained weights alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import keystr

import flax_sg as sg
from flax_sg import linen as nn

DECAY = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def check(
    name: str,
    loss: Callable[[Any], jax.Array],
    params: Any,
    in_model: Any,
    in_tree: Any,
    is_frozen: Callable[[str], bool],
) -> None:
    """Compares a step of fine-tuning with that by hand, to the last bit.

    Args:
        name: of the client.
        loss: of the parameters; it calls the client.
        params: the parameters, as ``loss`` takes them.
        in_model: the filter for what is frozen, as paths in the module.
        in_tree: the same, as paths in ``params``.
        is_frozen: the same by hand, of the names in ``params`` joined by '/'.
    """

    def blocked(params: Any) -> jax.Array:
        with nn.stop_gradient(in_model):
            return loss(params)

    def path(keys: Any) -> str:
        return keystr(keys, simple=True, separator='/')

    def by_hand(params: Any) -> jax.Array:
        return loss(
            jax.tree_util.tree_map_with_path(
                lambda keys, leaf: (
                    jax.lax.stop_gradient(leaf) if is_frozen(path(keys)) else leaf
                ),
                params,
            )
        )

    where = sg.filters.as_filter(in_tree)
    value, expected = jax.jit(jax.value_and_grad(by_hand))(params)
    found, grads = jax.jit(jax.value_and_grad(blocked))(params)
    assert_same(found, value)
    assert_same(grads, expected)
    selected, pruned = jax.jit(sg.value_and_grad(loss, wrt=~where))(params)
    np.testing.assert_allclose(selected, value, rtol=1e-6)

    # By hand: the trained weights alone, by path.
    leaves = {path(keys): leaf for keys, leaf in jax.tree.leaves_with_path(params)}
    by_path = {path(keys): g for keys, g in jax.tree.leaves_with_path(expected)}
    trained = {p: leaf for p, leaf in leaves.items() if not is_frozen(p)}
    gradient = {p: by_path[p] for p in trained}
    updates, _ = DECAY.update(gradient, DECAY.init(trained), trained)
    stepped = {**leaves, **optax.apply_updates(trained, updates)}

    tx = sg.freeze(DECAY, where)
    for given in (grads, expected):
        updates, _ = tx.update(given, tx.init(params), params)
        after = optax.apply_updates(params, updates)
        for keys, leaf in jax.tree.leaves_with_path(after):
            assert_same(leaf, stepped[path(keys)])
    # Something is frozen, and all that is trained has moved.
    assert 0 < len(trained) < len(leaves)
    assert len(jax.tree.leaves(pruned)) == len(trained)
    still = [p for p in trained if np.array_equal(stepped[p], leaves[p])]
    assert not still, still
    print(f'{name}: {len(trained)} of {len(leaves)} arrays trained, equal to by hand')


def assert_same(one: Any, other: Any) -> None:
    """Both trees are equal to the last bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)
