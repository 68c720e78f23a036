"""How often a function is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from flax_sg import errors
from flax_sg.engine import blocks
from flax_sg.errors.texts import shown, table
from flax_sg.internals import tracing

_F = TypeVar('_F', bound=Callable[..., Any])


def assert_traces_once(fn: _F) -> _F:
    """Returns the function, which raises when JAX traces it for a second time.

    A filter that differs from step to step, a shape, a Python number: each of them
    compiles a training step anew, and nothing shows it but the clock.

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
        fn: what is given to ``jax.jit``, ``jax.grad`` or another transformation.

    Returns:
        A function that does the same and counts. A trace that ends in an exception
        does not count.

    Raises:
        ArgumentTypeError: if ``fn`` is jitted already, or when it is called outside of
            any trace: nothing would be counted.
        ExpectationError: an ``AssertionError``, from the second trace on; it shows
            what is not as it was in the first one.

    Note:
        The idea of ``chex.assert_max_traces``, which does not say why. Flax traces the
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
            raise _traced_again(name, _difference(first[0], seen))
        out = fn(*args, **kwargs)
        first.append(seen)
        return out

    return counted  # pyright: ignore[reportReturnType]


def _described(args: Any, kwargs: Any) -> dict[str, Any]:
    """What a trace depends on, by what it is called in a message."""
    open_now = tuple(block.rewrite for block in blocks.active())
    seen: dict[str, Any] = {'open blocks': open_now}
    for name, tree in (('args', args), ('kwargs', kwargs)):
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
            weak = ' (weak)' if getattr(leaf, 'weak_type', False) else ''
            seen[name + jax.tree_util.keystr(keys)] = shown(leaf) + weak
    return seen


def _difference(one: Any, other: Any) -> list[tuple[str, str, str]]:
    rows = [(name, one.get(name), other.get(name)) for name in one | other]
    return [(name, _text(a), _text(b)) for name, a, b in rows if a != b]


def _text(seen: Any) -> str:
    if isinstance(seen, tuple):
        return ', '.join(map(repr, seen)) or 'none'
    return '-' if seen is None else seen


def _traced_again(
    name: str, rows: Sequence[tuple[str, str, str]]
) -> errors.ExpectationError:
    """A function that should be traced once was traced again."""
    if rows:
        text = table(['', 'first trace', 'this trace'], rows)
    else:
        text = (
            '  Its arguments and the open blocks are what they were. JAX keeps '
            'traces by the\n  function, the devices and its settings: is the '
            'function made, or jitted, anew for each call?'
        )
    return errors.ExpectationError(f'{name} is traced a second time.\n{text}')


def _never_traced(name: str) -> errors.ArgumentTypeError:
    """A function whose traces are to be counted runs without being traced."""
    return errors.ArgumentTypeError(
        f'assert_traces_once({name}) counts no traces: the function is called '
        'outside of any.\n'
        f'Write jax.jit(assert_traces_once({name})), not the other way round.'
    )
