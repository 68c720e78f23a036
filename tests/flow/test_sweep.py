"""Every function of jax.numpy and jax.lax that moves elements: no zero is missed.

A function moves elements if each element of its outputs is one of its input, or zero,
whatever the input is. Which gradients are zero is then known by hand. If a JAX writes
such a function by a primitive that nobody knows, this sweep says so.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_sg.flow import pullback
from flax_sg.internals import jaxprs
from flax_sg.programs.primitives import KINDS, Kind

RNG = np.random.default_rng(0)
X, OTHER = (jnp.asarray(RNG.uniform(1.0, 2.0, (3, 4)), jnp.float32) for _ in range(2))
FORMS: dict[str, Callable[[Any], Any]] = {
    'x': lambda f: f,
    '[*x]': lambda f: lambda x: f([*x]),
    '*x': lambda f: lambda x: f(*x),
    'x, 1': lambda f: lambda x: f(x, 1),
    'x, 0, 1': lambda f: lambda x: f(x, 0, 1),
    'x, (1, 0)': lambda f: lambda x: f(x, (1, 0)),
    'x, (4, 3)': lambda f: lambda x: f(x, (4, 3)),
    'x, x': lambda f: lambda x: f(x, x[::-1]),
    'x, axis=0': lambda f: lambda x: f(x, axis=0),
    'x, axis=1': lambda f: lambda x: f(x, axis=1),
}
# Which elements they take is computed, by an index or a comparison, while they run. To
# an analysis that is an index of data: all elements count.
BY_INDEX = frozenset(
    (
        *('diag', 'diagflat', 'diagonal', 'dynamic_index_in_dim', 'insert', 'take'),
        *('dynamic_slice_in_dim', 'fill_diagonal', 'roll', 'select', 'tril', 'triu'),
        *('apply_along_axis', 'piecewise', 'take_along_axis', 'unwrap', 'where'),
        # Of what an empty array had.
        *('repeat', 'tile', 'broadcast'),
    )
)
ARITHMETIC = Kind.PRODUCT | Kind.ZEROS_OF_ZEROS


def names_in(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxprs.opened(jaxpr).eqns:
        bodies = jaxprs.within(eqn)
        yield from () if bodies else (eqn.primitive.name,)
        for body in bodies:
            yield from names_in(body)


def may_move(name: str) -> bool:
    kind = KINDS.get(name, Kind(0))
    computes = Kind.ELEMENTWISE in kind and Kind.SAME not in kind
    is_bits = name == 'bitcast_convert_type'  # It has no derivative.
    return not (computes or is_bits or kind & ARITHMETIC)


def sources(fn: Any) -> list[np.ndarray] | None:
    """For each output where its elements come from; None if they are no others."""
    found: list[list[Any]] = []
    for x in (X, OTHER):
        flat = np.append(np.ravel(x), 0.0)
        rows: list[Any] = []
        try:
            outs = jax.tree.leaves(fn(x))
        except Exception:  # JAX checks some arguments when it compiles.
            return None
        for out in map(np.asarray, outs):
            index = np.argmax(out.reshape(-1, 1) == flat, 1)
            if out.dtype != np.float32 or (flat[index] != out.reshape(-1)).any():
                return None
            rows.append(index.tolist())
        found.append(rows)
    return list(map(np.array, found[0])) if found[0] == found[1] != [] else None


def functions() -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for module in (jnp, lax):
        for name, fn in vars(module).items():
            is_other = isinstance(fn, (type, jnp.ufunc))
            if name.startswith('_') or not callable(fn) or is_other:
                continue
            for form, make in FORMS.items():
                try:
                    jaxpr = jax.make_jaxpr(make(fn))(X)
                except Exception:  # It takes other arguments.
                    continue
                names = set(names_in(jaxpr))
                if not all(map(may_move, names)):  # Not so in any form.
                    break
                if names and str(jaxpr) not in seen:
                    seen.add(str(jaxpr))
                    yield f'{name}({form})', make(fn)


@pytest.mark.filterwarnings('ignore')
def test_no_function_of_rows_is_taken_in_the_gross():
    tried, coarse = 0, []
    for name, fn in functions():
        rows = sources(fn)
        if rows is None or name.startswith('stop_gradient'):
            continue

        def last_and_all(x: Any, fn: Any = fn) -> list[Any]:
            outs = jax.tree.leaves(fn(jnp.where(np.arange(3)[:, None] > 0, x, stop(x))))
            return [f(jnp.ravel(out)) for f in (jnp.sin, last) for out in outs]

        program = jax.make_jaxpr(last_and_all)(X)
        try:
            outputs = range(len(program.out_avals))
            told = [pullback.zero_gradients(program, [0], [n])[0] for n in outputs]
        except pullback.RefusedError:  # JAX checks some when it differentiates.
            continue
        for mask, index in zip(told, [*rows, *(row[-1:] for row in rows)], strict=True):
            zero = ~np.isin(np.arange(12), index).reshape(3, 4)
            zero[0] = True
            assert not (mask & ~zero).any(), name
            if (zero & ~mask).any():
                coarse.append(name)
        tried += 1
    assert tried > 60
    wrong = [name for name in coarse if name.partition('(')[0] not in BY_INDEX]
    assert wrong == []


stop = lax.stop_gradient


def last(x: Any) -> Any:
    return jnp.sin(x[-1:])
