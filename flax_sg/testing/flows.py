"""Assertions on what a loss trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax_sg import errors, filters, flow
from flax_sg.errors.texts import listed
from flax_sg.filters.paths import Path
from flax_sg.flow.analysis import report_of
from flax_sg.flow.report import FLOWS, PARTLY, STOPPED, UNUSED
from flax_sg.internals.types import Args, Kwargs
from flax_sg.rendering.rows import index
from flax_sg.trees import leaves
from flax_sg.trees.trainable import DECLARED, not_differentiable


def assert_flows(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> None:
    """Asserts that a loss trains every selected parameter.

    ``where`` names what is **trained**.

    The answer comes from ``sg.gradient_flow``: nothing is compiled or run.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg.testing import assert_flows
    >>> params = {'encoder': jnp.ones(2), 'head': jnp.ones(2)}
    >>> def loss(params, x):
    ...     code = jax.lax.stop_gradient(params['encoder'] * x)
    ...     return jnp.sum(code * params['head'])
    >>> assert_flows(loss, 'head', params, jnp.ones(2))

    Args:
        loss: a function of the parameters, or the report of ``sg.gradient_flow`` on
            one, for several assertions on one trace.
        where: the parameters, a filter of any kind. Integers and other leaves that
            have no gradient are left out.
        *args: the arguments of the function, as arrays or ``jax.ShapeDtypeStruct``.
            None for a report.
        output: the outputs of the function to look at, a filter on their names. Each of
            them has to train the parameters. By default they may do so together.
        argnums: which arguments hold parameters, by default the first; see
            ``sg.gradient_flow``.
        has_aux: whether the function returns ``(outputs, aux)``. Default False.
        **kwargs: keyword arguments of the function, as for ``sg.gradient_flow``. None
            for a report.

    Raises:
        ExpectationError: an ``AssertionError``, if a parameter is not trained.
        UnusedFilterError: if a part of ``where`` selects no parameter.
        UnknownNameError: if a part of ``output`` selects no output.
        ArgumentTypeError: if ``where`` selects only leaves without a gradient.
    """
    report = _report('assert_flows', loss, args, argnums, has_aux, kwargs)
    _check(report, where, output)


def assert_stopped(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> None:
    """Asserts that a loss trains no selected parameter.

    ``where`` names what is **stopped**.

    Their gradients are exactly zero. A parameter that the loss does not use passes too.
    Arguments and errors are those of ``assert_flows``.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg.testing import assert_stopped
    >>> params = {'encoder': jnp.ones(2), 'head': jnp.ones(2)}
    >>> def loss(params, x):
    ...     return jnp.sum(params['encoder'] * params['head'] * x)
    >>> try:
    ...     assert_stopped(loss, 'encoder', params, jnp.ones(2))
    ... except AssertionError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    Expected no gradient to 'encoder'.
    The loss trains encoder.
    encoder is used at ...
    """
    report = _report('assert_stopped', loss, args, argnums, has_aux, kwargs)
    _check(report, where, output, trained=False)


def assert_trains_only(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> None:
    """Asserts that a loss trains every selected parameter and no other one.

    ``where`` names what is **trained**.

    Arguments and errors are those of ``assert_flows``.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg.testing import assert_trains_only
    >>> params = {'encoder': jnp.ones(2), 'head': jnp.ones(2)}
    >>> def losses(params, x):
    ...     code = params['encoder'] * x
    ...     head = jax.lax.stop_gradient(code) * params['head']
    ...     return {'code': jnp.sum(code**2), 'head': jnp.sum(head**2)}
    >>> assert_trains_only(losses, 'head', params, jnp.ones(2), output='head')
    >>> assert_trains_only(losses, ['encoder', 'head'], params, jnp.ones(2))
    """
    report = _report('assert_trains_only', loss, args, argnums, has_aux, kwargs)
    _check(report, where, output, only=True)


def _report(
    name: str,
    loss: Callable[..., Any] | flow.GradientFlow,
    args: Args,
    argnums: int | Sequence[int],
    has_aux: bool,
    kwargs: Kwargs,
) -> flow.GradientFlow:
    """The report on a function; a report as it is, if there are no arguments."""
    if not isinstance(loss, flow.GradientFlow):
        call = f'testing.{name}(loss, where, params)'
        options = {'wrt': DECLARED, **kwargs}
        wrt = options.pop('wrt')
        return report_of(call, loss, args, argnums, has_aux, wrt, options)
    if args or kwargs:
        raise TypeError('A report was made with its own arguments: give none with it.')
    return loss


def _check(
    report: flow.GradientFlow,
    where: filters.Where,
    output: filters.Where | None,
    trained: bool = True,
    only: bool = False,
) -> None:
    """Raises ``ExpectationError`` if a report is not as expected.

    Args:
        report: the report.
        where: the parameters.
        output: the outputs to look at, each alone. None for all of them together.
        trained: whether these parameters should be trained.
        only: whether all others should not.
    """
    filter_ = filters.as_filter(where)
    [decisions] = leaves.selected([report.parameters], filter_)
    # Leaves without a gradient may be anything.
    judged = [n for n, x in enumerate(report.shapes) if leaves.is_differentiable(x)]
    meant = [n for n, decision in enumerate(decisions) if filters.is_meant(decision)]
    if trained and meant and not {*meant} & {*judged}:
        shapes = {report.parameters[n]: report.shapes[n] for n in meant}
        raise not_differentiable(filter_, shapes)
    lines: list[str] = []
    for name, outputs in _outputs(report, output):
        lacks: list[int] = []
        has: list[int] = []
        for n in judged:
            wanted = decisions[n] if trained else filters.negated(decisions[n])
            less, more = _differences(report, n, wanted, outputs)
            if less and trained:
                lacks.append(n)
            if more and (only or not trained):
                has.append(n)
        for verb, numbers in (('does not train', lacks), ('trains', has)):
            if numbers:
                names = listed([report.names[n] for n in numbers])
                lines += [f'{name} {verb} {names}.', *_why(report, numbers[0], outputs)]
    if lines:
        gradient = 'a gradient' if trained else 'no gradient'
        alone = ' and to nothing else' if only else ''
        lines = [f'Expected {gradient} to {named(where)}{alone}.', *lines]
        raise errors.ExpectationError('\n'.join(lines))


def _differences(
    report: flow.GradientFlow,
    n: int,
    wanted: bool | filters.Part,
    outputs: Sequence[int],
) -> tuple[bool, bool]:
    """Whether some outputs together train too little of a parameter, and too much."""
    trained = report.trained(n, outputs)
    most, want = report.mask(n, trained), report.mask(n, wanted)
    unclear = isinstance(trained, filters.Part) and trained.is_unclear
    least = most & (not unclear)
    return bool((want & ~least).any()), bool((most & ~want).any())


def _why(report: flow.GradientFlow, n: int, outputs: Sequence[int]) -> list[str]:
    """Where a parameter is used, and what stops it."""
    name, trained = report.names[n], report.trained(n, outputs)
    if isinstance(trained, filters.Part):
        return [f'{name} is trained in part: {trained.elements!r}.']
    # What stops it for one output need not stop it for another.
    order = (FLOWS, PARTLY, STOPPED, UNUSED) if trained else (STOPPED, UNUSED)
    k = min(outputs, key=lambda k: order.index(report.status[k][n]))
    why = report.why(report.outputs[k], name)
    lines = [f'{name} is used at {line}.' for line in why.lines[:1]]
    if why.by:
        lines.append(f'It is stopped by {why.by}.')
    return lines or ([f'{name} is not used.'] if why.status == UNUSED else [])


def _outputs(
    report: flow.GradientFlow, output: filters.Where | None
) -> list[tuple[str, Sequence[int]]]:
    """Who trains, and the numbers of the outputs that count together."""
    names = report.outputs
    if output is None:
        return [('The loss', range(len(names)))]
    output = filters.as_filter(output)
    paths = [Path.of('outputs', tuple(name.split('/'))) for name in names]
    for part in (*output.atoms, output):
        if not any(map(part, paths)):
            index('output', str(getattr(part, 'pattern', part)), names)
    return [(f'Output {x!r}', [n]) for n, x in enumerate(names) if output(paths[n])]


def named(where: filters.Where) -> str:
    """A filter in a message."""
    return repr(where if isinstance(where, (str, bool)) else filters.as_filter(where))
