"""The pullback of a program: what ``jax.grad`` runs, asked which gradients are zero.

The naive attempt asks JAX for the derivative of each equation alone. Alone, an equation
has no mesh, no closed-over arrays, and no other outputs: a rule of ``custom_vjp`` that
adds weight decay to its cotangents runs as soon as *one* of its outputs is read.

So JAX differentiates the whole program, for one output at a time, or for several with
cotangents that have nothing to do with each other: no sum of them is zero by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from flax_sg.flow.zeros import Mask, Value, zeros_of
from flax_sg.internals import jaxprs
from flax_sg.internals.types import AnyJaxpr, Array, Atom, Aval


def has_tangent(aval: Aval) -> bool:
    """Whether a derivative may flow through values of a type."""
    dtype = getattr(aval, 'dtype', np.int32)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        # Random keys have none. The maxima that fp8 layers keep have one.
        return not jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return jnp.issubdtype(dtype, np.inexact)


class RefusedError(Exception):
    """JAX does not differentiate a program; the cause is JAX's own error."""


def zero_gradients(
    program: ClosedJaxpr, slots: Sequence[int], outputs: Sequence[int]
) -> list[Mask]:
    """Which elements of gradients are zero, whatever the inputs of a program are.

    Args:
        program: the program.
        slots: the indices of the inputs that are differentiated.
        outputs: the outputs that count together.

    Returns:
        For each of the inputs. What has no derivative, such as an integer, has a
        gradient of zero.

    Raises:
        RefusedError: if ``jax.grad`` would raise.
    """
    wanted = [slot for slot in slots if has_tangent(program.in_avals[slot])]
    outputs = [n for n in outputs if has_tangent(program.out_avals[n])]
    zeros = dict.fromkeys(slots, np.array(True))
    if wanted and outputs:
        zeros |= zip(wanted, _zeros_of(program, outputs, wanted), strict=True)
    return list(zeros.values())


def _needed(jaxpr: Jaxpr, outputs: Sequence[int]) -> list[JaxprEqn]:
    """The equations without which some outputs cannot be computed."""
    read = {jaxpr.outvars[n] for n in outputs if isinstance(jaxpr.outvars[n], Var)}
    needed: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        # JAX keeps what works on mutable arrays, and runs the rules before it.
        has_ref = any(map(jaxprs.is_ref, (*eqn.invars, *eqn.outvars)))
        if has_ref or not read.isdisjoint(eqn.outvars):
            needed.append(eqn)
            read.update(var for var in eqn.invars if isinstance(var, Var))
    return needed[::-1]


def _run(eqn: JaxprEqn, operands: Sequence[Array]) -> Sequence[Array]:
    """Runs an equation; JAX remembers the derivatives of operations that are jitted."""
    params = tuple((name, value, type(value)) for name, value in eqn.params.items())
    is_custom = eqn.primitive.name.startswith('custom_')
    if not (eqn.effects or is_custom or jaxprs.within(eqn)):
        try:
            jitted = _jitted(eqn.primitive, params)
        except TypeError:  # A parameter has no hash.
            return jaxprs.bind(eqn, operands)
        with eqn.ctx.manager:
            return jitted(*operands)
    return jaxprs.bind(eqn, operands)


@functools.lru_cache(1024)
def _jitted(primitive: Primitive, params: tuple[Any, ...]) -> Any:
    keywords = {name: value for name, value, _ in params}

    def run(*operands: Array) -> Sequence[Array]:
        out = primitive.bind(*operands, **keywords)
        return out if primitive.multiple_results else [out]

    return jax.jit(run, inline=True)


def _zeros_of(
    program: ClosedJaxpr, outputs: Sequence[int], slots: Sequence[int]
) -> list[Mask]:
    jaxpr = program.jaxpr
    needed = _needed(jaxpr, outputs)

    def pulled_back(inputs: list[Array], cotangents: list[Array]) -> tuple[Array, ...]:
        def near(*wanted: Array) -> list[Array]:
            value_of = dict(zip(jaxpr.constvars, program.consts, strict=True))
            value_of |= zip(jaxpr.invars, inputs, strict=True)
            value_of |= zip((jaxpr.invars[slot] for slot in slots), wanted, strict=True)

            def read(var: Atom) -> Array:
                return var.val if isinstance(var, Literal) else value_of[var]

            for eqn in needed:
                outs = _run(eqn, list(map(read, eqn.invars)))
                value_of.update(zip(eqn.outvars, outs, strict=True))
            return [read(jaxpr.outvars[n]) for n in outputs]

        return jax.vjp(near, *(inputs[slot] for slot in slots))[1](cotangents)

    shapes = list(map(jaxprs.shape_of, program.in_avals))
    cotangents = [jaxprs.shape_of(program.out_avals[n]) for n in outputs]
    try:
        closed = jax.make_jaxpr(pulled_back)(shapes, cotangents)
    except Exception as error:
        raise RefusedError from error
    return zeros_of(closed, Value.of_closed_over)


def without_stops(program: AnyJaxpr) -> AnyJaxpr:
    """A program whose stops are identities, in all its bodies.

    Stops are ``lax.stop_gradient``, and identities with a rule of their own.
    """

    def changed(value: Any) -> Any:
        return without_stops(value) if hasattr(jaxprs.opened(value), 'eqns') else value

    eqns: list[JaxprEqn] = []
    for eqn in jaxprs.opened(program).eqns:
        if eqn.primitive.name == 'stop_gradient':
            eqns.append(eqn.replace(primitive=lax.copy_p))
        elif copies := _copies(eqn):
            eqns += copies
        elif jaxprs.within(eqn):
            eqns.append(eqn.replace(params=jax.tree.map(changed, eqn.params)))
        else:
            eqns.append(eqn)
    opened = jaxprs.opened(program).replace(eqns=eqns)
    consts = getattr(program, 'consts', None)
    return opened if consts is None else ClosedJaxpr(opened, consts)


def _copies(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Copies in place of an identity with a rule of its own; none for all else."""
    if eqn.primitive.name not in jaxprs.CUSTOM_CALLS:
        return []
    body = jaxprs.body_of(eqn)
    outer: dict[Atom, Atom] = dict(zip(body.invars, eqn.invars, strict=True))
    if body.eqns or not all(isinstance(x, Var) and x in outer for x in body.outvars):
        return []
    return [
        eqn.replace(primitive=lax.copy_p, params={}, invars=[outer[x]], outvars=[out])
        for x, out in zip(body.outvars, eqn.outvars, strict=True)
    ]


class Reach:
    """Through which operands of an equation a gradient passes, and from where.

    Each equation is asked alone: its pullback, and the question which of its gradients
    are zero. If it cannot be asked alone, everything counts as reached.
    """

    def __init__(self) -> None:
        # By the primitive, the parameters and the types of an equation. None if it
        # cannot be asked alone.
        self._asked: dict[Hashable, list[int] | None] = {}

    def sources(self, eqn: JaxprEqn) -> list[int]:
        """For each operand a bit for each output from which a gradient may come."""
        outs = sum(has_tangent(var.aval) << n for n, var in enumerate(eqn.outvars))
        safe = [outs * has_tangent(var.aval) for var in eqn.invars]
        if not any(safe) or any(map(jaxprs.is_ref, (*eqn.invars, *eqn.outvars))):
            return safe
        name = eqn.primitive.name
        key: Hashable = id(eqn)
        if not (name.startswith('custom_') or jaxprs.user_primitive_of(eqn)):
            # Equal equations have equal answers, unless they run a rule of the user.
            types = [
                str(var.val if isinstance(var, Literal) else var.aval)
                for var in eqn.invars
            ]
            key = name, str(eqn.params), *types
        if key not in self._asked:
            try:
                self._asked[key] = _sources_of(eqn)
            except Exception:  # JAX cannot differentiate it alone.
                self._asked[key] = None
        return self._asked[key] or safe


def _sources_of(eqn: JaxprEqn) -> list[int]:
    variables = list(dict.fromkeys(var for var in eqn.invars if isinstance(var, Var)))
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    alone = empty.replace(invars=variables, outvars=eqn.outvars, eqns=[eqn])
    sources = dict.fromkeys(variables, 0)
    for out in range(len(eqn.outvars)):
        masks = zero_gradients(ClosedJaxpr(alone, ()), range(len(variables)), [out])
        for var, zero in zip(variables, masks, strict=True):
            sources[var] |= (not zero.all()) << out
    return [sources[var] if isinstance(var, Var) else 0 for var in eqn.invars]


def culprit(program: AnyJaxpr, error: BaseException | None) -> list[JaxprEqn]:
    """The equation that JAX does not differentiate, below the calls that run it.

    Args:
        program: a jaxpr; its equations are tried alone.
        error: what JAX raised.

    Returns:
        The equations from the outermost to the innermost; none if all pass alone.
    """
    for eqn in jaxprs.opened(program).eqns:
        try:
            _sources_of(eqn)
        except RefusedError as refused:
            if type(refused.__cause__) is type(error):
                inner = (culprit(body, error) for body in jaxprs.within(eqn))
                return [eqn, *next(filter(None, inner), [])]
    return []
