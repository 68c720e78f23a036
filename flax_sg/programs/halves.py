"""Splits an equation in two: what does not change, and what does.

A loop of which a part changes is split by JAX, one that does not change stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from flax_sg.internals import jaxprs, partial_eval
from flax_sg.internals.jaxprs import CHECKPOINTS, CUSTOM_CALLS, opened, within
from flax_sg.internals.types import Atom, Aval


class Halves(NamedTuple):
    """An equation in two jaxprs.

    Attributes:
        known: makes the outputs that do not change, then what is kept for ``late``.
        known_reads: the inputs of the equation that it reads.
        kept: how many values are kept.
        late: makes the outputs that change, of what is kept and of inputs.
        late_reads: the inputs of the equation that it reads.
        changes: for each output whether it changes; None if nothing reads it.
    """

    known: Jaxpr
    known_reads: list[int]
    kept: int
    late: Jaxpr
    late_reads: list[int]
    changes: list[bool | None]


# Stands for an equation that is taken as one, and says nothing of its body.
_AS_ONE = Primitive('as_one')
_AS_ONE.multiple_results = True
_AS_ONE.def_abstract_eval(lambda *_, eqn: [var.aval for var in eqn.outvars])


def halves_of(
    eqn: JaxprEqn,
    changes: Sequence[bool],
    is_kept: Callable[..., bool],
    again: Set[int] = frozenset(),
    is_late: Sequence[bool] = (),
) -> Halves:
    """Splits an equation by which of its inputs change.

    A loop in its body that does not change is left whole: JAX would keep values of each
    turn.

    Args:
        eqn: the equation, without effects.
        changes: for each input whether it changes.
        is_kept: by a primitive, the types of what it reads and its parameters, whether
            what it makes is kept, rather than made again.
        again: the ids of equations in its body that run in the late half, too.
        is_late: which outputs the late half makes, whatever they depend on.
    """
    partial_eval.check()
    places = {x: n for n, x in enumerate(eqn.invars) if not isinstance(x, Literal)}
    outvars = [var for var in eqn.outvars if type(var).__name__ != 'DropVar']
    late_outs = dict(zip(eqn.outvars, is_late, strict=bool(is_late)))
    asked = [late_outs.get(var, False) for var in outvars]
    unknown = [changes[n] for n in places.values()]
    opens = set[int]()

    def policy(primitive: Primitive, *avals: Aval, **params: Any) -> bool:
        if primitive is _AS_ONE:
            return id(params['eqn']) not in again
        return is_kept(primitive, *avals, **params)

    while True:
        whole = _program_of(_as_ones(eqn, again, opens), [*places], outvars)
        known, late, is_new, inst, count = partial_eval.partial_eval_jaxpr_custom(
            whole, unknown, True, asked, asked, policy
        )
        # Loops of which a part changes are in the late half: they are opened.
        loops = {*_ones_in(late)} - again
        if not loops:
            break
        opens |= loops
    late, reads = partial_eval.dce_jaxpr(
        late, [new for new, is_made in zip(is_new, inst, strict=True) if is_made]
    )
    kept, late_reads = reads[:count], reads[count:]
    outs = [True] * (len(known.outvars) - count)
    known, known_reads = partial_eval.dce_jaxpr(known, [*outs, *kept])
    fixed = [n for n, new in zip(places.values(), unknown, strict=True) if not new]
    is_new_of = dict(zip(outvars, is_new, strict=True))
    of_user = any(one.params.get('differentiated') for one in jaxprs.all_in(eqn))
    return Halves(
        _restored(known, of_user),
        [n for n, used in zip(fixed, known_reads, strict=True) if used],
        sum(kept),
        _restored(late, of_user),
        [n for n, used in zip(places.values(), late_reads, strict=True) if used],
        [is_new_of.get(var) for var in eqn.outvars],
    )


def without_dead(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program without what no output needs, but with all of its inputs."""
    partial_eval.check()
    every = [True] * len(program.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(program.jaxpr, every, instantiate=True)
    return program.replace(jaxpr=jaxpr)


def _program_of(eqn: JaxprEqn, invars: Sequence[Atom], outvars: Sequence[Var]) -> Jaxpr:
    """A jaxpr of one equation."""
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    parts = {'invars': [*invars], 'outvars': [*outvars], 'eqns': [eqn]}
    return empty.replace(**parts, effects=eqn.effects)


def _as_ones(eqn: JaxprEqn, again: Set[int], opens: Set[int]) -> JaxprEqn:
    """The equation, in whose bodies those that are not opened stand as one."""

    def as_one(inner: JaxprEqn) -> JaxprEqn:
        ids = {id(one) for one in jaxprs.all_in(inner)}
        is_loop = inner.primitive.name in ('scan', 'while') and not ids & (
            again | opens
        )
        if not inner.effects and (is_loop or id(inner) in again):
            return inner.replace(primitive=_AS_ONE, params={'eqn': inner})
        return _in_bodies(inner, as_one)

    return _in_bodies(eqn, as_one)


def _restored(jaxpr: Jaxpr, of_user: bool) -> Jaxpr:
    """A jaxpr with the equations that stood as one.

    JAX marks the checkpoints in a late half as differentiated, which these are not yet.
    """

    def restored(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive is _AS_ONE:
            one = eqn.params['eqn']
            return eqn.replace(primitive=one.primitive, params=one.params)
        eqn = _in_bodies(eqn, restored)
        if of_user or eqn.primitive.name not in CHECKPOINTS:
            return eqn
        return eqn.replace(params={**eqn.params, 'differentiated': False})

    return _each(jaxpr, restored)


def _in_bodies(eqn: JaxprEqn, change: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    """An equation whose bodies have changed equations; rules of derivatives stay."""
    if eqn.primitive.name in CUSTOM_CALLS or not within(eqn):
        return eqn
    is_body = lambda x: hasattr(opened(x), 'eqns')  # noqa: E731
    params = {
        name: jax.tree.map(
            lambda x: _each(x, change) if is_body(x) else x, value, is_leaf=is_body
        )
        if any(map(is_body, jax.tree.leaves(value, is_leaf=is_body)))
        else value
        for name, value in eqn.params.items()
    }
    return eqn.replace(params=params)


def _each(jaxpr: Any, change: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """A jaxpr, open or closed, with changed equations."""
    if opened(jaxpr) is not jaxpr:  # jax 0.12 opens one that is open.
        return jaxpr.replace(jaxpr=_each(opened(jaxpr), change))
    return jaxpr.replace(eqns=[*map(change, jaxpr.eqns)])


def _ones_in(jaxpr: Jaxpr) -> Iterator[int]:
    """Yields the ids of the equations that stand as one in a jaxpr."""
    for eqn in jaxpr.eqns:
        for inner in jaxprs.all_in(eqn):
            if inner.primitive is _AS_ONE:
                yield id(inner.params['eqn'])
