"""``mirror``: a view of a module's parameters, or of other values in their place."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

from flax.core.scope import CollectionFilter
from flax.linen import nowrap

from flax_sg import filters
from flax_sg.errors.texts import unknown_choice
from flax_sg.filters.paths import Path
from flax_sg.forms import blocks, held_state, mistakes, wrappers
from flax_sg.internals import core_scopes, modules
from flax_sg.internals.modules import Module
from flax_sg.rules import rules, value_rewrites
from flax_sg.trees.leaves import collections_of, is_absent
from flax_sg.trees.variables import iter_variables


class Mirror(wrappers.Wrapper):
    """What ``mirror`` returns.

    Attributes:
        values: a rewrite that brings other values; None for those of the module.
    """

    state: str = held_state.HOLD
    values: rules.Rewrite | None = None

    # A view must not write the cache: the module itself may be called as well.
    _results = held_state.OF_MIRRORS

    @nowrap
    def make_rng(self, name: str = 'params') -> Any:
        """Draws as the module does: ``nn.jit`` draws before its body begins."""
        with _drawing_apart(self.module):
            return self.module.make_rng(name)

    @nowrap
    @contextlib.contextmanager
    def _in_block(self, judge: bool) -> Generator[None]:
        """The block of every wrapper, with random numbers and values of the view."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_drawing_apart(self.module))
            if self.values is not None:
                # State that is computed from other values is not that of the module.
                everything = filters.Constant(True)
                stack.enter_context(self._state_in(everything, held_state.HOLD))
                stack.enter_context(self._block(self.values, judge))
            stack.enter_context(super()._in_block(judge))
            yield


def mirror(
    module: Any,
    where: filters.Where = True,
    *,
    variables: Mapping[str, Any] | value_rewrites.Values | None = None,
    state: str = held_state.HOLD,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Any:
    """A view of a module: the same parameters, seen through ``stop_gradient``.

    ``where`` names what is **stopped**, by default everything.

    Use it for a target, a teacher or a second branch that must not be trained. A view
    has no parameters of its own. Calls, methods, attributes and submodules are those of
    ``module``. ``module`` may be called before the view or after it.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> class Siamese(nn.Module):
    ...     def setup(self):
    ...         self.encoder = nn.Dense(3)
    ...         self.predictor = nn.Dense(3)
    ...     def __call__(self, one, two, teacher=None):
    ...         target = nn.mirror(self.encoder, variables=teacher)(two)
    ...         return jnp.mean((self.predictor(self.encoder(one)) - target) ** 2)
    >>> model, x = Siamese(), jnp.ones((4, 2))
    >>> params = model.init(jax.random.key(0), x, x)['params']
    >>> sorted(params)
    ['encoder', 'predictor']

    The n-th call of a view draws what the n-th call of the module does, such as the
    same dropout masks, in whichever order they come. All views of a module are counted
    together, and the module draws what it draws without a view. Flax traces the body of
    ``nn.scan`` twice and goes on counting: call both equally often there.

    With ``variables`` it reads other values: a target network, an average of earlier
    weights.

    >>> ema = jax.tree.map(lambda p: 0.9 * p, params['encoder'])
    >>> def loss(params, ema):
    ...     return model.apply({'params': params}, x, -x, {'params': ema})
    >>> of_params, of_ema = jax.grad(loss, argnums=(0, 1))(params, ema)
    >>> bool(jnp.any(of_params['encoder']['kernel'] != 0))
    True
    >>> bool(jnp.any(of_ema['kernel'] != 0))
    False

    Args:
        module: a Module instance, in ``setup``, in a compact or any other method, or
            bound at top level. A module may mirror itself.
        where: the parameters to stop, by paths relative to ``module``; all by default.
        variables: other values to read, as ``nn.substitute`` takes them; None for the
            module's own. A tree of parameters, or one with collections on top,
            ``{'params': average}``, has all variables of each collection in it;
            ``sg.ABSENT`` in place of one stands for the module's own value. Other
            collections, and modules that lie elsewhere,
            are read as they are. It may also be the name of a collection, a bound
            module, or a function of the module's own values. A block around the view
            rewrites the module's own variables, and not these values.
        state: what happens to batch statistics and other state, as in ``nn.Frozen``.
            ``'hold'`` by default: only the module itself updates them, and its cache.
            Each call reads the values given as ``variables`` as they were given, even
            if an earlier call wrote them, and updates nothing, whatever ``where``
            selects.
        collections: the collections that ``where`` looks at, ``'params'`` by default.
            Running averages among ``variables`` are stopped with ``True``.
        unused: as in ``nn.Frozen``.

    Returns:
        A Module that can be called, assigned in ``setup``, passed on and lifted like
        ``module``.

    Raises:
        ArgumentTypeError: if ``module`` is no module.
        StructureError: at a read, if a value is missing or does not fit.
        UnusedFilterError: at the end of a call, if a value belongs to no variable, or a
            part of ``where`` matches none.
        ArgumentValueError: for another ``state``.

    Note:
        A view that is made in the body of ``nn.jit`` draws dropout masks of its own:
        make it outside, ``nn.jit(f)(nn.mirror(module), x)``.
        Asked for at the end of google/flax issue #1857. BYOL (Grill et al., 2020) and
        deep Q-learning (Mnih et al., 2015) have targets like these.
    """
    if not isinstance(module, modules.Module):
        raise mistakes.refused('nn.mirror wraps a Module instance', module)
    if variables is not None and state == held_state.UPDATE:
        raise unknown_choice('with variables=, state', state, held_state.STATE[1:])
    values = None
    if isinstance(variables, Mapping):
        if not _has_collections(module, variables):
            variables = {'params': variables}
        values = blocks.substitute(variables, collections=[*variables])
        # A variable that the tree lacks is a mistake: its read raises.
        of_tree = iter_variables(('', ()), variables)
        absent = (names for (_, names), value in of_tree if is_absent(value))
        stored = frozenset((top, tuple(names)) for top, *names in absent)
        own: Any = _is_own
        if stored:
            own = filters.as_filter(_is_own) & ~filters.Names(stored)
        values = dataclasses.replace(values, where=values.where | own)
    elif variables is not None:
        values = blocks.substitute(variables)
    return Mirror(
        module,
        where,
        collections=collections,
        state=state,
        unused=unused,
        values=values,
    )


def _has_collections(module: Module, variables: Mapping[str, Any]) -> bool:
    """Whether a tree of values has collections on top, as ``init`` returns it."""
    own = {} if module.scope is None else module.variables
    return bool(collections_of(variables) or variables.keys() & own.keys())


def _is_own(path: Path) -> bool:
    return not path.outside


# The key under which a scope's counts of draws have the counts of its views.
_OF_VIEWS: Any = object()


@contextlib.contextmanager
def _drawing_apart(module: Module) -> Generator[None]:
    """Lets the n-th call of a view draw what the n-th call of the module does."""
    with contextlib.ExitStack() as stack:
        for scope in modules.own_scopes(module):
            # Initializers draw other numbers for each parameter, in views too.
            shared = 'params' if scope.get_flag('initializing', False) else None
            stack.enter_context(_counted_apart(scope.rng_counters, shared))
        yield


@contextlib.contextmanager
def _counted_apart(counts: dict[Any, Any], shared: str | None) -> Generator[None]:
    """Lets views count their draws apart, but for a random stream that is shared."""
    # The counts of views are in the scope's own dict, which Flax carries through its
    # transforms.
    of_views = counts.pop(_OF_VIEWS, {})
    of_module = core_scopes.copied(counts)
    _set(counts, of_views, shared)
    if _OF_VIEWS in of_views:  # The counts of views of the view.
        counts[_OF_VIEWS] = of_views[_OF_VIEWS]
    try:
        yield
    finally:
        of_views = core_scopes.copied(counts)
        counts.pop(_OF_VIEWS, None)
        _set(counts, of_module, shared)
        if _any(of_views):
            counts[_OF_VIEWS] = of_views


def _set(counts: dict[Any, Any], wanted: Mapping[Any, Any], shared: str | None) -> None:
    """Sets counts in their own dicts, but for a random stream that is shared."""
    for key, count in counts.items():
        if isinstance(count, dict):
            _set(count, wanted.get(key, {}), shared)
        elif key != shared:
            counts[key] = wanted.get(key, 0)


def _any(counts: Mapping[Any, Any]) -> bool:
    return any(_any(c) if isinstance(c, Mapping) else c for c in counts.values())
