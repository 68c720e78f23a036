"""Views of NNX models: what a rule and a filter make of a model."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.internals.types import Kind, Model, PyTree
from flax_sg.internals.weak import ByIdentity
from flax_sg.nnx.asking import ask
from flax_sg.nnx.statics import PLAIN, check, leading_to
from flax_sg.nnx.values import raw
from flax_sg.rules import rules, substitutes
from flax_sg.rules.plain_trees import rewritten
from flax_sg.trees.leaves import is_array, is_differentiable, is_whole
from flax_sg.trees.nnx_paths import Keys
from flax_sg.trees.nnx_walks import Leaf, Walk

# Metadata of Variables that are no plain arrays, in one version of Flax or another.
_MUTABLE = ('hijax', 'is_hijax', 'ref', 'has_ref')


def view(walk: Walk, rewrite: rules.Rewrite, kind: Kind, name: str = '') -> Model:
    """A model that reads other values in the Variables that a filter selects.

    Args:
        walk: the model.
        rewrite: the filter and the rule.
        kind: an NNX filter of what the filter is asked for.
        name: the function that the user calls, for errors; by default that of the rule.

    Returns:
        A model of the same class. Its modules are shallow copies. A selected Variable
        is a new one with the same type and metadata, unless the rule leaves it as it
        is; every other is the model's own.

    Raises:
        ArgumentTypeError: if there is no module, or a selected Variable is a mutable
            array of JAX, or a static attribute leads to one.
        UnusedFilterError: if ``kind`` or a part of the filter matches nothing.
    """
    call = f'nnx.{name or rewrite.rule.name}'
    asked = ask(call, walk, rewrite.where, kind, rewrite.unused)
    chosen = [each for each in asked if each.is_meant]
    for leaf, (path, *_), _ in chosen:
        is_variable = isinstance(leaf.value, nnx.Variable)
        if is_variable and any(map(leaf.value.get_metadata().get, _MUTABLE)):
            raise errors.ArgumentTypeError(
                f'{str(path)!r} is a mutable array of JAX, which nnx.grad does not '
                'differentiate.\nMake the Variable without hijax=True and ref=True.'
            )
    decided = [one for each in chosen for one in each.decided]
    if isinstance(rewrite.rule, substitutes.FromTree):
        values = itertools.chain(
            *(_replacements(rewrite.rule, leaf) for leaf, *_ in chosen)
        )
        new = [
            filters.merged(decision, value, old, path)
            for value, (path, decision, old) in zip(values, decided, strict=True)
        ]
    else:
        new = rewritten(rewrite, decided)
    arrays, changed = iter(new), dict[Leaf, Any]()
    for leaf, *_ in chosen:
        own = [*itertools.islice(arrays, len(leaf.arrays))]
        # A count, a key or another integer that the rule leaves alone stays the model's
        # own Variable: what the view writes there has to reach the model.
        is_other = any(map(operator.is_not, leaf.arrays, own))
        if is_other or any(map(is_differentiable, own)):
            changed[leaf] = leaf.treedef.unflatten(own)
    model = copied(walk, changed)
    if isinstance(model, nnx.Pytree):
        VIEWS.put(model, name or rewrite.rule.name)
    return model


def copied(walk: Walk, new: Mapping[Leaf, Any]) -> PyTree:
    """A copy of a model: its modules are copied, with some leaves in place of others.

    Lists and dicts in them are new. What is static is the same object. It raises if
    what is static leads to a module that has one of the new leaves (``statics.py``).
    """
    copies = {key: object.__new__(type(x)) for key, x in walk.modules.items()}
    inside = {key: [*map(id, x)] for key, (_, x, _) in walk.parts.items()}
    changed = leading_to({*map(id, new)}, inside) | {id(leaf.value) for leaf in new}
    clean = dict[int, Any]()

    def instead(child: Any, keys: Keys) -> Any:
        if type(child) is not Leaf:
            return copies[id(child)]
        value = new.get(child, child.value)
        # A list with arrays is data for Flax, and so are the functions in the list.
        if not (isinstance(value, nnx.Variable) or is_array(value)):
            check(value, '.'.join(map(str, keys)), changed, clean)
        return value

    rebuilt: Any = None
    for key, (keys, children, treedef) in reversed(walk.parts.items()):
        rebuilt = treedef.unflatten(map(instead, children, keys))
        if (node := walk.modules.get(key)) is None:
            continue
        rebuilt = vars(node) | (rebuilt if key in walk.unknown else vars(rebuilt))
        data = _OWN.union(str(path[0]) for path in keys)
        for name, value in rebuilt.items():
            if name not in data and type(value) not in PLAIN:
                check(value, f'{type(node).__name__}.{name}', changed, clean)
        vars(copies[key]).update(rebuilt)
    return copies.get(id(walk.tree), rebuilt)


_OWN = frozenset(vars(nnx.Module()))  # Attributes that Flax itself has.
# The rule of each view that is alive: ``nnx.Optimizer`` warns if it is given a view.
VIEWS = ByIdentity[str]()


def _replacements(rule: substitutes.FromTree, leaf: Leaf) -> list[Any]:
    """The arrays that a tree has for a leaf."""
    path = Path.of('params', leaf.names)
    entry = rule.entries.get(path.place)
    if isinstance(entry, errors.StructureError):
        raise entry
    # A number of Python is compared by the shape and dtype of the array that is read.
    own = jax.tree.map(_as_read, raw(leaf.value))
    value = rule.instead(path, own, lambda _: rules.MISSING)
    return jax.tree.leaves(value, is_leaf=is_whole)


def _as_read(value: object) -> Any:
    """What a rule makes of a number of Python: an array."""
    return jnp.asarray(value) if type(value) in (int, float, complex) else value
