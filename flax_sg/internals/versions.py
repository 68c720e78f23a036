"""What the library needs of Flax and JAX beside their public names.

Checked when it is imported: a name that is gone, or that means something else, would
show itself in the middle of a program, or as a gradient that flows.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

import flax
import jax

from flax_sg import errors

# The oldest and newest that the tests have run on, by ``python3 dev.py versions``.
SUPPORTED = {'flax': ('0.12.0', '0.12.12'), 'jax': ('0.7.2', '0.12.0.1')}

# Where a name is, and for a function its parameters: hooks are called as what they
# stand for.
NAMES: dict[str, str] = {
    'flax.core.lift:_dedup_scopes': 'scopes',
    'flax.core.lift:_dup_scopes': 'orig_scopes scopes paths',
    'flax.core.lift:_partial_pack': (
        'scope_tree in_variable_filters out_variable_filters rng_filters name'
    ),
    'flax.core.scope:Scope._collection': 'self col',
    'flax.core.scope:Scope._populate_collections': 'self',
    'flax.core.scope:Scope.get_variable': 'self col name default',
    'flax.core.scope:Scope.invalidate': 'self',
    'flax.core.scope:Scope.make_rng': 'self name',
    'flax.core.scope:Scope.param': 'self name init_fn init_args unbox init_kwargs',
    'flax.core.scope:Scope.put_variable': 'self col name value',
    'flax.core.scope:Scope.variables': 'self',
    'flax.core.scope:in_filter': 'filter_like col',
    'flax.core.meta:unbox': 'tree',
    'flax.core.tracers:current_trace': '',
    'flax.linen.module:CompactNameScope': '',
    'flax.linen.module:Module.__getattr__': 'self name',
    'flax.linen.module:Module._call_wrapped_method': 'self fun args kwargs',
    'flax.linen.module:Module._register_submodules': 'self name val',
    'flax.linen.module:Module._try_setup': 'self shallow',
    'flax.linen.module:Module.has_variable': 'self col name',
    'flax.linen.module:Module.sow': 'self col name value reduce_fn init_fn',
    'flax.linen.module:SetupState.DONE': '',
    'flax.linen.module:Variable': '',
    'flax.linen.module:_ModuleInternalState.export': 'self',
    'flax.linen.module:_ModuleInternalState.reset': 'self',
    'flax.linen.module:_context.module_stack': '',
    'flax.linen.module:_global_interceptor_stack': '',
    'flax.linen.module:_unspecified_parent': '',
    'flax.linen.module:run_interceptors': 'orig_method module args kwargs',
    'flax.linen.module:uuid': '',
    'flax.linen.module:wrap_method_once': 'fun',
    'flax.linen.transforms:_is_module_class': 'target',
    'flax.linen.transforms:get_module_scopes': 'module args kwargs',
    'flax.linen.transforms:set_module_scopes': 'module args kwargs scopes',
    'jax:make_user_context': 'default_value',
    'jax._src.config:trace_context': '',
    'jax._src.core:Jaxpr': '',
    'jax._src.core:Tracer._trace': '',
    'jax._src.core:jaxpr_as_fun': '',
    'jax._src.core:set_current_trace': '',
    'jax._src.core:trace_ctx.trace': '',
    'jax._src.core:trace_state_clean': '',
    'jax._src.interpreters.ad:JVPTracer': '',
    'jax._src.interpreters.ad:LinearizeTracer': '',
    'jax._src.interpreters.batching:BatchTrace': '',
    'jax._src.interpreters.partial_eval:DynamicJaxprTrace': '',
    'jax._src.lax.lax:_convert_element_type': (
        'operand new_dtype weak_type sharding warn_on_complex_to_real_cast'
    ),
    'jax._src.linear_util:DebugInfo': '',
    'jax._src.source_info_util:is_user_filename': '',
    'jax._src.source_info_util:raw_frame_to_frame': 'code lasti',
    'jax.custom_batching:custom_vmap.__call__': 'self args kwargs',
    'jax:custom_jvp.__call__': 'self args kwargs',
    'jax:custom_jvp.jvp': '',
    'jax:custom_vjp.__call__': 'self args kwargs',
}

# What functions name in their code: attributes that they give to an object, globals
# that stand for something else in a copy, variables that are read off their frames.
# Of names with | between them one is enough: versions differ.
WITHIN: dict[str, str] = {
    'flax.core.axes_scan:scan': 'lax',
    'flax.core.lift:pack': 'fn in_variable_filters out_variable_filters',
    'flax.core.lift:scan': 'axes_scan variable_in_axes variable_out_axes',
    'flax.core.lift:vmap': 'variable_in_axes variable_out_axes',
    'flax.core.scope:apply': 'root temporary wrapper',
    'flax.core.scope:Scope.__init__': (
        '_invalid _variables debug_path flags mutable path rng_counters rngs '
        'trace_level'
    ),
    'flax.linen.module:Module._call_wrapped_method': 'self fun',
    'flax.linen.module:Module._register_submodules': (
        '_id _caches|_submodule_adoption_cache'
    ),
    'flax.linen.module:Module._try_setup': '_state',
    'flax.linen.module:_ModuleInternalState.__init__': (
        'autoname_cursor children in_setup is_initialized setup_called'
    ),
    'flax.linen.module:wrap_method_once': 'method_handler_wrapped',
    'flax.linen.transforms:scan': 'lift',
    'jax._src.core:OpaqueTraceState.__init__': '_trace_ref',
    'jax._src.interpreters.ad:JVPTrace.__init__': 'parent_trace',
    'jax._src.interpreters.ad:JVPTracer.__init__': 'primal',
    'jax._src.interpreters.ad:LinearizeTrace.__init__': 'parent_trace',
    'jax._src.interpreters.ad:LinearizeTracer.__init__': 'primal',
    'jax._src.interpreters.batching:BatchTrace.__init__': 'parent_trace',
    # What an equation of a scan says of its operands, which jaxprs are read by.
    'jax._src.lax.control_flow.loops:_scan_impl': 'num_consts|ft_in num_carry|ft_in',
    'jax._src.interpreters.partial_eval:DynamicJaxprTrace.__init__': 'parent_trace',
    'jax.custom_batching:custom_vmap.__init__': 'fun vmap_rule',
    'jax:custom_jvp.__init__': 'fun',
    'jax:custom_vjp.__init__': 'fun fwd bwd',
}


def check() -> None:
    """Raises if what the library rests on is gone, or is something else."""
    faults = list(dict.fromkeys(_faults()))
    if faults:
        raise unsupported(faults)


def _faults() -> Iterator[str]:
    for place in {**NAMES, **WITHIN}:
        try:
            found = _found(place)
        except (ImportError, AttributeError):
            yield place.replace(':', '.')
            continue
        expected = NAMES.get(place, '').split()
        if expected and not isinstance(found, types.FunctionType):
            yield place.replace(':', '.')
        elif expected:
            takes = list(inspect.signature(found).parameters)
            if takes != expected:
                yield (
                    f'{place.replace(":", ".")}({", ".join(expected)}), which takes '
                    f'({", ".join(takes)})'
                )
        code = getattr(found, '__code__', None)
        within = set[str]() if code is None else _names_in(code)
        for name in WITHIN.get(place, '').split():
            if within.isdisjoint(name.split('|')):
                yield f'{name} in {place.replace(":", ".")}'


def _found(place: str) -> Any:
    module, _, names = place.partition(':')
    found: Any = importlib.import_module(module)
    for name in names.split('.'):
        found = getattr(found, name)
    return found


def _names_in(code: types.CodeType) -> set[str]:
    names = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def unsupported(faults: Sequence[str]) -> errors.UnsupportedVersionError:
    """Flax or JAX lack a name that the library rests on, or it means something else."""
    found = f'flax {flax.__version__} and jax {jax.__version__}'
    ranges = [f'{name} {old} to {new}' for name, (old, new) in SUPPORTED.items()]
    pins = [f"'{name}>={old},<={new}'" for name, (old, new) in SUPPORTED.items()]
    lines = [
        'flax_sg needs what this installation does not have:',
        *(f'  {fault}' for fault in faults),
        f'Found {found}; supported are {" with ".join(ranges)}.',
        f'Fix: pip install {" ".join(pins)}',
    ]
    return errors.UnsupportedVersionError('\n'.join(lines))


def reloaded(name: str) -> errors.UnsupportedVersionError:
    """A module was loaded anew that holds what cannot be made a second time."""
    return errors.UnsupportedVersionError(
        f'{name} cannot be reloaded: open blocks, and what JAX keeps of compiled '
        'programs, rest on what it holds.\n'
        'Start Python anew; flax_sg and flax_sg.linen can be reloaded.'
    )
