"""Views of NNX models: what a rule and a filter make of a model."""

from __future__ import annotations

import itertools
import operator
from typing import Any, TypeAlias

import jax
from flax import nnx

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.forms.plain_trees import rewritten
from flax_sg.graphs.asking import Asked, ask
from flax_sg.graphs.values import as_one, raw
from flax_sg.graphs.walks import Walk
from flax_sg.internals.weak import ByIdentity
from flax_sg.rules import rules, substitutes
from flax_sg.trees.leaves import is_differentiable, is_whole

# Metadata of Variables that are no plain arrays, in one version of Flax or another.
_MUTABLE = ('hijax', 'is_hijax', 'ref', 'has_ref')


def view(walk: Walk, rewrite: rules.Rewrite, kind: Any) -> Any:
    """A model that reads other values in the Variables that a filter selects.

    Args:
        walk: the model.
        rewrite: the filter and the rule.
        kind: an NNX filter of what the filter is asked for.

    Returns:
        A model of the same class. Its modules are shallow copies. A selected Variable
        is a new one with the same type and metadata, unless the rule leaves it as it
        is; every other is the model's own.

    Raises:
        ArgumentTypeError: if there is no module, or a selected Variable is a mutable
            array of JAX, or a static attribute leads to one.
        UnusedFilterError: if ``kind`` or a part of the filter matches nothing.
    """
    call = f'nnx.{rewrite.rule.name}'
    if rewrite.collections != 'params':
        raise TypeError(f'{call}: collections= is for linen; see kind=')
    asked = ask(call, walk, rewrite.where, kind, rewrite.unused)
    chosen = [one for one in asked if any(one.said)]
    for leaf, path, _ in chosen:
        is_variable = isinstance(leaf.value, nnx.Variable)
        if is_variable and any(map(leaf.value.get_metadata().get, _MUTABLE)):
            raise errors.ArgumentTypeError(
                f'{str(path)!r} is a mutable array of JAX, which nnx.grad does not '
                'differentiate.\nMake the Variable without hijax=True and ref=True.'
            )
    # The structure of a Variable has its type and metadata.
    flat = [jax.tree.flatten(one.leaf.value, is_leaf=is_whole) for one in chosen]
    # For each array its path, what the filter says of it, and the array.
    rows = [
        [(path, takes, x) for takes, x in zip(said, leaves, strict=bool(leaves))]
        for (_, path, said), (leaves, _) in zip(chosen, flat, strict=True)
    ]
    seen = _of_tree(rewrite.rule, chosen, rows) or _of_rule(rewrite, rows)
    made = walk.copy(
        {
            leaf: treedef.unflatten(new)
            for (leaf, *_), (old, treedef), new in zip(chosen, flat, seen, strict=True)
            if _is_other(old, new)
        }
    )
    if isinstance(made, nnx.Pytree):
        VIEWS.put(made, rewrite.rule.name)
    return made


# The rule of each view that is still there: an optimizer asks for these.
VIEWS = ByIdentity[str]()


# For each leaf of a model its arrays: the path, what the filter says, and the array.
Rows: TypeAlias = list[list[tuple[Path, Any, Any]]]


def _of_rule(rewrite: rules.Rewrite, rows: Rows) -> list[list[Any]]:
    """What readers of the view see in place of the arrays of each leaf."""
    new = iter(rewritten(rewrite, [*itertools.chain(*rows)]))
    return [[*itertools.islice(new, len(of_leaf))] for of_leaf in rows]


def _of_tree(rule: Any, chosen: list[Asked], rows: Rows) -> list[list[Any]] | None:
    """The same of a rule with a value for each leaf; None if the rule has none."""
    if not isinstance(rule, substitutes.FromTree):
        return None
    out: list[list[Any]] = []
    for (leaf, *_), of_leaf in zip(chosen, rows, strict=True):
        path = Path.of('params', leaf.names)
        given = rule.entries.get(path.place)
        if isinstance(given, errors.StructureError):
            raise given
        given = rule.instead(path, as_one(raw(leaf.value)), lambda _: rules.AS_IT_IS)
        news = zip(of_leaf, jax.tree.leaves(given, is_leaf=is_whole), strict=True)
        out.append(
            [
                filters.merged(takes, new, old, path) if takes else old
                for (path, takes, old), new in news
            ]
        )
    return out


def _is_other(old: list[Any], new: list[Any]) -> bool:
    """Whether a rule has changed a value, or might have.

    Counts, keys and other integers that a rule leaves as they are go on in the model.
    """
    return any(map(operator.is_not, old, new)) or any(map(is_differentiable, old))
