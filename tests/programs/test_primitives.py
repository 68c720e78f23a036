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


# Of these no analysis relies on anything, or it walks the programs that they run.
NAMES = """
after_all approx_top_k argmax argmin call call_hi_primitive checkpoint cholesky
closed_call cond core_call create_token cumlogsumexp custom_jvp_call custom_lin
custom_linear_solve custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
dce_sink eig eigh empty2 eval_jaxpr get hessenberg householder_product jit lu
pjit polynomial qr ragged_all_to_all random_bits random_gamma reduce reduce_and
reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window
reduce_window_max reduce_window_min reduce_xor remat remat2 rng_bit_generator
rng_uniform scan scatter-add scatter-max scatter-min scatter-mul scatter-sub
scatter_add schur select_and_gather_add select_and_scatter shard_map stage svd
swap triangular_solve tridiagonal tridiagonal_solve while xla_pmap
"""
OTHERS = frozenset(NAMES.split())


def test_no_primitive_of_jax_is_unknown():
    """A new one needs a row: see CONTRIBUTING, "a primitive of JAX"."""
    assert sorted(OF_JAX.keys() - KINDS.keys() - OTHERS) == []
    assert sorted(OTHERS & KINDS.keys()) == []


def test_the_rules_of_an_analysis_are_of_primitives_in_the_table():
    rules = {*zeros._TOGETHER, *zeros._MOVES, *zeros._PARTS, *zeros._MEET}
    rules |= {*axes._ALONG, *axes._REDUCED, *axes._MATRICES, *axes._RULES}
    assert sorted(rules - KINDS.keys() - OTHERS) == []


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
    for kind in (Kind.PRODUCT, Kind.OVERWRITES, Kind.ZEROS_OF_ZEROS):
        assert names_of(kind) & MOVES <= {'dynamic_slice'}
    assert names_of(Kind.SAME) <= names_of(Kind.BY_ITSELF) & names_of(Kind.ZEROS_STAY)
