"""Functions that read a bound module from their closure, as functions of its variables.

``sg.grad(lambda: loss(m(x)), of=m)``: while the function runs, what it reads of ``m``
is replaced by the values that are differentiated. That is a rule like any other, and
the block that it holds in reaches what every block reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from flax import linen

from flax_sg import _private, errors, extents, filters, rewrites, rules
from flax_sg.leaves import Leaves, leaves_of
from flax_sg.paths import Path


class Replaced(rules.Rule):
    """Reads see other leaves. Equal to itself alone: what it holds may be traced."""

    name: ClassVar[str] = 'replaced'

    def __init__(
        self, prefix: tuple[str, ...], old: Leaves, new: Sequence[Any]
    ) -> None:
        # Two variables may hold one array: their names tell them apart. Leaves within
        # one variable have longer names than it has.
        self._new: dict[int, list[tuple[str, tuple[str, ...], Any, Any]]] = {}
        for (path, leaf), other in zip(old, new, strict=True):
            entry = (path.collection, (*prefix, *path.parts), leaf, other)
            self._new.setdefault(id(leaf), []).append(entry)
        self.brings = any(isinstance(leaf, _private.Tracer) for leaf in new)

    def __call__(self, path: Path, leaf: Any) -> Any:
        """The leaf that stands for a leaf of the module."""
        names = tuple(path.absolute.split('/'))
        for collection, entry, _, other in self._new.get(id(leaf), ()):
            if collection == path.collection and entry[: len(names)] == names:
                return other
        return leaf

    def clear(self) -> None:
        """Lets go of what may be traced."""
        self._new.clear()
        self.brings = False


def variables_of(module: Any) -> Any:
    """The variables of a bound module, by collection."""
    if not isinstance(module, linen.Module) or module.scope is None:
        raise errors.UnboundModuleError(module)
    return {name: dict(tree) for name, tree in module.variables.items()}


def as_function_of(fun: Callable[..., Any], module: linen.Module) -> Callable[..., Any]:
    """A function of the module's variables, and of what else ``fun`` takes."""
    scope: Any = module.scope

    def fun_of_variables(variables: Any, *args: Any, **kwargs: Any) -> Any:
        old = leaves_of(variables_of(module))
        rule = Replaced(scope.path, old, leaves_of(variables).values)
        every = rewrites.Rewrite(filters.Constant(True), rule, True, 'ignore')
        try:
            with extents.opened(every, scope):
                return fun(*args, **kwargs)
        finally:
            rule.clear()

    return fun_of_variables
