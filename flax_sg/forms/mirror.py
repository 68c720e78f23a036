"""``mirror``: a view of a module's parameters, or of other values in their place."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.scope import CollectionFilter
from flax.linen import nowrap

from flax_sg import errors, filters
from flax_sg.engine import blocks
from flax_sg.engine.variables import iter_variables
from flax_sg.forms import frozen, rng_policy, state_policy, substitute
from flax_sg.forms.wrappers import wrong_target
from flax_sg.internals import core_scopes, modules

_serial = itertools.count()


class _Shown:
    """The variables that a mirror shows.

    Never taken for another one: ``nn.jit`` tells modules apart by what is in their
    fields, and arrays in there would be read number by number.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.variables = variables
        self._number = next(_serial)

    def __hash__(self) -> int:
        return hash((_Shown, self._number))

    def __repr__(self) -> str:
        return f'<{", ".join(self.variables)}>'


class Mirror(frozen.Rewritten):
    """What ``mirror`` returns.

    Attributes:
        rngs: which random numbers it draws.
        shown: the variables that it shows; None for those of the module.
        origin: for a part of a module on such variables, the module as it is.
    """

    state: str = state_policy.HOLD
    rngs: str = rng_policy.SAME
    shown: Any = None
    origin: Any = None

    def __post_init__(self) -> None:
        rng_policy.check(self.rngs)
        super().__post_init__()

    @nowrap
    @contextlib.contextmanager
    def _extent(self, judge: bool) -> Generator[Any]:
        """As of every wrapper; with the draws and the values that it was made for."""
        module: Any = self.module
        if self.shown is not None and self.origin is None:
            _check_fits(module, self.shown.variables)
            root = blocks.root_of(module.scope)
            module = modules.on_variables(module, self.shown.variables)
            # The other values are those of the module, whoever reads them.
            blocks.root_of(module.scope).kept_trace = root.kept_trace
        with (
            rng_policy.handled(self.module, self.rngs),
            self._handing_over(module),
            self._opened(module, judge),
        ):
            yield module

    @nowrap
    def _handing_over(self, module: Any) -> Any:
        """What is sown on a copy of the module's scope goes to the scope itself."""
        if self.shown is None:
            return contextlib.nullcontext()
        pair = (module, self.module)
        if self.origin is not None:
            pair = (self.within, self.origin)
        return state_policy.results_handed_over(*pair, self.shown.variables)

    @nowrap
    def _part(self, part: Any, module: Any) -> Any:
        """A view of a part of the module in use, which is on what is shown."""
        within = module if self.within is None else self.within
        origin = self.origin if module is self.module else self.module
        return self.clone(module=part, within=within, name=None, origin=origin)


def mirror(
    module: Any,
    where: filters.Where = True,
    *,
    variables: Mapping[str, Any] | substitute.Values | None = None,
    rngs: str = rng_policy.SAME,
    state: str = state_policy.HOLD,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Any:
    """A view of a module: the same parameters, seen through ``stop_gradient``.

    It has no parameters of its own. Calls, methods, attributes and submodules are those
    of ``module``, which may come first or later, at initialization too.

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
        variables: what to read instead of the module's own variables: a tree like
            these, with collections on top. Collections that are not in it, and modules
            that lie elsewhere, are read as they are. Or the name of a collection of
            such parameters, a bound module, or a function of the module's own, as in
            ``nn.substitute``. None for the module's own.
        rngs: which random numbers a call draws:

            * ``'same'``: the n-th call of a view draws what the n-th call of the
              module does, in whichever order they come: the same dropout masks. All
              views of a module are counted together, and the draws of the module are
              what they are without a view. The body of
              ``nn.scan`` is traced twice and counts go on: there the two have to be
              called equally often;
            * ``'fresh'``: new ones, as another call of the module would.
        state: what happens to batch statistics and other state, as in ``nn.Frozen``.
            ``'hold'`` by default: they are updated once, by the module itself. The
            values given as ``variables`` belong to the caller and are not updated.
        collections: the collections that ``where`` looks at.
        unused: as in ``nn.Frozen``.

    Returns:
        A Module that can be called, kept, passed on and lifted in the place of
        ``module``.

    Raises:
        ArgumentTypeError: if ``module`` is no module.
        ArgumentValueError: if ``variables`` cannot be those of the module.
        StructureError: at a read, if other values do not fit.
        ArgumentValueError: for another ``rngs`` or ``state``.

    Note:
        Asked for at the end of google/flax issue #1857. BYOL (Grill et al., 2020) and
        deep Q-learning (Mnih et al., 2015) have targets like these.
    """
    if not isinstance(module, modules.Module):
        raise wrong_target('mirror', module)
    if variables is not None and state == state_policy.UPDATE:
        choices = {k: v for k, v in state_policy.CHOICES.items() if k != state}
        raise errors.unknown_choice('with variables=, state', state, choices)
    is_tree = isinstance(variables, Mapping)
    view = Mirror(
        module,
        where,
        collections=collections,
        state=state,
        unused=unused,
        rngs=rngs,
        shown=_Shown(variables) if is_tree else None,
    )
    if variables is None or is_tree:
        return view
    return substitute.substitute(variables)(view)


def _check_fits(module: Any, variables: Mapping[str, Any]) -> None:
    """Raises if a tree cannot be that of the variables of a bound module."""
    stored = core_scopes.stored(module.scope)
    there = _variables_in({c: t for c, t in stored.items() if c in variables})
    given = _variables_in(variables)
    absent = sorted(repr(c) for c in variables if c not in stored)
    problems = {
        'the module has no collection': absent if any(stored.values()) else [],
        'it lacks': sorted(there.keys() - given.keys()),
        'the module has no': sorted(given.keys() - there.keys()) if there else [],
        'it has other shapes than the module': [
            f'{name}: {given[name]} for {shapes}'
            for name, shapes in there.items()
            if name in given and shapes != given[name]
        ],
    }
    for problem, names in problems.items():
        if names:
            raise _wrong_variables(module, problem, names)


def _variables_in(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of the leaves of each variable, by its name."""
    return {
        '/'.join((collection, *path)): jax.tree.map(jnp.shape, core_scopes.unbox(value))
        for collection, tree in variables.items()
        for (_, path), value in iter_variables((collection, ()), tree)
    }


def _wrong_variables(
    module: Any, problem: str, names: Iterable[str] = ()
) -> errors.ArgumentValueError:
    """What a mirror should read does not fit the module that it shows."""
    path = '/'.join(module.scope.path)
    place = repr(path) if path else 'the root'
    lines = [
        f'nn.mirror({type(module).__name__}(...), variables=...): {problem}',
        *(f'  {name}' for name in names),
        f'The tree is that of the module at {place}, with collections on top, '
        "such as {'params': ...}.",
    ]
    return errors.ArgumentValueError('\n'.join(lines))
