"""The only file that touches private names of Flax and JAX.

Each name stands behind one function or constant that says why it is needed. Tried with
flax 0.12.0 and jax 0.7.2 up to flax 0.12.12 and jax 0.12.0.1.
"""

# ruff: noqa: E402
# What this file is for, and only this file.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax_sg.internals import versions
from flax_sg.internals.versions import reloaded

if 'Module' in globals():  # It was loaded before.
    raise reloaded(__name__)
versions.check()  # Before the names are asked for: it says which versions have them.

import flax
import jax
from flax.core import axes_scan, lift, meta, tracers
from flax.core import scope as flax_scope
from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope, in_filter
from flax.linen import module as linen_module
from flax.linen import summary
from flax.linen import transforms as linen_transforms
from jax import custom_batching
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src import linear_util, source_info_util
from jax._src.interpreters import ad as jax_ad
from jax._src.interpreters import batching as jax_batching
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as jax_lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from flax_sg.internals import optional

Module = linen_module.Module
Variable = linen_module.Variable
Tracer = jax_core.Tracer

# What the hooks replace, by (owner, name). All of them are read by Flax at call time,
# so replacing the attribute reaches code that was written and lifted before.
_HOOKED: dict[str, tuple[Any, str]] = {
    'get_variable': (Scope, 'get_variable'),
    'variables': (Scope, 'variables'),
    'param': (Scope, 'param'),
    'put_variable': (Scope, 'put_variable'),
    'make_rng': (Scope, 'make_rng'),
    'invalidate': (Scope, 'invalidate'),
    'partial_pack': (lift, '_partial_pack'),
    'has_variable': (Module, 'has_variable'),
    'sow': (Module, 'sow'),
    'try_setup': (Module, '_try_setup'),
    'getattribute': (Module, '__getattribute__'),
    'getattr': (Module, '__getattr__'),
    'custom_jvp': (jax.custom_jvp, '__call__'),
    'custom_vjp': (jax.custom_vjp, '__call__'),
    'custom_vmap': (custom_batching.custom_vmap, '__call__'),
}

# What JAX keeps of a function with rules of its own, and calls when it needs it.
RULES: dict[str, tuple[str, ...]] = {
    'custom_jvp': ('jvp',),
    'custom_vjp': ('fwd', 'bwd'),
    'custom_vmap': ('vmap_rule',),
}

_lock = threading.RLock()  # The garbage collector may close a block at any time.
_users: set[object] = set()
_applies: list[weakref.ref[Scope]] = []  # Roots of those that run and had users.
_make: Mapping[str, Callable[[Any], Any]] = {}
_made: dict[str, tuple[Any, Any]] = {}  # The last hooks, and what they are made of.
_before: dict[str, Any] = {}
_INHERITED = object()


def acquire_hooks(
    user: object, make: Mapping[str, Callable[[Any], Any]] | None = None
) -> None:
    """Installs hooks on Flax's reads for the first of their users.

    Args:
        user: who needs them, an object that tells it from others.
        make: for each name in ``_HOOKED`` a function from the original to its hook; by
            default those of the last time.
    """
    global _make
    with _lock:
        _make = _make if make is None else make
        _users.add(user)
        if len(_before) == len(_HOOKED):
            return
        root = _running_apply()
        for key, (owner, name) in _HOOKED.items():
            if key not in _before:
                _before[key] = vars(owner).get(name, _INHERITED)
                of = _make[key], getattr(owner, name)
                if key not in _made or _made[key][0] != of:
                    _made[key] = of, of[0](of[1])
                setattr(owner, name, _made[key][1])
        # To change Module is to change all its subclasses, which may be hundreds: once
        # will do for all blocks in an ``apply``.
        if root is not None:
            _applies.append(weakref.ref(root))


def users_of_hooks() -> list[object]:
    """The users of the hooks, in whatever threads they are."""
    with _lock:
        return list(_users)


def release_hooks(user: object) -> None:
    """Leaves Flax as it was when the last user is gone, and with it its ``apply``.

    An exception may have come while hooks were installed, or removed: whatever has been
    done by then, this completes it.
    """
    with _lock:
        _users.discard(user)
        _applies[:] = [ref for ref in _applies if _goes_on(ref())]
        for key in () if _users or _applies else tuple(_before):
            if key not in _before:  # The garbage collector has come in between.
                continue
            owner, name = _HOOKED[key]
            before = _before[key]
            if before is not _INHERITED:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)
            _before.pop(key, None)


_APPLY = next(
    code
    for code in flax_scope.apply.__code__.co_consts
    if getattr(code, 'co_name', '') == 'wrapper'
)


def _goes_on(root: Scope | None) -> bool:
    """Whether the ``apply`` with this root is running; Flax says so to the root."""
    return root is not None and not root._invalid


def _running_apply() -> Scope | None:
    """The root of the outermost ``apply`` or ``init`` that is running, if any."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        found = frame if frame.f_code is _APPLY else found
        frame = frame.f_back
    return None if found is None else found.f_locals.get('root')


# Part of every trace cache key of JAX (jit, scan, cond, checkpoint, ...) and local to
# the thread: what makes a cached trace belong to the blocks it was traced under.
user_context = jax.make_user_context(0)

# Whether normalization layers use running averages, whatever they were told; likewise.
running_averages = jax.make_user_context(False)


def current_module() -> Module | None:
    """The bound module whose method is running; the owner of a block opened now.

    In a method under ``nn.compact_name_scope`` Flax runs a helper module, but ``self``
    is the module that the method was written for, and that one counts.
    """
    module = linen_module._context.module_stack[-1]
    while isinstance(module, linen_module.CompactNameScope):
        module = module.module_fn()
    return module if module is not None and module.scope is not None else None


def current_trace() -> Any:
    """The trace that JAX records into, comparable with ``==``."""
    return tracers.current_trace()


def in_trace_of(leaf: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes the trace of ``leaf`` the current one.

    What is computed from an outer tracer inside an inner raw ``lax.scan`` or
    ``jax.jit`` belongs to the inner trace. A rewritten value is kept for later readers,
    so it has to live as long as the value it was made from.
    """
    if isinstance(leaf, Tracer):
        return jax_core.set_current_trace(leaf._trace)
    return contextlib.nullcontext()


def stopped(leaf: Any) -> Any:
    """``jax.lax.stop_gradient(leaf)``, in a fraction of the time.

    JAX traces the derivative of each stop to find that there is none, which takes as
    long as the rest of a small layer. Its rule stops the primal in the trace around.
    """
    trace = leaf._trace
    while isinstance(leaf, (jax_ad.JVPTracer, jax_ad.LinearizeTracer)):
        leaf, trace = leaf.primal, leaf._trace.parent_trace
    with jax_core.set_current_trace(trace):
        return jax.lax.stop_gradient(leaf)


def in_innermost_trace(
    levels: Sequence[Any], *leaves: Any, examples: bool = True
) -> contextlib.AbstractContextManager[Any]:
    """Makes the innermost trace of some ``current_trace()`` the current one.

    What belongs to one of two extents, of which either may have begun first, lives as
    long as the one that began last. Traces know only the one around them.

    Args:
        levels: results of ``current_trace``, of code around the running one.
        *leaves: what is to be used in there; their traces count too.
        examples: whether the trace of one example under ``vmap`` counts although
            nothing in ``leaves`` is mapped over.
    """
    used = [leaf._trace for leaf in leaves if isinstance(leaf, Tracer)]
    wanted = [level._trace_ref() for level in levels if level is not None]
    trace: Any = jax_core.trace_ctx.trace
    found = False
    while trace is not None:
        found = found or any(trace is other for other in wanted)
        counts = examples or not isinstance(trace, jax_batching.BatchTrace)
        if any(trace is other for other in used) or (found and counts):
            return jax_core.set_current_trace(trace)
        trace = getattr(trace, 'parent_trace', None)
    return in_trace_of(leaves[0]) if leaves else contextlib.nullcontext()


def in_trace_of_scope(scope: Scope) -> contextlib.AbstractContextManager[Any]:
    """Makes the trace that ``scope`` was created in the current one."""
    trace_level: Any = scope.trace_level
    trace = trace_level._trace_ref()
    if trace is None:
        return contextlib.nullcontext()
    return jax_core.set_current_trace(trace)


def kept_trace(scope: Scope | None = None) -> weakref.ref[Any] | None:
    """The innermost trace here that JAX may keep and run again on other arguments.

    Derivatives and batching in progress are none: their traces are made each time.

    Args:
        scope: to ask for the trace in which it was created, None if that is over.
    """
    level: Any = None if scope is None else scope.trace_level
    trace: Any = jax_core.trace_ctx.trace if level is None else level._trace_ref()
    if trace is None:
        return None
    while not isinstance(trace, partial_eval.DynamicJaxprTrace):
        outer = getattr(trace, 'parent_trace', None)
        if outer is None:
            break
        trace = outer
    return weakref.ref(trace)


def kept_traces() -> list[weakref.ref[Any]]:
    """The traces around the running code that JAX may keep, from the inside out.

    The last one is that in which nothing is traced.
    """
    found: list[weakref.ref[Any]] = []
    trace: Any = jax_core.trace_ctx.trace
    while trace is not None:
        outer = getattr(trace, 'parent_trace', None)
        if outer is None or isinstance(trace, partial_eval.DynamicJaxprTrace):
            found.append(weakref.ref(trace))
        trace = outer
    return found


def running_method() -> tuple[Module, str] | None:
    """The module whose method is running, and the name of the method.

    Flax keeps a stack of modules, without the methods.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Module._call_wrapped_method.__code__:
            return frame.f_locals['self'], frame.f_locals['fun'].__name__
        frame = frame.f_back
    return None


def stored(scope: Scope) -> dict[str, Any]:
    """The collections that ``scope`` really holds, not copies."""
    scope._populate_collections()
    return scope._variables


def variables_of(scope: Scope) -> dict[str, Any]:
    """The dict that ``scope`` keeps its collections in; ``rewound`` copies share it."""
    return scope._variables


def minimal_scopes(scope_tree: Any) -> tuple[Scope, ...]:
    """The scopes of a tree without those inside another one, in the order of pack."""
    return lift._dedup_scopes(jax.tree_util.tree_leaves(scope_tree))[0]


def axes_of_caller() -> Callable[[str], tuple[int | None, int | None]]:
    """The axes along which the lifted transform calling ``pack`` maps a collection.

    ``nn.vmap`` and ``nn.scan`` may take a collection in along one axis and give it out
    along another. Only the inner function of the lift knows, two frames up.
    """
    names = sys._getframe(2).f_locals
    fn = names.get('fn')
    cells = getattr(fn, '__closure__', None) or ()
    free = fn.__code__.co_freevars if fn is not None and cells else ()
    closure: dict[str, Any] = {
        name: cell.cell_contents
        for name, cell in zip(free, cells, strict=True)
        if name in ('variable_in_axes', 'variable_out_axes')
    }

    def axis(collection: str, side: str) -> Any:
        axes = closure.get(f'variable_{side}_axes', ())
        filters = names[f'{side}_variable_filters']
        unmapped = len(filters) - len(axes)
        number = next(n for n, f in enumerate(filters) if in_filter(f, collection))
        return axes[number - unmapped] if number >= unmapped else None

    return lambda collection: (axis(collection, 'in'), axis(collection, 'out'))


def scan_with(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``flax.linen.scan`` that runs its loop by another function than ``jax.lax.scan``.

    Flax takes no function in its place. Its own code with other names for the loop is
    Flax's in all that is done around it, and nothing of Flax is replaced for others.
    """
    in_axes = _with_names(axes_scan.scan, lax=types.SimpleNamespace(scan=loop))
    names = types.SimpleNamespace(scan=in_axes, broadcast=axes_scan.broadcast)
    in_scopes = _with_names(lift.scan, axes_scan=names)
    return _with_names(
        linen_transforms.scan, lift=types.SimpleNamespace(scan=in_scopes)
    )


def _with_names(fn: Any, **names: Any) -> Any:
    """A function with other objects for some names of its module."""
    copy = types.FunctionType(
        fn.__code__,
        {**fn.__globals__, **names},
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def is_set_up(module: Module) -> bool:
    """Whether ``setup`` has run to its end."""
    state = module._state
    return state.setup_called == linen_module.SetupState.DONE and not state.in_setup


def starts_setup(module: Module) -> bool:
    """Whether the next call of ``_try_setup`` runs the user's ``setup``."""
    state = module._state
    return (
        module.scope is not None
        and not state.in_setup
        and state.setup_called != linen_module.SetupState.DONE
    )


def run_setup(module: Module) -> None:
    """Runs ``setup`` of a bound module, if it has not run yet."""
    module._try_setup()


def as_method(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function of a module what Flax gives a method: setup, naming, state."""
    return linen_module.wrap_method_once(fn)


def is_module_class(target: Any) -> bool:
    """Whether ``target`` is a Module class or a ``functools.partial`` of one."""
    return linen_transforms._is_module_class(target)


def unbox(value: Any) -> Any:
    """The value without its ``AxisMetadata`` boxes, as ``Module.param`` returns it."""
    return meta.unbox(value)


def scopes_of(module: Module) -> list[Scope]:
    """The scopes of a module and of the modules in its fields, in Flax's order."""
    return linen_transforms.get_module_scopes(module)[0]


def copied(tree: Any) -> Any:
    """A copy of nested dicts, their leaves as they are."""
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    return tree


def copied_mutable(scope: Scope) -> dict[str, Any]:
    """Copies of the mutable collections of a scope."""
    return {
        col: copied(tree)
        for col, tree in stored(scope).items()
        if scope.is_mutable_collection(col)
    }


def scratch_scope(
    scope: Scope,
    flags: Mapping[str, Any],
    rngs: Mapping[str, Any] | None = None,
    counters: Mapping[Any, Any] | None = None,
    mutable: Mapping[str, Any] | None = None,
) -> Scope:
    """A scope of its own that reads as ``scope`` does and into which nothing is lost.

    Args:
        scope: the scope to copy.
        flags: flags to add.
        rngs: the random streams; None for those that it has now.
        counters: how often they were used; None for never.
        mutable: the mutable collections; None for what they are now.
    """
    kept = {
        c: t for c, t in stored(scope).items() if not scope.is_mutable_collection(c)
    }
    written = copied_mutable(scope) if mutable is None else copied(mutable)
    out = Scope(
        {**kept, **written},
        rngs=dict(scope.rngs if rngs is None else rngs),
        name=scope.name,
        mutable=scope.mutable,
        path=scope.path,
        debug_path=scope.debug_path,
        flags=FrozenDict({**scope.flags, **flags}),
    )
    if counters is not None:
        out.rng_counters = copied(counters)
    return out


def copy_scopes(
    scopes: list[Scope], copy: Callable[[Scope], Scope]
) -> tuple[dict[Scope, Scope], list[Scope]]:
    """Copies the outermost of some scopes, and with them all.

    Returns:
        The outermost scopes with their copies, and for each in ``scopes`` the scope at
        its place under one of the copies.
    """
    tops, paths = lift._dedup_scopes(scopes)
    copies = {top: copy(top) for top in tops}
    return copies, lift._dup_scopes(tops, list(copies.values()), paths)


def cached_properties(cls: type) -> frozenset[str]:
    """The names of the ``functools.cached_property`` of a Module class.

    Flax wraps descriptors, to run ``setup`` before they are read.
    """
    found: set[str] = set()
    for base in cls.__mro__:
        for name, attribute in vars(base).items():
            wrapped = getattr(attribute, '__dict__', {}).get('wrapped', attribute)
            if isinstance(wrapped, functools.cached_property):
                found.add(name)
    return frozenset(found)


def clone_on(module: Module, scopes: list[Scope]) -> Module:
    """A clone of a bound module on other scopes, before its ``setup``."""
    clone, _, _ = linen_transforms.set_module_scopes(module, (), {}, scopes)
    state = module._state.export()
    state.in_setup = False
    object.__setattr__(clone, '_state', state)
    if isinstance(module.parent, Module):
        object.__setattr__(clone, 'parent', module.parent)
    for field in dataclasses.fields(module):
        if field.init and field.name != 'parent':
            value = _in_order_of(
                getattr(module, field.name), getattr(clone, field.name)
            )
            object.__setattr__(clone, field.name, value)
    return clone


def _in_order_of(value: Any, copy: Any) -> Any:
    """A copy of a field, its dicts in the order of the original: Flax sorts them."""
    if isinstance(value, Mapping) and isinstance(copy, Mapping):
        items = {key: _in_order_of(item, copy[key]) for key, item in value.items()}
        make: Any = type(copy)
        return make(items)
    if isinstance(value, (list, tuple)) and type(copy) is type(value) in (list, tuple):
        return type(value)(map(_in_order_of, value, copy))
    return copy


def intercepts() -> bool:
    """Whether an ``nn.intercept_methods`` is open in this thread."""
    return bool(linen_module._global_interceptor_stack)


def is_handled(fn: Any) -> bool:
    """Whether a function is a method that Flax runs, and shows to interceptors."""
    return hasattr(fn, 'method_handler_wrapped')


def run_interceptors(fn: Any, module: Module, args: Any, kwargs: Any) -> Any:
    """Calls a method by way of the interceptors that are open, and of nothing else.

    What Flax does besides for a method of its own (names, state, captured results) has
    been done for the module that a wrapper forwards to.
    """
    return linen_module.run_interceptors(fn, module, *args, **kwargs)


def children_of(module: Module) -> dict[str, Any]:
    """The submodules of a module by name; names of variables are in there too."""
    return module._state.children


def is_tracing() -> bool:
    """Whether JAX is tracing something here: what is made now may hold tracers."""
    return not jax_core.trace_state_clean()


def as_weak(x: Any) -> Any:
    """The same values with a weak type, as that of Python's numbers.

    JAX makes weak types of Python's numbers only; what is computed to stand for one
    has to promote as it does.
    """
    return jax_lax._convert_element_type(x, x.dtype, weak_type=True)


def start(module: Module) -> None:
    """Gives a module its identity and state, as ``__post_init__`` does first."""
    object.__setattr__(module, '_id', linen_module.uuid())
    object.__setattr__(module, '_state', linen_module._ModuleInternalState())


def stand_in(wrapper: Module, module: Module) -> None:
    """Makes a wrapper take the place of a bound module, its children and all."""
    object.__setattr__(wrapper, 'parent', module.parent)
    object.__setattr__(wrapper, 'name', module.name)
    wrapper._state.children = module._state.children
    wrapper._state.is_initialized = True


def bind_at(module: Module, scope: Scope, name: str | None) -> Module:
    """Binds a module to a scope that somebody else has made for it.

    Flax may have queued the module for attachment, and then attaches it once more: with
    a scope as its parent that ends at the same place.
    """
    if module.parent is None:  # From outside: Flax clones these, once for each tree.
        outside, module = module, module.clone(name=None)
        adopted(scope)[outside._id] = module
    object.__setattr__(module, 'name', name)
    object.__setattr__(module, 'parent', scope)
    module.__post_init__()
    return module


def adopted(scope: Scope) -> weakref.WeakValueDictionary[Any, Module]:
    """The modules from outside that were attached somewhere in the tree of a scope."""
    cache: weakref.WeakValueDictionary[Any, Module] = weakref.WeakValueDictionary()
    root: Any = scope.root
    if hasattr(linen_module, '_caches'):
        return linen_module._caches.setdefault(root, cache)
    # From flax 0.12.9 on.
    return vars(root).setdefault('_submodule_adoption_cache', cache)  # pragma: no cover


def id_of(module: Module) -> Any:
    """The identity of a module, by which it is found among those ``adopted``."""
    return module._id


def place_of(module: Module) -> Any:
    """The module, the scope or None that a module being made will belong to."""
    if module.parent is linen_module._unspecified_parent:
        return linen_module._context.module_stack[-1]
    return module.parent


def names_at_once(place: Any) -> bool:
    """Whether a module made there is named now, and not when ``setup`` assigns it."""
    return isinstance(place, Module) and not place._state.in_setup


def autoname(parent: Any, cls: type) -> str:
    """The name that Flax gives to the next module of a class without a name."""
    cursor = parent._state.autoname_cursor.get(cls.__name__, 0)
    parent._state.autoname_cursor[cls.__name__] = cursor + 1
    return f'{cls.__name__}_{cursor}'


def is_method_of(fn: Any, cls: type) -> bool:
    """Whether ``fn`` is what Flax has wrapped as a method of a Module class."""
    for base in cls.__mro__:
        method = vars(base).get(getattr(fn, '__name__', ''))
        if method is not None and fn in (method, getattr(method, '__wrapped__', None)):
            return True
    return False


def own_scopes(module: Module) -> tuple[Scope, ...]:
    """The outermost scopes of a bound module and the modules in its fields."""
    modules = [module, *(m for m in field_leaves(module) if isinstance(m, Module))]
    return minimal_scopes([m.scope for m in modules if m.scope is not None])


def field_leaves(module: Module) -> list[Any]:
    """What is in the fields of a module, and in those of the modules there."""
    found: list[Any] = []
    waiting = [module]
    while waiting:
        part = waiting.pop()
        fields = [f.name for f in dataclasses.fields(part) if f.init]
        values = [getattr(part, name) for name in fields if name != 'parent']
        for leaf in jax.tree_util.tree_leaves(values):
            if not any(leaf is other for other in found):
                found.append(leaf)
                waiting += [leaf] if isinstance(leaf, Module) else []
    return found


def on_variables(module: Module, variables: Mapping[str, Any]) -> Any:
    """A clone of a bound module whose own scope holds other variables.

    It draws from the same random streams, and what it writes goes nowhere.
    """

    def copy(scope: Scope) -> Scope:
        if scope != module.scope:  # Of a module that lies elsewhere.
            return scope.rewound()  # The clone takes names there once more.
        out = scratch_scope(scope, {})
        out.rng_counters = scope.rng_counters
        out._variables.update(copied(variables))
        return out

    _, scopes = copy_scopes(scopes_of(module), copy)
    clone = clone_on(module, scopes)
    clone._state.reset()  # The module may be running right now.
    return clone


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


# Part of the keys of trace caches: a number of its own for each summary of a module, so
# that it finds no trace without the marks by which it tells modules apart.
summary_context = jax.make_user_context(0)


_summaries = itertools.count(1)


def traced_anew() -> contextlib.AbstractContextManager[Any]:
    """Makes JAX trace what is called in the body, whatever has been traced before."""
    return summary_context(next(_summaries))


def module_rows(
    module: Module, show_repeated: bool, *args: Any, **kwargs: Any
) -> summary.Table:
    """The rows of ``nn.tabulate``, which returns text only, without flops.

    Flax notes the calls of modules while it traces them: not those in a function of
    ``nn.jit`` that has been traced before.
    """
    make = summary._get_module_table(module, None, show_repeated, False, False)
    with traced_anew():
        return make(*args, **kwargs)


def written_as_text(cls: type[str]) -> None:
    """Lets the YAML in the cells of ``nn.tabulate`` have keys of a class of str."""
    represent = summary.yaml.SafeDumper.yaml_representers[str]
    summary.yaml.SafeDumper.add_representer(cls, represent)


def render_rows(
    table: summary.Table,
    console_kwargs: Mapping[str, Any] | None,
    table_kwargs: Mapping[str, Any],
    column_kwargs: Mapping[str, Any],
    columns: list[str],
) -> str:
    """What ``nn.tabulate`` makes of rows: columns are attributes of a row, by name."""
    return summary._render_table(
        table, console_kwargs, table_kwargs, column_kwargs, columns
    )


def render_with(renderable: Any, console_kwargs: Mapping[str, Any] | None) -> str:
    """Text of something that rich prints, with the settings of ``nn.tabulate``."""
    settings = {'force_terminal': True, 'force_jupyter': False}
    return summary._get_rich_repr(renderable, {**settings, **(console_kwargs or {})})


def size_text(count: int, size: int) -> str:
    """How ``nn.tabulate`` writes a number of values and their bytes, for rich."""
    return summary._size_and_bytes_repr(count, size)


def trace_context() -> Any:
    """All settings of JAX that a trace depends on, the user contexts among them."""
    return jax_config.trace_context()


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


# Frames in these are not of the user's program.
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), flax.__file__)
)
_DEMO = os.path.join(_LIBRARIES[0], 'demo') + os.sep


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
        if file.startswith(_DEMO) or (
            source_info_util.is_user_filename(file) and not file.startswith(_LIBRARIES)
        ):
            frame = source_info_util.raw_frame_to_frame(code, place)
            name = optional.file_name(file)
            return f'{name}:{frame.start_line} ({frame.function_name})'
        if within == f'{code.co_name} at {file}:{code.co_firstlineno}':
            return ''
    return ''


def frame(depth: int) -> types.FrameType:
    """A frame of the stack: 0 is that of the caller."""
    return sys._getframe(depth + 1)


# Files of this library, of Flax and JAX, and of the constructors of dataclasses.
_NOT_OF_USERS = (
    *_LIBRARIES,
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,
    '<string>',
)


def frame_of_user(depth: int) -> types.FrameType:
    """The innermost frame of the user's program, from a depth on."""
    found = sys._getframe(depth + 1)
    while found.f_back is not None and found.f_code.co_filename.startswith(
        _NOT_OF_USERS
    ):
        found = found.f_back
    return found


def function_in(eqn: Any) -> str:
    """The function, file and line that a jitted function was written in."""
    return str(eqn.params['jaxpr'].jaxpr.debug_info.func_src_info)
