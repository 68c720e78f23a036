"""``gradient_flow``: which output of a function trains which parameter."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from flax_sg import errors, filters
from flax_sg.errors.texts import shown
from flax_sg.filters import predicates
from flax_sg.filters.paths import Path
from flax_sg.flow.dependence import FROM_NOTHING, REFUSED, Dependence
from flax_sg.flow.derivatives import Derivatives, has_tangent, values
from flax_sg.flow.programs import Program
from flax_sg.flow.report import GradientFlow
from flax_sg.flow.statuses import FLOWS, STOPPED, UNUSED
from flax_sg.flow.uses import UNKNOWN, Uses
from flax_sg.internals import jaxprs
from flax_sg.trees.leaves import leaves_of, path_of
from flax_sg.trees.trainable import chosen


def gradient_flow(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: filters.Where | None = None,
) -> GradientFlow:
    """Says which output leaf depends differentiably on which parameter leaf.

    It looks at the program, not at numbers: the function is run once on shapes, and
    nothing is compiled. What JAX gives no derivative cuts (``lax.stop_gradient``,
    ``sign``, ``round``, integers, a rule of ``custom_jvp`` or ``custom_vjp`` that
    returns zeros); ``x - x`` flows. The promise is one-sided: what is called
    ``'stopped'`` or ``'unused'`` has a gradient of exactly zero.

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
    >>> flow.stopped_in('code')
    (1, 2)

    It says ``'flows'`` where JAX gives no more: for what a loop carries, after any
    number of turns; for every branch of a conditional; for all of an array if some of
    it flows; for primitives whose rule works only in its place, such as collectives in
    ``shard_map``; for rules with ``symbolic_zeros=True``. A cotangent that a rule makes
    out of nothing is taken to be there for every output that reads what the rule is of.

    Args:
        fun: a function of pytrees that returns arrays, of any shape, in a pytree; or an
            unbound module, which stands for its ``apply``.
        *args: its arguments, or their shapes (``jax.ShapeDtypeStruct``,
            ``jax.eval_shape``).
        argnums: which of them hold the parameters. For several, each path begins with
            the number of the argument.
        has_aux: whether ``fun`` returns a pair, the second not looked at.
        wrt: what is differentiated: any kind of filter. All else counts as stopped. By
            default what ``sg.grad`` differentiates, see ``sg.trainable``.

    Returns:
        Plain data. What is no array is no parameter; integers and keys are stopped.

    Raises:
        ArgumentTypeError: if nothing that is returned could be differentiated, or
            if it is no array.
        ArgumentTypeError: if the function needs values where there are shapes.
        ArgumentTypeError: if a parameter goes into a host callback, a mutable array, or
            anything that JAX cannot differentiate.
        UnusedFilterError: if a part of ``wrt`` matches no leaf.

    Note:
        ``jax.ad_checkpoint.print_saved_residuals`` looks at programs in this way; the
        dependences are those of symbolic zeros in ``jax.jvp``.
    """
    analysis = Analysis.of(fun, args, argnums, has_aux, wrt)
    analysis.check_outputs()
    return analysis.report()


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of the arguments that are differentiated.

    Attributes:
        path: its path.
        slots: the numbers of its arrays among the inputs of the program.
        is_wanted: whether the caller differentiates by it.
    """

    path: Path
    slots: tuple[int, ...]
    is_wanted: bool


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A program, with the parameters in it.

    Attributes:
        program: the program.
        outputs: each output leaf that is looked at: its path, what it is, and its
            number among the outputs of the program, None if it is no array.
        parameters: the parameters.
    """

    program: Program
    outputs: tuple[tuple[str, Any, int | None], ...]
    parameters: tuple[Parameter, ...]

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        wrt: filters.Where | None = None,
    ) -> Analysis:
        """Traces a function and finds its parameters; see ``gradient_flow``."""
        given = [argnums] if isinstance(argnums, int) else list(argnums)
        for number in given:
            if not -len(args) <= number < len(args):
                raise TypeError(
                    f'argnums={number}: arguments are counted from 0, and '
                    f'{len(args)} were given'
                )
        numbers = [number % len(args) for number in given]
        program = Program.of(fun, args, numbers)
        trees = [leaves_of(args[number]) for number in numbers]
        slots = {leaf: slot for slot, leaf in enumerate(program.inputs)}
        parameters: list[Parameter] = []
        masks = chosen(trees, wrt)
        for number, tree, mask in zip(numbers, trees, masks, strict=True):
            start = sum(len(jax.tree.leaves(arg)) for arg in args[:number])
            for (path, leaf), is_wanted in zip(tree, mask, strict=True):
                stop = start + len(jax.tree.leaves(leaf))
                mine = tuple(slots[n] for n in range(start, stop) if n in slots)
                start = stop
                if not isinstance(argnums, int):
                    parts = str(number), *filter(None, path.parts)
                    path = Path.of(path.collection, parts)
                if mine:
                    parameters.append(Parameter(path, mine, is_wanted))
        outputs = tuple(_outputs_of(program, has_aux))
        return cls(program, outputs, tuple(parameters))

    def check_outputs(self) -> None:
        """Raises if an output is no array, or none has a derivative.

        Raises:
            ArgumentTypeError: if it is so.
        """
        numbers = (jax.ShapeDtypeStruct, bool, int, float, complex)
        wrong = [
            (path, f'{type(leaf).__name__} object')
            for path, leaf, _ in self.outputs
            if not isinstance(leaf, numbers)
        ]
        leaves = [leaf for _, leaf, _ in self.outputs]
        if wrong or not any(isinstance(x, float) or has_tangent(x) for x in leaves):
            found = wrong or [
                (path, str(getattr(leaf, 'dtype', type(leaf).__name__)))
                for path, leaf, _ in self.outputs
            ]
            raise _no_output(predicates.describe(self.program.fun), found)

    def trained(self) -> list[bool]:
        """For each parameter whether it flows to any output that is looked at."""
        flow, read = self.dependences()
        asked = sum(1 << out for *_, out in self.outputs if out is not None)
        return [bool(live & asked) for live, _ in self._masks(flow, read)]

    def report(self) -> GradientFlow:
        """What there is to say."""
        jaxpr = self.program.closed.jaxpr
        flow, read = self.dependences()
        masks = self._masks(flow, read)
        owners: list[int | None] = [None] * len(jaxpr.invars)
        for index, parameter in enumerate(self.parameters):
            for slot in parameter.slots:
                owners[slot] = index
        ends = [out for *_, out in self.outputs if out is not None]
        uses = Uses(flow, read, len(self.parameters)).of(jaxpr, owners, ends)
        avals = [jaxpr.invars[parameter.slots[0]].aval for parameter in self.parameters]
        return GradientFlow(
            tuple(path for path, *_ in self.outputs),
            tuple(parameter.path for parameter in self.parameters),
            tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals),
            tuple(
                tuple(_status(live, used, out) for live, used in masks)
                for *_, out in self.outputs
            ),
            tuple(
                tuple(
                    dataclasses.replace(
                        use, stopped=use.stopped or not parameter.is_wanted
                    )
                    for use in found
                )
                for found, parameter in zip(uses, self.parameters, strict=True)
            ),
        )

    def _masks(self, flow: Dependence, read: Dependence) -> list[tuple[int, int]]:
        """For each parameter the outputs that it flows to, and those that read it."""
        jaxpr = self.program.closed.jaxpr
        flows, reads = flow.of(jaxpr), read.of(jaxpr)
        count = len(jaxpr.outvars)
        self._check_refused(flow, [row >> count + REFUSED & 1 for row in flows])
        out: list[tuple[int, int]] = []
        for parameter in self.parameters:
            live = used = 0
            for slot in parameter.slots:
                made = flows[slot] >> count + FROM_NOTHING & 1
                # A rule that makes one is run if its outputs are used in any way, as
                # zeros may be handed back to it.
                live |= flows[slot] | (reads[slot] if made else 0)
                used |= reads[slot] | live
            out.append((live if parameter.is_wanted else 0, used))
        return out

    @staticmethod
    def dependences() -> tuple[Dependence, Dependence]:
        """Differentiable dependence, and that on values."""
        return Dependence(Derivatives(), has_tangent, control=False), values()

    def _check_refused(self, flow: Dependence, refused: Sequence[int]) -> None:
        """Raises if a parameter goes into what JAX cannot differentiate."""
        met = [
            parameter.path
            for parameter in self.parameters
            if parameter.is_wanted and any(refused[slot] for slot in parameter.slots)
        ]
        if met:
            assert isinstance(flow.leaf, Derivatives)
            found = [
                (eqn.primitive.name, jaxprs.source_of(eqn) or UNKNOWN)
                for eqn, _ in flow.leaf.refused
            ]
            cause = next((error for _, error in flow.leaf.refused if error), None)
            raise _not_traced(met, list(dict.fromkeys(found))) from cause


def _status(live: int, used: int, out: int | None) -> str:
    if out is None:
        return UNUSED
    if live >> out & 1:
        return FLOWS
    return STOPPED if used >> out & 1 else UNUSED


def _outputs_of(
    program: Program, has_aux: bool
) -> Iterator[tuple[str, Any, int | None]]:
    """The path of each output leaf, the leaf, and its number among the arrays."""
    out = program.output
    if has_aux:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                'with has_aux=True the function has to return a pair (outputs, aux), '
                f'got {shown(out)}'
            )
        out = out[0]
    numbers = itertools.count()
    for keys, leaf in jax.tree_util.tree_leaves_with_path(out):
        is_array = isinstance(leaf, jax.ShapeDtypeStruct)
        yield str(path_of(keys)), leaf, next(numbers) if is_array else None


def _no_output(
    name: str, outputs: Sequence[tuple[str, str]]
) -> errors.ArgumentTypeError:
    """A function has no output to differentiate, or one that is no array."""
    found = [f'  {path!r}: {what}' for path, what in outputs] or ['  none at all']
    return errors.ArgumentTypeError(
        f'the outputs of {name} cannot be differentiated:\n'
        + '\n'.join(found)
        + '\nReturn real or complex arrays, and all else beside them: '
        'return outputs, aux with has_aux=True.'
    )


def _not_traced(
    parameters: Sequence[str], equations: Sequence[tuple[str, str]]
) -> errors.ArgumentTypeError:
    """A parameter goes where it cannot be followed."""
    places = [f'  {name}, at {source}' for name, source in equations]
    return errors.ArgumentTypeError(
        f'{", ".join(map(repr, parameters[:3]))}'
        f'{" and others" * (len(parameters) > 3)} goes where no report can follow '
        'it (a host callback, a mutable array, what has no derivative):\n'
        + '\n'.join(places)
        + '\nIf no gradient comes back from there, stop it '
        'before, with jax.lax.stop_gradient. Otherwise give that part a rule: '
        'jax.custom_jvp, jax.custom_vjp.'
    )
