"""The compilers of accelerators, which run on any CPU, and what they compile for.

A chip that is not there has no arrays. Programs are compiled for shapes that name its
devices: ``jax.ShapeDtypeStruct(..., sharding=...)``. The platform ``HERE`` is the
device that is there, on which programs run, too.
"""

import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

# The package that holds the compiler, and the smallest topology with each chip, by
# platform. A CUDA topology is slices x hosts x devices.
HERE = 'here'
PACKAGES = {'tpu': 'libtpu', 'cuda': 'jax-cuda12-pjrt'}
CHIPS = {
    'tpu': {
        'v5e': 'v5e:2x2',
        'v5p': 'v5p:2x2x1',
        'v6e': 'v6e:2x2',
        'tpu7x': 'tpu7x:2x2x1',
    },
    'cuda': {'H100': '1x1x1'},
}
# What XLA asks about a GPU: an H100, as its maker and its driver describe it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class NoCompilerError(Exception):
    """What is asked for cannot be compiled here; one line says why."""


def compiler(platform: str) -> str:
    """Returns the name and version of a platform's compiler, as 'libtpu 0.0.42'.

    Of ``HERE`` it is the name of the device.

    Raises:
        NoCompilerError: it is not installed.
    """
    if platform == HERE:
        return jax.devices()[0].device_kind
    # A plugin that finds no device must not be asked for one.
    jax.config.update('jax_platforms', 'cpu')
    package = PACKAGES[platform]
    try:
        return f'{package} {metadata.version(package)}'
    except metadata.PackageNotFoundError:
        raise NoCompilerError(
            f'{package} is not installed: python3 dev.py accelerators {platform}'
        ) from None


def devices(platform: str, topology: str) -> Sequence[Any]:
    """Returns devices that programs can be compiled for.

    Args:
        platform: ``'tpu'`` or ``'cuda'``; or ``HERE``.
        topology: such as ``'v5e:2x2'``, or ``'1x1x4'`` for four H100s.

    Raises:
        NoCompilerError: the compiler is missing, or does not know the topology.
    """
    if platform == HERE:
        return jax.devices()[:1]
    name = compiler(platform)
    # Without a device, libtpu would ask the network which machine of a pod this is.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    options = {'target_config': H100, 'topology': topology}
    try:
        if platform == 'cuda':
            return topologies.get_topology_desc('H100', 'cuda', **options).devices
        return topologies.get_topology_desc(topology, 'tpu').devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = str(error).partition('\n')[0]
        raise NoCompilerError(
            f'{name} with jax {jax.__version__} makes no topology {topology!r}: {why}'
        ) from None


def on(device: Any, tree: Any) -> Any:
    """Makes shapes of arrays, on a device."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )
