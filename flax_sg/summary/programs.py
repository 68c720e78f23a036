"""Traces a module on shapes: its variables, its modules, and what it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen
from flax.core.scope import DenyList

from flax_sg.filters.paths import Path
from flax_sg.flow.analysis import Analysis
from flax_sg.internals import tracing
from flax_sg.trees import leaves

# Parameters are immutable here: written collections do not count as outputs.
_STATE = DenyList(('params', 'intermediates'))


@dataclasses.dataclass(frozen=True)
class Program:
    """A module's method on some arguments.

    Attributes:
        variables: the shapes of the variables, as ``init`` makes them.
        classes: the class name of each module that is called, by the names in its
            path, in the order of the first calls.
        forward: maps parameters and ``rest`` to the outputs and the written state.
        rest: all other arrays: state, random keys, arguments.
    """

    variables: dict[str, Any]
    classes: Mapping[tuple[str, ...], str]
    forward: Callable[[Any, Any], tuple[Any, Any]]
    rest: Any

    def parameters(self) -> list[tuple[Path, Any, bool]]:
        """Returns the path and shape of each parameter, and if the outputs train it."""
        params = self.variables.get('params', {})
        analysis = Analysis.of(self.forward, (params, self.rest), has_aux=True)
        pairs = zip(analysis.parameters, analysis.trained(), strict=True)
        live = {parameter.path for parameter, is_trained in pairs if is_trained}
        return [(path, leaf, path in live) for path, leaf in leaves.leaves_of(params)]


def program_of(
    module: linen.Module, rngs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Program:
    """Returns the program of ``module.apply`` on the variables that ``init`` makes.

    Nothing is compiled or run.

    Args:
        module: the module.
        rngs: as for ``init``, or their shapes.
        args: as for ``init``. Arrays are traced; other values are passed on.
        kwargs: as for ``init``, including ``method=``.
    """
    flat, treedef = jax.tree.flatten((args, dict(kwargs)))
    arrays = [leaf for leaf in flat if _is_array(leaf)]

    def call(run: Callable[..., Any], arrays: Any, *first: Any, **options: Any) -> Any:
        given = iter(arrays)
        values = [next(given) if _is_array(leaf) else leaf for leaf in flat]
        args, kwargs = treedef.unflatten(values)
        return run(*first, *args, **kwargs, **options)

    classes: dict[tuple[str, ...], str] = {}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        called = context.module
        if called.scope is not None:
            # A lifted class calls its methods on clones, the last one of the bare
            # class. Some clones have the empty path of the root.
            bare = type(called if called.path else module)
            classes[called.path] = bare.__name__
        return next_fun(*args, **kwargs)

    def init(rngs: Any, arrays: Any) -> Any:
        return call(module.init, arrays, rngs)

    # On a cache hit, a function of nn.jit would call no modules.
    with tracing.traced_anew(), linen.intercept_methods(note):
        variables = dict(jax.eval_shape(init, rngs, arrays))

    def forward(params: Any, rest: Any) -> tuple[Any, Any]:
        state, rngs, arrays = rest
        variables = {**state, 'params': params}
        return call(module.apply, arrays, variables, rngs=rngs, mutable=_STATE)

    state = {name: tree for name, tree in variables.items() if name != 'params'}
    return Program(variables, classes, forward, (state, rngs, arrays))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
