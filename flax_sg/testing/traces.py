"""Counts traces of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from flax_sg import errors
from flax_sg.engine import blocks
from flax_sg.errors.texts import shown, table
from flax_sg.internals import tracing

_F = TypeVar('_F', bound=Callable[..., Any])


def assert_traces_once(fn: _F) -> _F:
    """Wraps a function so that it raises when JAX traces it for a second time.

    Use it in a test of a training step. Another filter, shape or Python number in each
    step compiles the step again, and only the clock shows it.

    >>> import jax.numpy as jnp
    >>> step = jax.jit(assert_traces_once(lambda x: 2 * x))
    >>> _ = step(jnp.ones(3)), step(jnp.zeros(3))
    >>> try:
    ...     step(jnp.ones(4))
    ... except AssertionError as error:
    ...     print(error)
    <lambda> is traced a second time.
               first trace  this trace
      args[0]  float32[3]   float32[4]

    Args:
        fn: a function to give to ``jax.jit``, ``jax.grad`` or another transform.

    Returns:
        The same function, counted. A trace that raises does not count.

    Raises:
        ArgumentTypeError: if ``fn`` is jitted already, or when it is called outside of
            a trace: no trace would be counted.
        ExpectationError: an ``AssertionError``, from the second trace on, with the
            arguments that differ from the first trace.

    Note:
        ``chex.assert_max_traces`` counts too, but does not say why. Flax traces the
        body of ``nn.scan`` more than once.
    """
    name = getattr(fn, '__name__', type(fn).__name__)
    if hasattr(fn, 'lower'):
        raise _never_traced(name)
    first: list[dict[str, Any]] = []

    @functools.wraps(fn)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if not tracing.is_tracing():
            raise _never_traced(name)
        seen = _described(args, kwargs)
        if first:
            raise _traced_again(name, first[0], seen)
        out = fn(*args, **kwargs)
        first.append(seen)
        return out

    return counted  # pyright: ignore[reportReturnType]


def _described(args: Any, kwargs: Any) -> dict[str, Any]:
    """Everything that a trace depends on, by its name in a message."""
    open_now = tuple(block.rewrite for block in blocks.active())
    seen: dict[str, Any] = {'open blocks': open_now}
    for name, tree in (('args', args), ('kwargs', kwargs)):
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            weak = ' (weak)' if getattr(leaf, 'weak_type', False) else ''
            seen[name + jax.tree_util.keystr(keys)] = shown(leaf) + weak
    return seen


def _text(seen: Any) -> str:
    if isinstance(seen, tuple):
        return ', '.join(map(repr, seen)) or 'none'
    return '-' if seen is None else seen


def _traced_again(
    name: str, first: dict[str, Any], now: dict[str, Any]
) -> errors.ExpectationError:
    """A function that should be traced once was traced again."""
    rows = [
        (key, _text(first.get(key)), _text(now.get(key)))
        for key in first | now
        if first.get(key) != now.get(key)
    ]
    if rows:
        text = table(['', 'first trace', 'this trace'], rows)
    else:
        text = (
            'Its arguments and the open blocks are the same. JAX caches traces by '
            'function object:\ndefine and jit the function once, not in each step.'
        )
    return errors.ExpectationError(f'{name} is traced a second time.\n{text}')


def _never_traced(name: str) -> errors.ArgumentTypeError:
    """A function whose traces are to be counted runs without being traced."""
    return errors.ArgumentTypeError(
        f'assert_traces_once({name}) runs outside of any trace, and counts nothing.\n'
        f'Write jax.jit(assert_traces_once({name})), not the other way round.'
    )
