"""Rewrites of plain trees of values, without a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax.core.scope import in_filter

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, wrong_argument
from flax_sg.filters.names import no_variables
from flax_sg.filters.paths import Path, name_of
from flax_sg.internals.optional import is_nnx_model
from flax_sg.internals.types import Decision, PyTree
from flax_sg.rules import cotangents, rules, substitutes
from flax_sg.trees.leaves import (
    ABSENT,
    OVERWRITE_WITH_GRADIENT,
    Absent,
    Leaves,
    check_unused,
    fitting,
    is_absent,
    leaves_of,
    no_value,
    selected,
    tree_before,
)


def rewrite(tree: PyTree, rewrite: rules.Rewrite) -> PyTree:
    """A tree with the rule of a rewrite applied to the leaves that it selects.

    >>> import jax, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> slow = nn.scale_gradient('encoder/**', 0.5)
    >>> def loss(params):
    ...     params = sg.rewrite(params, slow)
    ...     return params['encoder']['w'] * params['head']['w']
    >>> grads = jax.grad(loss)({'encoder': {'w': 2.0}, 'head': {'w': 3.0}})
    >>> float(grads['encoder']['w']), float(grads['head']['w'])
    (1.5, 2.0)

    Args:
        tree: any pytree. In a dict of collections (``{'params': ...}``) paths start
            below the collection, otherwise all leaves count as parameters. Leaves in a
            box share the path of the box.
        rewrite: a rule and what it applies to, such as ``nn.scale_gradient`` returns.

    Returns:
        The tree with other leaves. What is computed from *it* is under the rule.

    Raises:
        ArgumentTypeError: if ``rewrite`` is none, or there is no tree.
        UnusedFilterError: if a part of the filter matches no leaf.
    """
    argument: Any = rewrite
    if not isinstance(argument, rules.Rewrite):
        write = "sg.rewrite(tree, nn.scale_gradient('encoder/**', 0.5))"
        raise wrong_argument(argument, 'rule with a filter', write)
    leaves = _tree_before('sg.rewrite(tree, rewrite)', tree)
    values = list(leaves.values)
    looked_at = [
        (i, path)
        for i, path in enumerate(leaves.paths)
        if in_filter(rewrite.collections, path.collection)
        and path.collection != OVERWRITE_WITH_GRADIENT
    ]
    paths = [path for _, path in looked_at]
    [decisions] = selected([paths], rewrite.where, rewrite.unused)
    decided = [
        (path, decision, values[i])
        for (i, path), decision in zip(looked_at, decisions, strict=True)
    ]
    for (i, _), leaf in zip(looked_at, rewritten(rewrite, decided), strict=True):
        values[i] = leaf
    return leaves.restore(values)


def rewritten(
    rewrite: rules.Rewrite, decided: Sequence[tuple[Path, Any, Any]]
) -> list[Any]:
    """What a rule makes of some leaves.

    Args:
        rewrite: the rule.
        decided: for each leaf its path, the filter's decision, and the leaf.
    """
    values, rule = [leaf for *_, leaf in decided], rewrite.rule
    # The leaves in a box share the path of their variable, and its norm.
    together: dict[tuple[str, Path], list[int]] = {}
    for i, (path, decision, leaf) in enumerate(decided):
        if decision is False or is_absent(leaf):
            continue
        if rule.acts_on != 'cotangents' or cotangents.has_to_act(rewrite, path, leaf):
            together.setdefault((path.collection, path), []).append(i)
    # If a part of an array is selected, a rule on cotangents gets the part alone.
    cuts = rule.acts_on == 'cotangents'
    variables = [
        (
            path,
            [filters.within(cuts and decided[i][1], values[i], path) for i in indices],
        )
        for (_, path), indices in together.items()
    ]
    for indices, new in zip(together.values(), rule.together(variables), strict=True):
        for i, leaf in zip(indices, new, strict=True):
            path, decision, _ = decided[i]
            values[i] = filters.merged(decision, leaf, values[i], path)
    return values


def stop_gradient(
    tree: PyTree, where: filters.Where | Absent = ABSENT, *, unused: str = 'raise'
) -> PyTree:
    """A tree in which the selected leaves are behind ``jax.lax.stop_gradient``.

    ``where`` names what is **stopped**.

    >>> import jax, flax_sg as sg
    >>> def loss(params):
    ...     params = sg.stop_gradient(params, 'encoder/**')
    ...     return params['encoder']['w'] * params['head']['w']
    >>> grads = jax.grad(loss)({'encoder': {'w': 2.0}, 'head': {'w': 3.0}})
    >>> float(grads['encoder']['w']), float(grads['head']['w'])
    (0.0, 2.0)

    Args:
        tree: any pytree, as for ``rewrite``; of a dict of collections all of them.
        where: which leaves are stopped: any kind of filter.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        The tree. Leaves that are no real or complex arrays are unchanged.
    """
    if is_absent(where):
        raise errors.ArgumentTypeError(
            f'sg.stop_gradient got {brief(tree)} alone, and no filter.\n'
            'For a block, write nn.stop_gradient(where), from flax_sg import linen as '
            'nn.\n'
            'For a tree, write sg.stop_gradient(tree, where).'
        )
    _tree_before('sg.stop_gradient(tree, where)', tree)
    chosen, rule = filters.as_filter(where), rules.StopGradient()
    return rewrite(tree, rules.Rewrite(chosen, rule, True, unused))


def substitute(
    tree: PyTree,
    values: PyTree,
    *,
    where: filters.Where | Absent = ABSENT,
    unused: str = 'raise',
) -> PyTree:
    """A tree in which some leaves are other values.

    What ``nn.substitute`` does to the variables of a model, done to any tree.

    >>> import flax_sg as sg
    >>> params = {'backbone': {'w': 1.0}, 'head': {'w': 2.0, 'b': 3.0}}
    >>> sg.substitute(params, {'head': {'w': 5.0}})
    {'backbone': {'w': 1.0}, 'head': {'b': 3.0, 'w': 5.0}}
    >>> sg.substitute(params, lambda path, leaf: -leaf, where='**/w')
    {'backbone': {'w': -1.0}, 'head': {'b': 3.0, 'w': -2.0}}

    Args:
        tree: any pytree, as for ``partition``.
        values: a tree of the same structure, or a part of one, whose leaves have the
            shapes and dtypes of those that they stand for; or a function
            ``(path, leaf) -> leaf`` that keeps shapes.
        where: which leaves are other values. By default those that ``values`` has; all,
            if it is a function.
        unused: ``'ignore'`` to let a filter or a value pass that belongs to no leaf.

    Returns:
        The tree with other leaves.

    Raises:
        StructureError: if a value does not fit, or a selected leaf has none.
        UnusedFilterError: if a value belongs to no leaf.
        UnusedFilterError: if a part of ``where`` matches no leaf.
    """
    chosen = filters.as_filter(True if is_absent(where) else where)
    if callable(values):
        rule = substitutes.FromFunction(values)
        return rewrite(tree, rules.Rewrite(chosen, rule, True, unused))
    return _substituted(tree, values, None if is_absent(where) else chosen, unused)


def _tree_before(call: str, tree: PyTree) -> Leaves:
    """Takes a tree apart; raises for a model of NNX, whose copy would lose writes."""
    for node in jax.tree.leaves(tree, is_nnx_model):
        if is_nnx_model(node):
            raise errors.ArgumentTypeError(
                f'{call} would copy {brief(node)}: what the copy writes, such as batch '
                'statistics, is lost.\n'
                'Write nnx.stop_gradient(model, where), from flax_sg import nnx. Or '
                'give the state: nnx.state(model, nnx.Param).'
            )
    return tree_before(call, tree)


def _substituted(
    tree: PyTree, values: PyTree, where: filters.Filter | None, unused: str
) -> PyTree:
    leaves = _tree_before('sg.substitute(tree, values, where=where)', tree)
    check_unused(unused)
    replacements = leaves_of(values)
    present = {
        keys: (path, leaf)
        for keys, (path, leaf) in zip(replacements.key_paths, replacements, strict=True)
        if not is_absent(leaf)
    }
    if values is None or not (present or unused == 'ignore' or not leaves.values):
        raise errors.UnusedFilterError(
            f'sg.substitute was given {brief(values)}, which holds no value.\n'
            "If there may be none, pass {} and unused='ignore'."
        )
    unknown = present.keys() - set(leaves.key_paths)
    if unknown and unused != 'ignore':
        names = sorted(tuple(map(name_of, keys)) for keys in unknown)
        existing = ('/'.join(map(name_of, keys)) for keys in leaves.key_paths)
        raise no_variables('sg.substitute: the tree of values', names, existing)
    decisions: list[Decision] = [keys in present for keys in leaves.key_paths]
    if where is not None:
        [decisions] = selected([leaves.paths], where, unused)
    out: list[Any] = []
    pairs = zip(leaves, decisions, strict=True)
    for keys, ((path, leaf), decision) in zip(leaves.key_paths, pairs, strict=True):
        if decision is not False and keys not in present:
            raise no_value(path, 'the tree')
        if decision is not False:
            new = fitting(path, leaf, present[keys][1])
            leaf = filters.merged(decision, new, leaf, path)
        out.append(leaf)
    return leaves.restore(out)
