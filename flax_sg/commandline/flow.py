"""``python -m flax_sg flow`` shows which loss of a program trains which part.

Prints which output of a function trains which of its parameters. Nothing is
compiled or run, and the shapes of the arguments (jax.eval_shape) are enough.

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

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from flax_sg import errors, filters, flow
from flax_sg.commandline import places
from flax_sg.errors.texts import shown
from flax_sg.testing.flows import Broken, Expectation


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its status.

    Args:
        argv: what follows ``python -m flax_sg flow``.
    """
    parser = places.parser_of('flow', __doc__, place='the function')
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

    with places.usage_errors(parser):
        expected = list(map(_parsed, options.expect))
        # The user's program may print, and stdout must hold nothing but the JSON.
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            report = _report(options.place, options.args)
    with places.usage_errors(parser, errors.FlaxSGError):
        broken = [expectation.broken(report) for expectation in expected]
    if options.plot:
        # An unknown file format, a missing folder, or no matplotlib.
        with places.usage_errors(parser, ValueError, OSError, ModuleNotFoundError):
            report.plot(options.plot, options.depth)
    if options.json:
        print(json.dumps(_as_json(report, options.expect, broken), indent=2))
    else:
        _show(report, options, expected, broken)
    return int(any(broken))


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'expected a number from 0, got {text!r}')
    return int(text)


def _report(place: str, args: str | None) -> flow.GradientFlow:
    target = places.load(place)
    if args is not None:
        return flow.gradient_flow(target, *places.example(args))
    made = places.called(target, place) if callable(target) else target
    if isinstance(made, flow.GradientFlow):
        return made
    if isinstance(made, (tuple, list)) and made and callable(made[0]):
        return flow.gradient_flow(*made)
    raise places.UsageError(
        f'{place} returned {shown(made)}, and should return (loss, *args); '
        f'if it is the loss, say where its arguments are: --args package.module:name'
    )


def _parsed(text: str) -> Expectation:
    output, colon, globs = text.rpartition(':')
    try:
        who = filters.as_filter(output.strip()) if colon else None
        if not globs.split():
            return Expectation(True, trained=False, output=who)
        return Expectation(filters.as_filter(globs.split()), only=True, output=who)
    except errors.FlaxSGError as error:
        raise places.UsageError(f'--expect {text!r}: {error}') from None


def _show(
    report: flow.GradientFlow,
    options: argparse.Namespace,
    expected: list[Expectation],
    broken: list[list[Broken]],
) -> None:
    console = Console(highlight=False)
    console.print(report.matrix(options.depth))
    judged = zip(options.expect, expected, broken, strict=True)
    for said, expectation, found in judged:
        verdict = '[bold red]BROKEN[/]' if found else '[green]ok[/]    '
        console.print(f'\n{verdict}  ', end='')
        console.print(said, markup=False)
        for line in expectation.explained(found):
            print(f'  {line}')


def _as_json(
    report: flow.GradientFlow,
    texts: Sequence[str],
    broken: list[list[Broken]],
) -> dict[str, Any]:
    by_parameter = zip(*report.status, strict=True)
    columns = zip(
        report.parameters, report.shapes, by_parameter, report.uses, strict=True
    )
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
    fields = 'output', 'parameter', 'expected', 'found'
    judged = [
        {
            'expect': text,
            'holds': not found,
            'broken': [{name: getattr(one, name) for name in fields} for one in found],
        }
        for text, found in zip(texts, broken, strict=True)
    ]
    return {
        'outputs': report.outputs,
        'parameters': parameters,
        'expectations': judged,
    }
