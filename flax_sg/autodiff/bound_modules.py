"""Functions that read a bound module from their closure, as functions of its variables.

``sg.grad(lambda: loss(m(x)), of=m)``: while the function runs, it reads the values that
are differentiated in place of the variables of ``m``. This is a rule like any other, in
a block that is open around the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import linen
from flax.core.scope import Scope

from flax_sg import errors, filters
from flax_sg.engine import blocks, opening, views
from flax_sg.filters.paths import Path
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.internals import tracing
from flax_sg.rules import rules
from flax_sg.trees.leaves import Leaves, leaves_of


class Replaced(rules.Rule):
    """Reads see other leaves. It equals itself alone, for these may be tracers."""

    name = 'replaced'

    def __init__(
        self, prefix: tuple[str, ...], old: Leaves, new: Sequence[Any]
    ) -> None:
        # Two variables may hold one array, so their names tell them apart. The names
        # of a leaf within a variable begin with those of the variable.
        self._new: dict[int, list[tuple[str, tuple[str, ...], Any, Any]]] = {}
        for (path, leaf), other in zip(old, new, strict=True):
            entry = (path.collection, (*prefix, *path.parts), leaf, other)
            self._new.setdefault(id(leaf), []).append(entry)
        self.brings = any(isinstance(leaf, tracing.Tracer) for leaf in new)

    def __call__(self, path: Path, leaf: Any) -> Any:
        """The leaf that stands for a leaf of the module."""
        names = path.key[1]  # A name may hold a slash.
        for collection, entry, _, other in self._new.get(id(leaf), ()):
            if collection == path.collection and entry[: len(names)] == names:
                return other
        return leaf

    def clear(self) -> None:
        """Drops the leaves, which may be tracers."""
        self._new.clear()
        self.brings = False


def variables_of(module: Any) -> Any:
    """The variables of a bound module, by collection.

    Inside ``sg.grad(..., of=module)`` these are the values that are differentiated;
    elsewhere they are the stored ones.

    >>> dense = linen.Dense(1).bind({'params': {'bias': 2.0}})
    >>> variables_of(dense)
    {'params': {'bias': 2.0}}

    Raises:
        ArgumentTypeError: if it is no bound module.
    """
    if not isinstance(module, linen.Module) or module.scope is None:
        raise errors.ArgumentTypeError(
            f'of={type(module).__name__}(...) has no variables: expected a bound '
            'module, such as model.bind(variables).'
        )
    replacing, _ = _open_blocks()
    with blocks.thread.only(replacing):
        return _read(module)


def _open_blocks() -> tuple[tuple[blocks.Block, ...], tuple[blocks.Block, ...]]:
    """The open blocks up to the last one of ``of=``, and those inside that one."""
    found = blocks.active()
    replacing = [isinstance(b.rewrite.rule, Replaced) for b in found]
    count = max((n for n, yes in enumerate(replacing, start=1) if yes), default=0)
    return found[:count], found[count:]


def _read(module: linen.Module) -> Any:
    return {name: dict(tree) for name, tree in module.variables.items()}


def _in_open_blocks(scope: Scope, variables: Any) -> Any:
    """Variables in the place of those of a module, as the open blocks show them."""
    root, (_, others) = blocks.root_of(scope), _open_blocks()
    shown = root.within(())
    shown.level = root.level
    shown.parts.append((scope.path, variables))
    return {
        name: views.view(shown, others, (name, scope.path), tree)
        for name, tree in variables.items()
    }


def as_function_of(fun: Callable[..., Any], module: linen.Module) -> Callable[..., Any]:
    """A function of the module's variables, and of the arguments of ``fun``.

    >>> dense = linen.Dense(1).bind({'params': {'bias': 2.0}})
    >>> bias = as_function_of(lambda: dense.get_variable('params', 'bias'), dense)
    >>> bias({'params': {'bias': 5.0}}), bias(variables_of(dense))
    (5.0, 2.0)
    """
    scope: Any = module.scope

    def fun_of_variables(variables: Any, *args: Any, **kwargs: Any) -> Any:
        # The block below is the innermost one: what others do, they have done by then.
        new = leaves_of(_in_open_blocks(scope, variables))
        rule = Replaced(scope.path, leaves_of(_read(module)), new.values)
        every = BlockDecorator(filters.Constant(True), rule, True, 'ignore')
        try:
            with opening.InBlock(every, scope, opening.NOTHING):
                return fun(*args, **kwargs)
        finally:
            rule.clear()

    return fun_of_variables
