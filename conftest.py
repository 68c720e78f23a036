"""The flags under which every test and doctest runs; read before JAX starts.

It stands here and not in tests/ so that the doctests of flax_sg get them too.
"""

import os
import tempfile

# Results are compared to the last bit with programs that ran on the same device.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# XLA's own optimizations are all there; machine code that is slower is made in a
# quarter of the time, and each program runs but once or twice.
os.environ.setdefault(
    'XLA_FLAGS',
    '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false',
)
# Equal programs of several tests, in several processes, are compiled once. They are
# traced and lowered each time, and what is counted as a trace or a compilation is so.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix='flax_sg-tests-')
    os.environ['JAX_COMPILATION_CACHE_DIR'] = _cache.name
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
    os.environ['JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES'] = 'none'

import jax

# Programs for many devices are tested on one that counts as eight.
jax.config.update('jax_num_cpu_devices', 8)

# Implicit conversions hide faults: a float64 that slipped in, a mask that broadcast.
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')
