"""Wraps private names of JAX's traces and of the keys of its trace caches."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax.core import tracers
from jax._src import core as jax_core
from jax._src.interpreters import ad as jax_ad
from jax._src.interpreters import batching as jax_batching
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as jax_lax
from jax.core import Trace
from jax.core import Tracer as Tracer
from jax.interpreters import ad

from flax_sg.internals import versions
from flax_sg.internals.types import Array, Aval, Leaf, Level

versions.load_once(globals())

# Part of every trace cache key of JAX (jit, scan, cond, checkpoint, ...) and local to
# the thread. A cached trace is reused only under blocks with the same number.
user_context = jax.make_user_context(0)

# Whether normalization layers use running averages, regardless of their arguments. Also
# part of the cache keys, since it changes what is traced.
running_averages = jax.make_user_context(False)

# Whether freezes of optimizers mark their state, and whether an outer one has cut rows.
freezes = jax.make_user_context((False, False))


def current_trace() -> Level:
    """The trace that JAX records into, comparable with ``==``."""
    return tracers.current_trace()


def in_trace_of(leaf: Leaf) -> contextlib.AbstractContextManager[Any]:
    """Makes the trace of ``leaf`` the current one.

    Inside a raw ``lax.scan`` or ``jax.jit``, JAX computes with outer tracers in the
    inner trace. A rewritten value is cached for later readers, so it must live in the
    trace of its input.
    """
    if isinstance(leaf, Tracer):
        return jax_core.set_current_trace(leaf._trace)
    return contextlib.nullcontext()


def stopped(leaf: Leaf) -> Array:
    """``jax.lax.stop_gradient(leaf)``, in a fraction of the time.

    JAX traces the derivative of each stop to find that it is zero, which takes as long
    as the rest of a small layer. This stops the primal in the parent trace directly, as
    JAX's rule does.
    """
    trace = leaf._trace
    while isinstance(leaf, (jax_ad.JVPTracer, jax_ad.LinearizeTracer)):
        leaf, trace = leaf.primal, leaf._trace.parent_trace
    with jax_core.set_current_trace(trace):
        return jax.lax.stop_gradient(leaf)


def zeros_of(aval: Aval) -> Array:
    """Zeros of a type."""
    zeros = ad.zeros_like_aval(aval)
    # JAX makes zeros in the memory of the device, also for a type in host memory.
    space: Any = aval.memory_space
    if jax.typeof(zeros).memory_space == space:
        return zeros
    if not isinstance(zeros, Tracer):  # jax 0.7 would leave them on the device.
        space = zeros.sharding.with_memory_kind('pinned_host')
    return jax.device_put(zeros, space)


def _outwards(trace: Trace | None) -> Iterator[Any]:
    """Yields a trace and its outer traces, innermost first."""
    while trace is not None:
        yield trace
        trace = getattr(trace, 'parent_trace', None)


def in_innermost_trace(
    levels: Sequence[Level], *leaves: Any, examples: bool = True
) -> contextlib.AbstractContextManager[Any]:
    """Makes the innermost trace of some levels and leaves the current one.

    A value that depends on several traces lives as long as the innermost one. Any of
    them may be innermost. A trace knows only its parent, so this searches outwards.

    Args:
        levels: results of ``current_trace``, of calls that are still running.
        *leaves: values to use in that trace; their traces count too.
        examples: whether a ``vmap`` trace counts even if no leaf is batched in it.
    """
    used = [leaf._trace for leaf in leaves if isinstance(leaf, Tracer)]
    wanted = [level._trace_ref() for level in levels if level is not None]
    reached = False
    for trace in _outwards(jax_core.trace_ctx.trace):
        reached = reached or any(trace is level for level in wanted)
        counts = examples or not isinstance(trace, jax_batching.BatchTrace)
        if any(trace is other for other in used) or (reached and counts):
            return jax_core.set_current_trace(trace)
    return in_trace_of(leaves[0]) if leaves else contextlib.nullcontext()


def kept_traces(level: Level = None) -> Iterator[weakref.ref[Any]]:
    """The traces that JAX may cache and reuse for other arguments, innermost first.

    JAX makes the traces of derivatives and batching each time, so they are left out.
    The outermost trace, which does no tracing, comes last.

    Args:
        level: the trace to start from, a result of ``current_trace``; by default that
            of the running code. There are none if it has ended.
    """
    kept = kept_trace(level)
    while kept is not None:
        yield kept
        kept = _innermost_kept(getattr(kept(), 'parent_trace', None))


def kept_trace(level: Level = None) -> weakref.ref[Any] | None:
    """The innermost of ``kept_traces``."""
    return _innermost_kept(
        jax_core.trace_ctx.trace if level is None else level._trace_ref()
    )


def _innermost_kept(trace: Trace | None) -> weakref.ref[Any] | None:
    """A trace itself, or the first outer trace, that JAX may cache."""
    while trace is not None:
        outer = getattr(trace, 'parent_trace', None)
        if outer is None or isinstance(trace, partial_eval.DynamicJaxprTrace):
            return weakref.ref(trace)
        trace = outer
    return None


def as_weak(x: Array) -> Array:
    """Gives an array a weak type, as JAX gives to Python's numbers.

    JAX gives weak types to Python's numbers only. A computed array that replaces such a
    number has to promote in the same way.
    """
    as_type = functools.partial(versions.call, 'NonDifferentiable', jax_lax)
    return as_type('_convert_element_type', x, x.dtype, weak_type=True)


# Part of JAX's trace cache keys, with a new value for each module summary. On a cache
# hit, a jitted function would call no modules, and the summary would miss them.
summary_context = jax.make_user_context(0)

_summaries = itertools.count(1)


def traced_anew() -> contextlib.AbstractContextManager[Any]:
    """Makes JAX retrace every function that the body calls, even if it is cached."""
    return summary_context(next(_summaries))
