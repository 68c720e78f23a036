"""The flags under which every test and doctest runs; read before JAX starts.

It stands here and not in tests/ so that the doctests of flax_sg get them too.
"""

import os

# Results are compared to the last bit with programs that ran on the same device.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# XLA's own optimizations are all there; machine code that is slower is made in half the
# time, and each program runs but once or twice.
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')

import jax

# Programs for many devices are tested on one that counts as eight.
jax.config.update('jax_num_cpu_devices', 8)

# Implicit conversions hide faults: a float64 that slipped in, a mask that broadcast.
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')
