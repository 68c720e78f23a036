"""The variables and modules of a linen model, from a trace of ``init`` on shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen

from flax_sg.internals import tracing


def variables_of(
    module: linen.Module, rngs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """The shapes of a module's variables, and the classes of its modules.

    Nothing is compiled or run.

    Args:
        module: the module.
        rngs: as for ``init``, or their shapes.
        args: as for ``init``. Arrays are traced; other values are passed on.
        kwargs: as for ``init``, including ``method=``.

    Returns:
        The variables, as ``init`` makes them. And the class name of each module that is
        called, by the names in its path, in the order of the first calls.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = {n: leaf for n, leaf in enumerate(leaves) if _is_array(leaf)}
    classes: dict[tuple[str, ...], str] = {}

    def note(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        called = context.module
        if called.scope is not None:
            # A lifted class calls its methods on clones, the last one of the bare
            # class. Some clones have the empty path of the root.
            bare = type(called if called.path else module)
            classes[called.path] = bare.__name__
        return next_fun(*args, **kwargs)

    def init(rngs: Any, arrays: Any) -> Any:
        values = (arrays.get(n, leaf) for n, leaf in enumerate(leaves))
        args, kwargs = treedef.unflatten(values)
        return module.init(rngs, *args, **kwargs)

    # On a cache hit, a function of nn.jit would call no modules.
    with tracing.traced_anew(), linen.intercept_methods(note):
        return dict(jax.eval_shape(init, rngs, arrays)), classes


def classes_of(model: Any) -> dict[tuple[str, ...], str]:
    """The class name of each module in an NNX model, by the names in its path."""
    from flax import nnx  # Models of linen do not wait for it.

    modules = nnx.iter_modules(model)
    return {tuple(map(str, names)): type(one).__name__ for names, one in modules}


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
