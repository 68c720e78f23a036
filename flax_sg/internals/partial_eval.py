"""Wraps the partial evaluation that ``jax.checkpoint`` rests on.

``partial_eval_jaxpr_custom`` has a rule for each of JAX's loops, branches and calls. It
leaves calls with rules of derivatives whole. ``partial_eval_jaxpr_nounits`` takes a
``custom_jvp`` apart, and its rule is lost.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.interpreters import partial_eval

from flax_sg.internals import versions
from flax_sg.internals.jaxprs import CUSTOM_CALLS, all_in
from flax_sg.internals.types import Array

partial_eval_jaxpr_custom = partial_eval.partial_eval_jaxpr_custom
dce_jaxpr = partial_eval.dce_jaxpr


@functools.cache
def check() -> None:
    """Checks once that both functions do what a split needs."""
    versions.check(PROGRAMS, 'sg.precompute')


def _split(fun: Callable[..., Any], changes: Sequence[bool]) -> tuple[list[str], ...]:
    """The names of primitives in both halves of a function of numbers."""
    jaxpr = jax.make_jaxpr(fun)(*jnp.ones(len(changes))).jaxpr
    known, late, *_ = partial_eval_jaxpr_custom(
        jaxpr, changes, True, False, False, lambda *_, **__: True
    )
    return tuple(
        [one.primitive.name for eqn in half.eqns for one in all_in(eqn)]
        for half in (known, late)
    )


def _splits_loops() -> bool:
    def loop(a: Array, b: Array) -> Array:
        turn = lambda carry, _: (carry * jnp.sin(a), None)  # noqa: E731
        return jax.lax.scan(turn, b, None, 2)[0]

    known, late = _split(loop, [False, True])
    return 'sin' in known and 'sin' not in late and 'scan' in late


def _leaves_rules() -> bool:
    fun = jax.custom_jvp(lambda a, b: jnp.sin(a) * b)
    fun.defjvp(lambda primals, _: (fun(*primals), primals[0]))
    known, late = _split(fun, [False, True])
    return 'sin' not in known and bool(CUSTOM_CALLS & {*late})


def _drops() -> bool:
    jaxpr = jax.make_jaxpr(lambda a, b: (jnp.sin(a), jnp.cos(b)))(1.0, 1.0).jaxpr
    late, read = dce_jaxpr(jaxpr, [False, True])
    return [eqn.primitive.name for eqn in late.eqns] == ['cos'] and read == [
        False,
        True,
    ]


PROGRAMS: dict[str, Callable[[], bool]] = {
    'partial_eval_jaxpr_custom has to split a loop': _splits_loops,
    'partial_eval_jaxpr_custom has to leave custom rules whole': _leaves_rules,
    'dce_jaxpr has to drop what is not asked for': _drops,
}
