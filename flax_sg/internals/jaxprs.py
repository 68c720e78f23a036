"""Wraps private names of jaxprs and compiled programs."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AxisType

from flax_sg.internals import frames, versions
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

# The file in which JAX makes equations for ``cond`` and ``switch``.
_CONDITIONALS = inspect.unwrap(jax.lax.cond).__code__.co_filename

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


def callbacks_in(jaxpr: AnyJaxpr) -> list[Hashable]:
    """The functions of Python that a jaxpr calls, and what it prints.

    Two are equal if they are the same object, or compiled from the same code with the
    same values.
    """
    calls: list[Hashable] = []
    for eqn in opened(jaxpr).eqns:
        params = eqn.params
        if eqn.primitive.name.endswith(('callback', 'debug_print')):
            calls.append((eqn.primitive.name, _key_of(params.get('callback', params))))
        for inner in within(eqn):
            calls += callbacks_in(inner)
    return calls


def within(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """The jaxprs among the parameters of an equation."""
    values = jax.tree.leaves(list(eqn.params.values()))
    return [value for value in values if hasattr(opened(value), 'eqns')]


def _key_of(value: Any) -> Hashable:
    """What a value is compared by; of a function its code and the values in it."""
    value = getattr(value, 'callback_func', value)
    if isinstance(value, functools.partial):
        return _key_of(value.func), _key_of(value.args), _key_of(value.keywords)
    if isinstance(value, (tuple, list)):
        return tuple(map(_key_of, value))
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return _key_of(value.__code__), _key_of(cells), _key_of(value.__defaults__)
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_names, _key_of(value.co_consts)
    return value if isinstance(value, Hashable) else repr(value)


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


class Bodies(NamedTuple):
    """The jaxprs that an equation runs, but for custom derivative rules.

    Their inputs are those of the equation from ``first`` on. Their outputs are all of
    the equation's.

    Attributes:
        jaxprs: open or closed: the branches of a ``cond``, otherwise one or none.
        first: the index of the first input of the equation that goes into them.
        carry: the inputs that a loop carries from turn to turn. The first outputs of
            the body are their next values.
    """

    jaxprs: tuple[AnyJaxpr, ...]
    first: int = 0
    carry: range = range(0)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Bodies:
        """The jaxprs in an equation."""
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            return cls((closed_body_of(eqn),))
        if name == 'cond':
            return cls(tuple(params['branches']), 1)
        if name == 'scan':
            return cls((params['jaxpr'],), 0, carried_by(eqn))
        if name == 'while':
            first = params['cond_nconsts']
            carry = range(first + params['body_nconsts'], len(eqn.invars))
            return cls((params['body_jaxpr'],), first, carry)
        return cls(())


class Frame(NamedTuple):
    """A line of a function."""

    file: str
    function: str
    line: int


def frames_of(eqn: JaxprEqn, within: str = '') -> Iterator[Frame]:
    """The lines of the user's program that made an equation, the innermost first.

    Args:
        eqn: an equation of a jaxpr.
        within: the jitted function around the equation, from ``function_in``. JAX
            caches its trace, so frames outside the function belong to the first call.
            jax 0.7.2 records those frames, 0.10.2 does not.
    """
    traceback = eqn.source_info.traceback
    for code, last in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        if frames.is_of_user(code):
            # ``co_positions`` has one entry per instruction of two bytes.
            line = next(itertools.islice(code.co_positions(), last // 2, None))[0]
            yield Frame(code.co_filename, code.co_qualname, line or 0)
        if within == f'{code.co_name} at {code.co_filename}:{code.co_firstlineno}':
            return


def is_of_cond(eqn: JaxprEqn) -> bool:
    """Whether JAX itself made an equation, for ``lax.cond`` or ``lax.switch``.

    The frames that traced the branches do not count; jax 0.7.2 records these, too.
    """
    traceback = eqn.source_info.traceback
    codes = traceback.raw_frames()[0] if traceback else ()
    of_jax = itertools.takewhile(
        lambda code: not (frames.is_of_user(code) or 'to_jaxpr' in code.co_name), codes
    )
    return any(code.co_filename == _CONDITIONALS for code in of_jax)


def nearest(lines: Iterable[Frame]) -> str:
    """The innermost line in words; '' if there is none.

    A line of the user's own files is nearer than one of a package, such as optax.
    """
    known = [*lines]
    own = (frame for frame in known if not frames.is_installed(frame.file))
    return next(map(described, itertools.chain(own, known)), '')


def described(frame: Frame) -> str:
    """A line in words: ``'model.py:31 (Net.__call__)'``, or a cell of a notebook."""
    return f'{frames.file_name(frame.file)}:{frame.line} ({frame.function})'


def source_of(eqn: JaxprEqn, within: str = '') -> str:
    """The line of the user that made an equation, or ''; see ``frames_of``."""
    return nearest(frames_of(eqn, within))


def operation(eqn: JaxprEqn) -> str:
    """What an equation does, in the words of a user."""
    name, params = eqn.primitive.name, eqn.params
    if name in CUSTOM_CALLS:
        named = params.get('name') or body_of(eqn).debug_info.func_name
        return f'the rule of {named}'
    if name == 'convert_element_type':
        return f'a cast to {params["new_dtype"]}'
    return f'{params["name"]}' if name in JITTED else name


def function_in(eqn: JaxprEqn) -> str:
    """The name, file and line of the function that a jit equation runs."""
    return str(eqn.params['jaxpr'].jaxpr.debug_info.func_src_info)
