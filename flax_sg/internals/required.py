"""Checks at import every behaviour of Flax and JAX that gradients depend on.

If one behaved otherwise, a gradient would flow silently. Each has a program that tests
it. The programs compute nothing and leave Flax unchanged, so they take milliseconds,
start no device and disturb no other thread.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import jax
from flax.core import lift
from flax.core import scope as flax_scope
from flax.core.scope import Scope
from flax.linen import module as linen_module
from flax.linen import transforms as linen_transforms
from jax.custom_batching import custom_vmap

from flax_sg.internals import lifting, modules, tracing
from flax_sg.internals.types import Array, PyTree


class _Called(BaseException):
    """Ends a program when it calls the expected function."""


def _called(*_: Any, **__: Any) -> Any:
    raise _Called


def _ends(program: Callable[[], Any]) -> bool:
    """Whether a program calls ``_called``."""
    try:
        program()
    except _Called:
        return True
    return False


class _Probe(modules.Module):
    """A module that calls ``use`` in its ``setup``."""

    use: Any = None

    def setup(self) -> None:
        self.used = self.use(self)


def _probe(use: Any = None) -> Any:
    parent: Any = Scope({'params': {'w': 1.0}}, mutable=True)
    return _Probe(use, parent=parent)


def _asks(use: Callable[[Any], Any], method: str) -> bool:
    """Whether ``use``, called in ``setup``, calls a method of the module's scope."""
    probe = _probe(use)
    setattr(probe.scope, method, _called)  # On the object: Flax stays as it is.
    return _ends(lambda: modules.run_setup(probe))


def _sets_up() -> bool:
    """Whether reading an attribute that ``setup`` makes calls ``_try_setup``."""
    probe = _probe()
    object.__setattr__(probe, '_try_setup', _called)
    return _ends(lambda: probe.used)


def _tells_classes_apart() -> bool:
    cls = modules.told_apart(type, lambda _: 'token')('Probe', (_Probe,), {})
    return linen_transforms._fingerprint_recursive(cls, (), {}) == 'token'


def _has(owner: Any, names: str) -> bool:
    """Raises if ``owner`` lacks one of the attributes ``names``."""
    return bool(operator.attrgetter(*names.split())(owner)) or True


def _traces_anew() -> bool:
    traces: list[None] = []
    fn = jax.jit(lambda _: traces.append(None))
    x = jax.ShapeDtypeStruct((), 'float32')
    jax.eval_shape(fn, x)
    before = len(traces)
    with tracing.traced_anew():
        jax.eval_shape(fn, x)
    return len(traces) > before


def _tells_traces_apart() -> bool:
    checks: list[bool] = []
    outside = tracing.kept_trace()

    def traced(x: Array) -> Any:
        level, kept = tracing.current_trace(), tracing.kept_trace()

        def differentiated(y: Array) -> Any:
            for trace in (tracing.in_trace_of(x), tracing.in_innermost_trace([level])):
                with trace:
                    checks.append(tracing.current_trace() == level)
            checks.append(tracing.current_trace() != level)
            checks.append(tracing.kept_trace() == kept != outside)
            checks.append(not isinstance(tracing.stopped(y), type(y)))
            return y

        jax.jvp(differentiated, (x,), (x,))
        jax.linearize(differentiated, x)
        return x

    jax.eval_shape(traced, jax.ShapeDtypeStruct((), 'float32'))
    return all(checks)


def _packs() -> bool:
    """Whether lifted transforms call ``_partial_pack`` with these names."""
    packed: list[Any] = []

    def partial_pack(
        tree: PyTree, ins: PyTree, outs: PyTree, rngs: PyTree, name: Any
    ) -> Any:
        packed.append(name)
        raise _Called

    pack = lifting.with_names(lift.pack, _partial_pack=partial_pack)

    def probed(transform: Any) -> Any:
        return lifting.with_names(transform, pack=pack)

    scope = _probe().scope
    axes = {'variable_axes': {'params': 1}, 'split_rngs': {'params': False}}
    programs: dict[str, Callable[[], Any]] = {
        lifting.SCAN: lambda: probed(lift.scan)(id, **axes)(scope),
        lifting.JIT: lambda: probed(lift.jit)(id)(scope),
        lifting.MAP: lambda: probed(lift.map_variables)(id, 'params')(scope),
    }
    for program in programs.values():
        with contextlib.suppress(_Called):
            program()
    return packed == [*programs]


def _hands_on_flags() -> bool:
    """Whether each scope that Flax makes of a scope has its flags."""
    scope = Scope({'params': {'a': {}}}, mutable=True, flags={'flag': True})
    scope_fn, _, variables, rngs, _ = lift._partial_pack(scope, (True,), (), (True,))
    scopes = scope.push('a'), scope.rewound(), scope_fn(variables, rngs)
    return all(scope.has_flag('flag') for scope in scopes)


def _binds() -> bool:
    root = types.SimpleNamespace(temporary=_called)
    apply = lifting.with_names(flax_scope.apply, bind=lambda *_, **__: root)
    return _ends(lambda: apply(id)({}))


def _binds_modules() -> bool:
    core = types.SimpleNamespace(bind=_called)
    bind = lifting.with_names(inspect.unwrap(modules.Module.bind), core=core)
    return _ends(lambda: bind(_Probe(parent=None), {}))


# For each use of a module: a function doing it, and the scope method it has to call.
_READS: dict[str, tuple[Callable[[Any], Any], str]] = {
    'Module.param': (lambda m: m.param('w', None), 'param'),
    'Scope.param': (lambda m: m.scope.param('w', None), 'get_variable'),
    'Module.get_variable': (lambda m: m.get_variable('params', 'w'), 'get_variable'),
    'Variable.value': (lambda m: m.variable('params', 'w').value, 'get_variable'),
    'Module.variables': (lambda m: m.variables, 'variables'),
    'Module.put_variable': (lambda m: m.put_variable('params', 'w', 0), 'put_variable'),
    'Module.sow': (lambda m: m.sow('params', 'new', 0), 'put_variable'),
    'Module.make_rng': (lambda m: m.make_rng('params'), 'make_rng'),
}

# The attributes that must exist.
_ATTRIBUTES: dict[str, tuple[Callable[[], Any], str]] = {
    'a scope': (
        lambda: _probe().scope,
        '_check_valid _collection _populate_collections _validate_trace_level '
        '_variables debug_path flags rng_counters rngs trace_level._trace_ref',
    ),
    'a module': (
        _probe,
        '_call_wrapped_method.__code__ _id _register_submodules _state.autoname_cursor '
        '_state.children _state.export _state.in_setup _state.is_initialized '
        '_state.setup_called',
    ),
    'flax.core.lift': (lambda: lift, '_dedup_scopes _dup_scopes _partial_pack'),
    'flax.linen.module': (
        lambda: linen_module,
        'CompactNameScope SetupState.DONE _ModuleInternalState _context.module_stack '
        '_unspecified_parent uuid wrap_method_once',
    ),
    'flax.linen.transforms': (
        lambda: linen_transforms,
        '_fingerprint_recursive _is_module_class get_module_scopes set_module_scopes',
    ),
    'custom_jvp': (lambda: jax.custom_jvp(id), 'fun jvp'),
    'custom_vjp': (lambda: jax.custom_vjp(id), 'fun fwd bwd'),
    'custom_vmap': (lambda: custom_vmap(lambda x: x), 'fun vmap_rule'),
}

PROGRAMS: dict[str, Callable[[], bool]] = {
    **{
        f'{name} has to call {method}': functools.partial(_asks, use, method)
        for name, (use, method) in _READS.items()
    },
    'Module.__getattr__ has to call _try_setup': _sets_up,
    'a scope has to hand on its flags': _hands_on_flags,
    'flax.core.apply has to call bind': _binds,
    'Module.bind has to call flax.core.bind': _binds_modules,
    'nn.jit has to read __fn_or_cls__ of a class in a field': _tells_classes_apart,
    'jit has to trace anew in another jax.make_user_context': _traces_anew,
    'traces have to tell their outer traces': _tells_traces_apart,
    'lifted transforms have to call flax.core.lift._partial_pack': _packs,
    **{
        f'attributes of {name}': lambda owner=owner, names=names: _has(owner(), names)
        for name, (owner, names) in _ATTRIBUTES.items()
    },
}
