"""The commands of ``python -m flax_sg``.

python -m flax_sg                           this text
python -m flax_sg demo                      train a model in which each of three
                                            losses trains only its part
python -m flax_sg flow PLACE [--expect TEXT] [--depth N] [--json] [--plot FILE]
                                            which loss of your program trains which
                                            part of it; more with flow --help
python -m flax_sg paths PLACE [--where GLOB ...]
                                            the paths that filters can name in your
                                            model; more with paths --help
python -m flax_sg env                       versions, devices and flags, for reports
                                            of bugs
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
from flax import linen

import flax_sg
from flax_sg import errors, summary
from flax_sg.errors.texts import shown
from flax_sg.flow import GradientFlow, gradient_flow
from flax_sg.testing.flows import broken


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: what follows ``python -m flax_sg``; by default the process's arguments.
    """
    command, *rest = (sys.argv[1:] if argv is None else argv) or ['help']
    if command in COMMANDS:
        try:
            return COMMANDS[command](rest)
        except UsageError as error:
            print(f'python -m flax_sg {command}: error: {error}', file=sys.stderr)
            return 2
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


def flow(argv: Sequence[str]) -> int:
    """Prints which output of a function trains which of its parameters.

    Nothing is compiled or run. The shapes of the arguments (jax.eval_shape) are
    enough.

    PLACE is package.module:name. It names a tuple (loss, *args), a function without
    arguments that returns one, or one that returns the result of sg.gradient_flow.
    The first of args holds the parameters.

        python -m flax_sg flow train:check

        def loss(params, batch): ...
        def check():
            params = jax.eval_shape(model.init, jax.random.key(0), X)['params']
            return loss, params, jax.ShapeDtypeStruct((8, 64), jnp.float32)

    Expectations: 'gln: gln_*/** code/kernel' says that the output gln trains what
    these globs select and nothing else. 'gln:' says that gln trains nothing. A glob
    may name the outputs: each output is judged alone. 'gln_*/**' names no output:
    what all outputs train together counts.

    Status: 0 if every expectation holds, 1 if one is broken, 2 if the command is
    wrong. An exception in the program shows its traceback, with status 1.
    """
    parser = _parser(flow)
    about = 'what it has to train, and nothing else; any number of times'
    parser.add_argument(
        '--expect', metavar='TEXT', action='append', default=[], help=about
    )
    about = 'names of a module that count'
    parser.add_argument('--depth', metavar='N', type=int, help=about)
    parser.add_argument('--json', action='store_true', help='print the data')
    about = 'draw it (png, svg, pdf, ...)'
    parser.add_argument('--plot', metavar='FILE', help=about)
    options = parser.parse_args(argv)

    # The user's program may print, and stdout must hold nothing but the JSON.
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        report = _report(options.place)
    found = {text: _judged(text, report) for text in options.expect}
    if options.depth is not None and options.depth < 0:
        raise UsageError(f'--depth {options.depth}: expected 0, 1, 2, ...')
    if options.json:
        data = {'outputs': report.outputs, 'parameters': report.rows()}
        print(json.dumps({**data, 'expectations': found}, indent=2))
    else:
        print(report.table(options.depth))
        for text, lines in found.items():
            print(f'\n{"BROKEN" if lines else "ok"}  {text}')
            for line in lines:
                print(f'  {line}')
    if options.plot:
        try:
            report.plot(options.plot, options.depth)
        except (OSError, ValueError) as error:
            raise UsageError(f'--plot {options.plot}: {error}') from None
    return int(any(found.values()))


def paths(argv: Sequence[str]) -> int:
    """Prints the paths that filters can name, and what a filter selects.

    Each variable of a model is shown with its module's class and its shape. Nothing
    is compiled or run.

    PLACE is package.module:name. It names a tuple (module, *args) with arrays or
    their shapes (jax.ShapeDtypeStruct), a dict of parameters, a tuple (loss, params,
    ...), or a function without arguments that returns one of these.

        python -m flax_sg paths train:example --where 'head/**'

    Status: 0; 2 if the command is wrong, or a filter selects nothing.
    """
    parser = _parser(paths)
    about = 'say of each variable whether these globs select it'
    parser.add_argument('--where', metavar='GLOB', nargs='+', help=about)
    options = parser.parse_args(argv)
    found = _value(options.place)
    if not isinstance(found, tuple):
        found = (found,)
    if callable(found[0]) and not isinstance(found[0], linen.Module):
        found = found[1:2]  # The parameters of (loss, params, ...).
    if not found:
        raise UsageError(f'{options.place} should be (module, *args) or parameters')
    chosen = {} if options.where is None else {'where': options.where}
    try:
        print(summary.paths(*found, **chosen))
    except errors.UnusedFilterError as error:
        raise UsageError(_without_options(error)) from None
    return 0


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
    found = [('flax_sg', flax_sg.__version__)]
    packages = 'flax', 'jax', 'jaxlib', 'optax', 'chex'
    found += [(package, _version(package)) for package in packages]
    found += [('Python', platform.python_version()), ('platform', platform.platform())]
    try:
        found.append(('devices', ', '.join(map(str, jax.devices()))))
    except RuntimeError as error:  # A driver that fails belongs in the report.
        found.append(('devices', f'none: {error}'))
    # A new process takes its flags from the environment alone.
    flags = sorted(n for n in os.environ if n.startswith(('JAX_', 'XLA_')))
    found += [('flag', f'{name} = {os.environ[name]}') for name in flags]
    for name, value in found:
        print(f'{name:<10} {value}')
    return 0


COMMANDS = {'flow': flow, 'paths': paths, 'demo': demo, 'env': env}


class UsageError(Exception):
    """The command is wrong: the error's text is printed, and the status is 2."""


def _parser(command: Callable[..., int]) -> argparse.ArgumentParser:
    """Makes the parser of a command with ``PLACE``."""
    parser = argparse.ArgumentParser(
        f'python -m flax_sg {command.__name__}',
        description=inspect.getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('place', metavar='PLACE', help='package.module:name')
    return parser


def _judged(text: str, report: GradientFlow) -> list[str]:
    """Says what is against an expectation; nothing if the expectation holds."""
    output, colon, globs = text.rpartition(':')
    who, where = output.strip() if colon else None, globs.split()
    try:
        if not where:
            return broken(report, True, trained=False, output=who)
        return broken(report, where, only=True, output=who)
    except errors.FlaxSGError as error:
        raise UsageError(f'--expect {text!r}: {_without_options(error)}') from None


def _report(place: str) -> GradientFlow:
    found = _value(place)
    if isinstance(found, GradientFlow):
        return found
    if isinstance(found, (tuple, list)) and found and callable(found[0]):
        return gradient_flow(*found)
    raise UsageError(f'{place} is {shown(found)}, and should be (loss, *args)')


def _value(place: str) -> Any:
    """Imports ``package.module:name``, and calls it if it is a function."""
    module, _, name = place.partition(':')
    if not name:
        raise UsageError(
            f'{place!r} is not a place. Write package.module:name, such as train:check'
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f'{module}.'.startswith(f'{error.name}.'):
            raise UsageError(f'{place}: {error}') from None
        raise  # It is imported by the user's program.
    for part in name.split('.'):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            meant = f'. Did you mean {near[0]!r}?' if near else ''
            where = getattr(found, '__name__', type(found).__name__)
            raise UsageError(f'{place}: {where} has no attribute {part!r}{meant}')
        found = getattr(found, part)
    if not callable(found) or isinstance(found, linen.Module):
        return found
    signature = inspect.signature(found)
    try:
        signature.bind()
    except TypeError:
        raise UsageError(
            f'{place} takes arguments {signature}: name a function without arguments '
            'that returns the tuple (loss, *args) or (module, *args)'
        ) from None
    return found()


def _without_options(error: Exception) -> str:
    """The text of an error, without the advice to pass an option of a function."""
    lines = str(error).splitlines()
    return '\n'.join(line for line in lines if 'unused=' not in line)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return 'not installed'


if __name__ == '__main__':
    sys.exit(main())
