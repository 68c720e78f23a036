"""Views of NNX models: what a rule and a filter make of a model."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import jax
from flax import nnx

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.forms.plain_trees import rewritten
from flax_sg.graphs.asking import ask
from flax_sg.graphs.values import raw
from flax_sg.graphs.walks import Leaf, Walk
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
    rule, rows = rewrite.rule, [row for one in chosen for row in one.rows]
    if isinstance(rule, substitutes.FromTree):
        given = itertools.chain(*(_given(rule, leaf) for leaf, *_ in chosen))
        new = [
            filters.merged(takes, x, old, path) if takes else old
            for x, (path, takes, old) in zip(given, rows, strict=True)
        ]
    else:
        new = rewritten(rewrite, rows)
    each, changed = iter(new), dict[Leaf, Any]()
    for leaf, *_ in chosen:
        own = [*itertools.islice(each, len(leaf.arrays))]
        # Counts, keys and other integers that a rule leaves alone go on in the model.
        is_other = any(map(operator.is_not, leaf.arrays, own))
        if is_other or any(map(is_differentiable, own)):
            changed[leaf] = leaf.treedef.unflatten(own)
    made = walk.copy(changed)
    if isinstance(made, nnx.Pytree):
        VIEWS.put(made, rewrite.rule.name)
    return made


# The rule of each view that is still there: an optimizer asks for these.
VIEWS = ByIdentity[str]()


def _given(rule: substitutes.FromTree, leaf: Leaf) -> list[Any]:
    """The arrays that a tree has for a leaf."""
    path = Path.of('params', leaf.names)
    given = rule.entries.get(path.place)
    if isinstance(given, errors.StructureError):
        raise given
    given = rule.instead(path, raw(leaf.value), lambda _: rules.AS_IT_IS)
    return jax.tree.leaves(given, is_leaf=is_whole)
