"""XLA flags with which small programs compile in a quarter of the time.

For the tests, the notebooks in the check, and the benchmarks at a small size. XLA still
runs its own optimizations; the machine code is slower. JAX reads flags when it starts.
"""

from importlib import metadata

FLAGS = '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'
# Later releases of jaxlib stop at a flag that they have not.
if tuple(map(int, metadata.version('jaxlib').split('.')[:2])) <= (0, 10):
    FLAGS += ' --xla_cpu_use_fusion_emitters=false'
