"""Views of NNX models: what a rule and a filter make of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from flax_sg import errors, filters
from flax_sg.forms.plain_trees import rewritten
from flax_sg.graphs.asking import Asked, ask
from flax_sg.graphs.walks import Walk
from flax_sg.rules import rules, substitutes
from flax_sg.trees.leaves import is_whole

# Metadata of Variables that are no plain arrays, in one version of Flax or another.
_MUTABLE = ('hijax', 'is_hijax', 'ref', 'has_ref')


def view(model: Any, rewrite: rules.Rewrite, kind: Any) -> Any:
    """A model that reads other values in the Variables that a filter selects.

    Args:
        model: an NNX module, or a container of modules.
        rewrite: the filter and the rule.
        kind: an NNX filter of the Variables that the filter is asked for.

    Returns:
        A model of the same class. Its modules are shallow copies. A selected Variable
        is a new one with the same type and metadata; every other is the model's own.

    Raises:
        ArgumentTypeError: if there is no module, or a selected Variable is a mutable
            array of JAX.
        UnusedFilterError: if a part of the filter matches no Variable.
    """
    call = f'nnx.{rewrite.rule.name}'
    if rewrite.collections != 'params':
        raise TypeError(f'{call}: collections= is for linen; see kind=')
    walk = Walk(model)
    asked = ask(call, walk, rewrite.where, kind, rewrite.unused)
    chosen = [one for one in asked if any(one[2])]
    for variable, path, _ in chosen:
        if any(map(variable.get_metadata().get, _MUTABLE)):
            raise errors.ArgumentTypeError(
                f'{str(path)!r} is a mutable array of JAX, which nnx.grad does not '
                'differentiate.\nMake the Variable without hijax=True and ref=True.'
            )
    values = _seen(rewrite, chosen)
    return walk.copy({id(v): v.replace(next(values)) for v, *_ in chosen})


def as_one(value: Any) -> Any:
    """What a Variable holds; a dict as one value, which nests no Variables."""
    return (value,) if isinstance(value, Mapping) else value


def _seen(rewrite: rules.Rewrite, chosen: Sequence[Asked]) -> Iterator[Any]:
    """Yields what readers of the view see in place of each raw value."""
    raws = [variable.get_raw_value() for variable, *_ in chosen]
    flat = [jax.tree.flatten(raw, is_leaf=is_whole) for raw in raws]
    # For each leaf its path, what the filter says of it, and the leaf.
    rows = [
        [(path, takes, x) for takes, x in zip(said, leaves, strict=bool(leaves))]
        for (_, path, said), (leaves, _) in zip(chosen, flat, strict=True)
    ]
    if isinstance(rewrite.rule, substitutes.FromTree):
        for (_, path, _), raw, of, (_, treedef) in zip(
            chosen, raws, rows, flat, strict=True
        ):
            known = rewrite.rule.entries  # By any path of tied weights.
            there = (p for p in (path, *path.also) if ('params', p.parts) in known)
            given = rewrite.rule.instead(
                next(there, path), as_one(raw), lambda _: rules.AS_IT_IS
            )
            news = jax.tree.leaves(given, is_leaf=is_whole)
            yield treedef.unflatten(
                filters.merged(takes, new, old, path) if takes else old
                for (path, takes, old), new in zip(of, news, strict=True)
            )
        return
    new = iter(rewritten(rewrite, [*itertools.chain(*rows)]))
    for leaves, treedef in flat:
        yield treedef.unflatten(itertools.islice(new, len(leaves)))
