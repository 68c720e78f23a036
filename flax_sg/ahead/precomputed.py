"""``precompute``: what is not trained is computed once, and not at every step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters
from flax_sg.ahead.arguments import Name, check
from flax_sg.ahead.examples import Batch
from flax_sg.ahead.report import Report
from flax_sg.ahead.split import Split, split
from flax_sg.ahead.traced import Trace, traced
from flax_sg.ahead.writes import put
from flax_sg.errors.texts import brief, wrong_argument
from flax_sg.filters.predicates import describe
from flax_sg.internals import jaxprs
from flax_sg.internals.types import Array, Aval, Kwargs, PyTree
from flax_sg.programs.steps import Step, Value, numbers_in, run
from flax_sg.rendering.shown import InNotebooks
from flax_sg.trees.trainable import DECLARED, Declared

# What is kept, among the arguments of late.
_KEPT = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Precomputed(InNotebooks):
    """A function in two, see ``sg.precompute``.

    ``print`` shows a table: each value that is kept, its bytes, and the line that makes
    it; the share of the flops that is done once; why a frozen module is computed at
    each step; and whether what is kept belongs to a batch as a whole.
    """

    _trace: Trace
    _split: Split
    _batch: Batch | None
    _report: Report

    @property
    def kept(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of what is kept, as ``early`` returns it."""
        return [*map(jaxprs.shape_of, self._types)]

    @property
    def axes(self) -> list[int | None]:
        """For ``jax.vmap``, where examples are in what is kept of the loss of one.

        0 for what depends on the data, and None for what does not: it is kept once.
        """
        return [0 if n in self._split.data else None for n in self._split.kept]

    @property
    def reads(self) -> filters.Filter:
        """The parameters that ``late`` reads, for ``sg.partition``.

        Others may be ABSENT. Those that change are among them, read or not.
        """
        read = self._split.changing.union(numbers_in(self._split.outputs))
        read.update(n for step in self._split.late for n in step.read())
        known, places_read = set[Any](), set[Any]()
        for k, (name, paths) in enumerate(self._trace.own.items()):
            slots = self._trace.arguments[name].slots
            for path, inputs in zip(paths, slots, strict=True):
                where, names = path.place
                # Late has the arguments with parameters first.
                if self._trace.has_positions:
                    names = str(k), *names[1:]
                place = where, names
                known.add(place)
                places_read.update(() if read.isdisjoint(inputs) else {place})
        return filters.Derived(frozenset(places_read), frozenset(known), 'ahead.reads')

    @property
    def _types(self) -> list[Aval]:
        avals = [self._split.avals[n] for n in self._split.kept]
        if self._batch is None:
            return avals
        shapes = [*map(jaxprs.shape_of, avals)]
        return jax.make_jaxpr(self._in_front)(shapes).out_avals

    def _in_front(self, kept: list[Array]) -> list[Array]:
        return self._batch.in_front(self._split.kept, kept) if self._batch else kept

    def early(self, *args: Any, **kwargs: Any) -> list[Array]:
        """Computes once what is kept.

        Args:
            *args: the arguments of the function, but for those in ``each=``, of the
                shapes that were traced. What early does not read may be ``ABSENT``.
            **kwargs: its keyword arguments, but for those in ``each=``.

        Returns:
            A list of arrays, of the shapes in ``kept``. They are copies, or new:
            buffers of the arguments may be filled again.

        Raises:
            TypeError: for other arguments than were traced.
            ArgumentTypeError: if one has another structure, shape or constant.
            AbsentLeafError: if a leaf is ABSENT that early reads.
        """
        values = self._values(self._given('early', args, kwargs))
        # A loader may fill its buffers again, and an array may be donated.
        for slot in values.keys() & self._trace.data.keys():
            if slot in self._split.kept or not isinstance(values[slot], jax.Array):
                values[slot] = jnp.array(values[slot])
        kept = self._run('early', self._split.early, values, self._split.kept)
        return self._in_front(kept)

    def late(self, *args: Any, **kwargs: Any) -> PyTree:
        """The function, of its parameters, what is kept, and what is in ``each=``.

        Parameters that ``wrt=`` of ``precompute`` does not name have no gradient. What
        the function writes to a model of NNX is written: running averages, counts of
        random keys.

        Args:
            *args: the arguments that hold parameters, the list that early returned, the
                arguments in ``each=``. What late does not read may be ``ABSENT``.
            **kwargs: the keyword arguments in ``each=``.

        Returns:
            What the function returns.

        Raises:
            TypeError: for other arguments than were traced.
            ArgumentTypeError: if one has another structure, shape or constant, or if
                the data are given in place of what is kept.
            AbsentLeafError: if a leaf is ABSENT that late reads.
        """
        given = self._given('late', args, kwargs)
        values = self._values(given)
        # The part of a fixed parameter's gradient that goes through what is kept is
        # lost. So it has none, whoever differentiates.
        for slot in values.keys() - self._split.changing:
            values[slot] = jax.lax.stop_gradient(values[slot])
        values.update(zip(self._split.kept, self._checked(given[_KEPT]), strict=True))
        out = self._run('late', self._split.late, values, self._split.outputs)
        treedef, writes = self._trace.treedef, self._trace.writes
        written = {write.name for write in writes}
        holders = {n: self._trace.arguments[n].holders(given[n]) for n in written}
        put(writes, holders, out[treedef.num_leaves :])
        return jax.tree.unflatten(treedef, out[: treedef.num_leaves])

    def __str__(self) -> str:
        return str(self._report)

    def __repr__(self) -> str:
        kept = ', '.join(self._split.avals[n].str_short() for n in self._split.kept)
        return f'<precomputed: keeps {kept or "nothing"}>'

    def _run(
        self,
        part: str,
        steps: Sequence[Step],
        values: dict[int, Array],
        asked: Sequence[Value],
    ) -> list[Array]:
        known = {*values, *self._split.constants}
        for step in (*steps, None):
            read = step.read() if step else [x for x in asked if isinstance(x, int)]
            if missing := {*read} - known:
                slot = min(missing)
                line = step.source if step else ''
                raise errors.AbsentLeafError(
                    f'{self._trace.names[slot][1]} is ABSENT, and {part} reads it'
                    f'{" at " + line if line else ""}.\n'
                    'Give its value. ABSENT may be what a part does not read.'
                )
            known.update(step.outs if step else ())
        return run(steps, {**self._split.constants, **values}, asked)

    def _names(self, part: str) -> list[Name]:
        """The arguments of early or of late."""
        own, each = self._trace.own, self._trace.each
        if part == 'late':
            return [*own, _KEPT, *each]
        return [name for name in self._trace.arguments if name not in each]

    def _given(
        self, part: str, args: Sequence[Any], kwargs: Kwargs
    ) -> dict[Name, PyTree]:
        """The arguments by their names."""
        positions = [name for name in self._names(part) if isinstance(name, int)]
        given = {**dict(zip(positions, args, strict=False)), **kwargs}
        if len(args) != len(positions) or given.keys() != {*self._names(part)}:
            raise TypeError(
                f'{part} was given other arguments than precompute traced.\n'
                f'Write {self._call(part)}.'
            )
        return given

    def _values(self, given: Mapping[Name, PyTree]) -> dict[int, Any]:
        """The inputs of the program that some arguments hold."""
        values = dict[int, Any]()
        for n, (name, arg) in enumerate(given.items()):
            if name != _KEPT:
                # Errors count as the caller does.
                shown = n if isinstance(name, int) else name
                argument = self._trace.arguments[name]._replace(name=shown)
                values.update(argument.values(arg, self._split.avals))
        return values

    def _checked(self, kept: Any) -> list[Array]:
        """What is kept, as it is in the program."""
        types = self._types
        if jax.tree.structure(kept) != jax.tree.structure([0] * len(types)):
            lists = isinstance(kept, list)
            given = f'a list of {len(jax.tree.leaves(kept))}' if lists else brief(kept)
            raise errors.ArgumentTypeError(
                f'late was given {given} in place of what is kept, and early returns '
                f'a list of {len(types)}.\n'
                f'Write kept = {self._call("early")} and {self._call("late")}.'
            )
        arrays = list[Array]()
        for n, (array, aval) in enumerate(zip(kept, types, strict=True)):
            if np.shape(array) == aval.shape:
                array = jaxprs.placed(array, aval)
            check(f'Array {n} of what is kept', array, aval)
            arrays.append(array)
        if self._batch is None:
            return arrays
        return self._batch.back(self._split.kept, arrays, self._split.avals)

    def _call(self, part: str) -> str:
        """How a part is called."""
        arguments = self._trace.arguments
        words = (
            'kept' if name == _KEPT else arguments[name].as_written
            for name in self._names(part)
        )
        return f'ahead.{part}({", ".join(words)})'


def precompute(
    fun: Callable[..., Any],
    params: PyTree,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    wrt: filters.Where | Declared = DECLARED,
    each: Name | Sequence[Name] = (),
    examples: bool = False,
    **kwargs: Any,
) -> Precomputed:
    """Splits a function: what depends on nothing that changes is computed once.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> def loss(params, x):
    ...     return jnp.sum(x @ params['body'] @ params['head'])
    >>> params, x = {'body': jnp.ones((4, 2)), 'head': jnp.ones(2)}, jnp.ones((3, 4))
    >>> ahead = sg.precompute(loss, params, x, wrt='head')
    >>> ahead.kept
    [ShapeDtypeStruct(shape=(3, 2), dtype=float32)]
    >>> kept = ahead.early(params, x)
    >>> sg.grad(ahead.late, wrt='head')(params, kept)
    {'body': ABSENT, 'head': Array([12., 12.], dtype=float32)}

    Nothing is computed here: the function is traced once, on shapes. ``early`` and
    ``late`` are functions of arrays as any other, for ``jax.jit``, ``jax.vmap`` and
    ``sg.grad``. Values are those of ``fun``; jitted, they may differ in the last bits.

    Args:
        fun: a function of arrays, or an unbound module for its ``apply``, as for
            ``sg.live``. What an effect returns, such as a read of a ref, changes.
        params: its first argument, or the shapes.
        *args: its other arguments, or their shapes. Those not in ``each`` are data.
            A number or a bool of Python is a constant of the split, and another one
            in its place raises: give an array.
        argnums: which arguments hold the parameters.
        wrt: the parameters that are trained: those that change from step to step, or
            rows of these. Of a stack, the first layers are computed once if they are
            frozen. Give what ``sg.live`` returns; by default all parameters change.
            Variables of NNX that the function writes change, too.
        each: the positions, or names, of other arguments that change: keys, a step, a
            state.
        examples: whether all data hold examples along their first axis. Then all that
            is kept has this axis in front, and examples may be shuffled, stored and
            indexed. ``early`` and ``late`` take as many examples as were traced. What
            reads no data is made at each step.
        **kwargs: keyword arguments of the function. They are given by name to
            ``early``, or to ``late`` if they are in ``each``.

    Returns:
        An object with two functions. ``early`` takes the arguments but for those in
        ``each``, and returns what is kept. ``late`` takes the arguments of
        ``argnums``, then what is kept, then those in ``each``. What one of them does
        not read may be ``sg.ABSENT``: ``reads`` is a filter of what late reads. For
        ``jax.vmap`` of the loss of one example, ``axes`` tells what is kept once.

    Raises:
        ArgumentTypeError: when ``each`` names parameters or no argument, or for
            arguments of another structure or shape than traced. With ``examples``, when
            data have no axis of examples, or when a frozen module reads what mixes
            them, such as a batch mean.
        AbsentLeafError: at the call, when a leaf is ABSENT that is read.
    """
    if not callable(fun):
        write = "sg.precompute(loss, params, x, wrt='head/**')"
        raise wrong_argument(fun, 'function', write)
    args = (params, *args)
    trace = traced(fun, args, kwargs, argnums, wrt, each)
    batch = Batch(trace.data) if examples else None
    parts = split(trace.program, trace.changes, trace.is_data, batch)
    report = Report(trace, parts, batch, not isinstance(wrt, Declared))
    report.check_apart()
    for line in (report.lost(describe(fun)), report.worth()):
        if line:
            warnings.warn(line, stacklevel=2)
    return Precomputed(trace, parts, batch, report)
