"""``python -m flax_sg env``: versions, devices and flags, for reports of bugs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import jax

PACKAGES = ('flax', 'jax', 'jaxlib', 'optax', 'chex')


def main(version: str) -> int:
    """Prints the report and returns the status.

    Args:
        version: that of this library.
    """
    for name, value in (('flax_sg', version), *_lines()):
        print(f'{name:<10} {value}')
    return 0


def _lines() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        yield package, _version(package)
    yield 'Python', platform.python_version()
    yield 'platform', platform.platform()
    try:
        devices = ', '.join(str(device) for device in jax.devices())
    except RuntimeError as error:  # A driver that does not start is worth a report.
        devices = f'none: {error}'
    yield 'devices', devices
    for name, value in changed_flags().items():
        yield 'flag', f'{name} = {value}'
    if flags := os.environ.get('XLA_FLAGS'):
        yield 'XLA_FLAGS', flags


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return 'not installed'


def changed_flags() -> dict[str, str]:
    """The flags of JAX whose values are not those of a process without settings."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(('JAX_', 'XLA_'))
    }
    command = [sys.executable, '-c', _PRINT_FLAGS]
    defaults = json.loads(subprocess.check_output(command, env=environment))
    flags = {name: repr(value) for name, value in jax.config.values.items()}
    return {name: value for name, value in flags.items() if value != defaults[name]}


_PRINT_FLAGS = """
import json, jax
print(json.dumps({name: repr(value) for name, value in jax.config.values.items()}))
"""
