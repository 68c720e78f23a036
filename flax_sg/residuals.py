"""A stop in the body of a scan, without a copy of the stack.

The derivative rule of ``jax.lax.stop_gradient`` stops its own result, for all orders of
differentiation. So what JAX keeps for the backward pass of a scan is the stopped slice
of each step, and it no longer sees that this is a slice of an input: a second copy of
the whole stack. A ``custom_jvp`` identity is seen through, but stops one order only.

What is needed is that the backward pass stops the input once more, which costs nothing.
``jax.checkpoint`` does that, under a policy that saves everything but stopped values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
from flax.core import lift
from flax.core.scope import Scope

from flax_sg import _private

_LIFTS = re.compile(r'(scan|remat)\(')


def is_in_scan(scope: Scope) -> bool:
    """Whether a scope lies in the body of a lifted scan, not of a remat in there."""
    for component in reversed(scope.debug_path):
        lifts = _LIFTS.findall(component)
        if lifts:
            return lifts[0] == 'scan'
    return False


def stop_again(module: Any, fn: Callable[[Any], Any]) -> Any:
    """Calls ``fn`` with a module; its backward pass stops again what ``fn`` stops.

    Args:
        module: a bound module.
        fn: called with a clone of it. Has to read variables through the clone.
    """
    rest: list[Any] = []

    def core_fn(scopes: list[Scope]) -> list[Any]:
        leaves, treedef = jax.tree_util.tree_flatten(
            fn(_private.clone_on(module, scopes))
        )
        arrays = [isinstance(leaf, jax.Array) for leaf in leaves]
        others = [None if is_array else leaf for is_array, leaf in zip(arrays, leaves)]
        rest[:] = treedef, arrays, others
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    checkpointed = lift.checkpoint(core_fn, prevent_cse=False, policy=_saves)
    results = iter(checkpointed(_private.scopes_of(module)))
    treedef, arrays, others = rest
    return treedef.unflatten(
        next(results) if is_array else other
        for is_array, other in zip(arrays, others, strict=True)
    )


def _saves(primitive: Any, *args: Any, **params: Any) -> bool:
    del args, params
    return primitive.name != 'stop_gradient'
