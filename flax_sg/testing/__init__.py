"""For your tests: what a loss trains, what a step moves, what JAX compiles."""

from flax_sg.testing.flows import assert_flows as assert_flows
from flax_sg.testing.flows import assert_stopped as assert_stopped
from flax_sg.testing.flows import assert_trains_only as assert_trains_only
from flax_sg.testing.programs import assert_same_program as assert_same_program
from flax_sg.testing.programs import optimized_hlo as optimized_hlo
from flax_sg.testing.steps import assert_moves_only as assert_moves_only
from flax_sg.testing.steps import moves as moves
