"""Compiled programs as things to compare."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flax_sg import errors
from flax_sg.errors.texts import table
from flax_sg.internals import jaxprs

_TABLES = ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames')
_OPERATION = re.compile(r'= \S+ ([a-z][a-z0-9-]*)\(|= \(.*?\) ([a-z][a-z0-9-]*)\(')


def assert_same_program(
    f: Callable[..., Any], g: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Asserts that two functions are compiled to the same program.

    Compared is the optimized HLO, all constants included, and names left out: those of
    functions, scopes, instructions, and places in the source. Nothing is run.

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
        f: a function that JAX can trace, jitted or not; the settings of a jitted one
            (static arguments, shardings, donation) hold. Or a program that is compiled
            already (``jax.stages.Compiled``).
        g: the other one.
        *args: the arguments to compile for; ``jax.ShapeDtypeStruct`` will do in place
            of arrays.
        **kwargs: their keyword arguments.

    Raises:
        ExpectationError: an ``AssertionError`` that counts what differs.

    Note:
        How results are put into trees is no part of a program: functions that return
        ``(a, b)`` and ``{'a': a, 'b': b}`` have the same one.
    """
    first, second = (_compiled(fn, *args, **kwargs) for fn in (f, g))
    one, other = optimized_hlo(first), optimized_hlo(second)
    if one != other:
        lines = zip(_padded(one, other), _padded(other, one), strict=True)
        different = next((a, b) for a, b in lines if a != b)
        raise _different_programs(_rows(first, second), different)


def optimized_hlo(fn: Callable[..., Any] | Any, *args: Any, **kwargs: Any) -> str:
    """Returns the optimized HLO of a program, without names.

    Instructions and computations are called by the order in which they first appear,
    so that two texts are equal exactly if the programs are.

    Args:
        fn: a function or a compiled program, as for ``assert_same_program``.
        *args: the arguments that it is compiled for.
        **kwargs: its keyword arguments.
    """
    text = jaxprs.program_text(_compiled(fn, *args, **kwargs))
    lines: list[str] = []
    skipping = False
    for line in text.splitlines():
        if line.strip() in _TABLES:  # Of places in the source.
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


def _padded(text: str, other: str) -> list[str]:
    lines = text.splitlines()
    return lines + ['(no such line)'] * (len(other.splitlines()) - len(lines))


def _rows(first: Any, second: Any) -> list[tuple[str, str, str]]:
    """What the programs have different numbers of: operations, flops, memory."""
    one, other = map(_counts, (first, second))
    rows = [(name, one.get(name, 0), other.get(name, 0)) for name in one | other]
    return [(name, f'{a:,}', f'{b:,}') for name, a, b in rows if a != b]


def _counts(compiled: Any) -> dict[str, int]:
    cost = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    found = _OPERATION.findall(optimized_hlo(compiled))
    operations = collections.Counter(a or b for a, b in found)
    return {
        'flops': int(cost.get('flops', 0)),
        'temporary bytes': getattr(memory, 'temp_size_in_bytes', 0),
        **dict(sorted(operations.items())),
    }


def _different_programs(
    rows: Sequence[tuple[str, str, str]], lines: tuple[str, str]
) -> errors.ExpectationError:
    """Two functions are compiled to different programs."""
    counts = table(['', 'first', 'second'], rows) if rows else ''
    parts = [
        'the two functions are compiled to different programs.',
        counts or '  As many of each operation.',
        'The first line that differs:',
        *(
            f'  {name}  {" ".join(line.split())[:120]}'
            for name, line in zip(('first ', 'second'), lines, strict=True)
        ),
    ]
    return errors.ExpectationError('\n'.join(parts))
