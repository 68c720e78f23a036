"""Runs a training step on copies, and compares arrays before and after it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import experimental

from flax_sg import errors
from flax_sg.filters import predicates
from flax_sg.trees import leaves


class Compared(NamedTuple):
    """The share that changes, the norm, that of the change, and their cosine."""

    moved: Any
    size: Any
    change: Any
    cosine: Any


@jax.jit
def compared(old: Any, new: Any) -> Compared:
    """Compares an array with what it was."""
    kind = jnp.result_type(old)
    wide = kind if jnp.finfo(kind).bits >= 32 else jnp.float32
    old, new = jnp.asarray(old).astype(wide), jnp.asarray(new).astype(wide)
    moved = (new != old) & ~(jnp.isnan(new) & jnp.isnan(old))
    (old, scale, size), (way, by, change) = map(_scaled, (old, new - old))
    along = jnp.real(jnp.sum(jnp.conj(old) * way))
    # A single number always moves along itself.
    cosine = along / (size * change) if old.size > 1 else jnp.zeros_like(along)
    share = jnp.mean(moved) if moved.size else jnp.zeros_like(along)
    return Compared(share, scale * size, by * change, cosine)


def _scaled(x: Any) -> tuple[Any, Any, Any]:
    """An array whose largest number is 1, the factor, and its norm.

    Without the factor, squares are too small or too large for the type.
    """
    most = jnp.max(jnp.abs(x), initial=0)
    scale = jnp.where(most > 0, most, jnp.ones_like(most))
    x = x / scale.astype(x.dtype)
    return x, scale, jnp.sqrt(jnp.sum(jnp.abs(x) ** 2))


def measured(
    step: Callable[..., Any], args: Sequence[Any], watched: Iterable[int], times: int
) -> dict[int, Compared]:
    """Runs a step on copies; compares each watched leaf with its first value."""
    first, state = leaves.leaves_of(args[0]).values, args
    found: list[dict[int, Compared]] = []
    for _ in range(times):
        new = _stepped(step, jax.tree.map(_copied, tuple(state)))
        state = (*new, *args[len(new) :])
        now = leaves.leaves_of(state[0]).values
        found.append({n: compared(first[n], now[n]) for n in watched})
    found = jax.device_get(found)
    return {
        n: row._replace(moved=max(rows[n].moved for rows in found))
        for n, row in found[-1].items()
    }


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def _stepped(step: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
    """What a step makes of its leading arguments."""
    before = jax.tree.leaves(args)
    out = step(*args)
    is_several = type(out) is tuple and _form(out) != _form(args[0])
    results = out if is_several else (out,)
    fits = [_form(a) == _form(b) for a, b in zip(args, results, strict=False)]
    if fits[0]:
        return results[: [*fits, False].index(False)]
    after = jax.tree.leaves(args)
    if len(after) != len(before) or all(map(operator.is_, before, after)):
        raise errors.ArgumentTypeError(
            f'{predicates.describe(step)} returns {leaves.described(out)}, and no new '
            'state first.\n'
            'Return what the step makes of its first argument: '
            'return params, opt_state, loss.'
        )
    return args  # They were changed in place.


def _form(tree: Any) -> Any:
    values, treedef = jax.tree.flatten(tree)
    return treedef, [leaves.shape_of(value) for value in values]


def may_be_lost(row: Compared, kind: Any) -> bool:
    """Whether something stands still; of a narrow type, it may be most elements."""
    return row.moved < 1 if jnp.finfo(kind).bits < 32 else not row.moved


def in_wider_types(
    step: Callable[..., Any], args: Sequence[Any], asked: Sequence[int], times: int
) -> dict[int, Compared]:
    """What the steps do to some leaves if these have a wider type."""
    tree = leaves.leaves_of(args[0])
    values = list(tree.values)
    wider = {n: _WIDER.get(jnp.result_type(values[n]).name, 'float32') for n in asked}
    needs = jax.config.read('jax_enable_x64') or {*wider.values()} != {'float32'}
    # jax 0.8 moved it out of jax.experimental.
    home: Any = jax if hasattr(jax, 'enable_x64') else experimental
    with jax.numpy_dtype_promotion('standard'), home.enable_x64(needs):
        for n, kind in wider.items():
            values[n] = jnp.asarray(values[n]).astype(kind)
        try:
            return measured(step, (tree.restore(values), *args[1:]), asked, times)
        except Exception:  # The step does not run in other types.
            return {}


_WIDER = {
    'float32': 'float64',
    'float64': 'float64',
    'complex64': 'complex128',
    'complex128': 'complex128',
}
