"""A ``jax.shard_map`` of which a part does not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.steps import Split, Step, Value, is_in, numbers_in
from flax_sg.ahead.walk import Walk
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs


def in_parts(
    split: Callable[..., Split], walk: Walk, eqn: Any, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """A map becomes two: the second one reads what each device has kept in the first.

    What is kept has one value for each device along a new first axis, or one for all
    devices that have the same.
    """
    body = eqn.params['jaxpr']
    if body.constvars or jaxprs.is_in_shards(eqn):
        return None
    program = ClosedJaxpr(body, ())
    # Which rows change is not known of a shard.
    changes = [is_in(x, walk.changing) for x in read]
    is_data = [is_in(x, walk.data) for x in read]
    found = split(program, changes, is_data)
    is_late = [is_in(x, found.changing) for x in found.outputs]
    parts = split(program, changes, is_data, is_late)
    if all(is_cheap(step.eqn) for step in parts.early):
        return None
    stacks = {n: _axes(eqn, parts.avals[n]) for n in parts.kept if n >= len(read)}
    outs = tuple(walk.new(var.aval) for var in eqn.outvars)
    mesh = eqn.params['mesh']
    made: tuple[int, ...] = tuple(
        walk.new(
            jaxprs.stacked(parts.avals[n], math.prod(mesh.shape[name] for name in axes))
        )
        for n, axes in stacks.items()
    )

    def add(is_of_late: bool, steps: list[Step]) -> None:
        outputs = [k for k, late in enumerate(is_late) if late == is_of_late]
        used = set(numbers_in(parts.outputs[k] for k in outputs))
        used.update(*(step.read() for step in steps))
        inputs = [n for n in range(len(read)) if n in used]
        part = _Part(eqn, parts, steps, inputs, outputs, stacks, is_of_late)
        reads = (*(read[n] for n in inputs), *made * is_of_late)
        makes = (*(outs[k] for k in outputs), *made * (not is_of_late))
        if makes:
            walk.add(Step(eqn, site, reads, makes, part.run, tuple(steps)))

    add(False, parts.early)
    add(True, parts.late)
    return outs


def _axes(eqn: Any, aval: Any) -> tuple[str, ...]:
    """The axes of the mesh along which a value of the body may differ."""
    axes = jaxprs.manual_axes_of(eqn)
    if eqn.params['check_vma']:
        axes &= jaxprs.varying_axes(aval)
    return tuple(name for name in eqn.params['mesh'].axis_names if name in axes)


class _Part(NamedTuple):
    """A part of a map.

    Attributes:
        eqn: the map.
        parts: its body, as two programs.
        steps: those of the part.
        inputs: which inputs of the map the part reads.
        outputs: which outputs of the map the part makes.
        stacks: the axes of each value that is kept.
        is_late: whether the part reads what is kept; otherwise it makes that.
    """

    eqn: Any
    parts: Split
    steps: list[Step]
    inputs: list[int]
    outputs: list[int]
    stacks: dict[int, tuple[str, ...]]
    is_late: bool

    def run(self, *values: Any) -> Any:
        """Runs the part."""
        params = self.eqn.params
        stacks = {n: PartitionSpec(axes or None) for n, axes in self.stacks.items()}
        asked = [self.parts.outputs[k] for k in self.outputs]
        count = len(self.inputs)
        reads, makes = ([*stacks], []) if self.is_late else ([], [*stacks])

        def shard(*values: Any) -> list[Any]:
            known = dict(zip(self.inputs, values[:count], strict=True))
            rows = zip(reads, values[count:], strict=True)
            known.update((n, jax.numpy.squeeze(x, 0)) for n, x in rows)
            out = self.parts.run(self.steps, known, [*asked, *makes])
            first = len(asked)
            return out[:first] + [jax.numpy.expand_dims(x, 0) for x in out[first:]]

        mapped = jax.shard_map(
            shard,
            mesh=params['mesh'],
            in_specs=(
                *(params['in_specs'][n] for n in self.inputs),
                *(stacks[n] for n in reads),
            ),
            out_specs=[
                *(params['out_specs'][k] for k in self.outputs),
                *(stacks[n] for n in makes),
            ],
            check_vma=params['check_vma'],
            axis_names=jaxprs.manual_axes_of(self.eqn),
        )
        kept = list[Any](values[count:])
        if AxisType.Explicit in params['mesh'].axis_types:
            # Loaded from a file, what is kept lies on the devices in another way.
            for place, n in enumerate(reads):
                sharding = NamedSharding(params['mesh'], stacks[n])
                kept[place] = jax.sharding.reshard(kept[place], sharding)
        return mapped(*values[:count], *kept)
