"""Measures what flax_sg costs, next to stops by hand and other ways to freeze."""
