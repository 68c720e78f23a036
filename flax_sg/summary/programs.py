"""The variables and modules of a linen model, from a trace of ``init`` on shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import linen

from flax_sg.internals import initializing
from flax_sg.internals.types import Args, Kwargs, Model, PyTree


def variables_of(
    module: linen.Module, rngs: PyTree, args: Args, kwargs: Kwargs
) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """The shapes of a module's variables, and the classes of its modules.

    Nothing is compiled or run.

    Args:
        module: the module.
        rngs: as for ``init``, or their shapes.
        args: as for ``init``, arrays or their shapes.
        kwargs: as for ``init``, including ``method=``.

    Returns:
        The variables, as ``init`` makes them. And the class name of each module that is
        called, by the names in its path, in the order of the first calls.
    """
    classes: dict[tuple[str, ...], str] = {}

    def note(
        next_fun: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        context: linen.module.InterceptorContext,
    ) -> Any:
        called = context.module
        if called.scope is not None:
            # A lifted class calls its methods on clones, the last one of the bare
            # class. Some clones have the empty path of the root.
            bare = type(called if called.path else module)
            classes[called.path] = bare.__name__
        return next_fun(*args, **kwargs)

    return initializing.variables_of(module, rngs, args, kwargs, note), classes


def classes_of(model: Model) -> dict[tuple[str, ...], str]:
    """The class name of each module in an NNX model, by the names in its path."""
    from flax import nnx  # Models of linen do not wait for it.

    # flax 0.12.0 has no ``iter_modules``.
    nodes = getattr(nnx, 'iter_modules', None) or nnx.iter_graph
    return {
        tuple(map(str, names)): type(node).__name__
        for names, node in nodes(model)
        if isinstance(node, nnx.Module)
    }
