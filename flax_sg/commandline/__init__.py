"""The commands of ``python -m flax_sg``."""
