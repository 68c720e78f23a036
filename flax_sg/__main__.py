"""``python -m flax_sg`` runs the commands, or prints what is installed."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

import jax

import flax_sg
from flax_sg.commandline import flow, paths

USAGE = """\
python -m flax_sg                           this text
python -m flax_sg demo [--out DIR] [--steps N]
                                            train a model in which each of three
                                            losses trains only its part
python -m flax_sg flow PLACE [--args PLACE] [--expect TEXT] [--json] [--plot FILE]
                                            which loss of your program trains which
                                            part of it; more with flow --help
python -m flax_sg paths PLACE [--args PLACE] [--where GLOB]
                                            the paths that filters can name in your
                                            model; more with paths --help
python -m flax_sg env                       versions, devices and flags, for reports
                                            of bugs"""

# The packages that only the demo needs, as a failed import names them.
DEMO_PACKAGES = ('sklearn', 'matplotlib')


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: what follows ``python -m flax_sg``; by default the process's arguments.
    """
    command, *rest = (sys.argv[1:] if argv is None else argv) or ['help']
    if command == 'demo':
        return _demo(rest)
    if command == 'flow':
        return flow.main(rest)
    if command == 'paths':
        return paths.main(rest)
    if command == 'env':
        for name, value in _environment():
            print(f'{name:<10} {value}')
        return 0
    print(_about())
    if command in ('help', '-h', '--help'):
        return 0
    print(f'\nUnknown command: {command!r}', file=sys.stderr)
    return 2


def _about() -> str:
    versions = [
        f'{name} {metadata.version(name)}' for name in ('flax', 'jax', 'jaxlib')
    ]
    title = f'flax_sg {flax_sg.__version__} on {", ".join(versions)}'
    return f'{title}\n{flax_sg.__doc__}\n\n{USAGE}'


def _environment() -> Iterator[tuple[str, str]]:
    """Yields versions, devices and flags, for a bug report."""
    yield 'flax_sg', flax_sg.__version__
    for package in ('flax', 'jax', 'jaxlib', 'optax', 'chex'):
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, 'not installed'
    yield 'Python', platform.python_version()
    yield 'platform', platform.platform()
    try:
        yield 'devices', ', '.join(map(str, jax.devices()))
    except RuntimeError as error:  # A driver that fails belongs in the report.
        yield 'devices', f'none: {error}'
    # A new process takes its flags from the environment alone.
    for name in sorted(os.environ):
        if name.startswith(('JAX_', 'XLA_')):
            yield 'flag', f'{name} = {os.environ[name]}'


def _demo(argv: Sequence[str]) -> int:
    try:
        # Imported late: the library works without the packages of the demo.
        from flax_sg import demo

        return demo.main(argv)
    except ModuleNotFoundError as error:
        if (error.name or '').partition('.')[0] not in DEMO_PACKAGES:
            raise
        print(
            f'The demo needs {error.name}, which is not installed.\n'
            "Install what it needs with: pip install 'flax_sg[demo]'",
            file=sys.stderr,
        )
        return 1


if __name__ == '__main__':
    sys.exit(main())
