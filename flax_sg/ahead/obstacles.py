"""Why a frozen module is computed at each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.split import Split
from flax_sg.programs.steps import Step


class Root(NamedTuple):
    """What something is that changes, or a frozen parameter, for a report.

    Attributes:
        name: the path of a parameter, the name of another argument, or the operation
            that mixes examples and its line.
        kind: ``'parameter'``, ``'argument'``, ``'key'`` (an argument that may be a
            random key), ``'written'``, ``'mix'`` or ``'effect'``.
    """

    name: str
    kind: str


class Obstacle(NamedTuple):
    """Why some frozen parameters are read at each step.

    Attributes:
        module: the module of the parameters, as far as it tells it from the reason.
        reason: the module of a trained parameter, an argument, or what mixes examples.
        line: where the reason meets the data.
        is_backward: whether the module reads the reason in a backward pass alone.
    """

    module: str
    reason: Root
    line: str
    is_backward: bool = False

    def __str__(self) -> str:
        name, line = self.reason.name, self.line
        enters = f'{name}, which is in each=, enters at {line}'
        reader = 'its backward pass by an input' if self.is_backward else 'it'
        why = {
            'parameter': f'{reader} reads {name}, which is trained, at {line}',
            'argument': enters,
            'key': enters,
            'written': f'{name}, which the function writes, enters at {line}',
            'mix': f'{name} mixes the examples of a batch',
            'effect': f'{name} may return another value each time',
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
        weights: for each value that is made of frozen parameters at no cost what these
            are.
    """

    def __init__(self, split: Split, roots: Mapping[int, Root]) -> None:
        self.split, self.roots = split, roots
        self.found: dict[Obstacle, None] = {}
        self.reasons = {n: {n} for n in roots if n in split.changing}
        self.entries: dict[int, tuple[int, int]] = {}
        self.weights = {n: {n} for n in roots if self._is_weight(n)}

    def _is_weight(self, number: int) -> bool:
        is_fixed = number not in self.split.changing
        is_key = jnp.issubdtype(self.split.avals[number].dtype, jax.dtypes.prng_key)
        return is_fixed and self.roots[number].kind == 'parameter' and not is_key

    def follow(self, number: int, step: Step) -> None:
        """Follows them through the next step."""
        read, only_early = step.read(), self.split.only_early
        # An operation that mixes examples is a reason itself.
        reasons = _union(self.reasons, (*read, *step.outs))
        weights = _union(self.weights, read)
        if not reasons:
            if is_cheap(step.eqn) and only_early.isdisjoint(read):
                self.weights.update(dict.fromkeys(step.outs, weights))
            return
        entry = self._entry(number, step, reasons)
        self.reasons.update(dict.fromkeys(step.outs, reasons))
        if is_cheap(step.eqn):
            return
        start, reason = self.split.late[entry[0]], self.roots[entry[1]]
        for weight in sorted(weights):
            one = _obstacle(self.roots[weight], reason, start.source)
            if one not in self.found:
                is_backward = step.site.is_backward(step.eqn)
                self.found.setdefault(one._replace(is_backward=is_backward))

    def _entry(self, number: int, step: Step, reasons: set[int]) -> tuple[int, int]:
        """The first entry on the ways to what a step makes; by default the step."""
        entries = [self.entries[n] for n in step.read() if n in self.entries]
        for n in step.read():
            if n in self.reasons or n in self.split.only_early:
                met = reasons - self.reasons.get(n, set())
                entries += [(number, min(met))] if met else []
        if entries:
            self.entries.update(dict.fromkeys(step.outs, min(entries)))
        return min(entries, default=(number, min(reasons)))


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
