"""Why a frozen module is computed at each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.split import Split
from flax_sg.programs.steps import Step, Value, is_in, makers_of


class Root(NamedTuple):
    """What something is that changes, or a frozen parameter, for a report.

    Attributes:
        name: the path of a parameter, the name of another argument, or the operation
            that mixes examples and its line.
        kind: ``'parameter'``, ``'argument'``, ``'written'`` or ``'mix'``; of a reason
            ``'each'`` if the argument is the module itself, ``'alike'`` if it reads no
            example.
        path: where it is in its argument.
    """

    name: str
    kind: str
    path: str = ''


class Obstacle(NamedTuple):
    """Why some frozen parameters are read at each step.

    Attributes:
        module: the module of the parameters, as far as it tells it from the reason.
        reason: the module of a trained parameter, an argument, or what mixes examples.
        line: where the reason meets the data.
        is_dropout: whether it does so in dropout.
        is_backward: whether the module reads the reason in a backward pass alone.
    """

    module: str
    reason: Root
    line: str
    is_dropout: bool = False
    is_backward: bool = False

    def __str__(self) -> str:
        name, line = self.reason.name, self.line
        line += ', in dropout' if self.is_dropout else ''
        reader = 'its backward pass by an input' if self.is_backward else 'it'
        why = {
            'parameter': f'{reader} reads {name}, which is trained, at {self.line}',
            'argument': f'{name}, which is in each=, enters at {line}',
            'written': f'{name}, which the function writes, enters at {line}',
            'each': 'it is in each=. If it does not change, leave it out of each=',
            'mix': f'{name} mixes the examples of a batch',
            'effect': f'{name} may return another value each time',
            'alike': f'it reads no example, and what is kept are examples ({line}).\n'
            'Compute it before, and give its value in its place',
        }
        return f'{self.module} is computed at each step: {why[self.reason.kind]}.'


def obstacles(split: Split, roots: Mapping[int, Root]) -> list[Obstacle]:
    """The frozen modules that are computed at each step.

    Args:
        split: the program.
        roots: what its inputs are, the values in which examples are mixed, and what
            effects return.
    """
    search = _Search(split, roots)
    for number, step in enumerate(split.late):
        search.follow(number, step)
    return [*search.found]


class _Search:
    """Follows weights, and what changes, through the steps of late.

    Attributes:
        found: the obstacles, in order.
        reasons: for each value that changes the roots that it depends on.
        entries: for each of them that has met, on its way, what does not change: the
            number of the step where it first did, and the root that did.
        weights: for each value that is made of weights at no cost what these are:
            frozen parameters, and arguments in ``each=``.
        drawn: values that are drawn, and depend on no data yet.
        alike: what late makes of parameters alone, though it costs something.
    """

    def __init__(self, split: Split, roots: Mapping[int, Root]) -> None:
        self.split, self.roots = split, roots
        self.found: dict[Obstacle, None] = {}
        self.reasons = {n: {n} for n in roots if n in split.changing}
        self.entries: dict[int, tuple[int, int]] = {}
        self.weights = {n: {n} for n in roots if self._is_weight(n)}
        self.drawn, self.alike = set[int](), set[int]()
        self.makers = makers_of(split.steps)

    def _is_weight(self, number: int) -> bool:
        aval, kind = self.split.avals[number], self.roots[number].kind
        if number not in self.split.changing:
            return kind == 'parameter' and not jnp.issubdtype(
                aval.dtype, jax.dtypes.prng_key
            )
        is_array = bool(aval.shape) and jnp.issubdtype(aval.dtype, jnp.inexact)
        return kind == 'argument' and is_array

    def follow(self, number: int, step: Step) -> None:
        """Follows them through the next step."""
        read, only_early = step.read(), self.split.only_early
        # An operation that mixes examples is a reason itself.
        reasons = _union(self.reasons, (*read, *step.outs))
        weights = _union(self.weights, read)
        is_fixed = only_early.isdisjoint(read) and self.alike.isdisjoint(read)
        if is_cheap(step.eqn) and is_fixed and reasons <= weights and weights:
            self.weights.update(dict.fromkeys(step.outs, weights))
        if not reasons:
            self._alike(step, weights)
            return
        entry = self._entry(number, step, reasons)
        self.reasons.update(dict.fromkeys(step.outs, reasons))
        is_drawn = not self.drawn.isdisjoint(read) and only_early.isdisjoint(read)
        if step.name == 'random_bits' or is_drawn:
            self.drawn.update(step.outs)
        if not is_cheap(step.eqn):
            self._add(step, reasons, weights, entry)

    def _entry(self, number: int, step: Step, reasons: set[int]) -> tuple[int, int]:
        """The first entry on the ways to what a step makes; by default the step."""
        entries = [self.entries[n] for n in step.read() if n in self.entries]
        for n in step.read():
            if n in self.reasons or n in self.split.only_early or n in self.alike:
                met = reasons - self.reasons.get(n, set())
                entries += [(number, min(met))] if met else []
        if entries:
            self.entries.update(dict.fromkeys(step.outs, min(entries)))
        return min(entries, default=(number, min(reasons)))

    def _alike(self, step: Step, weights: set[int]) -> None:
        """Follows them through a step that changes nothing."""
        if not self.split.only_early.isdisjoint(step.read()):
            return
        is_costly = weights and not is_cheap(step.eqn)
        if is_costly and self.alike.isdisjoint(step.read()):
            for weight in sorted(weights):
                one = _obstacle(self.roots[weight], Root('', 'alike'), step.source)
                if all(one.module != other.module for other in self.found):
                    self.found.setdefault(one)
        if is_costly or not self.alike.isdisjoint(step.read()):
            self.alike.update(step.outs)

    def _add(
        self,
        step: Step,
        reasons: set[int],
        weights: set[int],
        entry: tuple[int, int],
    ) -> None:
        """The obstacles in a step that costs something, and reads what changes."""
        names = {self.roots[n].name for n in weights & reasons}
        if names and {self.roots[n].name for n in reasons} <= names:
            for name in sorted(names):
                self.found.setdefault(Obstacle(name, Root(name, 'each'), step.source))
        start, reason = self.split.late[entry[0]], self.roots[entry[1]]
        is_dropout = self._is_dropout(start)
        for weight in sorted(weights - self.split.changing):
            one = _obstacle(self.roots[weight], reason, start.source)
            one = one._replace(is_dropout=is_dropout)
            if one not in self.found:
                is_backward = step.site.is_backward(step.eqn)
                self.found.setdefault(one._replace(is_backward=is_backward))

    def _is_dropout(self, step: Step) -> bool:
        """Whether a step puts zeros where a mask was drawn."""
        if step.name != 'select_n' or not is_in(step.ins[0], self.drawn):
            return False
        return any(self._is_zero(value) for value in step.ins[1:])

    def _is_zero(self, value: Value) -> bool:
        if isinstance(value, Literal):
            return not np.any(value.val)
        step = self.makers.get(value)
        if step is None or step.name != 'broadcast_in_dim':
            return False
        return all(map(self._is_zero, step.ins))


def _union(sets: Mapping[int, set[int]], numbers: Iterable[int]) -> set[int]:
    return set[int]().union(*(sets.get(n, ()) for n in numbers))


def _obstacle(weight: Root, reason: Root, line: str) -> Obstacle:
    """Two paths as far as the first name in which they differ."""
    if reason.kind != 'parameter':
        return Obstacle(weight.name.partition('/')[0], reason, line)
    names = [weight.name.split('/'), reason.name.split('/')]
    pairs = zip(*names, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    module, name = ('/'.join(path[: same + 1]) for path in names)
    return Obstacle(module, reason._replace(name=name), line)
