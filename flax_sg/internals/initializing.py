"""Traces the ``init`` of a linen module on shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen

from flax_sg.internals import tracing
from flax_sg.internals.types import Args, Kwargs, PyTree


def variables_of(
    module: linen.Module,
    rngs: PyTree,
    args: Args,
    kwargs: Kwargs,
    note: Callable[..., Any],
) -> dict[str, Any]:
    """The shapes of a module's variables, by their collections.

    Nothing is compiled or run.

    Args:
        module: the module.
        rngs: as for ``init``, or their shapes.
        args: as for ``init``. Shapes are traced; other values are passed on, so a
            module may ask an array for its value.
        kwargs: as for ``init``, including ``method=``.
        note: an interceptor of ``linen.intercept_methods``, for each method called.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    shapes = {
        n: leaf
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    }

    def init(rngs: PyTree, traced: PyTree) -> Any:
        values = (traced.get(n, leaf) for n, leaf in enumerate(leaves))
        own_args, own_kwargs = treedef.unflatten(values)
        return module.init(rngs, *own_args, **own_kwargs)

    # On a cache hit, a function of nn.jit would call no modules.
    with tracing.traced_anew(), linen.intercept_methods(note):
        return dict(jax.eval_shape(init, rngs, shapes))
