"""A call of a module as functions of its parameters, to be traced and not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen
from flax.core.scope import CollectionFilter, DenyList, subtract_filters

from flax_sg import flow
from flax_sg.trees import leaves

# What ``init`` and ``nn.tabulate`` write when nothing is said.
MUTABLE = DenyList('intermediates')


@dataclasses.dataclass(frozen=True)
class Program:
    """A module's method on some arguments.

    Attributes:
        forward: from parameters and ``rest`` to the outputs and the written state.
        params: the shapes of the parameters.
        rest: all other arrays: state, random keys, arguments.
    """

    forward: Callable[[Any, Any], tuple[Any, Any]]
    params: Any
    rest: Any

    def flow(self) -> flow.GradientFlow | None:
        """Which parameters the outputs train; None if no output has a gradient."""
        outputs, _ = jax.eval_shape(self.forward, self.params, self.rest)
        if not any(map(leaves.is_differentiable, jax.tree.leaves(outputs))):
            return None
        return flow.gradient_flow(self.forward, self.params, self.rest, has_aux=True)

    def train(self, live: Sequence[bool]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The program with its backward pass, and its arguments.

        Args:
            live: for each leaf of the parameters whether it is differentiated.
        """
        shapes, treedef = jax.tree.flatten(self.params)
        outputs, _ = jax.eval_shape(self.forward, self.params, self.rest)

        def train(trained: Any, others: Any, rest: Any, cotangents: Any) -> Any:
            def forward(trained: Any) -> tuple[Any, Any]:
                a, b = iter(trained), iter(others)
                params = treedef.unflatten([next(a if t else b) for t in live])
                return self.forward(params, rest)

            out, pull_back, aux = jax.vjp(forward, trained, has_aux=True)
            floating = iter(cotangents)
            seeds = jax.tree.map(
                lambda leaf: (
                    next(floating)
                    if leaves.is_differentiable(leaf)
                    else np.zeros(leaf.shape, jax.dtypes.float0)
                ),
                outputs,
            )
            return out, aux, pull_back(seeds)

        pairs = list(zip(shapes, live, strict=True))
        trained = [shape for shape, takes in pairs if takes]
        others = [shape for shape, takes in pairs if not takes]
        cotangents = filter(leaves.is_differentiable, jax.tree.leaves(outputs))
        return train, (trained, others, self.rest, list(cotangents))


def program_of(
    module: linen.Module,
    rngs: Any,
    mutable: CollectionFilter,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Program:
    """The program of ``module.apply`` on variables as ``init`` makes them.

    Args:
        module: the module.
        rngs: as for ``init``.
        mutable: the collections that are written; parameters never are.
        args: as for ``init``. Arrays are traced, all else is as it is.
        kwargs: as for ``init``, ``method=`` among them.
    """
    flat, treedef = jax.tree.flatten((args, dict(kwargs)))
    arrays = [leaf for leaf in flat if _is_array(leaf)]
    written = subtract_filters(mutable, 'params')

    def call(run: Callable[..., Any], arrays: Any, **options: Any) -> Any:
        given = iter(arrays)
        values = [next(given) if _is_array(leaf) else leaf for leaf in flat]
        args, kwargs = treedef.unflatten(values)
        return run(*args, **kwargs, **options)

    def init(rngs: Any, arrays: Any) -> Any:
        options = init_options(mutable)
        return call(lambda *a, **k: module.init(rngs, *a, **k), arrays, **options)

    def forward(params: Any, rest: Any) -> tuple[Any, Any]:
        state, rngs, arrays = rest
        variables = {**state, 'params': params}
        return call(
            lambda *a, **k: module.apply(variables, *a, **k),
            arrays,
            rngs=rngs,
            mutable=written,
        )

    state = dict(jax.eval_shape(init, rngs, arrays))
    params = state.pop('params', {})
    return Program(forward, params, (state, rngs, arrays))


def init_options(mutable: CollectionFilter) -> dict[str, Any]:
    """How ``init`` is told what to write: a module's own ``init`` need not know it."""
    return {} if mutable == MUTABLE else {'mutable': mutable}


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
