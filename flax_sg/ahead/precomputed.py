"""``precompute``: what is not trained is computed once, and not at every step."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from flax_sg import errors, filters
from flax_sg.ahead.arguments import (
    Argument,
    Name,
    arrays_in,
    check,
    check_keywords,
    named_in,
    words_of,
)
from flax_sg.ahead.examples import Batch, of_the_batch
from flax_sg.ahead.report import Root, kept_of, obstacles, report
from flax_sg.ahead.rows import Mask
from flax_sg.ahead.split import split
from flax_sg.ahead.steps import Split, Step
from flax_sg.ahead.writes import Watch, Write, changed_by, put
from flax_sg.filters.predicates import describe
from flax_sg.internals import jaxprs
from flax_sg.trees.leaves import Leaves, arguments_of, leaves_of, path_of
from flax_sg.trees.trainable import DECLARED, Declared, chosen


@dataclasses.dataclass(frozen=True, eq=False)
class Precomputed:
    """A function in two, see ``sg.precompute``.

    ``print`` shows a table: each value that is kept, its bytes, and the line that makes
    it; the share of the flops that is done once; why a frozen module is computed at
    each step; and what mixes the examples of a batch in what is kept.
    """

    _split: Split
    _arguments: dict[Name, Argument]
    _params: tuple[int, ...]
    _each: tuple[Name, ...]
    _out: Any
    _outputs: tuple[str, ...]
    _writes: list[Write]
    _data: dict[int, tuple[str, Any]]
    _batch: Batch | None
    _roots: dict[int, Root]

    @property
    def kept(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of what is kept."""
        return tuple(map(jaxprs.shape_of, self._types))

    @property
    def _types(self) -> list[Any]:
        avals = [self._split.avals[n] for n in self._split.kept]
        if self._batch is None:
            return avals
        shapes = [*map(jaxprs.shape_of, avals)]
        return jax.make_jaxpr(self._in_front)(shapes).out_avals

    def _in_front(self, kept: list[Any]) -> list[Any]:
        return self._batch.in_front(self._split.kept, kept) if self._batch else kept

    def early(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Computes once what is kept, of the arguments but for those in ``each=``."""
        names = [name for name in self._arguments if name not in self._each]
        values = self._values('early', names, args, kwargs)
        return self._in_front(
            self._run('early', self._split.early, values, self._split.kept)
        )

    def late(self, *args: Any, **kwargs: Any) -> Any:
        """The function, of its parameters, what is kept, and what is in ``each=``.

        Parameters that ``wrt=`` of ``precompute`` does not name have no gradient. What
        the function writes to a model of NNX is written: running averages, counts of
        random keys.
        """
        first = len(self._params)
        names: list[Name] = [*self._params, *self._each]
        if len(args) <= first:
            raise self._miscounted('late', names, 1)
        others = (*args[:first], *args[first + 1 :])
        values = self._values('late', names, others, kwargs, 1)
        # The part of a fixed parameter's gradient that goes through what is kept is
        # lost. So it has none, whoever differentiates.
        for slot, array in values.items():
            values[slot] = self._stopped(slot, array)
        kept = jax.tree.leaves(args[first])
        if len(kept) != len(self._split.kept):
            raise errors.ArgumentTypeError(
                f'What is kept has {len(kept)} arrays, and {len(self._split.kept)} '
                'were traced.\n'
                f'Give what early returned as argument {first} of late.'
            )
        for n, (array, aval) in enumerate(zip(kept, self._types, strict=True)):
            check(f'Array {n} of what is kept', array, aval)
        if self._batch is not None:
            kept = self._batch.back(self._split.kept, kept, self._split.avals)
        values.update(zip(self._split.kept, kept, strict=True))
        out = self._run('late', self._split.late, values, self._split.outputs)
        count = self._out.num_leaves
        positions = (name for name in names if isinstance(name, int))
        given = {**dict(zip(positions, others, strict=True)), **kwargs}
        written = {write.name for write in self._writes}
        holders = {n: self._arguments[n].holders(given[n]) for n in written}
        put(self._writes, holders, out[count:])
        return jax.tree.unflatten(self._out, out[:count])

    def _stopped(self, slot: int, array: Any) -> Any:
        """An input whose gradient ends where it does not change."""
        rows = self._split.rows.get(slot)
        is_plain = rows is None or not self._split.reads_fixed_rows(slot)
        if slot in self._split.changing and is_plain:
            return array
        stopped = jax.lax.stop_gradient(array)
        if rows is None:
            return stopped
        mask = rows.changes.reshape(-1, *(1 for _ in array.shape[1:]))
        return jnp.where(mask, array, stopped)

    def __str__(self) -> str:
        text = report(self._split, self._outputs, self._roots)
        is_whole = self._batch is None and self._split.kept
        note = of_the_batch(self._split, self._data) if is_whole else ''
        return f'{text}\n{note}' if note else text

    def __repr__(self) -> str:
        kept = ', '.join(self._split.avals[n].str_short() for n in self._split.kept)
        return f'<precomputed: keeps {kept or "nothing"}>'

    def _run(
        self, part: str, steps: Sequence[Step], values: dict[int, Any], asked: Any
    ) -> list[Any]:
        known = {*values, *self._split.constants}
        for step in (*steps, None):
            read = step.read() if step else [x for x in asked if isinstance(x, int)]
            if missing := {*read} - known:
                twins = {rows.twin: n for n, rows in self._split.rows.items()}
                slot = min(twins.get(n, n) for n in missing)
                line = step.source if step else ''
                raise errors.AbsentLeafError(
                    f'{self._name_of(slot)} is ABSENT, and {part} reads it'
                    f'{" at " + line if line else ""}.\n'
                    'Give its value. ABSENT may be what a part does not read.'
                )
            known.update(step.outs if step else ())
        return self._split.run(steps, values, asked)

    def _name_of(self, slot: int) -> str:
        places = (
            argument.at(number)
            for argument in self._arguments.values()
            for number, slots in enumerate(argument.slots)
            if slot in slots
        )
        return next(places)

    def _values(
        self,
        part: str,
        names: Sequence[Name],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        kept: int = 0,
    ) -> dict[int, Any]:
        """The inputs of the program that some arguments hold."""
        positions = [name for name in names if isinstance(name, int)]
        words = {name for name in names if isinstance(name, str)}
        if len(args) != len(positions) or words != {*kwargs}:
            raise self._miscounted(part, names, kept)
        given = {**dict(zip(positions, args, strict=True)), **kwargs}
        # Errors count as the caller does.
        others = kept and len(self._params)
        own: dict[Name, Name] = {
            name: n + (n >= others) * kept for n, name in enumerate(positions)
        }
        values: dict[int, Any] = {}
        for name, arg in given.items():
            argument = self._arguments[name]._replace(name=own.get(name, name))
            values.update(argument.values(arg, self._split.avals))
        for n, rows in self._split.rows.items():
            if n in values:
                values[rows.twin] = values[n]
        return values

    def _miscounted(self, part: str, names: Sequence[Name], kept: int) -> TypeError:
        arguments = [self._arguments[name] for name in names]
        words = [argument.as_written for argument in arguments]
        first = len(self._params)
        words = [*words[:first], 'kept', *words[first:]] if kept else words
        return TypeError(
            f'{part} was given other arguments than precompute traced.\n'
            f'Write ahead.{part}({", ".join(words)}).'
        )


def precompute(
    fun: Callable[..., Any],
    params: Any,
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
    (ShapeDtypeStruct(shape=(3, 2), dtype=float32),)
    >>> kept = ahead.early(params, x)
    >>> sg.grad(ahead.late, wrt='head')(params, kept)
    {'body': ABSENT, 'head': Array([12., 12.], dtype=float32)}

    Nothing is computed here: the function is traced once, on shapes. ``early`` and
    ``late`` are functions of arrays as any other, for ``jax.jit``, ``jax.vmap`` and
    ``sg.grad``. Values are those of ``fun``; jitted, they may differ in the last bits.

    Args:
        fun: a function of arrays, without effects in what is computed once; or an
            unbound module for its ``apply``, as for ``sg.live``.
        params: its first argument, or the shapes.
        *args: its other arguments, or their shapes. Those not in ``each`` are data.
            Python numbers in data are constants, such as ``train=True``.
        argnums: which arguments hold the parameters.
        wrt: the parameters that are trained: those that change from step to step, or
            rows of these. Of a stack, the first layers are computed once if they are
            frozen. Give what ``sg.live`` returns; by default all parameters change.
            Variables of NNX that the function writes change, too.
        each: the positions, or names, of other arguments that change: keys, a step, a
            state.
        examples: whether all data hold examples along their first axis. Then all that
            is kept has this axis in front, and its rows may be shuffled, stored and
            indexed. ``early`` and ``late`` take as many examples as were traced.
        **kwargs: keyword arguments of the function. They are given by name to
            ``early``, or to ``late`` if they are in ``each``.

    Returns:
        An object with two functions. ``early`` takes the arguments but for those in
        ``each``, and returns what is kept. ``late`` takes the arguments of
        ``argnums``, then what is kept, then those in ``each``. What one of them does
        not read may be ``sg.ABSENT``: frozen weights of ``late``.

    Raises:
        ArgumentTypeError: when ``each`` names parameters or no argument, when an effect
            would be computed once, or for arguments of another structure or shape than
            traced. With ``examples``, when data have no axis of examples, or when a
            frozen module reads what mixes them, such as a batch mean.
        AbsentLeafError: at the call, when a leaf is ABSENT that is read.
    """
    check_keywords(fun, kwargs)
    args = (params, *args)
    own = arguments_of(args, argnums)
    changing = named_in(each, len(args), kwargs, own)
    trained = dict(zip(own, chosen([*own.values()], wrt), strict=True))
    trees: dict[Name, Leaves] = dict(enumerate(map(leaves_of, args)))
    trees.update({name: leaves_of(arg) for name, arg in kwargs.items()})
    inputs: list[Any] = []
    run = fun.apply if isinstance(fun, linen.Module) else fun
    words: dict[Name, str] = dict(enumerate(words_of(run, len(args))))
    arguments = {
        name: Argument.of(
            name, words.get(name, ''), tree, inputs, name in own or name in changing
        )
        for name, tree in trees.items()
    }
    form: list[Any] = []

    def of_arrays(arrays: list[Any]) -> list[Any]:
        given = {name: arguments[name].restored(trees[name], arrays) for name in trees}
        watches = {name: Watch(arguments[name], arg) for name, arg in given.items()}
        named = {name: given[name] for name in kwargs}
        out = run(*(given[n] for n in range(len(args))), **named)
        pairs, treedef = jax.tree_util.tree_flatten_with_path(out)
        found = [pair for watch in watches.values() for pair in watch.writes()]
        paths = [path_of(keys) for keys, _ in pairs]
        form[:] = treedef, paths, [write for write, _ in found]
        return [leaf for _, leaf in pairs] + [x for _, new in found for x in new]

    program = jax.make_jaxpr(of_arrays)(inputs)
    treedef, paths, found = form
    changed = changed_by(program, found, len(paths))
    lost = [x.name for x, _ in changed if x.name not in (*own, *changing)]
    changed = [row for row in changed if row[0].name not in lost]
    writes = [write for write, _ in changed]
    asked = [*range(len(paths)), *(n for _, numbers in changed for n in numbers)]
    paths += [''] * (len(asked) - len(paths))
    written = {slot for write in writes for slot in write.slots}
    changes: list[bool | Mask] = [False] * len(inputs)
    is_data = [False] * len(inputs)
    for name, argument in arguments.items():
        for number, slots in enumerate(argument.slots):
            for slot in slots:
                if name in own:
                    path, leaf = trees[name].paths[number], trees[name].values[number]
                    takes = slot in written or trained[name][number]
                    changes[slot] = _trained(takes, leaf, path)
                else:
                    changes[slot] = name in changing
                is_data[slot] = name not in own
    data = [a for name, a in arguments.items() if name not in (*own, *changing)]
    of_data = arrays_in(data, program.in_avals)
    batch = Batch(of_data) if examples else None
    mixes = batch and batch.mixes
    parts = split(program, changes, is_data, mixes=mixes, asked=asked)
    roots = _roots(arguments, own, written, batch)
    if batch is not None:
        _check_apart(parts, batch, roots)
    made = Precomputed(
        *(parts, arguments, tuple(own), changing, treedef),
        *(paths, writes, of_data, batch, roots),
    )
    if lost:
        warnings.warn(
            f'{describe(fun)} writes to {arguments[lost[0]].title}, a model of NNX, '
            'and early and late do not.\n'
            'Name the argument in argnums=, so that late writes to it, or call its '
            'eval().',
            stacklevel=2,
        )
    if not parts.early:
        warnings.warn(
            'Nothing is computed once: all that costs something reads what changes.\n'
            f'{made}',
            stacklevel=2,
        )
    return made


def _trained(takes: Any, leaf: Any, path: str) -> bool | Mask:
    """Whether a leaf is trained, or which of its rows."""
    if not isinstance(takes, filters.Part) or not jnp.ndim(leaf):
        return bool(takes)
    shape = jnp.shape(leaf)
    with contextlib.suppress(errors.PartError):  # The program tells which.
        mask = np.asarray(takes.mask(shape, path).any(tuple(range(1, len(shape)))))
        return mask if mask.size > 1 else bool(mask)
    return True


def _roots(
    arguments: Mapping[Name, Argument],
    own: Collection[Name],
    written: Set[int],
    batch: Batch | None,
) -> dict[int, Root]:
    """What the inputs are, and the values in which examples are mixed."""
    mixed = batch.mixed if batch else {}
    roots = {number: Root(what, 'mix', '') for number, what in mixed.items()}
    for name, argument in arguments.items():
        for path, slots in zip(argument.paths, argument.slots, strict=True):
            is_own = name in own
            kind = 'parameter' if is_own else 'argument'
            root = Root(path if is_own else argument.title, kind, path)
            roots.update(dict.fromkeys(slots, root))
            state = dict.fromkeys(written & {*slots}, Root(path, 'written', path))
            roots.update(state)
    return roots


def _check_apart(parts: Split, batch: Batch, roots: Mapping[int, Root]) -> None:
    """Raises if a frozen module, or what is kept, is not of single examples."""
    faults = [str(row) for row in obstacles(parts, roots) if row.reason.kind == 'mix']
    faults += [
        f'{row.type} ({row.line}) is the same for all examples.'
        for number, row in zip(parts.kept, kept_of(parts), strict=True)
        if not batch.is_of_examples(number)
    ]
    if faults:
        raise errors.ArgumentTypeError(
            f'{faults[0]}\n'
            'With examples=True, what is frozen is computed for each example by '
            'itself. An operation that flax_sg does not know counts as mixing them.\n'
            "Write nn.Frozen(module, state='eval') for a module that normalizes over "
            'the batch, or leave examples= out.'
        )
