"""``gradient_flow``: which output of a function trains which parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_sg import errors, filters
from flax_sg.flow import pullback
from flax_sg.flow.flat import Flat
from flax_sg.flow.report import FLOWS, PARTLY, STOPPED, UNUSED, GradientFlow
from flax_sg.flow.traced import Traced, trace_of
from flax_sg.flow.uses import unclear, uses
from flax_sg.flow.way import Way, way
from flax_sg.flow.zeros import Mask
from flax_sg.programs import sources
from flax_sg.programs.steps import UNKNOWN
from flax_sg.trees.trainable import DECLARED, Declared


def gradient_flow(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: filters.Where | Declared = DECLARED,
    **kwargs: Any,
) -> GradientFlow:
    """Tells which output of a function trains which parameter.

    The function is traced once, on shapes. Nothing is compiled or run.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> def losses(params, x):
    ...     code = jnp.tanh(x @ params['code'])
    ...     fixed = jax.lax.stop_gradient(params['code'])
    ...     return {'code': code.sum(), 'out': (x @ fixed * params['out']).sum()}
    >>> shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    >>> flow = sg.gradient_flow(losses, {'code': shape, 'out': shape}, shape)
    >>> flow
    GradientFlow(2 outputs, 2 parameters, 2 live)
    >>> flow.status_of('out', 'code'), flow.status_of('code', 'out')
    ('stopped', 'unused')
    >>> flow.why('out', 'code').by  # doctest: +ELLIPSIS
    'stop_gradient at ...:3 (losses)'

    A parameter that is ``'stopped'`` or ``'unused'`` has a gradient of exactly zero.
    A gradient is stopped by everything without a derivative: ``lax.stop_gradient``,
    ``sign``, ``round``, integers, and rules of ``custom_jvp`` or ``custom_vjp`` that
    return zeros.

    A parameter that ``'flows'`` may have a gradient of zero all the same, as in
    ``x - x``. The report also says ``'flows'`` if a gradient may come back:

    - through a loop after any number of turns, and through any branch of a conditional;
    - to any element of an array;
    - to a parameter that a condition stops, ``where & (step < k)``: the report says so;
    - through collectives in ``shard_map``, which JAX cannot differentiate elsewhere;
    - through rules with ``symbolic_zeros=True``;
    - from a rule whose cotangent is a constant, to whatever output reads its result.

    Args:
        fun: a function of pytrees that returns a pytree of arrays of any shape, or an
            unbound module for its ``apply``.
        *args: its arguments, or their shapes (``jax.ShapeDtypeStruct``,
            ``jax.eval_shape``). Arrays and numbers of Python are traced, since they may
            be others at the next step, as under ``jax.jit``; a bool is a flag. Bind a
            number whose value it asks for, as ``range(n)`` does:
            ``functools.partial(fun, n=12)``.
        argnums: which arguments hold the parameters, by default the first. With a tuple
            of them each path begins with the position: ``'1/kernel'``.
        has_aux: whether ``fun`` returns ``(outputs, aux)``. The report leaves ``aux``
            out. Default False.
        wrt: the parameters to differentiate, a filter of any kind. All others count as
            stopped. By default what ``sg.grad`` differentiates, see ``sg.trainable``.
        **kwargs: keyword arguments of the function, as for ``sg.live``.

    Returns:
        Plain data. Leaves of the arguments that are no arrays are left out. Integers
        and random keys are stopped, and an output of integers trains nothing.

    Raises:
        ArgumentTypeError: if the function returns nothing, or has no arrays there.
        ArgumentTypeError: if a parameter goes into a host callback, a mutable array or
            a primitive that JAX cannot differentiate; if the function asks for the
            value of a number.
        UnusedFilterError: if a part of ``wrt`` matches no leaf.
        ArgumentTypeError: if ``argnums`` names no positions, or one twice.

    Note:
        ``jax.ad_checkpoint.print_saved_residuals`` reads programs in this way. The
        result is that of symbolic zeros in ``jax.jvp``.
    """
    call = 'sg.gradient_flow(loss, params)'
    return report_of(call, fun, args, argnums, has_aux, wrt, kwargs)


def report_of(*call: Any) -> GradientFlow:
    """The report on a function, for the arguments of ``trace_of``."""
    return report_on(trace_of(*call))


def report_on(trace: Traced, together: bool = False) -> GradientFlow:
    """The report on a function that was traced.

    Args:
        trace: the function.
        together: whether only that counts which all outputs train together. If the
            first one trains all of it, the report says the same of the others.
    """
    try:
        return _report(trace, together)
    except pullback.RefusedError as error:
        cause = error.__cause__
        raise _refused(trace, cause) from cause


class _Cell(NamedTuple):
    """What an output does to a parameter, as the fields of a report have it."""

    status: str
    part: filters.Part | None = None
    condition: str = ''


def _report(trace: Traced, together: bool) -> GradientFlow:
    program, outputs, parameters = trace.program, trace.outputs, trace.parameters
    zeros = unread = (together and _zeros_of_first(trace)) or _zeros(trace)
    if any(zero.any() and not zero.all() for row in zeros for zero in row):
        # Without stops, the zeros are the elements that an output does not read.
        without = pullback.without_stops(program)
        try:
            unread = _zeros(trace._replace(program=without))
        except pullback.RefusedError:  # JAX cannot differentiate what a stop hides.
            unread = None
    flat, types = Flat(program), program.in_avals
    doubt = functools.cache(functools.partial(unclear, flat))

    def cell(output: int, n: int) -> _Cell:
        zero, slots = zeros[output][n], parameters[n].slots
        if zero.all():
            is_read = any(flat.read[flat.inputs[x]] >> output & 1 for x in slots)
            return _Cell(STOPPED if is_read else UNUSED)
        # With other inputs, the output may read more.
        if unread and (stopped := zero & ~unread[output][n]).any():
            return _Cell(PARTLY, filters.part_of(~stopped, types[slots[0]].shape))
        choice = doubt(slots, unread is not None or not zero.any())
        if choice and not choice.is_condition:
            return _Cell(PARTLY, filters.Part(filters.Unclear(choice.line)))
        return _Cell(FLOWS, condition=choice.line if choice else '')

    def explain(n: int, output: int) -> Way:
        slots = parameters[n].slots
        return way(flat, slots, output)._replace(uses=uses(flat, slots, output))

    cells = [[cell(k, n) for n in range(len(parameters))] for k in range(len(outputs))]
    shapes = [types[each.slots[0]] for each in parameters]
    return GradientFlow(
        outputs=outputs,
        parameters=tuple(each.path for each in parameters),
        shapes=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes),
        status=tuple(tuple(cell.status for cell in row) for row in cells),
        parts=tuple(tuple(cell.part for cell in row) for row in cells),
        explain=explain,
        arguments=trace.arguments,
        conditions=tuple(tuple(cell.condition for cell in row) for row in cells),
    )


def _zeros_of_first(trace: Traced) -> list[list[Mask]] | None:
    """The same as ``_zeros``, if the first output stands for all of them.

    Statistics beside a loss are many outputs, and each proof takes as long as the
    first. The gradients of all outputs together are zero where each of them is: so no
    other output trains more, if each parameter has none from all of them, or a gradient
    to each element from the first. Where the first stops a part, others may not.
    """
    count = len(trace.outputs)
    if count < 3:
        return None
    [first], [every] = _zeros(trace, [[0]]), _zeros(trace, [range(count)])
    pairs = [*zip(first, every, strict=True)]
    is_alike = all(zero.all() or not one.any() for one, zero in pairs)
    return [first] * count if is_alike else None


def _zeros(
    trace: Traced, groups: Iterable[Sequence[int]] | None = None
) -> list[list[Mask]]:
    """For each output, and each parameter, the elements whose gradient is zero.

    Args:
        trace: the function.
        groups: the outputs that count together; by default each alone.
    """
    slots = [slot for each in trace.parameters for slot in each.slots]
    groups = groups or [[n] for n in range(len(trace.outputs))]
    found = [pullback.zero_gradients(trace.program, slots, group) for group in groups]
    masks = [dict(zip(slots, row, strict=True)) for row in found]
    return [
        [
            functools.reduce(np.logical_and, (mask_of[slot] for slot in each.slots))
            for each in trace.parameters
        ]
        for mask_of in masks
    ]


def _refused(trace: Traced, error: BaseException | None) -> errors.ArgumentTypeError:
    """JAX cannot differentiate an output: says where, and what would pass there."""
    equations = pullback.culprit(trace.program, error)
    name = equations[-1].primitive.name if equations else ''
    lines = filter(None, map(sources.source_of, reversed(equations)))
    problem = 'it'
    if equations:
        problem = f'{name} at {next(lines, UNKNOWN)}'
    write = 'Otherwise write a rule for it: jax.custom_jvp or jax.custom_vjp.'
    if name == 'while' and trace.constant:
        write = f'If a number is how often it turns, {trace.constant}.'
    return errors.ArgumentTypeError(
        f'A gradient would pass through {problem}, which JAX cannot differentiate.\n'
        'If none should come back from there, apply jax.lax.stop_gradient before.\n'
        f'{write}'
    )
