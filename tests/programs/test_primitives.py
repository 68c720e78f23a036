"""The table of primitives knows what the running JAX has, and is right of it."""

import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

from flax_sg.ahead import axes
from flax_sg.flow import zeros
from flax_sg.programs import primitives as table
from flax_sg.programs.primitives import KINDS, Kind, names_of

OF_JAX: dict[str, Primitive] = {
    value.name: value
    for module in (primitives, lax)
    for value in vars(module).values()
    if isinstance(value, Primitive)
}


def test_no_primitive_of_jax_is_unknown():
    """A new one needs a row: see CONTRIBUTING, "a primitive of JAX"."""
    assert sorted(OF_JAX.keys() - KINDS.keys()) == []


def test_the_rules_of_an_analysis_are_of_primitives_in_the_table():
    rules = {*zeros._TOGETHER, *zeros._MOVES, *zeros._PARTS, *zeros._MEET}
    rules |= {*axes._ALONG, *axes._REDUCED, *axes._MATRICES, *axes._RULES}
    assert sorted(rules - KINDS.keys()) == []


def test_each_primitive_stands_in_one_row():
    names = [name for row in table._ROWS for name in row.split()]
    assert sorted(names) == sorted({*names})


UNARY = names_of(Kind.ELEMENTWISE | Kind.ZEROS_STAY) - names_of(Kind.SAME)


@pytest.mark.parametrize('name', sorted(UNARY))
def test_where_an_operand_is_zero_so_is_the_output(name):
    dtype = jnp.complex64 if name in ('real', 'imag', 'conj') else jnp.float32
    out = getattr(lax, name)(jnp.array([0.0, 0.5, 0.0], dtype))
    assert not out[0]
    assert not out[2]


MOVES = names_of(Kind.SAME) | names_of(Kind.FORM) | names_of(Kind.PARTS)


def test_what_moves_elements_does_no_arithmetic():
    """The rows of the table leave nothing open: no kind fits to another by mistake."""
    for kind in (Kind.PRODUCT, Kind.OVERWRITES, Kind.RUNS, Kind.ZEROS_OF_ZEROS):
        assert names_of(kind) & MOVES <= {'dynamic_slice'}
    assert names_of(Kind.SAME) <= names_of(Kind.BY_ITSELF) & names_of(Kind.ZEROS_STAY)
