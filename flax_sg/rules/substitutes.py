"""Rules that read other values in place of variables.

A trace is found by the key of a rule. A tree of values is no part of the key: it would
be compared number by number, and kept alive. So the key has the names of its variables,
and other values find the same trace. The values are compared, by a token, only if a
trace has read one of them as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core.scope import CollectionFilter, in_filter

from flax_sg import errors
from flax_sg.filters import tokens
from flax_sg.filters.paths import Path
from flax_sg.internals import modules
from flax_sg.internals.modules import Module
from flax_sg.internals.types import Leaf, PyTree
from flax_sg.rules import rules
from flax_sg.trees.leaves import (
    as_array,
    described,
    fitting,
    is_absent,
    misfit,
    no_value,
    shape_of,
)
from flax_sg.trees.nondifferentiable import NonDifferentiable

# The collection of a variable, and its names from the module on that opens the block.
Entry = tuple[str, tuple[str, ...]]


class Substitute(rules.Keyed):
    """Reads see other values."""

    name = 'substitute'
    brings = True
    at_init = False  # ``init`` has to store the variables, not the values.

    def __call__(self, path: Path, leaf: Leaf) -> Leaf:
        """What is read instead of one leaf."""
        raise errors.ArgumentTypeError(
            'sg.rewrite was given nn.substitute with values by name: only variables of '
            'a model have these names.\n'
            'For a tree write sg.substitute(tree, values).'
        )


class FromTree(Substitute):
    """Reads see the values of a tree."""

    def __init__(self, entries: Mapping[Entry, Any]) -> None:
        self.entries = {
            entry: jax.tree_util.tree_map(as_array, value)
            for entry, value in entries.items()
        }
        leaves = jax.tree_util.tree_leaves(list(self.entries.values()))
        token = tuple(
            (tokens.of_value if isinstance(leaf, jax.Array) else tokens.of_object)(leaf)
            for leaf in leaves
        )
        super().__init__(frozenset(self.entries), token)

    def instead(self, path: Path, value: PyTree, find: Callable[[str], Any]) -> PyTree:
        """Returns the given value."""
        del find
        entry = (path.collection, path.parts)
        if path.outside or entry not in self.entries:
            places = (x for top, x in self.entries if top == path.collection)
            size = len(path.parts)
            outer = next((x[:-size] for x in places if x[-size:] == path.parts), ())
            raise no_value(path, 'the tree', '/'.join(outer))
        return fitting(path, value, self.entries[entry])


class FromCollection(Substitute):
    """Reads see the variables of the same names in another collection."""

    def __init__(self, collection: str) -> None:
        super().__init__(collection)
        self.collection = collection

    def instead(self, path: Path, value: PyTree, find: Callable[[str], Any]) -> PyTree:
        """Returns the variable in the other collection."""
        other = find(self.collection)
        if other is rules.MISSING:
            raise no_value(path, f'the collection {self.collection!r}')
        return fitting(path, value, other)


class FromFunction(Substitute):
    """Reads see what a function makes of the stored values."""

    runs_code = True

    def __init__(self, fn: Callable[[Path, Any], Any]) -> None:
        super().__init__(tokens.of_object(fn))
        self.fn = fn

    def __call__(self, path: Path, leaf: Leaf) -> Leaf:
        """Returns what the function returns: any dtype, the shape of the leaf."""
        new = self.fn(path, leaf)
        if isinstance(leaf, NonDifferentiable):
            # Arithmetic of the function has made a plain array of it.
            new = NonDifferentiable(new)
            if shape_of(new) == shape_of(leaf):
                return new
        if jax.tree_util.treedef_is_leaf(jax.tree_util.tree_structure(new)):
            new = as_array(new) if isinstance(leaf, jax.Array) else new
            if shape_of(new) == shape_of(leaf):
                return new
        raise misfit(
            path,
            f'a value of shape {shape_of(leaf)}',
            described(new),
        )


def entries_of(values: PyTree, collections: CollectionFilter) -> dict[Entry, Any]:
    """The values in a tree by the names of variables; it may hold bound modules.

    >>> entries_of({'dense': {'bias': 1.0}}, 'params')
    {('params', ('dense', 'bias')): 1.0}

    Args:
        values: nested as the variables are; the collections on top unless
            ``collections`` is a single name.
        collections: the collections that may be in it.

    Raises:
        ArgumentTypeError: for what is no tree of values.
    """
    entries: dict[Entry, Any] = {}
    if isinstance(collections, str):
        values = {collections: values}
    elif isinstance(values, modules.Module):
        of_module = _of_module(values).items()
        values = {
            name: tree for name, tree in of_module if in_filter(collections, name)
        }
    for collection, tree in values.items():
        if not in_filter(collections, collection):
            raise no_values(
                f'values for the collection {collection!r}, which '
                f'collections={collections!r} leaves out,'
            )
        _collect(entries, collection, (), tree)
    return entries


def _collect(
    entries: dict[Entry, Any], collection: str, names: tuple[str, ...], node: object
) -> None:
    """Adds the values in a node of a tree to the entries."""
    if isinstance(node, modules.Module):
        node = _of_module(node).get(collection, {})
    if isinstance(node, Mapping):
        for name, below in node.items():
            _collect(entries, collection, (*names, str(name)), below)
    elif not names:
        raise no_values(f'{described(node)} for the collection {collection!r}')
    elif not is_absent(node):
        entries[collection, names] = node


def _of_module(module: Module) -> Mapping[str, Any]:
    if module.scope is None:
        raise no_values(f'a {type(module).__name__} that is not bound')
    return module.variables


def is_initializing(values: PyTree) -> bool:
    """Whether values are missing because their module is still being made."""
    if isinstance(values, Mapping):
        return any(map(is_initializing, values.values()))
    return isinstance(values, modules.Module) and values.is_initializing()


def no_values(name: str) -> errors.ArgumentTypeError:
    """The error for an argument that gives no values for variables."""
    return errors.ArgumentTypeError(
        f'{name} cannot be read in place of variables.\n'
        "Give values nested as the variables are: {'kernel': value}, or {'params': "
        "{'kernel': value}} for several collections. Or give a function (path, value) "
        '-> value, a bound module, or the name of another collection.'
    )
