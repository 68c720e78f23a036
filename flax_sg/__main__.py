"""The commands of ``python -m flax_sg``.

python -m flax_sg                           this text
python -m flax_sg demo                      train a model in which each of three
                                            losses trains only its part
python -m flax_sg flow PLACE [--args PLACE] [--expect TEXT] [--json] [--plot FILE]
                                            which loss of your program trains which
                                            part of it; more with flow --help
python -m flax_sg paths PLACE [--args PLACE] [--where GLOB]
                                            the paths that filters can name in your
                                            model; more with paths --help
python -m flax_sg env                       versions, devices and flags, for reports
                                            of bugs
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import metadata
from typing import Any

import jax
from flax import linen
from rich.console import Console

import flax_sg
from flax_sg import errors, filters, summary
from flax_sg.errors.texts import shown
from flax_sg.flow import GradientFlow, gradient_flow
from flax_sg.testing.flows import Broken, Expectation


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: what follows ``python -m flax_sg``; by default the process's arguments.
    """
    command, *rest = (sys.argv[1:] if argv is None else argv) or ['help']
    if command in COMMANDS:
        return COMMANDS[command](rest)
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

    PLACE is package.module:name. It names the function in one of two ways.

      The loss, with its arguments in --args: a tuple, or a function without
      arguments that returns a tuple. The first argument holds the parameters.

        python -m flax_sg flow train:loss --args train:example

        def loss(params, batch): ...
        def example():
            params = jax.eval_shape(model.init, jax.random.key(0), X)['params']
            return params, jax.ShapeDtypeStruct((8, 64), jnp.float32)

      A function without arguments that returns (loss, *args); or the result of
      sg.gradient_flow, for argnums= and has_aux=.

        python -m flax_sg flow train:check

        def check():
            return loss, *example()

    Expectations: 'gln: gln_*/** code/kernel' says that the output gln trains what
    these globs select and nothing else. 'gln:' says that gln trains nothing. A glob
    may name the outputs: each output is judged alone. 'gln_*/**' names no output:
    what all outputs train together counts.

    Status: 0 if every expectation holds, 1 if one is broken, 2 if the command is
    wrong. An exception in the program shows its traceback, with status 1.
    """
    parser = _parser(flow, place='the function')
    about = 'what it has to train, and nothing else; any number of times'
    parser.add_argument(
        '--expect', metavar='TEXT', action='append', default=[], help=about
    )
    about = 'names of a module that count'
    parser.add_argument('--depth', metavar='N', type=_depth, help=about)
    parser.add_argument('--json', action='store_true', help='print the data')
    about = 'draw it (png, svg, pdf, ...)'
    parser.add_argument('--plot', metavar='FILE', help=about)
    options = parser.parse_args(argv)

    with _usage_errors(parser):
        expected = list(map(_parsed, options.expect))
        # The user's program may print, and stdout must hold nothing but the JSON.
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            report = _report(options.place, options.args)
    with _usage_errors(parser, errors.FlaxSGError):
        broken = [expectation.broken(report) for expectation in expected]
    if options.plot:
        # An unknown file format, a missing folder, or no matplotlib.
        with _usage_errors(parser, ValueError, OSError, ModuleNotFoundError):
            report.plot(options.plot, options.depth)
    if options.json:
        print(json.dumps(_as_json(report, options.expect, broken), indent=2))
        return int(any(broken))
    console = Console(highlight=False)
    console.print(report.matrix(options.depth))
    judged = zip(options.expect, expected, broken, strict=True)
    for said, expectation, found in judged:
        verdict = '[bold red]BROKEN[/]' if found else '[green]ok[/]    '
        console.print(f'\n{verdict}  ', end='')
        console.print(said, markup=False)
        for line in expectation.explained(found):
            print(f'  {line}')
    return int(any(broken))


def paths(argv: Sequence[str]) -> int:
    """Prints the paths that filters can name, and what a filter selects.

    Each variable of a model is shown with its module's class and its shape. Nothing
    is compiled or run.

    PLACE is package.module:name. It names

      a module, with its arguments in --args: a tuple of arrays or of their shapes
      (jax.ShapeDtypeStruct), or a function without arguments that returns one;
      a tuple (module, *args), or a function without arguments that returns one;
      a tree of parameters.

        python -m flax_sg paths train:model --args train:example --where 'head/**'

    Status: 0; 2 if the command is wrong, or a filter selects nothing.
    """
    parser = _parser(paths, place='the model')
    about = 'say of each variable whether these globs select it'
    parser.add_argument('--where', metavar='GLOB', nargs='+', help=about)
    options = parser.parse_args(argv)
    with _usage_errors(parser, errors.UnusedFilterError):
        model, *args = _model(options.place, options.args)
        print(summary.paths(model, *args, where=options.where))
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
    for name, value in _environment():
        print(f'{name:<10} {value}')
    return 0


COMMANDS = {'flow': flow, 'paths': paths, 'demo': demo, 'env': env}


class UsageError(Exception):
    """The command is wrong: the error's text is printed, and the status is 2."""


@contextlib.contextmanager
def _usage_errors(
    parser: argparse.ArgumentParser, *kinds: type[Exception]
) -> Generator[None]:
    """Ends the process with status 2 if the command is wrong.

    Args:
        parser: the parser that prints the error.
        kinds: more exceptions that mean a wrong command.
    """
    try:
        yield
    except (UsageError, *kinds) as error:
        parser.error(str(error))


def _parser(command: Callable[..., int], place: str) -> argparse.ArgumentParser:
    """Makes the parser of a command with ``PLACE`` and ``--args``."""
    parser = argparse.ArgumentParser(
        f'python -m flax_sg {command.__name__}',
        description=inspect.getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('place', metavar='PLACE', help=place)
    parser.add_argument('--args', metavar='PLACE', help='its arguments')
    return parser


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'expected a number from 0, got {text!r}')
    return int(text)


def _parsed(text: str) -> Expectation:
    output, colon, globs = text.rpartition(':')
    try:
        who = filters.as_filter(output.strip()) if colon else None
        if not globs.split():
            return Expectation(True, trained=False, output=who)
        return Expectation(filters.as_filter(globs.split()), only=True, output=who)
    except errors.FlaxSGError as error:
        raise UsageError(f'--expect {text!r}: {error}') from None


def _report(place: str, args: str | None) -> GradientFlow:
    found = _load(place)
    if args is not None:
        return gradient_flow(found, *_example(args))
    found = _called(found, place)
    if isinstance(found, GradientFlow):
        return found
    if isinstance(found, (tuple, list)) and found and callable(found[0]):
        return gradient_flow(*found)
    raise UsageError(
        f'{place} returned {shown(found)}, and should return (loss, *args); '
        f'if it is the loss, say where its arguments are: --args package.module:name'
    )


def _model(place: str, args: str | None) -> tuple[Any, ...]:
    """Returns the model or tree at a place, and its arguments."""
    found = _load(place)
    if not isinstance(found, linen.Module):
        found = _called(found, place)
    if args is not None:
        return found, *_example(args)
    if isinstance(found, tuple) and found and isinstance(found[0], linen.Module):
        return found
    if isinstance(found, linen.Module):
        raise UsageError(
            f'{place} is a module: say where its arguments are, --args '
            'package.module:name, or name a tuple (module, *args)'
        )
    return (found,)


def _example(place: str) -> Sequence[Any]:
    """Returns the arguments at a place, or from the function there."""
    given = _called(_load(place), place)
    if isinstance(given, (tuple, list)):
        return given
    raise UsageError(f'--args {place} is {shown(given)}; expected a tuple of arguments')


def _called(found: Any, place: str) -> Any:
    """Returns what a function without arguments returns; other values as they are."""
    if not callable(found):
        return found
    signature = inspect.signature(found)
    try:
        signature.bind()
    except TypeError:
        raise UsageError(
            f'{place} takes arguments {signature}: say where they are, '
            '--args package.module:name, or name a function without arguments that '
            'returns (loss, *args)'
        ) from None
    return found()


def _load(place: str) -> Any:
    """Imports the object at ``package.module:name``."""
    module, _, name = place.partition(':')
    if not module or not name or module.endswith('.py') or '/' in module:
        dotted = module.removesuffix('.py').strip('./').replace('/', '.')
        raise UsageError(
            f'{place!r} is not a place. Write package.module:name, such as '
            f"'{dotted or 'train'}:{name or 'loss'}'"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An import inside the user's module failed: an error of the user's program.
        if error.name is None or not f'{module}.'.startswith(f'{error.name}.'):
            raise
        raise UsageError(f'there is no module {error.name!r} to import') from None
    for part in name.split('.'):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 3)
            meant = f'; did you mean {" or ".join(map(repr, near))}?' if near else ''
            raise UsageError(f'{module} has no {name!r}{meant}')
        found = getattr(found, part)
    return found


def _as_json(
    report: GradientFlow, texts: Sequence[str], broken: list[list[Broken]]
) -> dict[str, Any]:
    statuses = zip(*report.status, strict=True)
    columns = zip(report.parameters, report.shapes, statuses, report.uses, strict=True)
    parameters = [
        {
            'path': str(path),
            'shape': shape.shape,
            'dtype': str(shape.dtype),
            'status': dict(zip(report.outputs, status, strict=True)),
            'uses': list(map(dataclasses.asdict, uses)),
        }
        for path, shape, status, uses in columns
    ]
    judged = [
        {
            'expect': text,
            'holds': not found,
            'broken': [one._asdict() for one in found],
        }
        for text, found in zip(texts, broken, strict=True)
    ]
    return {
        'outputs': report.outputs,
        'parameters': parameters,
        'expectations': judged,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return 'not installed'


def _environment() -> Iterator[tuple[str, str]]:
    """Yields versions, devices and flags, for a bug report."""
    yield 'flax_sg', flax_sg.__version__
    for package in ('flax', 'jax', 'jaxlib', 'optax', 'chex'):
        yield package, _version(package)
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


if __name__ == '__main__':
    sys.exit(main())
