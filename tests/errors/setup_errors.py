"""Values that ``setup`` keeps, and that no block can reach; see test_errors."""

from __future__ import annotations

from typing import Any

import flax.linen as fnn
import jax

from flax_sg import linen as nn
from tests.errors.block_errors import ONES, X


def traced(model: Any, variables: Any, **options: Any) -> Any:
    """Traces a model: what is no tracer needs no stop."""
    return jax.eval_shape(lambda v: model.apply(v, X, **options), variables)


class Draws(fnn.Module):
    """Keeps what it draws, and draws once more."""

    def setup(self) -> None:
        self.w = self.param('w', ONES, (2, 2))
        self.kept = self.w + jax.random.normal(self.make_rng('noise'), (2, 2))

    def __call__(self, x: Any) -> Any:
        x = x + jax.random.normal(self.make_rng('noise'), (2, 2))
        with nn.stop_gradient('w'):
            return self.kept * x


def kept() -> Any:
    return traced(Draws(), {'params': {'w': X}}, rngs={'noise': jax.random.key(0)})


class Hides(fnn.Module):
    """Keeps a function that holds the module, where nothing can take its place."""

    def setup(self) -> None:
        self.w = self.param('w', ONES, (2, 2))
        self.kept = Holder(self.w, self)

    def __call__(self, x: Any) -> Any:
        with nn.stop_gradient('w'):
            return self.kept.w * x


class Holder:
    """Has slots, and so no attributes that could be copied."""

    __slots__ = ('__weakref__', 'module', 'w')

    def __init__(self, w: Any, module: Any) -> None:
        self.w, self.module = w, module


calls: list[int] = []


class Forgets(fnn.Module):
    """Makes another attribute on its second run, or none."""

    again: str

    def setup(self) -> None:
        self.w = self.param('w', ONES, (2, 2))
        self.twice = 2.0 * self.w
        if self.again == 'always' or not calls:
            self.kept = (self.twice, None)
        elif self.again == 'other':
            self.kept = {'module': Hides(), 'w': self.twice}
        calls.append(1)

    def __call__(self, x: Any) -> Any:
        with nn.stop_gradient('w'):
            return self.kept[0] * x


def forgets(again: str) -> Any:
    calls.clear()
    return traced(Forgets(again), {'params': {'w': X}})


class ReadsAtOnce(fnn.Module):
    """Reads what ``setup`` makes where it is made."""

    sizes: Any

    def setup(self) -> None:
        self.kept = 2.0 * self.param('w', ONES, (2, 2))
        self.layers = [fnn.Dense(n, name=name) for name, n in self.sizes.items()]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope is not None:
            self.kept  # noqa: B018

    def __call__(self, x: Any) -> Any:
        return self.kept * x


def at_once(**sizes: int) -> Any:
    with nn.stop_gradient('w'):
        return traced(ReadsAtOnce(sizes), {'params': {'w': X}})


class OpensAfter(fnn.Module):
    """Opens a block in ``setup``, and reads in it what was computed before."""

    def setup(self) -> None:
        self.w = self.param('w', ONES, (2, 2))
        self.kept = 2.0 * self.w
        with nn.stop_gradient('w'):
            self.used = self.kept + 1.0

    def __call__(self, x: Any) -> Any:
        return self.used * x


CASES: dict[str, Any] = {
    'a draw that is kept': kept,
    'a module beside an array': lambda: traced(Hides(), {'params': {'w': X}}),
    'a value that is not made again': lambda: forgets('never'),
    'a value of another type': lambda: forgets('other'),
    'a value that is read in a constructor': (
        lambda: at_once(second=2, first=2),
        lambda: at_once(first=2, second=2),
    ),
    'a value that is read in setup': lambda: traced(OpensAfter(), {'params': {'w': X}}),
}
