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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from flax.core import lift
from jax.extend import core
from jax.extend.core import JaxprEqn, Primitive, Var

from flax_sg import errors
from flax_sg.engine import contents
from flax_sg.internals import core_scopes, jaxprs, lifting, modules
from flax_sg.internals.modules import Module
from flax_sg.internals.tracing import Tracer
from flax_sg.internals.types import Array, Atom, Aval, BoundModule, PyTree
from flax_sg.trees.leaves import is_differentiable

_STOP = 'stop_gradient'
# The primitives that make the slice of a layer of a stopped stack.
_OF_LAYER = {_STOP, 'dynamic_slice', 'squeeze'}
_ARRAY = object()


def call(
    name: str,
    inner: Module,
    module: BoundModule,
    fn: Callable[[Any], Any],
    captured: PyTree,
) -> PyTree:
    """Calls ``fn`` with a module; in the body of a scan, frozen values are not saved.

    Args:
        name: what the user calls the rule or the wrapper.
        inner: the module in the wrapper.
        module: a bound module, or its wrapper.
        fn: called with the module or a clone of it.
        captured: what ``fn`` uses beside the module.
    """
    if lifting.is_in_scan(module.scope):
        fields = modules.field_leaves(module)
        functions = [leaf for leaf in fields if isinstance(leaf, contents.FUNCTIONS)]
        # Another module is bound outside of the trace that ``stop_again`` makes.
        if not contents.may_hold((captured, functions), contents.MODULES):
            return stop_again(module, fn)
        _warn(name, inner)
    return fn(module)


def _warn(wrapper: str, module: BoundModule) -> None:
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
        # At the call of the wrapper, two functions above ``call``.
        warnings.warn(errors.ScanMemoryWarning(text), stacklevel=5)


def stop_again(module: BoundModule, fn: Callable[[Any], Any]) -> PyTree:
    """Calls ``fn`` with a module, without residuals of what ``fn`` stops.

    Args:
        module: a bound module.
        fn: called with a clone of it, in a trace of its own.
    """
    outputs: list[Any] = []

    def inner(
        scope_fn: Callable[..., Any],
        repack_fn: Callable[..., Any],
        variable_groups: PyTree,
        rng_groups: PyTree,
    ) -> Any:
        def body(variable_groups: PyTree, rng_groups: PyTree) -> Any:
            scopes = scope_fn(variable_groups, rng_groups)
            out = fn(modules.clone_on(module, scopes))
            # Only arrays come out of a jaxpr: the rest of the output is kept here.
            outputs.append(jax.tree.map(lambda x: _ARRAY if _is_array(x) else x, out))
            return list(filter(_is_array, jax.tree.leaves(out))), repack_fn(scopes)

        closed, shapes = jax.make_jaxpr(body, return_shape=True)(
            variable_groups, rng_groups
        )
        # Values of other types, such as int8 weights, are never differentiated.
        operands = [
            leaf if is_differentiable(leaf) else Remade(_same, (leaf,))
            for leaf in jax.tree.leaves(variable_groups)
        ]
        operands += jax.tree.leaves(rng_groups)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), evaluate(closed, operands)
        )

    packed = lift.pack(inner, (True,), (True,), (True,), name='stop_again')
    arrays = iter(packed(modules.scopes_of(module)))
    return jax.tree.map(lambda x: next(arrays) if x is _ARRAY else x, outputs[-1])


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['operands'], meta_fields=['make']
)
@dataclasses.dataclass(frozen=True)
class Remade:
    """A frozen value that is no residual: the backward pass computes it again.

    Attributes:
        make: the function that computes it; without a gradient.
        operands: the arguments of ``make``, which are saved anyway.
    """

    make: Callable[..., Any]
    operands: tuple[Any, ...]


def _value_of(x: Array | Remade) -> Array:
    return x.make(*x.operands) if isinstance(x, Remade) else x


def _same(x: Array) -> Array:
    return x


def evaluate(closed: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr whose backward pass computes frozen values again.

    Frozen values are stopped ones, those that come in as ``Remade``, and all that is
    computed of these and of constants alone, such as a cast or a dequantized weight.
    What a matrix product makes of them is saved.

    Args:
        closed: the jaxpr.
        operands: its arguments, which may be ``Remade`` too.
    """
    run = _Run(closed, operands)
    for equation in closed.jaxpr.eqns:
        run.step(equation)
    results = run.computed(_variables_in(closed.jaxpr.outvars))
    return [_read(results, v) for v in closed.jaxpr.outvars]


class _Run:
    """Runs a jaxpr, equation by equation. Equations for frozen values have to wait.

    Attributes:
        values: the values of variables so far.
        frozen: the variables that hold frozen values, which are made when needed.
        constant: the variables that no gradient goes through.
        waiting: for each frozen variable the equation that makes it, in order.
    """

    def __init__(self, closed: core.ClosedJaxpr, operands: Sequence[Any]) -> None:
        variables = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        values = zip(variables, [*closed.consts, *operands], strict=True)
        self.values: dict[Var, Array | Remade] = dict(values)
        pairs = self.values.items()
        self.frozen = {v for v, value in pairs if isinstance(value, Remade)}
        self.constant = {v for v, value in pairs if not isinstance(value, Tracer)}
        self.waiting: dict[Var, JaxprEqn] = {}

    def step(self, equation: JaxprEqn) -> None:
        """Runs an equation, or lets it wait."""
        inputs, outputs = _variables_in(equation.invars), equation.outvars
        is_stop = equation.primitive.name == _STOP
        is_constant = self.constant.issuperset(inputs) and not equation.effects
        reads_frozen = not self.frozen.isdisjoint(inputs)
        if is_stop or (is_constant and reads_frozen and not _is_slow(equation)):
            self.waiting |= dict.fromkeys(outputs, equation)
            self.frozen.update(outputs)
            self.constant.update(outputs)
        elif reads_frozen and not equation.effects:
            steps, first = self.steps_to(inputs)
            results = _bind_again(steps, equation, {v: self.values[v] for v in first})
            self.values |= zip(outputs, results, strict=True)
        else:  # ``jax.checkpoint`` refuses callbacks.
            ran = _run([equation], self.computed(inputs))
            self.values |= {v: ran[v] for v in outputs}
            self.constant.update(outputs if is_constant else ())

    def steps_to(self, variables: Iterable[Var]) -> tuple[list[JaxprEqn], list[Var]]:
        """The equations that make some variables, in order, and what these read."""
        waiting, needed, first = [*variables][::-1], set[int](), dict[Var, None]()
        while waiting:
            variable = waiting.pop()
            equation = self.waiting.get(variable)
            if equation is None:
                first[variable] = None
            elif id(equation) not in needed:
                needed.add(id(equation))
                waiting += reversed(_variables_in(equation.invars))
        steps = {id(step): step for step in self.waiting.values()}
        return [step for key, step in steps.items() if key in needed], list(first)

    def computed(self, variables: Iterable[Var]) -> dict[Var, Array]:
        """The values of some variables; frozen ones are computed now."""
        steps, first = self.steps_to(variables)
        return _run(steps, {v: _value_of(self.values[v]) for v in first})


def _variables_in(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, core.Literal)]


def _read(values: dict[Var, Array], atom: Atom) -> Array:
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def _run(equations: Sequence[JaxprEqn], values: dict[Var, Array]) -> dict[Var, Array]:
    for equation in equations:
        operands = [_read(values, v) for v in equation.invars]
        results = jaxprs.bind(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return values


def _bind_again(
    steps: Sequence[JaxprEqn], equation: JaxprEqn, values: dict[Var, Array | Remade]
) -> Sequence[Array]:
    """Runs an operation whose backward pass runs some steps before it again.

    If the operation is a checkpoint of the user, the steps are computed in it: a second
    checkpoint around it would save what the user's discards.

    Args:
        steps: the equations that make frozen values.
        equation: the operation.
        values: what all of these read, by variable.
    """
    inner = jaxprs.checkpoint_of(equation)
    of_steps = {signature for step in steps for signature in _operations(step)}

    def saves(primitive: Primitive, *avals: Aval, **params: Any) -> bool:
        if primitive.name in _OF_LAYER or _signature(primitive, avals) in of_steps:
            return False
        if inner is None:
            return True
        return inner.policy is not None and inner.policy(primitive, *avals, **params)

    def again(*leaves: Array | Remade) -> Sequence[Array]:
        known = dict(zip(values, map(_value_of, leaves), strict=True))
        known = _run(steps, known)
        if inner is None:
            known = _run([equation], known)
            return [known[v] for v in equation.outvars]
        operands = [_read(known, v) for v in equation.invars]
        return core.jaxpr_as_fun(core.ClosedJaxpr(inner.jaxpr, ()))(*operands)

    cse = inner is not None and inner.prevent_cse
    return jax.checkpoint(again, prevent_cse=cse, policy=saves)(*values.values())


def _is_slow(equation: JaxprEqn) -> bool:
    is_product: Any = jax.checkpoint_policies.dots_saveable
    return any(is_product(primitive) for primitive, *_ in _operations(equation))


def _operations(equation: JaxprEqn) -> Iterator[tuple[Any, ...]]:
    """The signatures of an operation, and of all operations within it."""
    yield _signature(equation.primitive, [v.aval for v in equation.invars])
    for inner in jaxprs.within(equation):
        for part in jaxprs.opened(inner).eqns:
            yield from _operations(part)


def _signature(primitive: Primitive, avals: Sequence[Aval]) -> tuple[Any, ...]:
    """What the policy of a checkpoint can tell of an operation."""
    return primitive, *map(str, avals)
