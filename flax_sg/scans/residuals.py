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

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax.core import lift
from flax.core.scope import Scope
from jax.extend import core

from flax_sg import errors
from flax_sg.internals import core_scopes, jaxprs, modules

_LIFTS = re.compile(r'(scan|remat)\(')
_STOP = 'stop_gradient'
_REMAT = ('remat2', 'checkpoint')  # In newer versions of JAX, and in older ones.
# What makes such a value: a stop, or the slice of one layer of a stopped stack.
_MADE_AGAIN = {_STOP, 'dynamic_slice', 'squeeze'}


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
    scopes = modules.own_scopes(module)
    trees = [core_scopes.stored(scope).get('params', {}) for scope in scopes]
    params = jax.tree.leaves(trees)
    if params and not module.is_initializing():
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in params)
        warning = _scan_memory(wrapper, module, size)
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
            arrays, others[:] = _split(fn(modules.clone_on(module, scopes)))
            return arrays, repack_fn(scopes)

        closed, shapes = jax.make_jaxpr(body, return_shape=True)(
            variable_groups, rng_groups
        )
        operands = jax.tree.leaves((variable_groups, rng_groups))
        return jax.tree.unflatten(
            jax.tree.structure(shapes), evaluate(closed, operands)
        )

    packed = lift.pack(inner, (True,), (True,), (True,), name='stop_again')
    return _joined(packed(modules.scopes_of(module)), *others)


def _split(tree: Any) -> tuple[list[Any], list[Any]]:
    """The arrays in a tree, and what ``_joined`` needs to put them back."""
    leaves, treedef = jax.tree.flatten(tree)
    others = [None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves]
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return arrays, [treedef, others]


def _joined(arrays: Sequence[Any], treedef: Any, others: Sequence[Any]) -> Any:
    rest = iter(arrays)
    return treedef.unflatten(next(rest) if o is None else o[0] for o in others)


@dataclasses.dataclass(frozen=True)
class Again:
    """A stopped value that the backward pass makes again, and that nothing keeps.

    Attributes:
        make: the function that makes it; without a gradient.
        operands: what it is made of, which is kept for other reasons.
    """

    make: Callable[..., Any]
    operands: tuple[Any, ...]


def evaluate(closed: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Runs a program in which stopped values are made again on the way back.

    Args:
        closed: the program.
        operands: its arguments, which may be made again too.
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
        elif any(isinstance(x, Again) for x in operands):
            results = _bind_again(equation, operands)
        else:
            results = jaxprs.bind(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    out = map(read, jaxpr.outvars)
    return [x.make(*x.operands) if isinstance(x, Again) else x for x in out]


def _bind_again(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs an operation on operands that its backward pass makes once more.

    A checkpoint of the user makes them within: around it, another one would keep what
    the user's does not.
    """
    inner = equation.params if equation.primitive.name in _REMAT else None
    cse = inner['prevent_cse'] if inner else False

    def saves(primitive: Any, *args: Any, **params: Any) -> Any:
        if primitive.name in _MADE_AGAIN:
            return False
        if inner:
            policy = inner['policy']
            return policy is not None and policy(primitive, *args, **params)
        return True

    parts = [x.operands if isinstance(x, Again) else (x,) for x in operands]

    def again(*parts: Sequence[Any]) -> Sequence[Any]:
        made = [
            x.make(*part) if isinstance(x, Again) else part[0]
            for x, part in zip(operands, parts, strict=True)
        ]
        if inner:
            return core.jaxpr_as_fun(core.ClosedJaxpr(inner['jaxpr'], ()))(*made)
        return jaxprs.bind(equation, made)

    return jax.checkpoint(again, prevent_cse=cse, policy=saves)(*parts)


def _scan_memory(wrapper: str, module: Any, size: int) -> errors.ScanMemoryWarning:
    """In the body of a scan, what is stopped is kept for the way back at each step."""
    name, path = type(module).__name__, '/'.join(module.scope.path)
    return errors.ScanMemoryWarning(
        f'nn.{wrapper}({name}(...)) at {path!r} is called in the body of a scan '
        'with a function that uses other modules of the body.\n'
        'Gradients are right, but the stopped parameters are kept for the way back '
        f'at each step: at least {size:,} bytes times the length of the scan.\n'
        'Call the other modules outside of the wrapper, or open a block around the '
        "scan: with nn.stop_gradient('layers/...'): layers(x)."
    )
