"""The trace of a function: its program, and what comes in from where."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.extend.core import ClosedJaxpr

from flax_sg import errors, filters
from flax_sg.ahead.arguments import (
    Argument,
    Name,
    Run,
    check_keywords,
    is_number,
    named_in,
    words_of,
)
from flax_sg.ahead.numbers import agrees
from flax_sg.ahead.writes import Watch, Write, changed_by
from flax_sg.filters.paths import Path
from flax_sg.flow.traced import with_numbers
from flax_sg.internals import partial
from flax_sg.internals.types import Array, Aval, Kwargs, Scalar, TreeDef
from flax_sg.trees.leaves import Leaves, arguments_of, leaves_of, path_of
from flax_sg.trees.trainable import Declared, chosen

# A leaf of the arguments: the name of its argument, and its number in that.
_Place: TypeAlias = tuple[Name, int]


class Traced(NamedTuple):
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
    own: dict[int, list[Path]]
    has_positions: bool
    each: tuple[Name, ...]
    changes: list[bool]
    treedef: TreeDef
    outputs: list[str]
    writes: list[Write]
    lost: list[Name]

    @property
    def is_data(self) -> list[bool]:
        """For each input whether it comes with a batch, and not with the parameters."""
        own = {slot for name in self.own for slot in self.arguments[name].inputs}
        return [n not in own for n in range(len(self.changes))]

    @property
    def data(self) -> dict[int, tuple[str, Aval]]:
        """For each input that is data, by its number, its name and its type."""
        return {
            slot: (argument.at(number), self.program.in_avals[slot])
            for name, argument in self.arguments.items()
            if name not in (*self.own, *self.each)
            for number, slots in enumerate(argument.slots)
            for slot in slots
        }


class _Form(NamedTuple):
    """A trace, before it is known what changes: see ``Traced``."""

    program: ClosedJaxpr
    arguments: dict[Name, Argument]
    treedef: TreeDef
    outputs: list[str]
    writes: list[Write]


def traced(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Kwargs,
    argnums: int | Sequence[int],
    wrt: filters.Where | Declared,
    each: Name | Sequence[Name],
    examples: bool,
) -> Traced:
    """Traces a function; see ``precompute``."""
    run = fun.apply if isinstance(fun, linen.Module) else fun
    check_keywords(fun, kwargs)
    own = arguments_of(args, argnums)
    changing = named_in(each, len(args), kwargs, own)
    trained = dict(zip(own, chosen([*own.values()], wrt), strict=True))
    trees: dict[Name, Leaves] = dict(enumerate(map(leaves_of, args)))
    trees.update({name: leaves_of(arg) for name, arg in kwargs.items()})
    words: dict[Name, str] = dict(enumerate(words_of(run, len(args))))
    runs: dict[Name, dict[int, list[Run]]] = {
        name: _runs_in(tree, trained[name]) for name, tree in own.items()
    }

    def trace(constants: Collection[_Place]) -> _Form:
        inputs, form = list[Array](), list[Any]()
        arguments = {
            name: Argument.of(
                *(name, words.get(name, ''), tree, inputs),
                {n for at, n in constants if at == name},
                runs.get(name, {}),
            )
            for name, tree in trees.items()
        }

        def of_arrays(arrays: list[Array]) -> list[Array]:
            restored = {n: arguments[n].restored(trees[n], arrays) for n in trees}
            watches = [Watch(arguments[n], arg) for n, arg in restored.items()]
            named = {name: restored.pop(name) for name in kwargs}
            out = run(*restored.values(), **named)
            pairs, treedef = jax.tree_util.tree_flatten_with_path(out)
            written = [pair for watch in watches for pair in watch.writes()]
            paths = [str(path_of(keys)) for keys, _ in pairs]
            form[:] = treedef, paths, [write for write, _ in written]
            return [leaf for _, leaf in pairs] + [x for _, new in written for x in new]

        try:
            return _Form(jax.make_jaxpr(of_arrays)(inputs), arguments, *form)
        except NameError as error:
            raise _unbound(error) from error

    numbers = [
        (name, n)
        for name, tree in trees.items()
        for n, leaf in enumerate(tree.values)
        if is_number(leaf) and name not in (*own, *changing)
    ]
    # The rows of examples hold no number.
    values = {at: trees[at[0]].values[at[1]] for at in numbers}
    form = trace(numbers) if examples else _of_numbers(trace, values)
    program, arguments, treedef, outputs, writes = form
    changed = changed_by(program, writes, len(outputs))
    lost = [write.name for write, _ in changed if write.name not in (*own, *changing)]
    changed = [row for row in changed if row[0].name not in lost]
    asked = [*range(len(outputs)), *(n for _, places in changed for n in places)]
    jaxpr = program.jaxpr
    new = {slot for name in changing for slot in arguments[name].inputs}
    for name, takes in trained.items():
        for n, slots in enumerate(arguments[name].slots):
            are_new = [run.is_trained for run in runs[name].get(n, ())]
            are_new = are_new or [takes[n] is not False] * len(slots)
            new.update(itertools.compress(slots, are_new))
    new.update(slot for write, _ in changed for slot in write.slots)
    return Traced(
        partial.without_dead(
            program.replace(
                jaxpr=jaxpr.replace(outvars=[jaxpr.outvars[n] for n in asked])
            )
        ),
        *(arguments, {n: tree.paths for n, tree in own.items()}),
        *(isinstance(argnums, Sequence), changing),
        [n in new for n in range(len(jaxpr.invars))],
        *(treedef, outputs + [''] * (len(asked) - len(outputs))),
        *([write for write, _ in changed], lost),
    )


def _of_numbers(
    trace: Callable[[Collection[_Place]], _Form], numbers: Mapping[_Place, Scalar]
) -> _Form:
    """A trace in which numbers are inputs, but for those whose values are asked for.

    So are those for which the function does something else than for a traced number.
    """
    fixed = trace(numbers)

    def of(inputs: Collection[_Place]) -> _Form | None:
        form = trace([x for x in numbers if x not in inputs])
        arguments = form.arguments
        slots = {arguments[name].slots[n][0]: numbers[name, n] for name, n in inputs}
        return form if agrees(form.program, fixed.program, slots) else None

    return with_numbers([*numbers], of) or fixed


def _unbound(error: NameError) -> Exception:
    """The error for a collective outside of the function that is mapped."""
    if 'unbound axis name' not in str(error):
        return error
    return errors.ArgumentTypeError(
        f'The function has a collective, and is not mapped here: {error}\n'
        'Call sg.precompute in the mapped function, in that of early and in that of '
        'late:\n'
        'def early(params, x): return sg.precompute(loss, params, x, ...)'
        '.early(params, x)'
    )


def _runs_in(tree: Leaves, takes: Sequence[Any]) -> dict[int, list[Run]]:
    """For each leaf of which some rows are trained the runs of its rows."""
    runs_of: dict[int, list[Run]] = {}
    for n, (take, (path, leaf)) in enumerate(zip(takes, tree, strict=True)):
        shape = jnp.shape(leaf) if isinstance(take, filters.Part) else ()
        mask = None
        with contextlib.suppress(errors.PartError):  # Where a program tells which.
            mask = take.mask(shape, path) if shape else None
        if mask is None:
            continue
        rows = np.asarray(mask.any(tuple(range(1, len(shape)))))
        ends = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
        if len(ends) > 2:
            pairs = itertools.pairwise(ends)
            runs_of[n] = [Run(start, stop, bool(rows[start])) for start, stop in pairs]
    return runs_of
