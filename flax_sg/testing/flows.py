"""Assertions on what a loss trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax_sg import errors, filters, flow
from flax_sg.filters.paths import Path
from flax_sg.flow.report import FLOWS, STOPPED, UNUSED, unknown_name
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
        argnums: which arguments hold parameters, by default the first. See
            ``sg.gradient_flow``.
        has_aux: whether the function returns ``(outputs, aux)``. Default False.

    Raises:
        ExpectationError: an ``AssertionError``, if a parameter is not trained.
        UnusedFilterError: if a part of ``where`` selects no parameter.
        UnknownNameError: if there is no such output.
        NotDifferentiableError: if ``where`` selects only leaves without a gradient.
        ArgumentTypeError: if arguments are given with a report.
    """
    _check(Expectation(where, output=output), loss, args, argnums, has_aux)


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
    _check(
        Expectation(where, trained=False, output=output), loss, args, argnums, has_aux
    )


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
    >>> params = {'encoder': jnp.ones(2), 'head': jnp.ones(2)}
    >>> def losses(params, x):
    ...     code = params['encoder'] * x
    ...     head = jax.lax.stop_gradient(code) * params['head']
    ...     return {'code': jnp.sum(code**2), 'head': jnp.sum(head**2)}
    >>> assert_trains_only(losses, 'head', params, jnp.ones(2), output='head')
    >>> assert_trains_only(losses, ['encoder', 'head'], params, jnp.ones(2))
    """
    _check(Expectation(where, only=True, output=output), loss, args, argnums, has_aux)


class Broken(NamedTuple):
    """One parameter that does not meet an expectation.

    Attributes:
        output: the name of the output.
        parameter: the path of the parameter.
        expected: ``'flows'`` or ``'stopped'``.
        found: the status in the report.
        place: says where the parameter is used, or stopped if it should be trained.
    """

    output: str
    parameter: str
    expected: str
    found: str
    place: str


def _place(parameter: str, found: str, uses: Sequence[flow.Use]) -> str:
    if found == UNUSED or not uses:
        return f'{parameter} is not used.'
    stops = [use for use in uses if use.stopped]
    live = [use for use in uses if not use.stopped]
    shown = live or stops if found == FLOWS else stops or live
    lines = list(dict.fromkeys(use.source for use in shown))
    verb = 'stopped' if shown[0].stopped else 'used'
    more = f' and {len(lines) - 1} more' * (len(lines) > 1)
    return f'{parameter} is {verb} at {lines[0]}{more}.'


class Expectation(NamedTuple):
    """What a report should say. Leaves without a gradient may be anything.

    Attributes:
        where: the parameters, a filter of any kind.
        trained: whether they should be trained.
        only: whether all others should be the opposite.
        output: the outputs to look at, each alone. None for all of them together.
    """

    where: filters.Where
    trained: bool = True
    only: bool = False
    output: filters.Where | None = None

    def broken(self, report: flow.GradientFlow) -> list[Broken]:
        """The parameters that do not meet the expectation.

        Raises:
            UnusedFilterError: if a part of the filter selects no parameter.
            UnknownNameError: if a part of ``output`` selects no output.
            NotDifferentiableError: if all selected parameters are integers, keys and
                the like, and should be trained.
        """
        where = filters.as_filter(self.where)
        [named] = leaves.selected([_paths(report.parameters)], where)
        columns = zip(report.parameters, report.shapes, report.uses, named, strict=True)
        rows = [(n, *column) for n, column in enumerate(columns)]
        taken = {path: shape for _, path, shape, _, takes in rows if takes}
        judged = [row for row in rows if leaves.is_differentiable(row[2])]
        if self.trained and taken and not any(row[-1] for row in judged):
            raise not_differentiable(where, taken)
        found: list[Broken] = []
        for output, statuses in self._outputs(report):
            for n, path, _, uses, takes in judged:
                word = FLOWS if self.trained == bool(takes) else STOPPED
                is_wrong = (word == FLOWS) != (statuses[n] == FLOWS)
                if is_wrong and (takes or self.only):
                    place = _place(path, statuses[n], uses)
                    found.append(Broken(output, path, word, statuses[n], place))
        return found

    def explained(self, broken: Sequence[Broken]) -> list[str]:
        """Lines that say what is trained, or not trained, against the expectation."""
        groups: dict[tuple[str, str], list[Broken]] = {}
        for one in broken:
            groups.setdefault((one.output, one.expected), []).append(one)
        lines: list[str] = []
        for (output, expected), group in list(groups.items())[:2]:
            who = 'The loss' if self.output is None else f'Output {output!r}'
            trains = 'does not train' if expected == FLOWS else 'trains'
            names = [one.parameter for one in group[:3]]
            names += [f'{len(group) - 3} more'] * (len(group) > 3)
            what = 'of its parameters'
            if self.only and expected == STOPPED:
                what = f'other parameter{"s" * (len(group) > 1)}'
            text = f'{who} {trains} {len(group)} {what}: {", ".join(names)}.'
            lines += [text, group[0].place]
        if len(groups) > 2:
            lines.append(f'{len({name for name, _ in groups})} outputs are wrong.')
        return lines

    def _outputs(self, report: flow.GradientFlow) -> list[tuple[str, Sequence[str]]]:
        """The outputs to judge: a name, and a status for each parameter."""
        names = report.output_names
        if self.output is None:
            columns = zip(*report.status, strict=True)
            together = [min(column, key=_BEST_FIRST.index) for column in columns]
            return [(names[0] if len(names) == 1 else 'together', together)]
        output, paths = filters.as_filter(self.output), _paths(names)
        for part in (*output.atoms, output):
            if not any(map(part, paths)):
                said = part.pattern if isinstance(part, filters.Glob) else repr(part)
                raise unknown_name('output', said, names)
        rows = zip(names, report.status, map(output, paths), strict=True)
        return [(name, row) for name, row, takes in rows if takes]


_BEST_FIRST = (FLOWS, STOPPED, UNUSED)


def _paths(names: Sequence[str]) -> list[Path]:
    return [
        name if isinstance(name, Path) else Path.of('outputs', tuple(name.split('/')))
        for name in names
    ]


def _check(
    expected: Expectation,
    loss: Callable[..., Any] | flow.GradientFlow,
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> None:
    """Raises ``ExpectationError`` if a function or a report is not as expected."""
    if not isinstance(loss, flow.GradientFlow):
        loss = flow.gradient_flow(loss, *args, argnums=argnums, has_aux=has_aux)
    elif args:
        several = '1 argument' if len(args) == 1 else f'{len(args)} arguments'
        raise errors.ArgumentTypeError(
            f'A report was given with {several}, but it was made with its own.\n'
            'Leave the arguments out, or give the function instead of the report.'
        )
    broken = expected.broken(loss)
    if not broken:
        return
    what = 'a gradient' if expected.trained else 'no gradient'
    where = filters.as_filter(expected.where)
    shown = repr(expected.where if isinstance(expected.where, str) else where)
    who = 'all parameters' if where == filters.as_filter(True) else shown
    rest = ' and to nothing else' * expected.only
    but = '\n'.join(expected.explained(broken))
    but = but[0].lower() + but[1:]
    raise errors.ExpectationError(f'Expected {what} to {who}{rest}, but {but}')
