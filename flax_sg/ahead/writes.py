"""What a function writes to models of NNX among its arguments: ``late`` writes it, too.

Counts of random keys and running averages are written in place. They change from step
to step, whatever is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal

from flax_sg.ahead.arguments import Argument, Name
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import type_of
from flax_sg.internals.types import AnyJaxpr, Atom, PyTree, TreeDef
from flax_sg.programs.bodies import Bodies
from flax_sg.trees.leaf_types import is_variable
from flax_sg.trees.leaves import leaves_of


class Write(NamedTuple):
    """A Variable that a function writes.

    Attributes:
        name: the argument that it is in.
        numbers: its leaves in the argument.
        slots: the inputs of the program that hold what is written over.
        treedef: what puts the Variable together.
    """

    name: Name
    numbers: list[int]
    slots: list[int]
    treedef: TreeDef


def changed_by(
    program: ClosedJaxpr, writes: Sequence[Write], first: int
) -> list[tuple[Write, range]]:
    """The writes that change something, and which outputs of the program they are.

    ``nnx.jit`` and ``nnx.remat`` write all Variables that they read, most of them as
    they were.

    Args:
        program: a jaxpr that returns what is written.
        writes: the writes.
        first: the first output that is one.
    """
    inputs = handed_through(program) if writes else []
    changed = list[tuple[Write, range]]()
    for write in writes:
        numbers = range(first, first + write.treedef.num_leaves)
        first = numbers.stop
        if [inputs[n] for n in numbers] != write.slots:
            changed.append((write, numbers))
    return changed


def handed_through(jaxpr: AnyJaxpr) -> list[int | None]:
    """For each output of a jaxpr the input that it is, as it came; None for others."""
    jaxpr = jaxprs.opened(jaxpr)
    inputs: dict[Any, int | None] = {var: n for n, var in enumerate(jaxpr.invars)}

    def input_of(atom: Atom) -> int | None:
        return None if isinstance(atom, Literal) else inputs.get(atom)

    for eqn in jaxpr.eqns:
        bodies = Bodies.of(eqn)
        of_bodies = zip(*map(handed_through, bodies.jaxprs), strict=True)
        for k, (number, *numbers) in enumerate(of_bodies):
            if number is None or any(n != number for n in numbers):
                continue
            # A loop carries a value at its place, and stacks what it has scanned.
            place, carried = bodies.first + number, bodies.carry[k : k + 1]
            is_same = place in carried if carried else place >= bodies.carry.stop
            read, var = eqn.invars[place], eqn.outvars[k]
            if (
                is_same and type_of(read).shape == type_of(var).shape
            ):  # The map of shards.
                inputs[var] = input_of(read)
    return [*map(input_of, jaxpr.outvars)]


def put(
    writes: Iterable[Write],
    holders: Mapping[Name, Sequence[Any]],
    values: Iterable[Any],
) -> None:
    """Writes the Variables that a function writes.

    Args:
        writes: the Variables.
        holders: for each argument what holds its leaves.
        values: the arrays for all of them.
    """
    arrays = iter(values)
    for name, numbers, _, treedef in writes:
        new = treedef.unflatten([*itertools.islice(arrays, treedef.num_leaves)])
        variable = holders[name][numbers[0]]
        if is_variable(variable):  # It may be ABSENT.
            variable.update_from_state(new)


class Watch:
    """Looks at the Variables of an argument before a function runs, and after it."""

    def __init__(self, argument: Argument, value: PyTree) -> None:
        self._argument, self._value = argument, value
        variables: dict[int, tuple[Any, list[int]]] = {}
        for number, holder in enumerate(argument.holders(value)):
            if is_variable(holder):
                variables.setdefault(id(holder), (holder, []))[1].append(number)
        self._before = [
            (variable, numbers, jax.tree.leaves(variable))
            for variable, numbers in variables.values()
        ]

    def writes(self) -> Iterator[tuple[Write, list[Any]]]:
        """The Variables that were written since, and the arrays that are in them.

        Another Variable in the place of one is a write, too. New ones, such as what a
        module sows, are left out.
        """
        is_same = leaves_of(self._value).treedef == self._argument.treedef
        holders = self._argument.holders(self._value) if is_same else []
        for variable, numbers, before in self._before:
            now = holders[numbers[0]] if is_same else variable
            arrays, treedef = jax.tree.flatten(now)
            if [*map(id, arrays)] != [*map(id, before)]:
                slots = [slot for n in numbers for slot in self._argument.slots[n]]
                name = self._argument.name
                yield Write(name, numbers, slots, treedef), arrays
