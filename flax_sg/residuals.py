"""A stop in the body of a scan, without a copy of the stack.

The derivative rule of ``jax.lax.stop_gradient`` stops its own result, for all orders of
differentiation. So what JAX keeps for the backward pass of a scan is the stopped slice
of each step, and it no longer sees that this is a slice of an input: a second copy of
the whole stack. A ``custom_jvp`` identity is seen through, but stops one order only.
``jax.checkpoint`` around the layer stops the slice again on the way back, which costs
nothing, but adds up the gradient of the layer's input in another order.

So it is put around each operation that reads a stopped value, and around no more.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax.core import lift
from flax.core.scope import Scope
from jax.extend import core

from flax_sg import _private, errors

_LIFTS = re.compile(r'(scan|remat)\(')
_STOP = 'stop_gradient'


def is_in_scan(scope: Scope) -> bool:
    """Whether a scope lies in the body of a lifted scan, not of a remat in there."""
    for component in reversed(tuple(scope.debug_path)):
        lifts = _LIFTS.findall(component)
        if lifts:
            return lifts[0] == 'scan'
    return False


def warn(wrapper: str, module: Any) -> None:
    """Says what a stop in the body of a scan costs, where it cannot be made cheap.

    Args:
        wrapper: the name of what stops.
        module: a bound module.
    """
    scopes = _private.own_scopes(module)
    trees = [_private.stored(scope).get('params', {}) for scope in scopes]
    params = jax.tree.leaves(trees)
    if params and not module.is_initializing():
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in params)
        warning = errors.ScanMemoryWarning(wrapper, module, size)
        # At the call: of this function, of the wrapper's method, of the wrapper.
        warnings.warn(warning, stacklevel=4)


def stop_again(module: Any, fn: Callable[[Any], Any]) -> Any:
    """Calls ``fn`` with a module; its backward pass stops again what ``fn`` stops.

    Args:
        module: a bound module.
        fn: called with a clone of it, in a trace of its own.
    """
    others: list[Any] = []

    def inner(
        scope_fn: Callable[..., Any],
        repack_fn: Callable[..., Any],
        variable_groups: Any,
        rng_groups: Any,
    ) -> Any:
        def body(variable_groups: Any, rng_groups: Any) -> Any:
            scopes = scope_fn(variable_groups, rng_groups)
            arrays, others[:] = _split(fn(_private.clone_on(module, scopes)))
            return arrays, repack_fn(scopes)

        closed, shapes = jax.make_jaxpr(body, return_shape=True)(
            variable_groups, rng_groups
        )
        operands = jax.tree.leaves((variable_groups, rng_groups))
        return jax.tree.unflatten(
            jax.tree.structure(shapes), _evaluate(closed, operands)
        )

    packed = lift.pack(inner, (True,), (True,), (True,), name='stop_again')
    return _joined(packed(_private.scopes_of(module)), *others)


def _split(tree: Any) -> tuple[list[Any], list[Any]]:
    """The arrays in a tree, and what ``_joined`` needs to put them back."""
    leaves, treedef = jax.tree.flatten(tree)
    others = [None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves]
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return arrays, [treedef, others]


def _joined(arrays: Sequence[Any], treedef: Any, others: Sequence[Any]) -> Any:
    rest = iter(arrays)
    return treedef.unflatten(next(rest) if o is None else o[0] for o in others)


def _evaluate(closed: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *operands], strict=True)
    )
    before: dict[Any, Any] = {}  # What a stopped value was before it was stopped.

    def read(variable: Any) -> Any:
        is_literal = isinstance(variable, core.Literal)
        return variable.val if is_literal else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        if equation.primitive.name == _STOP:
            results = _private.bind(equation, operands)
            before[equation.outvars[0]] = operands[0]
        elif any(stopped := [_in(before, v) for v in equation.invars]):
            pairs = zip(equation.invars, operands, strict=True)
            operands = [before[v] if _in(before, v) else x for v, x in pairs]
            results = _bind_stopping(equation, operands, stopped)
        else:
            results = _private.bind(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _in(values: Mapping[Any, Any], variable: Any) -> bool:
    return not isinstance(variable, core.Literal) and variable in values


def _bind_stopping(
    equation: Any, operands: Sequence[Any], stopped: Sequence[bool]
) -> Sequence[Any]:
    """Runs an operation on operands that its backward pass stops once more."""

    def stopping(*operands: Any) -> Sequence[Any]:
        pairs = zip(operands, stopped, strict=True)
        again = [jax.lax.stop_gradient(x) if stop else x for x, stop in pairs]
        return _private.bind(equation, again)

    return jax.checkpoint(stopping, prevent_cse=False, policy=_saves)(*operands)


def _saves(primitive: Any, *args: Any, **params: Any) -> bool:
    del args, params
    return primitive.name != _STOP
