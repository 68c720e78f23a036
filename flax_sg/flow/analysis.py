"""``gradient_flow``: which output of a function trains which parameter."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.errors import FlaxError
from jax.extend.core import ClosedJaxpr, Literal

from flax_sg import errors, filters
from flax_sg.errors.texts import listed, shown
from flax_sg.filters import predicates
from flax_sg.filters.paths import Path, natural_key
from flax_sg.flow import pullback
from flax_sg.flow.facts import UNKNOWN, Facts, Table, merged
from flax_sg.flow.pullback import Reach, has_tangent
from flax_sg.flow.report import (
    FLOWS,
    PARTLY,
    STOPPED,
    UNUSED,
    GradientFlow,
    unique,
)
from flax_sg.flow.uses import uses
from flax_sg.flow.way import Way, way
from flax_sg.flow.zeros import Mask
from flax_sg.internals import jaxprs
from flax_sg.trees.leaves import Leaves, arguments_of, is_differentiable, path_of
from flax_sg.trees.tied import each_once
from flax_sg.trees.trainable import DECLARED, Declared, chosen, states

# What JAX raises where a program asks for a value that has only a shape.
_ASKED_FOR_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

# The name of an output that is not in a tree.
ALONE = 'output'


def gradient_flow(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: filters.Where | Declared = DECLARED,
    **kwargs: Any,
) -> GradientFlow:
    """Tells which output of a function trains which parameter.

    The function is traced once, on shapes. Nothing is compiled or run.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> def losses(params, x):
    ...     code = jnp.tanh(x @ params['code'])
    ...     fixed = jax.lax.stop_gradient(params['code'])
    ...     return {'code': code.sum(), 'out': (x @ fixed * params['out']).sum()}
    >>> shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    >>> flow = sg.gradient_flow(losses, {'code': shape, 'out': shape}, shape)
    >>> flow
    GradientFlow(2 outputs, 2 parameters, 2 live)
    >>> flow.status_of('out', 'code'), flow.status_of('code', 'out')
    ('stopped', 'unused')
    >>> flow.why('out', 'code').by  # doctest: +ELLIPSIS
    'stop_gradient at ...:3 (losses)'

    A parameter that is ``'stopped'`` or ``'unused'`` has a gradient of exactly zero.
    A gradient is stopped by everything without a derivative: ``lax.stop_gradient``,
    ``sign``, ``round``, integers, and rules of ``custom_jvp`` or ``custom_vjp`` that
    return zeros.

    A parameter that ``'flows'`` may have a gradient of zero all the same, as in
    ``x - x``. The report also says ``'flows'`` if a gradient may come back:

    - through a loop after any number of turns, and through any branch of a conditional;
    - to any element of an array;
    - through collectives in ``shard_map``, which JAX cannot differentiate elsewhere;
    - through rules with ``symbolic_zeros=True``;
    - from a rule whose cotangent is a constant, to whatever output reads its result.

    Args:
        fun: a function of pytrees that returns a pytree of arrays of any shape, or an
            unbound module for its ``apply``.
        *args: its arguments, or their shapes (``jax.ShapeDtypeStruct``,
            ``jax.eval_shape``).
        argnums: which arguments hold the parameters, by default the first. With a tuple
            of them each path begins with the position: ``'1/kernel'``.
        has_aux: whether ``fun`` returns ``(outputs, aux)``. The report leaves ``aux``
            out. Default False.
        wrt: the parameters to differentiate, a filter of any kind. All others count as
            stopped. By default what ``sg.grad`` differentiates, see ``sg.trainable``.
        **kwargs: keyword arguments of the function, as for ``sg.live``.

    Returns:
        Plain data. Leaves that are no arrays are left out. Integers and random keys are
        stopped.

    Raises:
        ArgumentTypeError: if no output has a derivative, or one is no array.
        ArgumentTypeError: if the function needs values where there are shapes.
        ArgumentTypeError: if a parameter goes into a host callback, a mutable array or
            a primitive that JAX cannot differentiate.
        UnusedFilterError: if a part of ``wrt`` matches no leaf.
        TypeError: if there is no argument at a position in ``argnums``.

    Note:
        ``jax.ad_checkpoint.print_saved_residuals`` reads programs in this way. The
        result is that of symbolic zeros in ``jax.jvp``.
    """
    analysis = Analysis.of(fun, args, argnums, has_aux, wrt, kwargs)
    analysis.check_outputs()
    return analysis.report()


class Parameter(NamedTuple):
    """One leaf of the arguments that are differentiated.

    Attributes:
        path: its path.
        slots: the numbers of its arrays among the inputs of the program.
        is_wanted: whether the caller differentiates with respect to it, or which part.
    """

    path: Path
    slots: tuple[int, ...]
    is_wanted: bool | filters.Part

    def zero(self, found: Mapping[int, Mask], shape: Any, asked: bool) -> Mask:
        """The elements whose gradient is zero, or not asked for."""
        zeros = (found.get(slot, np.array(True)) for slot in self.slots)
        mask = functools.reduce(np.logical_and, zeros)
        if asked and isinstance(self.is_wanted, filters.Part):
            mask = mask | ~self.is_wanted.mask(shape, self.path)
        return mask


class Analysis(NamedTuple):
    """The trace of a function, with its parameters and outputs.

    Attributes:
        program: from the arrays in the arguments to the arrays that are returned,
            without ``aux``.
        name: the name of the function, and where it stands.
        outputs: the path of each leaf that is returned, and its shape, or the leaf
            itself if it is no array.
        parameters: the leaves of the differentiated arguments.
    """

    program: ClosedJaxpr
    name: str
    outputs: list[tuple[str, Any]]
    parameters: list[Parameter]

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        wrt: filters.Where | Declared = DECLARED,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Analysis:
        """Traces a function once and finds its parameters; see ``gradient_flow``.

        Python numbers in the differentiated arguments are traced. In the other
        arguments they are constants.
        """
        kwargs, is_module = dict(kwargs or {}), isinstance(fun, linen.Module)
        run = fun.apply if isinstance(fun, linen.Module) else fun
        # What a module writes comes back beside its output.
        writes = is_module and kwargs.get('mutable', False) is not False
        name = type(fun).__name__ if is_module else predicates.describe(run)
        parts = [each_once(arg) for arg in args]
        args = tuple(tree for tree, _ in parts)
        leaves, treedef = jax.tree.flatten((args, kwargs))
        ranges = _ranges(args, argnums)
        own = set(itertools.chain(*ranges.values()))
        inputs = {
            n: leaf
            for n, leaf in enumerate(leaves)
            if _is_array(leaf) or (n in own and is_differentiable(leaf))
        }
        if not inputs.keys() & own:
            raise errors.ArgumentTypeError(
                f'{name} has no parameters: argument {", ".join(map(str, ranges))} '
                'holds no arrays.\n'
                'Give arrays or their shapes, and say which argument holds them: '
                'argnums=1.'
            )
        outputs: list[tuple[str, Any]] = []

        def of_arrays(arrays: dict[int, Any]) -> list[Any]:
            full = [arrays.get(n, leaf) for n, leaf in enumerate(leaves)]
            args, options = treedef.unflatten(full)
            args = [tie(arg) for (_, tie), arg in zip(parts, args, strict=True)]
            out = run(*args, **options)
            if writes:
                out, _ = out
            if has_aux:
                out = _without_aux(out, name)
            pairs = jax.tree_util.tree_leaves_with_path(out)
            # JAX sorts the keys of dicts as text. People count: loss_2, loss_10.
            keys_of = itertools.chain(*(keys for keys, _ in pairs))
            if all(isinstance(key, jax.tree_util.DictKey) for key in keys_of):
                pairs.sort(key=lambda pair: natural_key(path_of(pair[0])))
            paths = unique([path_of(keys) for keys, _ in pairs])
            names = [path or ALONE for path in paths]
            shapes = [_shape_of(leaf) for _, leaf in pairs]
            outputs[:] = zip(names, shapes, strict=True)
            is_array = [isinstance(x, jax.ShapeDtypeStruct) for x in shapes]
            return list(itertools.compress((leaf for _, leaf in pairs), is_array))

        try:
            closed = jax.make_jaxpr(of_arrays)(inputs)
        except _ASKED_FOR_A_VALUE as error:
            raise errors.ArgumentTypeError(
                f'{name} needs the values of its arguments, but it is traced on their '
                "shapes. JAX's error above says where.\n"
                'Bind such an argument, as a number or a NumPy array: '
                'functools.partial(fun, ...).'
            ) from error
        except FlaxError as error:
            if is_module and 'params' not in args[0]:
                raise errors.ArgumentTypeError(
                    f'{type(fun).__name__} takes a dict of collections, and was given '
                    f'{", ".join(map(repr, args[0]))}.\n'
                    "Write the collection: sg.live(model, {'params': params}, x)."
                ) from error
            raise
        slots = {leaf: slot for slot, leaf in enumerate(inputs)}
        trees = arguments_of(args, argnums)
        parameters: list[Parameter] = []
        for position, mask in zip(trees, chosen([*trees.values()], wrt), strict=True):
            numbers = iter(ranges[position])
            parameters += _parameters(trees[position], mask, numbers, slots)
        return cls(closed, name, outputs, parameters)

    def check_outputs(self) -> None:
        """Raises if an output is no array, or none has a derivative.

        Raises:
            ArgumentTypeError: if it is so.
        """
        wrong = [
            (path, leaf)
            for path, leaf in self.outputs
            if not isinstance(leaf, jax.ShapeDtypeStruct)
        ]
        if not wrong and any(has_tangent(leaf) for _, leaf in self.outputs):
            return
        which, what = 'output', 'empty'
        if wrong or self.outputs:
            path, leaf = (wrong or self.outputs)[0]
            which += f' {path!r}' * (path != ALONE)
            what = f'{shown(leaf)}, which has no gradient'
        raise errors.ArgumentTypeError(
            f'The {which} of {self.name} is {what}.\n'
            'Return real or complex arrays to be differentiated, and all else as aux: '
            'return outputs, aux with has_aux=True.'
        )

    def unread(self) -> list[list[Mask]] | None:
        """What would be zero without a stop: what an output does not read.

        None if JAX does not differentiate what is behind a stop.
        """
        changed = self._replace(program=pullback.without_stops(self.program))
        try:
            return changed.zeros(asked=False)
        except pullback.RefusedError:
            return None

    def zeros(self, asked: bool = True) -> list[list[Mask]]:
        """For each output, and each parameter, the elements whose gradient is zero.

        Args:
            asked: whether what nobody asked about counts as zero, too.

        Raises:
            RefusedError: if JAX does not differentiate an output.
        """
        wanted = [slot for p in self.parameters if p.is_wanted for slot in p.slots]
        outputs = [n for n, (_, x) in enumerate(self.outputs) if has_tangent(x)]
        rows = pullback.zero_gradients(self.program, outputs, wanted)
        every, avals = np.array(True), self.program.in_avals
        found: list[list[Mask]] = [[every] * len(self.parameters) for _ in self.outputs]
        for output, row in zip(outputs, rows, strict=True):
            zero = dict(zip(wanted, row, strict=True))
            found[output] = [
                one.zero(zero, avals[one.slots[0]].shape, asked)
                for one in self.parameters
            ]
        return found

    def report(self) -> GradientFlow:
        """What there is to say."""
        try:
            zeros = unread = self.zeros()
        except pullback.RefusedError as error:
            raise self._refused(error.__cause__) from error.__cause__
        if any(zero.any() and not zero.all() for row in zeros for zero in row):
            unread = self.unread()
        reads, avals = Facts().of(self.program.jaxpr), self.program.in_avals
        inputs = reads.inputs()
        every = [merged(inputs[n] for n in one.slots).read for one in self.parameters]
        explained = functools.cache(lambda: Facts(Reach()).of(self.program.jaxpr))
        unclear = functools.cache(functools.partial(_unclear, reads, explained))
        shapes = [
            jax.ShapeDtypeStruct(avals[slots[0]].shape, avals[slots[0]].dtype)
            for _, slots, _ in self.parameters
        ]

        def cell(output: int, n: int) -> tuple[str, filters.Part | None]:
            zero, slots = zeros[output][n], self.parameters[n].slots
            if zero.all():
                return (STOPPED if every[n] >> output & 1 else UNUSED), None
            # With other inputs, the output may read more.
            if unread and (stopped := zero & ~unread[output][n]).any():
                return PARTLY, filters.part_of(~stopped, shapes[n].shape)
            is_known = unread is not None or not zero.any()
            if line := unclear(slots, is_known):
                return PARTLY, filters.Part(filters.Unclear(line))
            return FLOWS, None

        def explain(n: int, output: int) -> Way:
            if not self.parameters[n].is_wanted:
                return Way(by='wrt=, which leaves it out')
            return way(explained(), self.parameters[n].slots, output)

        cells = [
            [cell(output, n) for n in range(len(shapes))]
            for output in range(len(self.outputs))
        ]
        return GradientFlow(
            tuple(path for path, _ in self.outputs),
            tuple(parameter.path for parameter in self.parameters),
            tuple(shapes),
            tuple(tuple(status for status, _ in row) for row in cells),
            tuple(tuple(part for _, part in row) for row in cells),
            explain,
        )

    def _refused(self, error: BaseException | None) -> errors.ArgumentTypeError:
        """JAX cannot differentiate an output: says where, and what would pass there."""
        jaxpr = self.program.jaxpr
        found = pullback.culprit(self.program, error)
        what, names = self.name, list[str]()
        if found:
            lines = filter(None, map(jaxprs.source_of, reversed(found)))
            what = f'{found[-1].primitive.name} at {next(lines, UNKNOWN)}'
            before = jaxpr.eqns[: jaxpr.eqns.index(found[0])]
            floats = [v for v in found[0].invars if not isinstance(v, Literal)]
            until = jaxpr.replace(eqns=before, outvars=floats)
            inputs = Facts(Reach()).of(until).inputs()
            names = [
                repr(str(path))
                for path, slots, is_wanted in self.parameters
                if is_wanted and any(inputs[slot].live for slot in slots)
            ]
        of = f' of {listed(names)}' if names else ''
        return errors.ArgumentTypeError(
            f'A gradient{of} would pass through {what}, which JAX cannot '
            'differentiate.\n'
            'If none should come back from there, apply jax.lax.stop_gradient before.\n'
            'Otherwise write a rule for it: jax.custom_jvp or jax.custom_vjp.'
        )


def _ranges(args: Sequence[Any], argnums: int | Sequence[int]) -> dict[int, range]:
    """The numbers of the leaves of each differentiated argument, by its position."""
    positions = [argnums] if isinstance(argnums, int) else argnums
    for position in positions:
        if not -len(args) <= position < len(args):
            raise TypeError(
                f'argnums={position} is out of range: arguments are counted from 0, '
                f'and {len(args)} were given.'
            )
    sizes = (len(jax.tree.leaves(arg)) for arg in args)
    ends = list(itertools.accumulate(sizes, initial=0))
    of_all = [range(*pair) for pair in itertools.pairwise(ends)]
    return {position % len(args): of_all[position] for position in positions}


def _parameters(
    tree: Leaves,
    mask: Sequence[Any],
    numbers: Iterator[int],
    slots: Mapping[int, int],
) -> Iterator[Parameter]:
    """The parameters of one argument, whose leaves have these numbers.

    The state of an NNX model, such as batch statistics, is left out unless it is meant.
    """
    rows = zip(tree, mask, states(tree.tree), strict=True)
    for (path, leaf), is_wanted, is_state in rows:
        inside = itertools.islice(numbers, len(jax.tree.leaves(leaf)))
        mine = tuple(slots[n] for n in inside if n in slots)
        if mine and (is_wanted or not is_state):
            yield Parameter(path, mine, is_wanted)


def _unclear(
    reads: Table,
    explained: Callable[[], Table],
    slots: Sequence[int],
    is_known: bool,
) -> str:
    """The line of a use of which nobody can tell which part it trains, or ''.

    Args:
        reads: what is read in the program.
        explained: returns what is live in it, too, which takes longer to find.
        slots: the inputs of the program that are the parameter.
        is_known: whether the proof tells what is stopped from what is not read.
    """
    if is_known and not any(use.chooses for use in uses(reads, slots)):
        return ''
    found = uses(explained(), slots)
    live = [use for use in found if not use.stopped]
    if len(live) == len(found) or (is_known and not all(x.chooses for x in live)):
        return ''
    return next((use.source for use in live), '')


def _without_aux(out: Any, name: str) -> Any:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            'With has_aux=True the function has to return a pair (outputs, aux), but '
            f'{name} returned {shown(out)}.'
        )
    return out[0]


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_array(leaf) else leaf


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in 'biufcV'
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
