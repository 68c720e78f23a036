"""A program as two lists of steps: those that are run once, and the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from flax_sg import errors
from flax_sg.ahead.cut import cheapest_cut
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs

# What is made again rather than kept: it costs as much as to read it.
_CHEAP = frozenset(
    (
        *('abs', 'add', 'add_any', 'and', 'broadcast_in_dim', 'ceil', 'clamp', 'copy'),
        *('concatenate', 'convert_element_type', 'cos', 'div', 'eq', 'erf'),
        *('exp', 'exp2', 'expand_dims', 'expm1', 'floor', 'ge', 'gt', 'integer_pow'),
        *('iota', 'is_finite', 'le', 'log', 'log1p', 'logistic', 'lt', 'max', 'min'),
        *('mul', 'ne', 'neg', 'not', 'or', 'pad', 'pow', 'reshape', 'rev', 'round'),
        *('rsqrt', 'select_n', 'sign', 'sin', 'slice', 'split', 'sqrt', 'square'),
        *('squeeze', 'stop_gradient', 'sub', 'tanh', 'transpose', 'xor'),
    )
)


class Step(NamedTuple):
    """An equation, with the numbers of the values that it reads and makes.

    A constant of the program stands among what is read as it is, in a ``Literal``.

    Attributes:
        eqn: the equation.
        site: where the body stands that it is in.
        ins: what it reads.
        outs: what it makes.
        call: runs a part of the equation; None for the whole one.
        inner: the steps of this part.
        times: how many times these run.
    """

    eqn: Any
    site: Site
    ins: tuple[int | Literal, ...]
    outs: tuple[int, ...]
    call: Callable[..., Sequence[Any]] | None = None
    inner: tuple[Step, ...] = ()
    times: int = 1

    def read(self) -> list[int]:
        """The values that it reads."""
        return _numbers(self.ins)

    @property
    def source(self) -> str:
        """The line of the user."""
        return self.site.source(self.eqn)


def run(
    steps: Iterable[Step], values: Mapping[int, Any], asked: Iterable[int | Literal]
) -> list[Any]:
    """Runs some steps on the values that they read; returns the values asked for."""
    known = dict(values)

    def value_of(x: int | Literal) -> Any:
        return x.val if isinstance(x, Literal) else known[x]

    for step in steps:
        operands = [*map(value_of, step.ins)]
        out = step.call(*operands) if step.call else jaxprs.bind(step.eqn, operands)
        known.update(zip(step.outs, out, strict=True))
    return [*map(value_of, asked)]


class Split(NamedTuple):
    """A program in two.

    Attributes:
        early: the steps that make what is kept.
        late: the steps that make the outputs, of what is kept and of other inputs.
        kept: the values that are kept.
        outputs: the values that the program returns, or constants.
        avals: the type of each value.
        constants: the values that are constants of the program.
        steps: all steps.
        changing: the values that change from step to step.
        data: the values that depend on the data of a batch, and do not change.
    """

    early: list[Step]
    late: list[Step]
    kept: list[int]
    outputs: list[int | Literal]
    avals: list[Any]
    constants: dict[int, Any]
    steps: list[Step]
    changing: set[int]
    data: set[int]

    def run(
        self,
        steps: Iterable[Step],
        values: Mapping[int, Any],
        asked: Iterable[int | Literal],
    ) -> list[Any]:
        """Runs some steps on the values of inputs; returns the values asked for."""
        return run(steps, {**self.constants, **values}, asked)


class _Walk:
    """Writes a program out as steps, and notes of each value what it depends on.

    Calls of ``jax.jit`` are inlined. Of a loop or a ``jax.checkpoint`` that reads what
    changes, the part that does not becomes steps of its own.
    """

    def __init__(self) -> None:
        self.steps = list[Step]()
        self.avals = list[Any]()
        self.constants = dict[int, Any]()
        self.changing, self.data = set[int](), set[int]()

    def new(self, aval: Any) -> int:
        """Another value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def add(self, step: Step) -> None:
        """Another step."""
        self.steps.append(step)
        read = step.read()
        if not self.changing.isdisjoint(read):
            self.changing.update(step.outs)
        elif not self.data.isdisjoint(read):
            self.data.update(step.outs)

    def walk(
        self, closed: Any, ins: Sequence[int | Literal], site: Site
    ) -> list[int | Literal]:
        """Adds the steps of a jaxpr; returns its outputs."""
        jaxpr = jaxprs.opened(closed)
        numbers: dict[Any, int | Literal] = dict(zip(jaxpr.invars, ins, strict=True))
        consts = getattr(closed, 'consts', ())
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            numbers[var] = number = self.new(var.aval)
            self.constants[number] = value

        def at(atom: Any) -> int | Literal:
            return atom if isinstance(atom, Literal) else numbers[atom]

        for eqn in jaxpr.eqns:
            read = tuple(map(at, eqn.invars))
            outs: Sequence[int | Literal] | None = None
            if jaxprs.is_plain_jit(eqn):
                outs = self.walk(eqn.params['jaxpr'], read, Site(eqn, site))
            elif self._is_mixed(eqn, read):
                outs = self._in_parts(eqn, read, site)
            if outs is None:
                outs = tuple(self.new(var.aval) for var in eqn.outvars)
                self.add(Step(eqn, site, read, outs))
            numbers.update(zip(eqn.outvars, outs, strict=True))
        return [at(atom) for atom in jaxpr.outvars]

    def _is_mixed(self, eqn: Any, read: Sequence[int | Literal]) -> bool:
        """Whether an equation reads what changes, and data, and has no effect."""
        numbers = set(_numbers(read))
        is_split = numbers & self.changing and numbers & self.data
        return bool(is_split) and not eqn.effects

    def _in_parts(
        self, eqn: Any, read: Sequence[int | Literal], site: Site
    ) -> Sequence[int | Literal] | None:
        """Adds the parts of an equation; None if it is of a kind that stays whole."""
        checkpoint = jaxprs.checkpoint_of(eqn)
        if checkpoint is not None:
            return self._checkpoint(checkpoint, eqn, read, site)
        if eqn.primitive.name == 'scan':
            return self._scan(eqn, read, site)
        return None

    def _checkpoint(
        self, checkpoint: jaxprs.Checkpoint, eqn: Any, read: Any, site: Site
    ) -> Sequence[int | Literal] | None:
        """What depends on data leaves a checkpoint, and the rest is one again.

        What is made of parameters alone stays in it: outside, it would be saved for the
        backward pass.
        """
        begin = len(self.steps)
        outs = self.walk(checkpoint.jaxpr, read, Site(eqn, site))
        body = self.steps[begin:]
        del self.steps[begin:]
        fixed = [step for step in body if self.changing.isdisjoint(step.outs)]
        of_data = [step for step in fixed if not self.data.isdisjoint(step.outs)]
        if all(is_cheap(step.eqn) for step in of_data):
            return None
        taken = {id(step) for step in of_data}
        others = [step for step in body if id(step) not in taken]
        maker = {n: step for step in others for n in step.outs}
        made_here = [x for x in _numbers(outs) if x in maker and x in self.changing]
        asked = [*dict.fromkeys(made_here)]
        rest = _made(others, maker, asked, [], set())
        made = {n for step in rest for n in step.outs}
        ins = [n for step in rest for n in step.read() if n not in made]
        ins = tuple(dict.fromkeys(ins))

        def run_rest(*values: Any) -> list[Any]:
            return run(rest, dict(zip(ins, values, strict=True)), asked)

        call = jax.checkpoint(
            run_rest, policy=checkpoint.policy, prevent_cse=checkpoint.prevent_cse
        )
        self.steps += fixed
        self.add(Step(eqn, site, ins, tuple(asked), call, tuple(rest)))
        return outs

    def _scan(
        self, eqn: Any, read: Sequence[int | Literal], site: Site
    ) -> Sequence[int | Literal] | None:
        """A loop becomes two: the second one reads what the first one has stacked."""
        body, carry = eqn.params['jaxpr'], jaxprs.carried_by(eqn)
        if any(jaxprs.varying_axes(var.aval) for var in eqn.outvars):
            return None  # The type of what is stacked would not say so.
        changes = [_is_in(x, self.changing) for x in read]
        # What differs from turn to turn is data for the body.
        is_data = [n >= carry.start or _is_in(x, self.data) for n, x in enumerate(read)]
        while True:
            parts = split(body, changes, is_data)
            found = [_is_in(x, parts.changing) for x in parts.outputs]
            more = [k for k in range(len(carry)) if found[k] and not changes[carry[k]]]
            if not more:
                break
            for k in more:
                changes[carry[k]] = True
        is_late = [
            changes[carry[k]] if k < len(carry) else x for k, x in enumerate(found)
        ]
        parts = split(body, changes, is_data, is_late)
        if all(is_cheap(step.eqn) for step in parts.early):
            return None
        inputs = range(len(read))
        stacked = [n for n in parts.kept if n not in inputs or n in carry]

        def loop(is_of_late: bool, steps: list[Step], arrays: list[int]) -> _Loop:
            outputs = [k for k, late in enumerate(is_late) if late == is_of_late]
            used = set(_numbers(parts.outputs[k] for k in outputs))
            used.update(*(step.read() for step in steps))
            used.update(carry[k] for k in outputs if k < len(carry))
            used.difference_update(arrays)
            return _Loop(eqn, [n for n in inputs if n in used], outputs, arrays)

        length = eqn.params['length']
        outs = tuple(self.new(var.aval) for var in eqn.outvars)
        stacks = tuple(
            self.new(jaxprs.stacked(parts.avals[n], length)) for n in stacked
        )

        def add(part: _Loop, steps: list[Step], into: Any, out_of: Any) -> None:
            reads = (*(read[n] for n in part.inputs), *into)
            makes = (*(outs[k] for k in part.outputs), *out_of)
            kept = stacked if out_of else []
            call = functools.partial(part.run, parts, steps, kept)
            self.add(Step(eqn, site, reads, makes, call, tuple(steps), length))

        add(loop(False, parts.early, []), parts.early, (), stacks)
        add(loop(True, parts.late, stacked), parts.late, stacks, ())
        return outs


class _Loop(NamedTuple):
    """A part of a scan.

    Attributes:
        eqn: the scan.
        inputs: which of its inputs the part reads.
        outputs: which of its outputs the part makes.
        stacked: the values of the body that come in stacked, behind the inputs.
    """

    eqn: Any
    inputs: list[int]
    outputs: list[int]
    stacked: list[int]

    def run(
        self, parts: Split, steps: list[Step], kept: list[int], *values: Any
    ) -> list[Any]:
        """Runs the part, with steps of the body; stacks the values in ``kept``."""
        carry, params = jaxprs.carried_by(self.eqn), self.eqn.params
        given = dict(zip((*self.inputs, *self.stacked), values, strict=True))
        consts = {n: x for n, x in given.items() if n < carry.start}
        carried = [n for n in given if n in carry]
        along = [n for n in given if n not in consts and n not in carried]
        next_ones = [parts.outputs[k] for k in self.outputs if k < len(carry)]
        rows = [parts.outputs[k] for k in self.outputs if k >= len(carry)]

        def body(before: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            known = {
                **consts,
                **dict(zip((*carried, *along), before + row, strict=True)),
            }
            out = parts.run(steps, known, [*next_ones, *rows, *kept])
            return out[: len(carried)], out[len(carried) :]

        after, stacks = jax.lax.scan(
            body,
            [given[n] for n in carried],
            [given[n] for n in along],
            params['length'],
            params['reverse'],
            params['unroll'],
        )
        return [*after, *stacks]


def split(
    program: Any,
    changes: Sequence[bool],
    is_data: Sequence[bool],
    is_late: Sequence[bool] | None = None,
) -> Split:
    """Splits a closed jaxpr.

    Args:
        program: the closed jaxpr. Its inputs have the first numbers.
        changes: for each input whether it changes from step to step.
        is_data: for each input whether it comes with a batch. The others are
            parameters: what depends on them alone is not kept.
        is_late: for each output whether the late part makes it, rather than the early
            part. By default it makes all.
    """
    walk = _Walk()
    inputs = [walk.new(var.aval) for var in program.jaxpr.invars]
    walk.changing = {n for n in inputs if changes[n]}
    walk.data = {n for n in inputs if is_data[n] and not changes[n]}
    outputs = walk.walk(program, inputs, Site())
    steps, avals, changing, data = walk.steps, walk.avals, walk.changing, walk.data
    asked = is_late or [True] * len(outputs)
    makers: dict[int, list[int]] = {}
    maker: dict[int, Step] = {}
    at_each_step: list[Step] = []
    for step in steps:
        maker.update(dict.fromkeys(step.outs, step))
        read = step.read()
        has_effect = bool(step.eqn.effects)
        if not changing.isdisjoint(read) or (has_effect and data.isdisjoint(read)):
            at_each_step.append(step)
        elif has_effect:
            raise errors.ArgumentTypeError(
                f'{jaxprs.operation(step.eqn)} has an effect, and stands in the part '
                f'that is computed once: {step.source}.\n'
                'Computed ahead, it would not run at each step.\n'
                'Take it out of the loss, or name an argument that it reads in each=.'
            )
        elif not data.isdisjoint(read) and is_cheap(step.eqn):
            of_data = [x for x in dict.fromkeys(read) if x in data]
            makers.update(dict.fromkeys(step.outs, of_data))
    late_outputs = [x for x, late in zip(outputs, asked, strict=True) if late]
    live = _needed(at_each_step, late_outputs)
    ends = _numbers(late_outputs)
    for step in live:
        ends += step.read()
    # What is read of the parameters alone is made in the late part.
    sizes = {n: avals[n].size * avals[n].dtype.itemsize for n in data}
    kept = sorted(cheapest_cut(sizes, makers, [x for x in ends if x in data]))
    wanted = [step for step in at_each_step if step.eqn.effects]
    late = _made(steps, maker, ends, wanted + live, set(kept))
    others = [x for x, late in zip(outputs, asked, strict=True) if not late]
    early = _made(steps, maker, kept + _numbers(others), [], set())
    return Split(
        early, late, kept, outputs, avals, walk.constants, steps, changing, data
    )


def _numbers(values: Iterable[int | Literal]) -> list[int]:
    """Those of some values that are no constants."""
    return [x for x in values if not isinstance(x, Literal)]


def _is_in(value: int | Literal, values: set[int]) -> bool:
    return not isinstance(value, Literal) and value in values


def _needed(at_each_step: Sequence[Step], outputs: Iterable[Any]) -> list[Step]:
    """Of the steps that read what changes those that an output needs."""
    needed = set(_numbers(outputs))
    live: list[Step] = []
    for step in reversed(at_each_step):
        if step.eqn.effects or not needed.isdisjoint(step.outs):
            live.append(step)
            needed.update(step.read())
    return live[::-1]


def _made(
    steps: Sequence[Step],
    maker: Mapping[int, Step],
    values: Iterable[int],
    wanted: Iterable[Step],
    given: set[int],
) -> list[Step]:
    """The steps that make some values and all that those need, in order."""
    run, done = {id(step) for step in wanted}, set(given)
    todo = [*values, *(x for step in wanted for x in step.read())]
    while todo:
        value = todo.pop()
        if value in done or value not in maker:
            continue
        done.add(value)
        run.add(id(maker[value]))
        todo += maker[value].read()
    return [step for step in steps if id(step) in run]


def is_cheap(eqn: Any) -> bool:
    """Whether the outputs of an equation are made again, rather than kept."""
    if eqn.primitive.name in jaxprs.CUSTOM_CALLS or jaxprs.is_plain_jit(eqn):
        return all(map(is_cheap, jaxprs.body_of(eqn).eqns))
    return eqn.primitive.name in _CHEAP
