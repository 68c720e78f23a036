"""Blocks and filters for NNX models, which Flax calls graphs."""
