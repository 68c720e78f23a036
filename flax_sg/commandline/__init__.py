"""``python -m flax_sg``: what a shell can ask of the library."""
