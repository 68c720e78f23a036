"""Wraps private names of jaxprs and compiled programs."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AxisType

from flax_sg.internals import versions
from flax_sg.internals.types import AnyJaxpr, Array, Atom, Aval

# Primitives that run one jaxpr once, with the same inputs and outputs. Their names
# differ between versions of JAX.
JITTED = frozenset(('jit', 'pjit'))
CHECKPOINTS = frozenset(('remat', 'remat2', 'checkpoint'))
# A jaxpr as an equation. jax 0.12 has a new name.
CLOSED = frozenset(('closed_call', 'eval_jaxpr'))
CALLS = frozenset(
    (
        *JITTED,
        *CHECKPOINTS,
        *CLOSED,
        *('core_call', 'core_closed_call', 'shard_map'),
        'custom_vmap_call',
    )
)
# Primitives that also run one jaxpr, and have custom derivative rules.
CUSTOM_CALLS = frozenset(
    ('custom_jvp_call', 'custom_vjp_call', 'custom_vjp_call_jaxpr')
)
_BODY = ('jaxpr', 'call_jaxpr', 'call', 'fun_jaxpr')

# Begins the name of the scope of equations by which a block rewrites a value.
BLOCK = 'block:'


def opened(jaxpr: AnyJaxpr) -> Jaxpr:
    """The open jaxpr of a jaxpr that may be closed over constants."""
    open_jaxpr: Jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)  # pyright: ignore
    return open_jaxpr


def closed_body_of(eqn: JaxprEqn) -> AnyJaxpr:
    """What an equation of ``CALLS`` or ``CUSTOM_CALLS`` runs, with its constants."""
    return next(eqn.params[name] for name in _BODY if name in eqn.params)


def body_of(eqn: JaxprEqn) -> Jaxpr:
    """The open jaxpr of what an equation of ``CALLS`` or ``CUSTOM_CALLS`` runs."""
    return opened(closed_body_of(eqn))


def called_by(eqn: JaxprEqn) -> AnyJaxpr | None:
    """The jaxpr that a call, a checkpoint or a custom call runs; None for others.

    With the flag ``jax_remat3`` and its like, the jaxpr is in an object of JAX.
    """
    name, call = eqn.primitive.name, eqn.params.get('_prim')
    if name in JITTED | CHECKPOINTS | CUSTOM_CALLS | CLOSED:
        return closed_body_of(eqn)
    jaxpr = getattr(getattr(call, 'traced', call), 'jaxpr', None)
    is_body = jaxpr is not None and len(opened(jaxpr).invars) == len(eqn.invars)
    return jaxpr if is_body else None


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Whether an equation is a ``jax.jit`` that says no more than its body does.

    If a JAX names these parameters otherwise, no equation is.
    """
    names = 'in_shardings', 'out_shardings', 'donated_invars'
    if eqn.primitive.name not in JITTED or {*names} - eqn.params.keys():
        return False
    more = 'in_layouts', 'out_layouts', 'compiler_options_kvs'
    said = [x for name in (*names, *more) for x in eqn.params.get(name, ())]
    return not any(x and type(x).__name__ != 'UnspecifiedValue' for x in said)


def type_of(atom: Atom) -> Aval:
    """The type of a variable or a literal, which JAX declares without a shape."""
    return atom.aval


def is_ref(var: Atom) -> bool:
    """Whether a variable of a jaxpr is a mutable array."""
    return 'Ref' in type(getattr(var, 'aval', None)).__name__


def shape_of(aval: Aval) -> jax.ShapeDtypeStruct:
    """The argument with which a function is traced for a type."""
    options = {'weak_type': getattr(aval, 'weak_type', False)}
    mesh = getattr(getattr(aval, 'sharding', None), 'mesh', None)
    if mesh is not None and not mesh.empty:
        options['sharding'] = aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **options)


def placed(array: Array, aval: Aval) -> Array:
    """An array with the sharding of a type, on a mesh whose axes are part of types."""
    sharding = getattr(aval, 'sharding', None)
    axes = getattr(getattr(sharding, 'mesh', None), 'axis_types', None) or ()
    if AxisType.Explicit not in axes or jax.typeof(array).sharding == sharding:
        return array
    return jax.sharding.reshard(array, sharding)


def explicit_spec(aval: Aval) -> tuple[Any, ...]:
    """How a type is split, on a mesh whose axes are part of types; () if it is not."""
    spec = [*(getattr(getattr(aval, 'sharding', None), 'spec', None) or ())]
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)


def varying_axes(aval: Aval) -> frozenset[str]:
    """The axes of a ``jax.shard_map`` along which the values of a type differ.

    It knows none with ``check_vma=False``. jax 0.9 gave the attribute another name.
    """
    if hasattr(aval, 'vma'):
        return aval.vma
    return getattr(getattr(aval, 'manual_axis_type', None), 'varying', frozenset())


def has_effect(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than to make its outputs.

    In a ``jax.shard_map`` JAX notes the axes that a collective reads as effects.
    """
    return any(type(x).__name__ != 'NamedAxisEffect' for x in eqn.effects)


class Checkpoint(NamedTuple):
    """The jaxpr and the arguments of a ``jax.checkpoint``."""

    jaxpr: Jaxpr
    policy: Callable[..., Any] | None
    prevent_cse: bool


def checkpoint_of(eqn: JaxprEqn) -> Checkpoint | None:
    """The ``jax.checkpoint`` of an equation; None for other equations."""
    if eqn.primitive.name not in CHECKPOINTS:
        return None
    params = eqn.params
    return Checkpoint(params['jaxpr'], params['policy'], params['prevent_cse'])


def user_primitive_of(eqn: JaxprEqn) -> Any:
    """The primitive of a user (``jax.experimental.hijax``) in an equation, or None."""
    return eqn.params.get('_prim')


def bind(equation: JaxprEqn, operands: Sequence[Array]) -> Sequence[Array]:
    """Runs one equation of a jaxpr, as ``jax.core.eval_jaxpr`` does."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    name = name_stack_of(equation)
    scope = jax.named_scope(name) if name else contextlib.nullcontext()
    with equation.ctx.manager, scope:
        out = equation.primitive.bind(*functions, *operands, **params)
    return out if equation.primitive.multiple_results else [out]


def program_text(compiled: Any) -> str:
    """Returns optimized HLO with all constants and without source locations.

    ``as_text`` elides constants, so programs that differ only in constants would have
    the same text. jaxlib has moved the options class: it is in the module of HloModule.
    """
    [module] = compiled.runtime_executable().hlo_modules()
    home = importlib.import_module(type(module).__module__)
    options = versions.call('assert_same_program', home, 'HloPrintOptions')
    options.print_large_constants = True
    options.print_metadata = False
    return module.to_string(options)


def counts(compiled: Any) -> dict[str, float]:
    """Returns XLA's counts of a compiled program: its flops, the bytes it accesses.

    A program for a GPU that this machine lacks has no counts. Then XLA counts the
    optimized program as it does for a CPU.
    """
    analysis = compiled.cost_analysis()
    if analysis is None:
        [module] = compiled.runtime_executable().hlo_modules()
        [cpu, *_] = jax.devices('cpu')
        home, name = importlib.import_module('jaxlib._jax'), 'hlo_module_cost_analysis'
        analysis = versions.call('benchmarks', home, name, cpu.client, module)
    return analysis


def kept_arguments(compiled: Any) -> list[int]:
    """The indices of the arguments that a compiled program has.

    ``jax.jit`` drops arguments that are not used.
    """
    return sorted(compiled._executable._kept_var_idx)


def name_stack_of(eqn: JaxprEqn) -> str:
    """The name stack under which an equation of a jaxpr was traced."""
    return str(eqn.source_info.name_stack)


def carried_by(scan: JaxprEqn) -> range:
    """The positions of the carry among the inputs of a scan.

    Constants come before the carry, scanned inputs after it. jax 0.11 replaced the two
    counts in the parameters by a tree of a private class.
    """
    if 'ft_in' in scan.params:  # pragma: no cover (from jax 0.11 on)
        consts, carry, _ = scan.params['ft_in'].unpack()
        return range(len(consts), len(consts) + len(carry))
    first = scan.params['num_consts']
    return range(first, first + scan.params['num_carry'])


def within(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """The jaxprs among the parameters of an equation."""
    values = jax.tree.leaves(list(eqn.params.values()))
    return [value for value in values if hasattr(opened(value), 'eqns')]


def all_in(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation, and those in its bodies."""
    yield eqn
    for body in within(eqn):
        for inner in opened(body).eqns:
            yield from all_in(inner)
