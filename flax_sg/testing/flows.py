"""Which loss trains which parameter, as assertions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax_sg import errors, filters, flow
from flax_sg.testing.expectations import Expectation


def assert_flows(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> None:
    """Asserts that every selected parameter is trained.

    Nothing is compiled or run: the answer comes from ``sg.gradient_flow``.

    >>> import jax, jax.numpy as jnp
    >>> params = {'encoder': jnp.ones(2), 'head': jnp.ones(2)}
    >>> def loss(params, x):
    ...     code = jax.lax.stop_gradient(params['encoder'] * x)
    ...     return jnp.sum(code * params['head'])
    >>> assert_flows(loss, 'head', params, jnp.ones(2))

    Args:
        loss: a function of the parameters, or what ``sg.gradient_flow`` said of one: a
            report serves any number of assertions.
        where: which parameters, a filter of any kind. Leaves without a gradient, such
            as integers, are not looked at.
        *args: the arguments of the function, arrays or ``jax.ShapeDtypeStruct``; none
            for a report.
        output: which of the outputs of a function with several, a filter on their
            names; each of them has to. By default what they train together counts.
        argnums: which arguments hold parameters, as in ``sg.gradient_flow``.
        has_aux: whether the function returns ``(outputs, aux)``.

    Raises:
        ExpectationError: an ``AssertionError`` with a table of what is not so.
        UnusedFilterError: if a part of ``where`` selects no parameter.
        UnknownNameError: if there is no such output.
        NotDifferentiableError: if ``where`` selects nothing that can be trained.
        ArgumentTypeError: if arguments are given with a report.
    """
    expected = Expectation(filters.as_filter(where), output=_filter(output))
    expected.check(_report(loss, args, argnums, has_aux))


def assert_stopped(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> None:
    """Asserts that no selected parameter is trained: all gradients are exactly zero.

    A parameter that is not used gets no gradient either. Arguments and errors are those
    of ``assert_flows``.

    >>> import jax, jax.numpy as jnp
    >>> params = {'encoder': jnp.ones(2), 'head': jnp.ones(2)}
    >>> def loss(params, x):
    ...     return jnp.sum(params['encoder'] * params['head'] * x)
    >>> try:
    ...     assert_stopped(loss, 'encoder', params, jnp.ones(2))
    ... except AssertionError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    The function trains nothing of Glob('encoder'): this does not hold.
      output  parameter  expected  found   at
      output  encoder    stopped   trains  ...
    """
    where = filters.as_filter(where)
    expected = Expectation(where, trained=False, output=_filter(output))
    expected.check(_report(loss, args, argnums, has_aux))


def assert_trains_only(
    loss: Callable[..., Any] | flow.GradientFlow,
    where: filters.Where,
    *args: Any,
    output: filters.Where | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> None:
    """Asserts that every selected parameter is trained, and no other one.

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
    where = filters.as_filter(where)
    expected = Expectation(where, only=True, output=_filter(output))
    expected.check(_report(loss, args, argnums, has_aux))


def _filter(output: filters.Where | None) -> filters.Filter | None:
    return None if output is None else filters.as_filter(output)


def _report(
    loss: Callable[..., Any] | flow.GradientFlow,
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> flow.GradientFlow:
    if not isinstance(loss, flow.GradientFlow):
        return flow.gradient_flow(loss, *args, argnums=argnums, has_aux=has_aux)
    if args:
        raise _missing_arguments(len(args))
    return loss


def _missing_arguments(count: int) -> errors.ArgumentTypeError:
    """Arguments are given together with a report, which has its own."""
    several = '1 argument' if count == 1 else f'{count} arguments'
    return errors.ArgumentTypeError(
        f'a report was given with {several}; it says what it says of the arguments '
        'that it was made with.\n'
        'Leave them out, or give the function in place of the report.'
    )
