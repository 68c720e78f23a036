"""Functions that read a bound module from their closure, as functions of its variables.

``sg.grad(lambda: loss(m(x)), of=m)``: while the function runs, it reads the values that
are differentiated in place of the variables of ``m``. This is a rule like any other, in
a block that is open around the function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from flax import linen

from flax_sg import errors, filters
from flax_sg.engine import blocks, opening
from flax_sg.filters.paths import Path
from flax_sg.rules import rules, substitutes


class Differentiated(substitutes.Substitute):
    """Reads see the values that are differentiated. It equals itself alone.

    Args:
        stored: the variables of a module, as the blocks around show them.
        given: the values, nested alike.
    """

    at_init = True

    def __init__(self, stored: Any, given: Any) -> None:
        self.stored, self.given = (
            substitutes.entries_of(tree, True) for tree in (stored, given)
        )
        super().__init__(frozenset(self.given), object())

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Returns what was written meanwhile as it is."""
        return leaf

    def instead(self, path: Path, value: Any, find: Callable[[str], Any]) -> Any:
        """Returns the value that is differentiated, unless another one was written."""
        entry = path.collection, path.parts
        pairs = zip(*map(jax.tree.leaves, (value, self.stored[entry])), strict=False)
        same = all(now is before for now, before in pairs)
        return self.given[entry] if same else rules.AS_IT_IS


def variables_of(module: Any) -> Any:
    """The variables of a bound module, by collection.

    Inside ``sg.grad(..., of=module)`` these are the values that are differentiated;
    elsewhere they are the stored ones.

    >>> dense = linen.Dense(1).bind({'params': {'bias': 2.0}})
    >>> variables_of(dense)
    {'params': {'bias': 2.0}}
    """
    replacing, _ = _open_blocks()
    with blocks.thread.only(replacing):
        return _read(module)


def _read(module: linen.Module) -> Any:
    return {name: dict(tree) for name, tree in module.variables.items()}


def _open_blocks() -> tuple[tuple[blocks.Block, ...], tuple[blocks.Block, ...]]:
    """The open blocks up to the last one of ``of=``, and those inside that one."""
    found = blocks.active()
    replacing = [isinstance(b.rewrite.rule, Differentiated) for b in found]
    count = max((n for n, yes in enumerate(replacing, start=1) if yes), default=0)
    return found[:count], found[count:]


def as_function_of(fun: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """A function of the module's variables, and of the arguments of ``fun``.

    >>> dense = linen.Dense(1).bind({'params': {'bias': 2.0}})
    >>> bias = as_function_of(lambda: dense.get_variable('params', 'bias'), dense)
    >>> bias({'params': {'bias': 5.0}}), bias(variables_of(dense))
    (5.0, 2.0)

    Raises:
        ArgumentTypeError: if it is no bound module.
    """
    if not isinstance(module, linen.Module) or module.scope is None:
        raise errors.ArgumentTypeError(
            f'of={type(module).__name__}(...) has no variables: expected a bound '
            'module, such as model.bind(variables).'
        )
    scope = module.scope

    def fun_of_variables(variables: Any, *args: Any, **kwargs: Any) -> Any:
        rule = Differentiated(_read(module), variables)
        names = filters.Names(frozenset(rule.given))
        replaced = rules.Rewrite(names, rule, True, 'ignore'), scope
        # The other blocks are opened again: what they made is not what is read now.
        others = [(block.rewrite, block.owner) for block in _open_blocks()[1]]
        with contextlib.ExitStack() as stack:
            for rewrite, owner in (replaced, *others):
                block = opening.InBlock(rewrite, owner, opening.NOTHING)
                stack.enter_context(block)
            return fun(*args, **kwargs)

    return fun_of_variables
