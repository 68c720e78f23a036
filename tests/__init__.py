"""The tests of flax_sg, and what they share."""
