"""A program as a list of steps, and as two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import Literal

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
    """

    eqn: Any
    site: Site
    ins: tuple[Value, ...]
    outs: tuple[int, ...]

    def read(self) -> list[int]:
        """The values that it reads."""
        return numbers_in(self.ins)

    @property
    def source(self) -> str:
        """The line of the user."""
        return self.site.source(self.eqn)


def makers_of(steps: Iterable[Step]) -> dict[int, Step]:
    """For each value the step that makes it."""
    return {n: step for step in steps for n in step.outs}


def made_by(
    steps: Sequence[Step],
    values: Iterable[int],
    wanted: Iterable[Step] = (),
    given: Iterable[int] = (),
) -> list[Step]:
    """The steps that make some values and all that those need, in order."""
    maker = makers_of(steps)
    found, done = {id(step) for step in wanted}, set(given)
    todo = [*values, *(x for step in wanted for x in step.read())]
    while todo:
        value = todo.pop()
        if value not in done and value in maker:
            done.add(value)
            found.add(id(maker[value]))
            todo += maker[value].read()
    return [step for step in steps if id(step) in found]


def run(
    steps: Iterable[Step], values: Mapping[int, Any], asked: Iterable[Value]
) -> list[Any]:
    """Runs some steps on the values that they read; returns the values asked for."""
    known = dict(values)

    def value_of(x: Value) -> Any:
        return x.val if isinstance(x, Literal) else known[x]

    for step in steps:
        out = jaxprs.bind(step.eqn, [*map(value_of, step.ins)])
        known.update(zip(step.outs, out, strict=True))
    return [*map(value_of, asked)]
