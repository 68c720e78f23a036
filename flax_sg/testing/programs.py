"""Compares compiled programs."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax

from flax_sg import errors
from flax_sg.internals import jaxprs

_TABLES = ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames')
_OPERATION = re.compile(r'= \S+ ([a-z][a-z0-9-]*)\(|= \(.*?\) ([a-z][a-z0-9-]*)\(')


def assert_same_program(
    f: Callable[..., Any], g: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Asserts that two functions compile to the same program.

    The optimized HLO has to be equal, with all constants. Names of functions, scopes
    and instructions may differ, and lines of the source. Nothing is run.

    >>> import jax.numpy as jnp
    >>> from flax_sg import linen as nn
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
    one, other = (optimized_hlo(fn, *args, **kwargs) for fn in (f, g))
    if one != other:
        raise _different_programs(one, other)


def optimized_hlo(fn: Callable[..., Any] | Any, *args: Any, **kwargs: Any) -> str:
    """Returns the optimized HLO of a program, without names.

    Instructions and computations are numbered in the order of their first use. So two
    texts are equal exactly if the programs are.

    Args:
        fn: a function or a compiled program, as for ``assert_same_program``.
        *args: the arguments to compile for.
        **kwargs: the keyword arguments to compile for.
    """
    text = jaxprs.program_text(_compiled(fn, *args, **kwargs))
    lines: list[str] = []
    skipping = False
    for line in text.splitlines():
        if line.strip() in _TABLES:  # Of lines in the source.
            skipping = True
        elif not line.strip():
            skipping = False
        if not skipping:
            lines.append(line)
    text = '\n'.join(lines)
    # The head of a computation repeats the names of its parameters.
    text = re.sub(r'\b[\w.-]+: (?=[a-z]+\d*\[|\()', '', text)
    names: dict[str, str] = {}
    text = re.sub(
        r'%[\w.-]+', lambda m: names.setdefault(m.group(), f'%{len(names)}'), text
    )
    return re.sub(r'^HloModule [\w.-]+', 'HloModule', text)


def _compiled(fn: Any, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
    if isinstance(fn, jax.stages.Compiled):
        return fn
    jitted = fn if hasattr(fn, 'lower') else jax.jit(fn)
    return jitted.lower(*args, **kwargs).compile()


def _different_programs(one: str, other: str) -> errors.ExpectationError:
    """Two functions compile to different programs."""
    first, second = (
        collections.Counter(a or b for a, b in _OPERATION.findall(text))
        for text in (one, other)
    )
    counts = [
        f'{name} {first[name]} and {second[name]}'
        for name in sorted(first | second)
        if first[name] != second[name]
    ]
    pairs = itertools.zip_longest(
        one.splitlines(), other.splitlines(), fillvalue='(no such line)'
    )
    different = next((a, b) for a, b in pairs if a != b)
    shown = (' '.join(line.split())[:120] for line in different)
    return errors.ExpectationError(
        'The two functions compile to different programs: '
        f'{", ".join(counts) or "with the same operations"}.\n'
        'The first line that differs:\n' + '\n'.join(f'  {line}' for line in shown)
    )
