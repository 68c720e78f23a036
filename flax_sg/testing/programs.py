"""Compares compiled programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from flax_sg import errors
from flax_sg.errors.texts import wrong_argument
from flax_sg.internals import jaxprs
from flax_sg.internals.types import PyTree
from flax_sg.programs.callbacks import callbacks_in

# Tables of lines in the source, each up to an empty line.
_TABLES = re.compile(
    r'^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*', re.MULTILINE
)
# A hash of the program before it was optimized, of its names too.
_FINGERPRINT = re.compile(r'\bfingerprint\w*="[^"]*",?')
_SETTINGS = re.compile(r'(?<=backend_config=)\{.*')
# Parameters stand anywhere in a computation.
_PARAMETER = re.compile(r'\s+(?:ROOT )?%[\w.-]+ = [^"]* parameter\((\d+)\)')


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
        g: the other function or program.
        *args: the arguments to compile for, as arrays or ``jax.ShapeDtypeStruct``.
        **kwargs: the keyword arguments to compile for.

    Raises:
        ExpectationError: an ``AssertionError``.

    Note:
        A program returns a flat list: functions that return ``(a, b)`` and
        ``{'a': a, 'b': b}`` have the same one.

        While XLA compiles for a GPU that is there, it tries kernels and takes the
        fastest, so equal functions may get different ones. Set
        ``XLA_FLAGS=--xla_gpu_autotune_level=0`` before JAX starts.
    """
    _check_functions('testing.assert_same_program(f, g, *args)', f, g)
    first, second = (_compiled(fn, *args, **kwargs) for fn in (f, g))
    if first.text != second.text:
        raise _differ('compile to different programs')
    if first.takes != second.takes:
        raise _differ(
            f'use different arguments: leaves {first.takes} and {second.takes}'
        )
    if None not in (first.calls, second.calls) and first.calls != second.calls:
        raise _differ('call back different functions, or print other texts')


def _differ(difference: str) -> errors.ExpectationError:
    return errors.ExpectationError(
        f'The two functions {difference}.\n'
        'To see more, compare what testing.optimized_hlo returns for each.'
    )


def optimized_hlo(fn: Callable[..., Any] | Any, *args: Any, **kwargs: Any) -> str:
    """Returns the optimized HLO of a program, without names.

    The parameters of a computation come first, by their index. Instructions and
    computations are numbered in the order of their first use. So programs that differ
    in names alone have equal texts. Functions of Python that a
    program calls back are not in its text; ``assert_same_program`` compares them, too.

    Args:
        fn: a function or a compiled program, as for ``assert_same_program``.
        *args: the arguments to compile for.
        **kwargs: the keyword arguments to compile for.
    """
    _check_functions('testing.optimized_hlo(fn, *args)', fn)
    return _compiled(fn, *args, **kwargs).text


class _Compiled(NamedTuple):
    """A compiled program: its text, the arguments it takes, and what it calls back.

    What it calls back is not known of a program that somebody else has compiled.
    """

    text: str
    takes: list[int]
    calls: list[Any] | None


def _check_functions(call: str, *functions: Any) -> None:
    """Raises if something is no function, and no compiled program."""
    for fn in functions:
        if not callable(fn):
            raise wrong_argument(fn, 'function, and no compiled program', call)


def _compiled(fn: Callable[..., PyTree], *args: Any, **kwargs: Any) -> _Compiled:
    # Functions of nnx.jit have stages that hold those of JAX.
    calls, compiled = None, getattr(fn, 'compiled', fn)
    if not isinstance(compiled, jax.stages.Compiled):
        jitted: Any = fn if hasattr(fn, 'trace') else jax.jit(fn)
        traced = jitted.trace(*args, **kwargs)
        traced = getattr(traced, 'traced', traced)
        calls, compiled = callbacks_in(traced.jaxpr), traced.lower().compile()
    return _Compiled(_text_of(compiled), jaxprs.kept_arguments(compiled), calls)


def _text_of(compiled: Any) -> str:
    text = _TABLES.sub('', jaxprs.program_text(compiled))
    # The head of a computation repeats the names of its parameters.
    text = re.sub(r'\b[\w.-]+: (?=[a-z]+\d*\[|\()', '', text)
    text = _SETTINGS.sub(_in_order, text)
    head, *lines = _FINGERPRINT.sub('', text).split('\n')
    text = '\n'.join([head, *_parameters_first(lines)])
    names: dict[str, str] = {}
    text = re.sub(
        r'%[\w.-]+', lambda m: names.setdefault(m.group(), f'%{len(names)}'), text
    )
    return re.sub(r'^HloModule [\w.-]+', 'HloModule', text)


def _in_order(match: re.Match[str]) -> str:
    """Sorts the settings of an instruction; the compiler of a GPU does not always."""
    try:
        settings, end = json.JSONDecoder().raw_decode(match[0])
    except json.JSONDecodeError:  # Not of XLA: those of Triton are in MLIR.
        return match[0]
    return json.dumps(settings, sort_keys=True) + match[0][end:]


def _parameters_first(lines: list[str]) -> list[str]:
    """Moves the parameters of each computation to its top, by their index.

    The other instructions stay in their order: it may be the order they run in.
    """
    out: list[str] = []
    top = 0  # Where the parameters of this computation begin in ``out``.
    parameters: dict[int, str] = {}
    for line in lines:
        if match := _PARAMETER.match(line):
            parameters[int(match[1])] = line
            continue
        if line == '}':
            out[top:top] = [parameters.pop(n) for n in sorted(parameters)]
        out.append(line)
        if line.endswith('{'):
            top = len(out)
    return out
