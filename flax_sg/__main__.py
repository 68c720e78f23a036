"""The commands of ``python -m flax_sg``.

python -m flax_sg                           this text
python -m flax_sg demo                      train a model in which each of three
                                            losses trains only its part
python -m flax_sg env                       versions, devices and flags, for reports
                                            of bugs
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

import jax

import flax_sg


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: what follows ``python -m flax_sg``; by default the process's arguments.
    """
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ['help']
    if command in COMMANDS:
        return COMMANDS[command](arguments)
    versions = ', '.join(
        f'{name} {_version(name)}' for name in ('flax', 'jax', 'jaxlib')
    )
    print(
        f'flax_sg {flax_sg.__version__} on {versions}\n{flax_sg.__doc__}\n\n{__doc__}'
    )
    if command in ('help', '-h', '--help'):
        return 0
    print(f'Unknown command: {command!r}', file=sys.stderr)
    return 2


def demo(argv: Sequence[str]) -> int:
    """Trains a model whose three losses train three parts."""
    # Imported late: the library works without the packages of the demo.
    from flax_sg import demo

    try:
        return demo.main(argv)
    except ModuleNotFoundError as error:  # It says what to install.
        print(error, file=sys.stderr)
        return 1


def env(argv: Sequence[str]) -> int:
    """Prints versions, devices and flags, for reports of bugs."""
    rows = [('flax_sg', flax_sg.__version__)]
    packages = 'flax', 'jax', 'jaxlib', 'optax'
    rows += [(package, _version(package)) for package in packages]
    rows += [('Python', platform.python_version()), ('platform', platform.platform())]
    try:
        rows.append(('devices', ', '.join(map(str, jax.devices()))))
    except RuntimeError as error:  # A driver that fails belongs in the report.
        rows.append(('devices', f'none: {error}'))
    # A new process takes its flags from the environment alone.
    flags = sorted(n for n in os.environ if n.startswith(('JAX_', 'XLA_')))
    rows += [('flag', f'{name} = {os.environ[name]}') for name in flags]
    for name, value in rows:
        print(f'{name:<10} {value}')
    return 0


COMMANDS = {'demo': demo, 'env': env}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return 'not installed'


if __name__ == '__main__':
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # Nobody reads on, as after ``| head``.
        # Python flushes once more at its end, and would print an error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
