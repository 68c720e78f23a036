"""Everything private of Flax and JAX, and what of it is required."""
