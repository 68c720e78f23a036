"""Everything private of Flax and JAX, by topic, and which of it is required.

Each name stands behind one function or constant that says why it is needed. Tried with
flax 0.12.0 and jax 0.7.2 up to flax 0.12.12 and jax 0.12.0.1.
"""

from flax_sg.internals import versions

versions.check()  # Before the names are asked for: it says which versions have them.
