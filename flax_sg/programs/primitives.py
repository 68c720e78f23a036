"""What the primitives of JAX do, by their names.

Analyses of programs ask it. A primitive that is in no row may do anything: its operands
are all read, and nothing is known of its outputs. What needs the parameters of an
equation, such as the axis of a sum, stands beside the analysis, in a table by name.

Names are those of all supported versions: ``psum2`` is one of jax 0.7.2.
"""

from __future__ import annotations

import enum
import functools


class Kind(enum.Flag):
    """What a primitive does."""

    ELEMENTWISE = enum.auto()
    """An element of the output is made of the same element of each operand."""
    SAME = enum.auto()
    """Its n-th output is its n-th operand, in another type or place."""
    FORM = enum.auto()
    """It returns all elements of its operand, in another form or order."""
    PARTS = enum.auto()
    """It returns some elements of its first operand."""
    OVERWRITES = enum.auto()
    """It returns its first operand, with other elements in some places."""
    BY_ITSELF = enum.auto()
    """Its n-th output depends on its n-th operand alone."""
    ZEROS_STAY = enum.auto()
    """Where an operand is zero, so is the output: each operand for itself."""
    ZEROS_OF_ZEROS = enum.auto()
    """An output is all zero if its operand is: each operand for itself."""
    PRODUCT = enum.auto()
    """The output is all zero if one of two operands is."""
    CHEAP = enum.auto()
    """It costs as much as reading its output from memory."""


_K = Kind
_EACH = _K.ELEMENTWISE | _K.CHEAP
_UNARY = _EACH | _K.ZEROS_STAY
_SAME = _K.SAME | _K.BY_ITSELF | _K.ZEROS_STAY | _K.CHEAP

_ROWS: dict[str, Kind] = {
    # Functions of one element, of which zero is zero.
    'abs asin asinh atan atanh cbrt ceil conj erf erf_inv expm1 floor imag': _UNARY,
    'log1p neg real round sign sin sinh sqrt square tan tanh': _UNARY,
    # Other functions of one element, or of several.
    'acos acosh add add_any and atan2 clamp clz complex cos cosh div eq eq_to': _EACH,
    'erfc exp exp2 ge gt integer_pow is_finite le le_to log log2 logistic lt': _EACH,
    'lt_to max min mul mulhi ne nextafter not one_minus_square or pow': _EACH,
    'population_count random_clone random_fold_in random_seed rem rsqrt': _EACH,
    'select_n shift_left shift_right_arithmetic shift_right_logical sub xor': _EACH,
    'bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma': _K.ELEMENTWISE,
    'polygamma regularized_incomplete_beta threefry2x32 zeta': _K.ELEMENTWISE,
    # Values as they are.
    'convert_element_type copy copy_p name reduce_precision stop_gradient': (
        _SAME | _K.ELEMENTWISE
    ),
    'device_put layout_constraint mesh_cast optimization_barrier pcast pvary': _SAME,
    'reshard sharding_constraint': _SAME,
    # Elements that move.
    'broadcast_in_dim expand_dims reshape rev squeeze transpose': _K.FORM | _K.CHEAP,
    'slice split unstack': _K.PARTS | _K.CHEAP,
    'gather': _K.PARTS,
    'dynamic_slice': _K.PARTS | _K.ZEROS_OF_ZEROS | _K.CHEAP,
    'dynamic_update_slice scatter': _K.OVERWRITES,
    'bitcast_convert_type concatenate pad stack': _K.CHEAP,
    'tile': _K.ZEROS_OF_ZEROS | _K.CHEAP,
    'sort top_k': _K.ZEROS_OF_ZEROS,
    # Sums, products and the like.
    'cummax cummin cumprod cumsum fft reduce_window_sum select_and_scatter_add': (
        _K.ZEROS_OF_ZEROS
    ),
    'conv_general_dilated dot_general ragged_dot_general': _K.PRODUCT,
    # What needs no operand, or makes random numbers.
    'axis_index iota random_split random_unwrap random_wrap': _K.CHEAP,
    # Between devices.
    'psum psum2': _K.BY_ITSELF | _K.ZEROS_OF_ZEROS,
    'all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast': (
        _K.ZEROS_OF_ZEROS
    ),
    'pmax pmin ppermute psum_invariant reduce_scatter unreduced_psum': (
        _K.ZEROS_OF_ZEROS
    ),
}
KINDS: dict[str, Kind] = {
    name: kind for names, kind in _ROWS.items() for name in names.split()
}


@functools.cache
def names_of(kind: Kind) -> frozenset[str]:
    """The names of the primitives that do all of this.

    >>> 'slice' in names_of(Kind.PARTS), 'slice' in names_of(Kind.PARTS | Kind.FORM)
    (True, False)
    """
    return frozenset(name for name, does in KINDS.items() if kind in does)
