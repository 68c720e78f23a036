"""``mirror``: a view of a module's parameters, or of other values in their place."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

from flax.core.scope import CollectionFilter
from flax.linen import nowrap

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.forms import frozen, rng_policy, state_policy, substitute, targets
from flax_sg.internals import modules
from flax_sg.rules import rules


class Mirror(frozen.Rewritten):
    """What ``mirror`` returns.

    Attributes:
        values: a rewrite that brings other values; None for those of the module.
        rngs: which random numbers it draws.
    """

    state: str = state_policy.HOLD
    values: rules.Rewrite | None = None
    rngs: str = rng_policy.SAME

    def __post_init__(self) -> None:
        rng_policy.check(self.rngs)
        super().__post_init__()

    @nowrap
    @contextlib.contextmanager
    def _extent(self, judge: bool) -> Generator[Any]:
        """As of every wrapper, with the random numbers and values of the view."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(rng_policy.handled(self.module, self.rngs))
            if self.values is not None:
                stack.enter_context(self._block(self.values, judge))
            yield stack.enter_context(super()._extent(judge))


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
        variables: what to read instead of the module's own variables, by
            ``nn.substitute``. A tree like these, with collections on top, and all
            variables of a collection. Collections that are not in it, and modules
            that lie elsewhere, are read as they are. Or the name of a collection of
            such parameters, a bound module, or a function of the module's own. None
            for the module's own. A block around the view changes the module's own,
            and not what is read in their place.
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
            values given as ``variables`` are not updated: a call reads them as they
            are given, also after it has written such a variable.
        collections: the collections that ``where`` looks at.
        unused: as in ``nn.Frozen``.

    Returns:
        A Module that can be called, kept, passed on and lifted in the place of
        ``module``.

    Raises:
        ArgumentTypeError: if ``module`` is no module.
        StructureError: at a read, if there is no other value, or it does not fit.
        UnusedFilterError: at the end of a call, if a value belongs to no variable.
        ArgumentValueError: for another ``rngs`` or ``state``.

    Note:
        Asked for at the end of google/flax issue #1857. BYOL (Grill et al., 2020) and
        deep Q-learning (Mnih et al., 2015) have targets like these.
    """
    if not isinstance(module, modules.Module):
        raise targets.not_wrappable('mirror', module)
    if variables is not None and state == state_policy.UPDATE:
        choices = {k: v for k, v in state_policy.CHOICES.items() if k != state}
        raise errors.unknown_choice('with variables=, state', state, choices)
    values = None
    if isinstance(variables, Mapping):
        values = substitute.substitute(variables, collections=[*variables])
        # One that the tree lacks is a mistake, and not read as it is.
        values = dataclasses.replace(values, where=values.where | _is_own)
    elif variables is not None:
        values = substitute.substitute(variables)
    return Mirror(
        module,
        where,
        collections=collections,
        state=state,
        unused=unused,
        values=values,
        rngs=rngs,
    )


def _is_own(path: Path) -> bool:
    return not path.outside
