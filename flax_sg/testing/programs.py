"""Compares compiled programs."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import jax

from flax_sg import errors
from flax_sg.internals import jaxprs

# Tables of lines in the source, each up to an empty line.
_TABLES = re.compile(
    r'^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*', re.MULTILINE
)
_OPERATION = re.compile(r'= \S+ ([a-z][a-z0-9-]*)\(|= \(.*?\) ([a-z][a-z0-9-]*)\(')


def assert_same_program(
    f: Callable[..., Any], g: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Asserts that two functions compile to the same program.

    The optimized HLO has to be equal, with all constants. So have the arguments that
    the programs take, and the functions that they call back. Names of functions, scopes
    and instructions may differ, and lines of the source. Nothing is run.

    >>> import jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> from flax_sg.testing import assert_same_program
    >>> def frozen(params, x):
    ...     with nn.stop_gradient('bias'):
    ...         return jnp.sum(nn.Dense(2).apply({'params': params}, x))
    >>> def by_hand(params, x):
    ...     params = {**params, 'bias': jax.lax.stop_gradient(params['bias'])}
    ...     return jnp.sum(nn.Dense(2).apply({'params': params}, x))
    >>> params = {'kernel': jnp.ones((3, 2)), 'bias': jnp.ones(2)}
    >>> assert_same_program(jax.grad(frozen), jax.grad(by_hand), params, jnp.ones(3))

    Args:
        f: a function that JAX can trace, jitted or not, or a compiled program
            (``jax.stages.Compiled``). The settings of a jitted function count: static
            arguments, shardings, donation.
        g: the other one.
        *args: the arguments to compile for, as arrays or ``jax.ShapeDtypeStruct``.
        **kwargs: the keyword arguments to compile for.

    Raises:
        ExpectationError: an ``AssertionError`` that counts the operations.

    Note:
        A program returns a flat list: functions that return ``(a, b)`` and
        ``{'a': a, 'b': b}`` have the same one.
    """
    both = [_compiled(fn, *args, **kwargs) for fn in (f, g)]
    one, other = (_text_of(compiled) for compiled, _ in both)
    takes = [jaxprs.kept_arguments(compiled) for compiled, _ in both]
    calls = [called for _, called in both]
    if one != other:
        raise _different_programs(one, other)
    if takes[0] != takes[1]:
        raise errors.ExpectationError(
            'The two functions use different arguments, counted as leaves: '
            f'{takes[0]} and {takes[1]}.\n'
            'Read the same parameters in both.'
        )
    if None not in calls and calls[0] != calls[1]:
        raise errors.ExpectationError(
            'The two functions call back different functions, or print other texts: '
            f'{len(calls[0] or ())} and {len(calls[1] or ())} calls.\n'
            'Call the same functions in both, in the same order.'
        )


def _different_programs(one: str, other: str) -> errors.ExpectationError:
    """The error for two texts of programs, which counts their operations."""
    first, second = (
        collections.Counter(a or b for a, b in _OPERATION.findall(text))
        for text in (one, other)
    )
    counts = [
        f'{name} {first[name]} and {second[name]}'
        for name in sorted(first | second)
        if first[name] != second[name]
    ]
    return errors.ExpectationError(
        'The two functions compile to different programs: '
        f'{", ".join(counts) or "with the same operations"}.\n'
        'To see more, compare what testing.optimized_hlo returns for each.'
    )


def optimized_hlo(fn: Callable[..., Any] | Any, *args: Any, **kwargs: Any) -> str:
    """Returns the optimized HLO of a program, without names.

    Instructions and computations are numbered in the order of their first use. So
    programs that differ in names alone have equal texts. Functions of Python that a
    program calls back are not in its text; ``assert_same_program`` compares them, too.

    Args:
        fn: a function or a compiled program, as for ``assert_same_program``.
        *args: the arguments to compile for.
        **kwargs: the keyword arguments to compile for.
    """
    return _text_of(_compiled(fn, *args, **kwargs)[0])


def _compiled(fn: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any] | None]:
    """A compiled program, and what it calls back; None if that is not known."""
    if isinstance(fn, jax.stages.Compiled):
        return fn, None
    jitted: Any = fn if hasattr(fn, 'trace') else jax.jit(fn)
    traced = jitted.trace(*args, **kwargs)
    return traced.lower().compile(), jaxprs.callbacks_in(traced.jaxpr)


def _text_of(compiled: Any) -> str:
    text = _TABLES.sub('', jaxprs.program_text(compiled))
    # The head of a computation repeats the names of its parameters.
    text = re.sub(r'\b[\w.-]+: (?=[a-z]+\d*\[|\()', '', text)
    names: dict[str, str] = {}
    text = re.sub(
        r'%[\w.-]+', lambda m: names.setdefault(m.group(), f'%{len(names)}'), text
    )
    return re.sub(r'^HloModule [\w.-]+', 'HloModule', text)
