"""A stop in the body of a scan, without a copy of the stack.

The derivative rule of ``jax.lax.stop_gradient`` stops its own result, for all orders of
differentiation. So a scan saves the stopped slice of each step as a residual: JAX no
longer sees that it is a slice of an input, and keeps a second copy of the whole stack.

The naive attempts: JAX sees through a ``custom_jvp`` identity, but that stops one order
only. ``jax.checkpoint`` around the layer stops the slice again in the backward pass,
at no cost, but sums the gradient of the layer's input in another order.

Here ``jax.checkpoint`` is around each single operation that reads a stopped value.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax.core import lift
from jax.extend import core

from flax_sg import errors
from flax_sg.internals import core_scopes, jaxprs, modules

_STOP = 'stop_gradient'
# The primitives of such a value: a stop, or the slice of a layer of a stopped stack.
_MADE_AGAIN = {_STOP, 'dynamic_slice', 'squeeze'}
_ARRAY = object()


def warn(wrapper: str, module: Any) -> None:
    """Warns that a scan saves stopped parameters at each step.

    Args:
        wrapper: the name of what stops.
        module: a bound module.
    """
    scopes = modules.own_scopes(module)
    trees = [core_scopes.stored(scope).get('params', {}) for scope in scopes]
    params = jax.tree.leaves(trees)
    if params and not module.is_initializing():
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in params)
        name, path = type(module).__name__, '/'.join(module.scope.path)
        text = (
            f'nn.{wrapper}({name}(...)) at {path!r} is called in the body of a scan '
            'with a function that uses other modules of the body.\n'
            'Gradients are right, but each step saves the stopped parameters for the '
            f'backward pass: at least {size:,} bytes times the length of the scan.\n'
            'Call the other modules outside of the wrapper, or open a block around the '
            "scan: with nn.stop_gradient('layers/...'): layers(x)."
        )
        # At the call: of this function, of the wrapper's method, of the wrapper.
        warnings.warn(errors.ScanMemoryWarning(text), stacklevel=4)


def stop_again(module: Any, fn: Callable[[Any], Any]) -> Any:
    """Calls ``fn`` with a module, without residuals of what ``fn`` stops.

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
            out = fn(modules.clone_on(module, scopes))
            # Only arrays come out of a jaxpr.
            others.append(jax.tree.map(lambda x: _ARRAY if _is_array(x) else x, out))
            return list(filter(_is_array, jax.tree.leaves(out))), repack_fn(scopes)

        closed, shapes = jax.make_jaxpr(body, return_shape=True)(
            variable_groups, rng_groups
        )
        operands = jax.tree.leaves((variable_groups, rng_groups))
        return jax.tree.unflatten(
            jax.tree.structure(shapes), evaluate(closed, operands)
        )

    packed = lift.pack(inner, (True,), (True,), (True,), name='stop_again')
    arrays = iter(packed(modules.scopes_of(module)))
    return jax.tree.map(lambda x: next(arrays) if x is _ARRAY else x, others[-1])


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['operands'], meta_fields=['make']
)
@dataclasses.dataclass(frozen=True)
class Again:
    """A stopped value that is no residual: the backward pass computes it again.

    Attributes:
        make: the function that computes it; without a gradient.
        operands: the arguments of ``make``, which are saved anyway.
    """

    make: Callable[..., Any]
    operands: tuple[Any, ...]


def _value_of(x: Any) -> Any:
    return x.make(*x.operands) if isinstance(x, Again) else x


def evaluate(closed: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr whose backward pass computes stopped values again.

    Args:
        closed: the jaxpr.
        operands: its arguments, which may be ``Again`` too.
    """
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *operands], strict=True)
    )

    def read(variable: Any) -> Any:
        is_literal = isinstance(variable, core.Literal)
        return variable.val if is_literal else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        if equation.primitive.name == _STOP:
            [value] = operands
            stop = jax.lax.stop_gradient
            again = value if isinstance(value, Again) else Again(stop, (value,))
            results: Sequence[Any] = [again]
        elif equation.effects:  # ``jax.checkpoint`` refuses callbacks.
            results = jaxprs.bind(equation, list(map(_value_of, operands)))
        elif any(isinstance(x, Again) for x in operands):
            results = _bind_again(equation, operands)
        else:
            results = jaxprs.bind(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [_value_of(read(variable)) for variable in jaxpr.outvars]


def _bind_again(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs an operation on operands that its backward pass computes again.

    Inside a checkpoint of the user they are computed in the user's: a second checkpoint
    around it would save what theirs discards.
    """
    inner = jaxprs.checkpoint_of(equation)

    def saves(primitive: Any, *args: Any, **params: Any) -> Any:
        if primitive.name in _MADE_AGAIN:
            return False
        if inner is None:
            return True
        return inner.policy is not None and inner.policy(primitive, *args, **params)

    def again(*operands: Any) -> Sequence[Any]:
        made = list(map(_value_of, operands))
        if inner is None:
            return jaxprs.bind(equation, made)
        return core.jaxpr_as_fun(core.ClosedJaxpr(inner.jaxpr, ()))(*made)

    cse = inner is not None and inner.prevent_cse
    return jax.checkpoint(again, prevent_cse=cse, policy=saves)(*operands)
