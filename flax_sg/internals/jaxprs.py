"""Private names of jaxprs and compiled programs."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from flax_sg.internals import frames, versions

# Equations that run a jaxpr of the same inputs and outputs, once. Versions of JAX have
# other names for them.
JITTED = frozenset(('jit', 'pjit'))
CHECKPOINTS = frozenset(('remat', 'remat2', 'checkpoint'))
CALLS = frozenset(
    (
        *JITTED,
        *CHECKPOINTS,
        *('closed_call', 'core_call', 'core_closed_call', 'shard_map'),
        'custom_vmap_call',
    )
)
# They run one too, and have rules of their own for the derivative.
CUSTOM_CALLS = frozenset(
    ('custom_jvp_call', 'custom_vjp_call', 'custom_vjp_call_jaxpr')
)
_BODY = ('jaxpr', 'call_jaxpr', 'call', 'fun_jaxpr')


def opened(jaxpr: Any) -> Any:
    """A jaxpr, without the constants that may come with it."""
    return getattr(jaxpr, 'jaxpr', jaxpr)


def body_of(eqn: Any) -> Any:
    """The jaxpr that an equation of ``CALLS`` or ``CUSTOM_CALLS`` runs."""
    return opened(next(eqn.params[name] for name in _BODY if name in eqn.params))


class Checkpoint(NamedTuple):
    """What ``jax.checkpoint`` was told."""

    jaxpr: Any
    policy: Callable[..., Any] | None
    prevent_cse: bool


def checkpoint_of(eqn: Any) -> Checkpoint | None:
    """What an equation says of ``jax.checkpoint``, None if it is of another kind."""
    if eqn.primitive.name not in CHECKPOINTS:
        return None
    params = eqn.params
    return Checkpoint(params['jaxpr'], params['policy'], params['prevent_cse'])


def bind(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Runs one equation of a jaxpr, as ``jax.core.eval_jaxpr`` does."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager:
        out = equation.primitive.bind(*functions, *operands, **params)
    return out if equation.primitive.multiple_results else [out]


def function_of(eqn: Any, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """One equation of a jaxpr as a function of some variables."""

    def run(*values: Any) -> Sequence[Any]:
        known = dict(zip(inputs, values, strict=True))
        return bind(
            eqn, [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
        )

    return run


def program_text(compiled: Any) -> str:
    """Optimized HLO with all constants, and without places in the source.

    ``as_text`` elides the values of constants: programs that differ in these alone
    have one text. The class of the options has moved within jaxlib.
    """
    [module] = compiled.runtime_executable().hlo_modules()
    home = importlib.import_module(type(module).__module__)
    options = versions.call('assert_same_program', home, 'HloPrintOptions')
    options.print_large_constants = True
    options.print_metadata = False
    return module.to_string(options)


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
    for code, last in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        if frames.is_of_user(code):
            # For each instruction, of two bytes.
            line = next(itertools.islice(code.co_positions(), last // 2, None))[0]
            return f'{frames.file_name(code.co_filename)}:{line} ({code.co_qualname})'
        if within == f'{code.co_name} at {code.co_filename}:{code.co_firstlineno}':
            return ''
    return ''


def function_in(eqn: Any) -> str:
    """The function, file and line that a jitted function was written in."""
    return str(eqn.params['jaxpr'].jaxpr.debug_info.func_src_info)
