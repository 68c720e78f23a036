"""XLA flags with which small programs compile in a quarter of the time.

For the tests, the notebooks in the check, and the benchmarks at a small size. XLA still
runs its own optimizations; the machine code is slower. JAX reads flags when it starts.
"""

import os
from importlib import metadata
from pathlib import Path

FLAGS = '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'
# Later releases of jaxlib stop at a flag that they have not.
if tuple(map(int, metadata.version('jaxlib').split('.')[:2])) <= (0, 10):
    FLAGS += ' --xla_cpu_use_fusion_emitters=false'


def set_flags(cache: str | Path) -> None:
    """Sets the flags of tests, before JAX starts.

    Equal programs of several tests and processes are compiled once. Each is still
    traced and lowered, so tests that count traces and compilations count right.

    Args:
        cache: a folder for compiled programs, if the environment names none.
    """
    # Results are compared to the last bit with programs that ran on the same device.
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    os.environ.setdefault('XLA_FLAGS', FLAGS)  # Each program runs only once or twice.
    if 'JAX_COMPILATION_CACHE_DIR' in os.environ:  # A process around has set it.
        return
    os.environ['JAX_COMPILATION_CACHE_DIR'] = str(cache)
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
    os.environ['JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES'] = 'none'
