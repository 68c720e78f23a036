"""Private names of jaxprs and compiled programs."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core as jax_core
from jax._src import linear_util, source_info_util
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from flax_sg.internals import frames, optional


def bind(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs one equation of a jaxpr, as ``jax.core.eval_jaxpr`` does."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager:
        out = equation.primitive.bind(*functions, *operands, **params)
    return out if equation.primitive.multiple_results else [out]


def program_text(compiled: Any) -> str:
    """Optimized HLO with all constants, and without places in the source.

    ``as_text`` elides the values of constants: programs that differ in these alone
    have one text. The class of the options has moved within jaxlib.
    """
    [module] = compiled.runtime_executable().hlo_modules()
    home: Any = importlib.import_module(type(module).__module__)
    options = home.HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = False
    return module.to_string(options)


def function_of(eqn: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """One equation of a jaxpr as a function of some variables.

    JAX has a public constructor of a jaxpr, and deprecates its use without a DebugInfo,
    which is public in the latest releases only.
    """
    info = linear_util.DebugInfo('jaxpr', eqn.primitive.name, None, None)
    jaxpr = jax_core.Jaxpr((), inputs, eqn.outvars, [eqn], eqn.effects, debug_info=info)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))


def name_stack_of(eqn: Any) -> str:
    """The names of the scopes that an equation of a jaxpr was traced in."""
    return str(eqn.source_info.name_stack)


def carried_by(scan: Any) -> range:
    """The numbers of the inputs of a scan that one turn hands to the next.

    Before them are the constants, after them what each turn takes a slice of. Where
    there were two numbers, jax 0.11 has a tree of a private class.
    """
    if 'ft_in' in scan.params:  # pragma: no cover (from jax 0.11 on)
        consts, carry, _ = scan.params['ft_in'].unpack()
        return range(len(consts), len(consts) + len(carry))
    first = scan.params['num_consts']
    return range(first, first + scan.params['num_carry'])


def source_of(eqn: Any, within: str = '') -> str:
    """The line of the user's program that an equation comes from, or ''.

    Args:
        eqn: an equation of a jaxpr.
        within: what JAX notes of the jitted function that the equation is in, as
            ``function_in`` gives it. The trace of one is kept: the frames around it
            are those of the first call, which jax 0.7.2 notes and 0.10.2 does not.
    """
    traceback = eqn.source_info.traceback
    for code, place in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        file = code.co_filename
        if file.startswith(frames.DEMO) or (
            source_info_util.is_user_filename(file)
            and not file.startswith(frames.LIBRARIES)
        ):
            user_frame = source_info_util.raw_frame_to_frame(code, place)
            name = optional.file_name(file)
            return f'{name}:{user_frame.start_line} ({user_frame.function_name})'
        if within == f'{code.co_name} at {file}:{code.co_firstlineno}':
            return ''
    return ''


def function_in(eqn: Any) -> str:
    """The function, file and line that a jitted function was written in."""
    return str(eqn.params['jaxpr'].jaxpr.debug_info.func_src_info)
