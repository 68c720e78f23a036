"""Assertions on what a loss trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax_sg import errors, filters, flow
from flax_sg.filters import predicates
from flax_sg.filters.paths import Path
from flax_sg.flow.report import FLOWS, PARTLY, STOPPED, UNUSED, unknown_name
from flax_sg.trees import leaves
from flax_sg.trees.trainable import not_differentiable


def assert_flows(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> None:
    """Asserts that a loss trains every selected parameter.

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

    Raises:
        ExpectationError: an ``AssertionError``, if a parameter is not trained.
        UnusedFilterError: if a part of ``where`` selects no parameter.
        UnknownNameError: if there is no such output.
        ArgumentTypeError: if ``where`` selects only leaves without a gradient.
        ArgumentTypeError: if arguments are given with a report.
    """
    _check(loss, args, argnums, has_aux, where, output)


def assert_stopped(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> None:
    """Asserts that a loss trains no selected parameter.

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
    Expected no gradient to 'encoder', but the loss trains 1 of its parameters: encoder.
    encoder is used at ...
    """
    _check(loss, args, argnums, has_aux, where, output, trained=False)


def assert_trains_only(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> None:
    """Asserts that a loss trains every selected parameter and no other one.

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
    _check(loss, args, argnums, has_aux, where, output, only=True)


def broken(
    report: flow.GradientFlow,
    where: filters.Where,
    trained: bool = True,
    only: bool = False,
    output: filters.Where | None = None,
) -> list[str]:
    """Says which parameters are trained, or not trained, against an expectation.

    Leaves without a gradient may be anything.

    Args:
        report: the report.
        where: the parameters, a filter of any kind.
        trained: whether they should be trained.
        only: whether all others should be the opposite.
        output: the outputs to look at, each alone. None for all of them together.

    Returns:
        Lines of text, none if the report is as expected.

    Raises:
        UnusedFilterError: if a part of the filter selects no parameter.
        UnknownNameError: if a part of ``output`` selects no output.
        ArgumentTypeError: if all selected parameters are integers, keys and the
            like, and should be trained.
    """
    where = filters.as_filter(where)
    [named] = leaves.selected([_paths(report.parameters)], where)
    taken = [n for n, takes in enumerate(named) if takes]
    judged = [n for n, x in enumerate(report.shapes) if leaves.is_differentiable(x)]
    if trained and taken and not {*taken} & {*judged}:
        shapes = {report.parameters[n]: report.shapes[n] for n in taken}
        raise not_differentiable(where, shapes)
    wrong: dict[tuple[str, bool], list[int]] = {}
    columns = _outputs(report, output)
    for name, numbers in columns:
        for n in judged:
            if not (only or named[n]):
                continue
            wanted = named[n] if trained else filters.negated(named[n])
            lacks, has = report.differs(n, wanted, numbers)
            if trained and lacks:
                wrong.setdefault((name, True), []).append(n)
            elif has and (only or not trained):
                wrong.setdefault((name, False), []).append(n)
    of_name = dict(columns)
    lines: list[str] = []
    for (name, wanted), group in list(wrong.items())[:2]:
        who = 'The loss' if output is None else f'Output {name!r}'
        names = [
            'the rest of ' * (not wanted and trained and bool(named[n]))
            + report.names[n]
            for n in group[:3]
        ]
        names += [f'{len(group) - 3} more'] * (len(group) > 3)
        what = 'of its parameters'
        if only and not wanted:
            what = f'other parameter{"s" * (len(group) > 1)}'
        trains = 'does not train' if wanted else 'trains'
        lines.append(f'{who} {trains} {len(group)} {what}: {", ".join(names)}.')
        lines += _place(report, group[0], of_name[name], wanted).splitlines()
    if len(wrong) > 2:
        lines.append(f'{len({name for name, _ in wrong})} outputs are wrong.')
    return lines


def _place(
    report: flow.GradientFlow, n: int, outputs: Sequence[int], wanted: bool
) -> str:
    """Where a parameter is used or stopped, against an expectation."""
    parameter, found = report.names[n], report.trained(n, outputs)
    if all(report.status[k][n] == UNUSED for k in outputs):
        return f'{parameter} is not used.'
    if isinstance(found, filters.Part):
        return f'{parameter} is trained in part: {found.elements!r}.'
    # What stops it for one output need not stop it for another.
    status = (STOPPED,) if wanted else (FLOWS, PARTLY)
    shown = next(k for k in outputs if report.status[k][n] in status)
    why = report.why(report.outputs[shown], parameter)
    line, *_ = *why.lines, ''
    used = f'{parameter} is used at {line}.' * bool(line)
    if not wanted:
        leaves = (
            f'Its value leaves its block at {why.leaves}: '
            'write jax.lax.stop_gradient there.'
        )
        return '\n'.join(filter(None, (used, leaves * bool(why.leaves))))
    if line and why.by.endswith(line):
        return f'{parameter} is stopped by {why.by}.'
    by = f'It is stopped by {why.by}.'
    return '\n'.join(filter(None, (used, by * bool(why.by))))


def _outputs(
    report: flow.GradientFlow, output: filters.Where | None
) -> list[tuple[str, Sequence[int]]]:
    """The outputs to judge: a name, and the numbers of those that count together."""
    names = report.outputs
    if output is None:
        return [('', range(len(names)))]
    output, paths = filters.as_filter(output), _paths(names)
    for part in (*output.atoms, output):
        if not any(map(part, paths)):
            said = part.pattern if isinstance(part, filters.Glob) else repr(part)
            raise unknown_name('output', said, names)
    return [(names[n], [n]) for n, path in enumerate(paths) if output(path)]


def _paths(names: Sequence[str]) -> list[Path]:
    return [
        name if isinstance(name, Path) else Path.of('outputs', tuple(name.split('/')))
        for name in names
    ]


def named(where: filters.Where) -> str:
    """A filter in a message."""
    if where is True:
        return 'all parameters'
    return repr(where if isinstance(where, str) else filters.as_filter(where))


def _check(
    loss: Callable[..., Any] | flow.GradientFlow,
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
    where: filters.Where,
    output: filters.Where | None,
    trained: bool = True,
    only: bool = False,
) -> None:
    """Raises ``ExpectationError`` if a function or a report is not as expected."""
    if not isinstance(loss, flow.GradientFlow):
        if not args:
            raise errors.ArgumentTypeError(
                f'{predicates.describe(loss)} is to be traced, and its arguments are '
                'not given.\n'
                "Write them after the filter: assert_flows(loss, 'head/**', params, x)."
            )
        loss = flow.gradient_flow(loss, *args, argnums=argnums, has_aux=has_aux)
    elif args:
        several = '1 argument' if len(args) == 1 else f'{len(args)} arguments'
        raise errors.ArgumentTypeError(
            f'A report was given with {several}, but it was made with its own.\n'
            'Leave the arguments out, or give the function instead of the report.'
        )
    lines = broken(loss, where, trained, only, output)
    if not lines:
        return
    what = 'a gradient' if trained else 'no gradient'
    who = named(where)
    rest = ' and to nothing else' * only
    but = '\n'.join(lines)
    but = but[0].lower() + but[1:]
    raise errors.ExpectationError(f'Expected {what} to {who}{rest}, but {but}')
