"""``python -m flax_sg paths``: the paths of a model, and what a filter selects.

Prints the paths that filters can name: each variable of a model with its
module's class and its shape. Nothing is compiled or run.

PLACE is package.module:name. It names

  a module, with its arguments in --args: a tuple of arrays or of their shapes
  (jax.ShapeDtypeStruct), or a function without arguments that returns one;
  a tuple (module, *args), or a function without arguments that returns one;
  a tree of parameters.

    python -m flax_sg paths train:model --args train:example --where 'head/**'

Status: 0; 2 if the command is wrong, or a filter selects nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from flax import linen

from flax_sg import errors, summary
from flax_sg.commandline import places


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its status.

    Args:
        argv: what follows ``python -m flax_sg paths``.
    """
    parser = places.parser_of('paths', __doc__, place='the model')
    about = 'say of each variable whether these globs select it'
    parser.add_argument('--where', metavar='GLOB', nargs='+', help=about)
    options = parser.parse_args(argv)
    with places.usage_errors(parser, errors.UnusedFilterError):
        model, *args = _model(options.place, options.args)
        print(summary.paths(model, *args, where=options.where))
    return 0


def _model(place: str, args: str | None) -> tuple[object, ...]:
    """Returns the model or tree at a place, and its arguments."""
    found = places.load(place)
    if callable(found) and not isinstance(found, linen.Module):
        found = places.called(found, place)
    if args is not None:
        return found, *places.example(args)
    if isinstance(found, tuple) and found and isinstance(found[0], linen.Module):
        return found
    if isinstance(found, linen.Module):
        raise places.UsageError(
            f'{place} is a module: say where its arguments are, --args '
            'package.module:name, or name a tuple (module, *args)'
        )
    return (found,)
