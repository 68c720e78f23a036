"""Writes of held state whose collection is not mutable: into a copy that is dropped.

``state='hold'`` keeps nothing of what a call writes, so ``mutable=`` need not name the
collection. The dicts of a collection that is not mutable are the caller's own. So the
first write copies the dict of its scope and of each parent scope, and when the block
closes the scopes get their own dicts back. The copy is seen by everybody who reads
these scopes. The body of a lifted transform inside of the block has other scopes: there
Flax raises, as it does without a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax.core.scope import Scope

from flax_sg.engine.blocks import Block, root_of
from flax_sg.engine.selection import selects, wants
from flax_sg.internals import core_scopes
from flax_sg.trees.variables import MISSING, Key, leaf_keys


def put(scope: Scope, open_blocks: Sequence[Block], key: Key, value: Any) -> bool:
    """Stores a variable in a copy, if Flax would refuse the write and a block holds it.

    Args:
        scope: the scope that writes.
        open_blocks: the open blocks, outermost first.
        key: the collection and the path of the variable.
        value: what is written.

    Returns:
        Whether it is stored. Otherwise Flax stores it, or raises.
    """
    if scope.is_mutable_collection(key[0]):
        return False
    root = root_of(scope)
    for block in reversed(open_blocks):
        if (
            block.rewrite.rule.acts_on == 'nothing'
            and block.owner is not None
            and root_of(block.owner) is root
            and wants(block, root, key[0])
            and scope.has_variable(key[0], key[1][-1])
            and all(selects(block, root, k, False, True) for k in leaf_keys(key, value))
        ):
            core_scopes.check_writes(scope)
            _copy_in(block, scope, key[0])[key[1][-1]] = value
            return True
    return False


def drop(block: Block) -> None:
    """Gives the scopes that wrote in a block what they had before."""
    while block.copies:
        variables, collection, before = block.copies.pop()
        if before is MISSING:
            del variables[collection]
        else:
            variables[collection] = before


def _copy_in(block: Block, scope: Scope, collection: str) -> dict[str, Any]:
    """The copy of a scope's collection in a block; made at the first call."""
    variables = core_scopes.variables_of(scope)
    if any(mine is variables and col == collection for mine, col, _ in block.copies):
        return variables[collection]
    copy = dict(core_scopes.collection_of(scope, collection))
    block.copies.append((variables, collection, variables.get(collection, MISSING)))
    variables[collection] = copy
    if scope.parent is not None and scope.name is not None:
        _copy_in(block, scope.parent, collection)[scope.name] = copy
    return copy
