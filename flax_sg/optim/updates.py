"""Updates applied to what is trained; the rest is passed on as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training import train_state

from flax_sg.trees.beside import beside, other_shape
from flax_sg.trees.leaves import (
    OVERWRITE_WITH_GRADIENT,
    Leaves,
    is_absent,
    leaves_of,
)
from flax_sg.trees.nondifferentiable import NonDifferentiable


def apply_updates(params: Any, updates: Any) -> Any:
    """``optax.apply_updates`` that does not touch what is frozen.

    >>> import jax.numpy as jnp, flax_sg as sg
    >>> params = {'body': jnp.ones(2), 'head': jnp.ones(1)}
    >>> new = sg.apply_updates(params, {'body': sg.ABSENT, 'head': jnp.ones(1)})
    >>> new['head'].tolist(), new['body'] is params['body']
    ([2.0], True)

    Args:
        params: parameters.
        updates: a tree of the same structure, or a pruned one. Where it has ``ABSENT``,
            None, ``optax.MaskedNode``, nothing, a ``float0``, or the constant that
            ``sg.freeze`` makes for what is frozen, the parameter is passed on: the
            same object, and under ``jit`` the same buffer if it is donated.

    Returns:
        The new parameters, each of the type that it had.

    Raises:
        StructureError: if there is an update for what is no parameter, or it has
            another shape.
    """
    leaves = leaves_of(params)
    new = beside(leaves, updates, 'the update').values
    return leaves.restore(
        _applied(leaves, number, update) for number, update in enumerate(new)
    )


def _applied(leaves: Leaves, number: int, update: Any) -> Any:
    leaf = leaves.values[number]
    is_constant = isinstance(leaf, NonDifferentiable)
    if is_absent(update) or is_constant or _adds_nothing(update):
        return leaf
    own, given = np.shape(leaf), np.shape(update)
    pairs = zip(given[::-1], own[::-1], strict=False)
    if len(given) > len(own) or any(n not in (1, size) for n, size in pairs):
        raise other_shape('the update', leaves.paths[number], leaf, update)
    return jnp.asarray(leaf + update).astype(jnp.asarray(leaf).dtype)


def _adds_nothing(update: Any) -> bool:
    if not isinstance(update, np.ndarray):
        return False
    constant = update.size == 0 or not any(update.strides)
    return update.dtype == jax.dtypes.float0 or (constant and not update.any())


class TrainState(train_state.TrainState):
    """Flax's ``TrainState``, which takes pruned gradients and leaves the rest alone.

    >>> import jax, jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'body': jnp.ones(2), 'head': jnp.ones(2)}
    >>> def loss(params, x):
    ...     return jnp.sum(params['body'] * params['head'] * x)
    >>> state = sg.TrainState.create(
    ...     apply_fn=loss, params=params, tx=sg.freeze(optax.sgd(0.5), 'body')
    ... )
    >>> grads = sg.grad(loss, wrt='head')(state.params, 1.0)
    >>> state.apply_gradients(grads=grads).params['head'].tolist()
    [0.5, 0.5]

    ``_overwrite_with_gradient`` is as in Flax: its values are replaced by their
    gradient, and the optimizer sees ``params['params']``. Parameters may be of any
    pytree class, which Flax's own class refuses.
    """

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Any:
        """Makes the state of step 0.

        Args:
            apply_fn: what computes outputs, such as ``model.apply``.
            params: the parameters, a pytree of any kind.
            tx: an optax transformation, such as ``sg.freeze`` returns.
            **kwargs: other fields of a subclass.

        Returns:
            The state, with ``tx.init`` of the parameters.
        """
        state = tx.init(params['params'] if _is_split(params) else params)
        return cls(
            step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=state, **kwargs
        )

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Any:
        """Updates step, parameters and optimizer state.

        Args:
            grads: full or pruned gradients, if ``tx`` is from ``sg.freeze``; full ones
                otherwise, as the optimizer needs them.
            **kwargs: other fields to replace.

        Returns:
            The new state. Frozen parameters are the same objects.

        Raises:
            StructureError: if ``grads`` have a leaf that is no parameter, or with
                ``sg.freeze`` lack something that is trained.
            ValueError: from another optimizer, if something is absent.
        """
        split = _is_split(grads)
        seen = grads['params'] if split else grads
        params = self.params['params'] if split else self.params
        updates, opt_state = self.tx.update(seen, self.opt_state, params)
        params = apply_updates(params, updates)
        if split:
            new = grads[OVERWRITE_WITH_GRADIENT]
            params = {**self.params, 'params': params, OVERWRITE_WITH_GRADIENT: new}
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )


def _is_split(tree: Any) -> bool:
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree
