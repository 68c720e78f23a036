"""For your tests: what a loss trains, what a step moves, what JAX compiles."""

from flax_sg.testing.flows import assert_flows, assert_stopped, assert_trains_only
from flax_sg.testing.programs import assert_same_program, optimized_hlo
from flax_sg.testing.steps import assert_moves_only, moves

__all__ = [
    'assert_flows',
    'assert_moves_only',
    'assert_same_program',
    'assert_stopped',
    'assert_trains_only',
    'moves',
    'optimized_hlo',
]


def __dir__() -> list[str]:
    return sorted(__all__)
