"""Private names of JAX's traces, and of the keys of its caches."""

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
from flax.core.scope import Scope
from jax._src import core as jax_core
from jax._src.interpreters import ad as jax_ad
from jax._src.interpreters import batching as jax_batching
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as jax_lax
from jax.core import Tracer as Tracer

from flax_sg.internals import versions

versions.load_once(globals())

# Part of every trace cache key of JAX (jit, scan, cond, checkpoint, ...) and local to
# the thread: what makes a cached trace belong to the blocks it was traced under.
user_context = jax.make_user_context(0)

# Whether normalization layers use running averages, whatever they were told; likewise.
running_averages = jax.make_user_context(False)


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


def _outwards(trace: Any) -> Iterator[Any]:
    """A trace and those around it, from the inside out."""
    while trace is not None:
        yield trace
        trace = getattr(trace, 'parent_trace', None)


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
    found = False
    for trace in _outwards(jax_core.trace_ctx.trace):
        found = found or any(trace is other for other in wanted)
        counts = examples or not isinstance(trace, jax_batching.BatchTrace)
        if any(trace is other for other in used) or (found and counts):
            return jax_core.set_current_trace(trace)
    return in_trace_of(leaves[0]) if leaves else contextlib.nullcontext()


def in_trace_of_scope(scope: Scope) -> contextlib.AbstractContextManager[Any]:
    """Makes the trace that ``scope`` was created in the current one."""
    return in_innermost_trace([scope.trace_level])


def kept_traces(scope: Scope | None = None) -> list[weakref.ref[Any]]:
    """The traces that JAX may keep and run again on other arguments, inside out.

    Derivatives and batching in progress are none: their traces are made each time. The
    last one is that in which nothing is traced.

    Args:
        scope: to ask for the traces around it; there are none if its own is over.
    """
    level: Any = None if scope is None else scope.trace_level
    trace: Any = jax_core.trace_ctx.trace if level is None else level._trace_ref()
    return [
        weakref.ref(trace)
        for trace in _outwards(trace)
        if isinstance(trace, partial_eval.DynamicJaxprTrace)
        or getattr(trace, 'parent_trace', None) is None
    ]


def kept_trace(scope: Scope | None = None) -> weakref.ref[Any] | None:
    """The innermost of ``kept_traces``."""
    return next(iter(kept_traces(scope)), None)


def is_tracing() -> bool:
    """Whether JAX is tracing something here: what is made now may hold tracers."""
    return not jax_core.trace_state_clean()


def as_weak(x: Any) -> Any:
    """The same values with a weak type, as that of Python's numbers.

    JAX makes weak types of Python's numbers only; what is computed to stand for one
    has to promote as it does.
    """
    as_type = functools.partial(versions.call, 'NonDifferentiable', jax_lax)
    return as_type('_convert_element_type', x, x.dtype, weak_type=True)


# Part of the keys of trace caches: a number of its own for each summary of a module, so
# that it finds no trace without the marks by which it tells modules apart.
summary_context = jax.make_user_context(0)

_summaries = itertools.count(1)


def traced_anew() -> contextlib.AbstractContextManager[Any]:
    """Makes JAX trace what is called in the body, whatever has been traced before."""
    return summary_context(next(_summaries))
