"""A program as two lists of steps: those that are run once, and the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
    """

    eqn: Any
    site: Site
    ins: tuple[int | Literal, ...]
    outs: tuple[int, ...]

    def read(self) -> list[int]:
        """The values that it reads."""
        return [x for x in self.ins if not isinstance(x, Literal)]

    @property
    def source(self) -> str:
        """The line of the user."""
        return self.site.source(self.eqn)


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
        self, steps: Sequence[Step], values: Mapping[int, Any], asked: Sequence[Any]
    ) -> list[Any]:
        """Runs some steps on the values of inputs; returns the values asked for."""
        known = {**self.constants, **values}

        def value_of(x: int | Literal) -> Any:
            return x.val if isinstance(x, Literal) else known[x]

        for step in steps:
            out = jaxprs.bind(step.eqn, list(map(value_of, step.ins)))
            known.update(zip(step.outs, out, strict=True))
        return list(map(value_of, asked))


def split(program: Any, changes: Sequence[bool], is_data: Sequence[bool]) -> Split:
    """Splits a closed jaxpr.

    Args:
        program: the closed jaxpr. Its inputs have the first numbers.
        changes: for each input whether it changes from step to step.
        is_data: for each input whether it comes with a batch. The others are
            parameters: what depends on them alone is not kept.
    """
    steps: list[Step] = []
    avals: list[Any] = []
    constants: dict[int, Any] = {}

    def new(var: Any) -> int:
        avals.append(var.aval)
        return len(avals) - 1

    def walk(
        closed: Any, ins: Sequence[int | Literal], site: Site
    ) -> list[int | Literal]:
        numbers: dict[Any, int | Literal] = dict(
            zip(closed.jaxpr.invars, ins, strict=True)
        )
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            numbers[var] = number = new(var)
            constants[number] = value

        def at(atom: Any) -> int | Literal:
            return atom if isinstance(atom, Literal) else numbers[atom]

        for eqn in closed.jaxpr.eqns:
            read = tuple(map(at, eqn.invars))
            if jaxprs.is_plain_jit(eqn):
                outs = walk(eqn.params['jaxpr'], read, Site(eqn, site))
                numbers.update(zip(eqn.outvars, outs, strict=True))
                continue
            made = tuple(map(new, eqn.outvars))
            numbers.update(zip(eqn.outvars, made, strict=True))
            steps.append(Step(eqn, site, read, made))
        return [at(atom) for atom in closed.jaxpr.outvars]

    inputs = [new(var) for var in program.jaxpr.invars]
    outputs = walk(program, inputs, Site())
    changing = {n for n in inputs if changes[n]}
    data = {n for n in inputs if is_data[n] and not changes[n]}
    makers: dict[int, list[int]] = {}
    maker: dict[int, Step] = {}
    at_each_step: list[Step] = []
    for step in steps:
        maker.update(dict.fromkeys(step.outs, step))
        read = step.read()
        if not changing.isdisjoint(read):
            changing.update(step.outs)
            at_each_step.append(step)
        elif step.eqn.effects and data.isdisjoint(read):
            at_each_step.append(step)
        elif step.eqn.effects:
            raise errors.ArgumentTypeError(
                f'{jaxprs.operation(step.eqn)} has an effect, and stands in the part '
                f'that is computed once: {step.source}.\n'
                'Computed ahead, it would not run at each step.\n'
                'Take it out of the loss, or name an argument that it reads in each=.'
            )
        elif not data.isdisjoint(read):
            data.update(step.outs)
            if is_cheap(step.eqn):
                of_data = [x for x in dict.fromkeys(read) if x in data]
                makers.update(dict.fromkeys(step.outs, of_data))
    live = _needed(at_each_step, outputs)
    ends = [x for x in outputs if not isinstance(x, Literal)]
    for step in live:
        ends += step.read()
    # What is read of the parameters alone is made in the late part.
    sizes = {n: avals[n].size * avals[n].dtype.itemsize for n in data}
    kept = sorted(cheapest_cut(sizes, makers, [x for x in ends if x in data]))
    wanted = [step for step in at_each_step if step.eqn.effects]
    late = _made(steps, maker, ends, wanted + live, set(kept))
    early = _made(steps, maker, kept, [], set())
    return Split(early, late, kept, outputs, avals, constants, steps, changing, data)


def _needed(at_each_step: Sequence[Step], outputs: Iterable[Any]) -> list[Step]:
    """Of the steps that read what changes those that an output needs."""
    needed = {x for x in outputs if not isinstance(x, Literal)}
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
