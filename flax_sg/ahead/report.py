"""What is kept, what it saves, and why a frozen module is computed at each step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.flops import flops_of_steps
from flax_sg.ahead.steps import Split, Step, Value, is_in
from flax_sg.internals import jaxprs
from flax_sg.rendering import text

# How many obstacles a report shows.
_SHOWN = 8


class Root(NamedTuple):
    """What something is that changes, or a frozen parameter, for a report.

    Attributes:
        name: the path of a parameter, the name of another argument, or the operation
            that mixes examples and its line.
        kind: ``'parameter'``, ``'argument'``, ``'written'`` or ``'mix'``.
        path: where it is in its argument.
    """

    name: str
    kind: str
    path: str


class Kept(NamedTuple):
    """A value that is kept: its type, its bytes, and the line that makes it."""

    type: str
    bytes: int
    line: str


def kept_of(split: Split) -> list[Kept]:
    """The values that are kept."""
    makers = {n: step for step in split.steps for n in step.outs}
    rows: list[Kept] = []
    for number in split.kept:
        aval, step = split.avals[number], makers.get(number)
        line = f'{jaxprs.operation(step.eqn)} at {step.source}' if step else 'an input'
        rows.append(Kept(aval.str_short(), aval.size * aval.dtype.itemsize, line))
    return rows


class Obstacle(NamedTuple):
    """Why some frozen parameters are read at each step.

    Attributes:
        module: the module of the parameters, as far as it tells it from the reason.
        reason: the module of a trained parameter, an argument, or what mixes examples.
        line: where the reason meets the data.
        is_dropout: whether it does so in dropout.
    """

    module: str
    reason: Root
    line: str
    is_dropout: bool = False

    def __str__(self) -> str:
        name, line = self.reason.name, self.line + ', in dropout' * self.is_dropout
        why = {
            'parameter': f'it reads {name}, which is trained, at {self.line}',
            'argument': f'{name}, which is in each=, enters at {line}',
            'written': f'{name}, which the function writes, enters at {line}',
            'mix': f'{name} mixes the examples of a batch',
        }
        return f'{self.module} is computed at each step: {why[self.reason.kind]}.'


def obstacles(split: Split, roots: Mapping[int, Root]) -> list[Obstacle]:
    """The frozen modules that are computed at each step.

    Args:
        split: the program.
        roots: what its inputs are, and the values in which examples are mixed.
    """
    # For each value that changes the roots that it depends on and that change.
    changing = {n: {n} for n in roots if n in split.changing}
    # For each value that is made of frozen parameters alone what these are.
    frozen = {
        n: {n}
        for n, root in roots.items()
        if root.kind == 'parameter'
        and n not in changing
        and not jnp.issubdtype(split.avals[n].dtype, jax.dtypes.prng_key)
    }
    enters: dict[int, Step] = {}
    # Values that are drawn, and depend on no data yet.
    drawn: set[int] = set()
    makers = {n: step for step in split.steps for n in step.outs}
    in_late = {id(step) for step in split.late}
    rows: dict[Obstacle, None] = {}
    for step in split.steps:
        read = step.read()
        # An operation that mixes examples is a reason itself. A part of an equation is
        # none: what is frozen in it may come before that.
        values = (*read, *step.outs) if step.call is None else read
        reasons = set[int]().union(*(changing.get(n, ()) for n in values))
        weights = set[int]().union(*(frozen.get(n, ()) for n in read))
        if not reasons:
            if weights and split.data.isdisjoint(read):
                frozen.update(dict.fromkeys(step.outs, weights))
            continue
        changing.update(dict.fromkeys(step.outs, reasons))
        if step.eqn.primitive.name == 'random_bits' or (
            not drawn.isdisjoint(read) and split.data.isdisjoint(read)
        ):
            drawn.update(step.outs)
        for n in read:
            for reason in reasons - changing.get(n, set()):
                if n in changing or n in split.data:
                    enters.setdefault(reason, step)
        if weights and not is_cheap(step.eqn) and id(step) in in_late:
            # Of several reasons the one that enters first.
            reason = next((n for n in enters if n in reasons), min(reasons))
            entry = enters.get(reason, step)
            is_dropout = _is_dropout(entry, drawn, makers)
            for weight in sorted(weights):
                row = _obstacle(roots[weight], roots[reason], entry.source)
                rows.setdefault(row._replace(is_dropout=is_dropout))
    return [*rows]


def _without_dropout(row: Obstacle) -> str:
    """What to write, so that dropout does not stand in the way."""
    if row.reason.kind == 'written':
        return 'To turn dropout off there, call eval() of the frozen module.'
    return (
        "To turn dropout off there, write nn.Frozen(module, state='eval'). To draw "
        f'once for a batch, leave {row.reason.name} out of each=.'
    )


def _is_dropout(step: Step, drawn: set[int], makers: Mapping[int, Step]) -> bool:
    """Whether a step puts zeros where a mask was drawn."""
    if step.eqn.primitive.name != 'select_n' or not is_in(step.ins[0], drawn):
        return False
    return any(_is_zero(value, makers) for value in step.ins[1:])


def _is_zero(value: Value, makers: Mapping[int, Step]) -> bool:
    if isinstance(value, Literal):
        return not np.any(value.val)
    step = makers.get(value)
    if step is None or step.eqn.primitive.name != 'broadcast_in_dim':
        return False
    return all(_is_zero(x, makers) for x in step.ins)


def _obstacle(weight: Root, reason: Root, line: str) -> Obstacle:
    """Two paths as far as the first name in which they differ."""
    if reason.kind != 'parameter':
        return Obstacle(weight.name.partition('/')[0], reason, line)
    names = [weight.name.split('/'), reason.name.split('/')]
    pairs = zip(*names, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    module, other = ('/'.join(path[: same + 1]) for path in names)
    return Obstacle(module, reason._replace(name=other), line)


def written(split: Split, paths: Sequence[str], roots: Mapping[int, Root]) -> list[str]:
    """The parameters and running averages that early reads and a step writes.

    A step writes a value if an output has the same path and shape.

    Args:
        split: the program.
        paths: the path of each output.
        roots: what the inputs are.
    """
    found: list[str] = []
    read = {*split.kept, *(n for step in split.early for n in step.read())}
    for number, root in roots.items():
        if root.kind == 'mix' or not root.path or number not in read:
            continue
        for path, output in zip(paths, split.outputs, strict=True):
            if isinstance(output, Literal) or output == number:
                continue
            is_same = f'/{path}'.endswith(f'/{root.path}')
            if is_same and split.avals[output].shape == split.avals[number].shape:
                found.append(root.path)
    return [*dict.fromkeys(found)]


def report(split: Split, paths: Sequence[str], roots: Mapping[int, Root]) -> str:
    """All of this as text."""
    rows = kept_of(split)
    lines: list[str] = []
    if rows:
        cells = [[row.type, f'{row.bytes:,}', row.line] for row in rows]
        lines += [text.table(['kept', 'bytes', 'made by'], cells, ['bytes']), '']
    once, late = map(flops_of_steps, (split.early, split.late))
    share = once / (once + late) if once + late else 0.0
    total = sum(row.bytes for row in rows)
    lines.append(f'{share:.1%} of the flops are done once; {total:,} bytes are kept.')
    found = obstacles(split, roots)
    lines += map(str, found[:_SHOWN])
    if len(found) > _SHOWN:
        lines.append(f'So are {len(found) - _SHOWN} others.')
    lines += dict.fromkeys(_without_dropout(row) for row in found if row.is_dropout)
    names = written(split, paths, roots)
    for name in names:
        lines.append(
            f'{name} is written by the function. What is computed once reads the value '
            'that early gets.'
        )
    if names:
        lines.append(
            'To go on from step to step, it needs an argument of its own in each=.'
        )
    return '\n'.join(lines)
