"""The variables and modules of a linen model, from a trace of ``init`` on shapes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from flax_sg import errors, filters
from flax_sg.internals import initializing
from flax_sg.trees.leaves import leaves_of


def variables_of(
    module: linen.Module, rngs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """The shapes of a module's variables, and the classes of its modules.

    Nothing is compiled or run.

    Args:
        module: the module.
        rngs: as for ``init``, or their shapes.
        args: as for ``init``, arrays or their shapes.
        kwargs: as for ``init``, including ``method=``.

    Returns:
        The variables, as ``init`` makes them. And the class name of each module that is
        called, by the names in its path, in the order of the first calls.
    """
    classes: dict[tuple[str, ...], str] = {}

    def note(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        called = context.module
        if called.scope is not None:
            # A lifted class calls its methods on clones, the last one of the bare
            # class. Some clones have the empty path of the root.
            bare = type(called if called.path else module)
            classes[called.path] = bare.__name__
        return next_fun(*args, **kwargs)

    return initializing.variables_of(module, rngs, args, kwargs, note), classes


@contextlib.contextmanager
def inputs_explained(
    call: str, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Generator[None]:
    """Says what to write if a model raises for what it is given as its inputs.

    A model may take a text, such as a mode, or a random key: nothing is said before
    it raises.

    Args:
        call: the function of ``sg`` that the user calls.
        model: the model.
        args: what the model is given.
        kwargs: the same by name.

    Raises:
        ArgumentTypeError: from the error of the model.
    """
    try:
        yield
    except Exception as error:
        lines = _explanation(call, model, args, kwargs, error)
        if lines is None:
            raise
        given, write = lines
        raise errors.ArgumentTypeError(
            f'{call}() gave {type(model).__name__} {given}, '
            f'which raised {type(error).__name__}.\n{write}'
        ) from error


def _explanation(
    call: str,
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: Exception,
) -> tuple[str, str] | None:
    """What was given in the place of inputs, and what to write; None if nothing was."""
    filter_ = next(filter(_is_filter, args), kwargs.get('where'))
    if filter_ is not None:
        inputs = 'model, x' if isinstance(model, linen.Module) else 'model'
        written = repr(filter_) if isinstance(filter_, str) else 'where'
        return (
            f'{filter_!r} as an input',
            'A filter is no input: sg.paths shows what it names.\n'
            f'Write sg.paths({inputs}, where={written}).',
        )
    given = next(filter(None, map(_for_init, args)), '')
    if given:
        return (
            f'{given} as its argument',
            f'{call}() makes the variables itself, and random keys have a name.\n'
            f'Write sg.{call}(model, x), or sg.{call}(model, x, rngs=rngs).',
        )
    if not args and isinstance(error, TypeError) and 'missing' in str(error):
        return (
            'no inputs',
            f'{error}.\nWrite sg.{call}(model, x): arrays, or their shapes.',
        )
    return None


def _is_filter(value: Any) -> bool:
    """Whether something is a filter; a text without a sign of globs may be a mode."""
    if isinstance(value, str):
        return not {*'/*'}.isdisjoint(value)
    return isinstance(value, (filters.Filter, re.Pattern))


def _for_init(x: Any) -> str:
    """What other functions take first, in words, or ''."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return 'a random key'
    if isinstance(x, Mapping):
        names = {str(path).rpartition('/')[2] for path in leaves_of(x).paths}
        return 'variables' if 'params' in x or names & _NAMES else ''
    return ''


# What Flax's layers call their parameters.
_NAMES = {'kernel', 'bias', 'scale', 'embedding'}


def classes_of(model: Any) -> dict[tuple[str, ...], str]:
    """The class name of each module in an NNX model, by the names in its path."""
    from flax import nnx  # Models of linen do not wait for it.

    # flax 0.12.0 has no ``iter_modules``.
    nodes = getattr(nnx, 'iter_modules', None) or nnx.iter_graph
    return {
        tuple(map(str, names)): type(node).__name__
        for names, node in nodes(model)
        if isinstance(node, nnx.Module)
    }
