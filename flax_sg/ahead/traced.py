"""The trace of a function: its program, and what comes in from where."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen
from jax.extend.core import ClosedJaxpr

from flax_sg import filters
from flax_sg.ahead.arguments import Argument, Name, named_in
from flax_sg.ahead.writes import Watch, Write, changed_by
from flax_sg.filters.paths import Path
from flax_sg.internals.types import Array, Aval, Kwargs, TreeDef
from flax_sg.programs import sources
from flax_sg.programs.halves import without_dead
from flax_sg.trees.leaves import Leaves, arguments_of, leaves_of, path_of
from flax_sg.trees.trainable import Declared, chosen


class Trace(NamedTuple):
    """A function that was traced on shapes.

    Attributes:
        program: from the arrays of the arguments to those that are asked for: what the
            function returns, and what it writes.
        arguments: the arguments, by their names.
        own: the arguments that hold parameters, with the paths of their leaves.
        has_positions: whether these paths begin with the position of the argument.
        each: the other arguments that change.
        changes: for each input of the program whether it changes from step to step.
        treedef: the structure of what is returned.
        outputs: the path of each output; empty for what is written.
        writes: what is written to models of NNX by late.
        lost: other arguments that the function writes to.
    """

    program: ClosedJaxpr
    arguments: dict[Name, Argument]
    own: Mapping[Name, list[Path]]
    has_positions: bool
    each: tuple[Name, ...]
    changes: list[bool]
    treedef: TreeDef
    outputs: list[str]
    writes: list[Write]
    lost: list[Name]

    @property
    def names(self) -> dict[int, tuple[Name, str]]:
        """For each input of the program its argument, and what an error calls it."""
        return {
            slot: (name, argument.at(number))
            for name, argument in self.arguments.items()
            for number, slots in enumerate(argument.slots)
            for slot in slots
        }

    @property
    def is_data(self) -> list[bool]:
        """For each input whether it comes with a batch, and not with the parameters."""
        return [name not in self.own for name, _ in self.names.values()]

    @property
    def data(self) -> dict[int, tuple[str, Aval]]:
        """For each input that is data, by its number, its name and its type."""
        return {
            slot: (where, self.program.in_avals[slot])
            for slot, (name, where) in self.names.items()
            if name not in (*self.own, *self.each)
        }


def traced(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Kwargs,
    argnums: int | Sequence[int],
    wrt: filters.Where | Declared,
    each: Name | Sequence[Name],
) -> Trace:
    """Traces a function; see ``precompute``."""
    run = fun.apply if isinstance(fun, linen.Module) else fun
    own = arguments_of(args, argnums)
    words: dict[Any, str] = {**sources.names_of_arguments(run)}
    changing = named_in(each, len(args), kwargs, own, words)
    trees: dict[Name, Leaves] = dict(enumerate(map(leaves_of, args)))
    trees.update({name: leaves_of(arg) for name, arg in kwargs.items()})
    # Which leaves change, or which parts of them.
    takes: dict[Name, list[Any]] = {
        name: [name in changing] * len(tree.values) for name, tree in trees.items()
    }
    takes.update(zip(own, chosen([*own.values()], wrt), strict=True))
    inputs: OrderedDict[str, Array] = OrderedDict()
    arguments = {
        name: Argument.of(name, words.get(name, ''), tree, takes[name], inputs)
        for name, tree in trees.items()
    }
    program, treedef, outputs, writes = _program_of(
        run, trees, kwargs, arguments, inputs
    )
    changed = changed_by(program, writes, len(outputs))
    lost = [write.name for write, _ in changed if write.name not in (*own, *changing)]
    changed = [(write, places) for write, places in changed if write.name not in lost]
    written = [n for _, places in changed for n in places]
    jaxpr = program.jaxpr
    asked = [jaxpr.outvars[n] for n in (*range(len(outputs)), *written)]
    new = {slot for name in trees for slot in arguments[name].new(takes[name])}
    new.update(slot for write, _ in changed for slot in write.slots)
    return Trace(
        program=without_dead(program.replace(jaxpr=jaxpr.replace(outvars=asked))),
        arguments=arguments,
        own={name: tree.paths for name, tree in own.items()},
        has_positions=isinstance(argnums, Sequence),
        each=changing,
        changes=[n in new for n in range(len(jaxpr.invars))],
        treedef=treedef,
        outputs=outputs + [''] * len(written),
        writes=[write for write, _ in changed],
        lost=lost,
    )


def _program_of(
    run: Callable[..., Any],
    trees: Mapping[Name, Leaves],
    kwargs: Kwargs,
    arguments: Mapping[Name, Argument],
    inputs: OrderedDict[str, Array],
) -> tuple[ClosedJaxpr, TreeDef, list[str], list[Write]]:
    """The program of a function of the inputs, and the form of its outputs.

    Returns:
        The program, of which the outputs are those of the function, then what it
        writes; the structure and the paths of the former; the latter.
    """
    form = list[Any]()

    # JAX's errors name the function of the user, and the inputs by their keys.
    @functools.wraps(run, updated=())
    def of_arrays(inputs: OrderedDict[str, Array]) -> list[Array]:
        arrays = [*inputs.values()]
        restored = {n: arguments[n].restored(trees[n], arrays) for n in trees}
        watches = [Watch(arguments[n], arg) for n, arg in restored.items()]
        named = {name: restored.pop(name) for name in kwargs}
        out = run(*restored.values(), **named)
        pairs, treedef = jax.tree_util.tree_flatten_with_path(out)
        written = [pair for watch in watches for pair in watch.writes()]
        paths = [str(path_of(keys)) for keys, _ in pairs]
        form[:] = treedef, paths, [write for write, _ in written]
        return [leaf for _, leaf in pairs] + [x for _, new in written for x in new]

    program = jax.make_jaxpr(of_arrays)(inputs)
    treedef, paths, writes = form
    return program, treedef, paths, writes
