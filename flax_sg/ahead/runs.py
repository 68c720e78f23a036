"""Values whose rows come in runs: some known, some that change.

A stack of layers of which some are trained is joined of both. What works on each row by
itself works on each run by itself, and a loop over the rows becomes one loop for each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from numpy.typing import NDArray

from flax_sg.ahead.axes import ELEMENTWISE
from flax_sg.ahead.walk import Walk
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import type_of
from flax_sg.internals.types import Array, Atom, Aval
from flax_sg.programs.steps import Site, Value, is_in, made_by, run

# Where runs of rows begin and end.
Bounds: TypeAlias = Sequence[tuple[int, int]]


def in_runs(
    walk: Walk, eqn: JaxprEqn, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """An equation on runs of rows; None if it reads none, or all of them at once."""
    name, params = eqn.primitive.name, eqn.params
    if name == 'concatenate' and params['dimension'] == 0:
        return _joined(walk, eqn, read, site)
    places = [n for n, x in enumerate(read) if isinstance(x, int) and x in walk.runs]
    bounds_read = {_bounds_of(walk, walk.runs[read[n]]) for n in places}
    if len(bounds_read) != 1:
        return None
    [bounds] = bounds_read
    found = _Found(walk, eqn, read, site, places, bounds)
    if name in ELEMENTWISE:
        return found.elementwise()
    if name == 'slice':
        return found.sliced()
    if name != 'scan':
        return None
    carried = jaxprs.carried_by(eqn)
    if places[-1] < carried.start:
        return found.scan_by_index()
    return found.scans() if places[0] >= carried.stop else None


def _bounds_of(walk: Walk, parts: Sequence[Value]) -> Bounds:
    sizes = [_aval_of(walk, x).shape[0] for x in parts]
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _aval_of(walk: Walk, value: Value) -> Aval:
    return value.aval if isinstance(value, Literal) else walk.avals[value]


def _joined(
    walk: Walk, eqn: JaxprEqn, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """Notes what a value is joined of, if a part of it changes."""
    changes = [is_in(x, walk.changing) for x in read]
    if all(changes) or not any(changes):
        return None
    outs = walk.whole(eqn, read, site)
    walk.runs[outs[0]] = [part for x in read for part in walk.runs.get(x, [x])]
    return outs


class _Found(NamedTuple):
    """An equation that reads runs of rows.

    Attributes:
        walk: the program.
        eqn: the equation.
        read: what it reads.
        site: where it stands.
        places: which of the values that it reads come in runs.
        bounds: where the runs begin and end, the same for all of them.
    """

    walk: Walk
    eqn: JaxprEqn
    read: Sequence[Value]
    site: Site
    places: Sequence[int]
    bounds: Bounds

    def traced(self, fun: Callable[..., Any], ins: Sequence[Value]) -> Sequence[Value]:
        """The steps of a function that takes the place of the equation."""
        return self.walk.traced(fun, ins, Site(self.eqn, self.site))

    def elementwise(self) -> Sequence[Value]:
        """The equation on all rows, and on each run by itself."""
        outs = self.walk.whole(self.eqn, self.read, self.site)
        has_rows = [
            n not in self.places and type_of(x).ndim
            for n, x in enumerate(self.eqn.invars)
        ]
        outs_of_runs: list[Sequence[Value]] = []
        for k, bound in enumerate(self.bounds):
            part = [
                self.walk.runs[x][k] if n in self.places else x
                for n, x in enumerate(self.read)
            ]

            def on_rows(*values: Array, rows: slice = slice(*bound)) -> Sequence[Array]:
                pairs = zip(values, has_rows, strict=True)
                return jaxprs.bind(
                    self.eqn, [x[rows] if cut else x for x, cut in pairs]
                )

            outs_of_runs.append(self.traced(on_rows, part))
        runs = zip(*outs_of_runs, strict=True)
        self.walk.runs.update(zip(outs, runs, strict=True))
        return outs

    def sliced(self) -> Sequence[Value] | None:
        """Rows that are all in one run, of that run."""
        params, runs = self.eqn.params, self.walk.runs[self.read[0]]
        first, last = params['start_indices'][0], params['limit_indices'][0]
        for part, (start, stop) in zip(runs, self.bounds, strict=True):
            if start <= first and last <= stop:
                begin = first - start, *params['start_indices'][1:]
                end = last - start, *params['limit_indices'][1:]
                cut = functools.partial(jax.lax.slice, strides=params['strides'])
                of_rows = lambda x: [cut(x, begin, end)]  # noqa: E731, B023
                return self.traced(of_rows, [part])
        return None

    def scans(self) -> Sequence[Value]:
        """The turns of a scan in several scans."""
        parts = [x for n in self.places for x in self.walk.runs[self.read[n]]]
        whole = [x for n, x in enumerate(self.read) if n not in self.places]
        return self.traced(self._run_scans, [*whole, *parts])

    def _run_scans(self, *values: Array) -> list[Array]:
        """The scans, of the values that are in no runs, then those in runs."""
        params, carried = self.eqn.params, jaxprs.carried_by(self.eqn)
        body, reverse = params['jaxpr'], params['reverse']
        operands: list[Any] = [*values[: len(self.read) - len(self.places)]]
        parts = iter(values[len(operands) :])
        for n in self.places:
            operands.insert(n, [next(parts) for _ in self.bounds])
        consts, xs = operands[: carried.start], operands[carried.stop :]
        carry = operands[carried.start : carried.stop]

        def turn(carry: Sequence[Array], row: Sequence[Array]) -> Any:
            out = jaxpr_as_fun(body)(*consts, *carry, *row)
            return out[: len(carry)], out[len(carry) :]

        ys_of_runs: list[Any] = []
        runs = [*enumerate(self.bounds)]
        for k, (start, stop) in runs[::-1] if reverse else runs:
            rows = [x[k] if isinstance(x, list) else x[start:stop] for x in xs]
            options = stop - start, reverse, params['unroll']
            carry, ys = jax.lax.scan(turn, [*carry], rows, *options)
            ys_of_runs.append(ys)
        stacked = zip(*(ys_of_runs[::-1] if reverse else ys_of_runs), strict=True)
        return [*carry, *map(jnp.concatenate, stacked)]

    def scan_by_index(self) -> Sequence[Value] | None:
        """A scan that reads rows of one known run alone, by an index.

        Other rows do not count. ``nn.scan`` with ``frozen_layers=`` reads the whole
        stack so. The known run, padded, takes the place of the stack.
        """
        walk, read = self.walk, [*self.read]
        body, first = self.eqn.params['jaxpr'].jaxpr, jaxprs.carried_by(self.eqn).stop
        for n in self.places:
            size = _aval_of(walk, read[n]).shape[0]
            indices = [
                _known(walk, read[k])
                for k in range(first, len(read))
                if _reads_rows(body, body.invars[n], body.invars[k])
            ]
            lows = [i.min(initial=size) for i in indices if i is not None]
            highs = [i.max(initial=0) for i in indices if i is not None]
            for part, (start, stop) in zip(
                walk.runs[read[n]], self.bounds, strict=True
            ):
                is_inside = lows and min(lows) >= start and max(highs) < stop
                if is_inside and not is_in(part, walk.changing):
                    ends = start, size - stop

                    def padded(x: Array, ends: tuple[int, int] = ends) -> list[Array]:
                        return [jnp.pad(x, [ends] + [(0, 0)] * (x.ndim - 1))]

                    [read[n]] = self.traced(padded, [part])
                    break
        if any(is_in(x, walk.changing) for x in read):
            return None
        return walk.whole(self.eqn, read, self.site)


def _reads_rows(jaxpr: Jaxpr, stack: Atom, index: Atom) -> bool:
    """Whether a jaxpr reads a stack by rows alone, at one index."""
    for eqn in jaxpr.eqns:
        stacks = [n for n, x in enumerate(eqn.invars) if x is stack]
        indices = [n for n, x in enumerate(eqn.invars) if x is index]
        is_call = eqn.primitive.name in (*jaxprs.JITTED, *jaxprs.CHECKPOINTS)
        if eqn.primitive.name == 'dynamic_slice' and stacks:
            if (stacks, indices) != ([0], [1]) or eqn.params['slice_sizes'][0] != 1:
                return False
        elif stacks and not (is_call and len(stacks) == 1):
            return False
        elif stacks:
            body = jaxprs.body_of(eqn)
            places = [(body.invars[stacks[0]], body.invars[k]) for k in indices]
            if not any(_reads_rows(body, *place) for place in places):
                return False
    return not any(x is stack for x in jaxpr.outvars)


def _known(walk: Walk, value: Value) -> NDArray[Any] | None:
    """A value that is made of constants alone, as NumPy has it; None for others."""
    if isinstance(value, Literal):
        return np.asarray(value.val)
    steps = made_by(walk.steps, [value], known=walk.constants)
    computed = {n for step in steps for n in step.outs}
    read = {value, *(n for step in steps for n in step.read())} - computed
    constants = {n: walk.constants.get(n) for n in read}
    if any(x is None or isinstance(x, Tracer) for x in constants.values()):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(run(steps, constants, [value])[0])
