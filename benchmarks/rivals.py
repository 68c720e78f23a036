"""The ways to freeze, by their names in the tables."""

import dataclasses
import functools
from collections.abc import Callable

from benchmarks import foreign, spellings, trainers
from benchmarks.trainers import Data, Trainer
from benchmarks.workloads import Workload

BY_HAND = 'stops by hand'


@dataclasses.dataclass(frozen=True)
class Rival:
    """A way to freeze.

    Attributes:
        make: makes the training step of a workload, or raises ``UnableError``.
        gradient_of: the rival whose gradient this rival takes, if any.
    """

    make: Callable[[Workload, Data], Trainer]
    gradient_of: str | None = None


def _stops(spelling: spellings.Spelling, **options: bool) -> Rival:
    gradient_of = BY_HAND if options else None
    make = functools.partial(trainers.stops, spelling=spelling, **options)
    return Rival(make, gradient_of)


def _masks(gradient_of: str | None, **options: bool) -> Rival:
    return Rival(functools.partial(trainers.masks, **options), gradient_of)


RIVALS: dict[str, Rival] = {
    BY_HAND: _stops(spellings.by_hand),
    'stops by hand, one jit': _stops(spellings.by_hand, one_jit=True),
    'partition by hand': Rival(trainers.partition),
    'optax mask': _masks(None),
    'optax mask, clip': _masks('optax mask', clip=True),
    'optax mask, one jit': _masks('optax mask', one_jit=True),
    'optax mask, one jit, clip': _masks('optax mask', one_jit=True, clip=True),
    'nn.map_variables': _stops(trainers.map_variables),
    'hk.custom_getter': Rival(foreign.haiku),
    'equinox partition': Rival(foreign.equinox),
    'nnx DiffState': Rival(foreign.diff_state),
    'flax_sg block': _stops(spellings.block_around),
    'flax_sg frozen_layers': Rival(trainers.frozen_layers),
    'flax_sg live': Rival(trainers.live),
    'flax_sg live, one jit': Rival(
        functools.partial(trainers.live, one_jit=True), 'flax_sg live'
    ),
}
