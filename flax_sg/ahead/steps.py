"""A program as a list of steps, and as two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import Literal

from flax_sg.ahead.rows import Operation, Rows, changing_rows
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs

# A value by its number, or a constant as it is.
Value: TypeAlias = int | Literal


def numbers_in(values: Iterable[Value]) -> list[int]:
    """Those of some values that are no constants."""
    return [x for x in values if not isinstance(x, Literal)]


def is_in(value: Value, values: set[int]) -> bool:
    """Whether a value is one of some; a constant never is."""
    return not isinstance(value, Literal) and value in values


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
    ins: tuple[Value, ...]
    outs: tuple[int, ...]
    call: Callable[..., Sequence[Any]] | None = None
    inner: tuple[Step, ...] = ()
    times: int = 1

    def read(self) -> list[int]:
        """The values that it reads."""
        return numbers_in(self.ins)

    @property
    def source(self) -> str:
        """The line of the user."""
        return self.site.source(self.eqn)


def run(
    steps: Iterable[Step], values: Mapping[int, Any], asked: Iterable[Value]
) -> list[Any]:
    """Runs some steps on the values that they read; returns the values asked for."""
    known = dict(values)

    def value_of(x: Value) -> Any:
        return x.val if isinstance(x, Literal) else known[x]

    for step in steps:
        operands = [*map(value_of, step.ins)]
        out = step.call(*operands) if step.call else jaxprs.bind(step.eqn, operands)
        known.update(zip(step.outs, out, strict=True))
    return [*map(value_of, asked)]


def made_by(
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
        rows: the inputs of which some rows change. Their twins are inputs, too, behind
            those of the program.
    """

    early: list[Step]
    late: list[Step]
    kept: list[int]
    outputs: list[Value]
    avals: list[Any]
    constants: dict[int, Any]
    steps: list[Step]
    changing: set[int]
    data: set[int]
    rows: dict[int, Rows]

    def reads_fixed_rows(self, number: int) -> bool:
        """Whether late may read rows of an input that do not change."""
        masks = [self.rows[number].changes]
        if number in numbers_in(self.outputs):
            return True
        for step in self.late:
            if number in step.read():
                # No other operation reads only the rows that it returns.
                if step.eqn.primitive.name != 'slice':
                    return True
                [read] = changing_rows(Operation(step.eqn, masks, bool)) or [False]
                if not np.all(read):
                    return True
        return False

    def run(
        self,
        steps: Iterable[Step],
        values: Mapping[int, Any],
        asked: Iterable[Value],
    ) -> list[Any]:
        """Runs some steps on the values of inputs; returns the values asked for."""
        return run(steps, {**self.constants, **values}, asked)
