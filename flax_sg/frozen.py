"""``Frozen``: a module whose parameters are read through ``stop_gradient``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from flax.linen import nowrap

from flax_sg import extents, filters, residuals, rules, statistics, values, wrappers


class Rewritten(wrappers.Wrapper):
    """A wrapper in whose extent a rewrite holds.

    Attributes:
        where: the variables to rewrite, by paths relative to the wrapped module.
        collections: the collections that ``where`` looks at.
        state: what happens to running statistics and other state.
        unused: what to do if a part of ``where`` took no variable.
        rule: what a reader sees instead of the stored value.
        within: for a part of a wrapped module, the one that paths are relative to.
    """

    where: Any = True
    collections: Any = 'params'
    state: str = statistics.UPDATE
    unused: str = 'raise'
    rule: rules.Rule = rules.StopGradient()
    within: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, 'where', filters.as_filter(self.where))
        rewrite = values.Value(self.where, self.rule, self.collections, self.unused)
        object.__setattr__(self, 'collections', rewrite.collections)
        object.__setattr__(self, '_rewrite', rewrite)
        statistics.check(self.state)
        super().__post_init__()

    @nowrap
    @contextlib.contextmanager
    def extent(self, judge: bool) -> Generator[Any]:
        """The rewrite holds, and state is treated as ``state`` says."""
        with self._opened(self.module, judge):
            yield self.module

    @nowrap
    @contextlib.contextmanager
    def _opened(self, module: Any, judge: bool) -> Generator[None]:
        owner = module if self.within is None else self.within
        with (
            statistics.handled(module, self.state),
            extents.opened(self._rewrite, owner.scope, judge),
        ):
            yield

    @nowrap
    def part(self, part: Any, module: Any) -> Any:
        """A wrapper of a part of ``module``, with the same paths."""
        within = module if self.within is None else self.within
        return self.clone(module=part, within=within, name=None)


class Frozen(Rewritten):
    """doc"""
