"""``Frozen``: a module whose parameters are read through ``stop_gradient``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from flax.linen import nowrap

from flax_sg import errors, filters
from flax_sg.engine import extents
from flax_sg.forms import state_policy, wrappers
from flax_sg.rules import rules


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
    state: str = state_policy.UPDATE
    unused: str = 'raise'
    rule: rules.Rule = rules.StopGradient()
    within: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, 'where', filters.as_filter(self.where))
        rewrite = rules.Rewrite(self.where, self.rule, self.collections, self.unused)
        object.__setattr__(self, 'collections', rewrite.collections)
        object.__setattr__(self, '_rewrite', rewrite)
        state_policy.check(self.state)
        super().__post_init__()

    @nowrap
    @contextlib.contextmanager
    def _extent(self, judge: bool) -> Generator[Any]:
        """The rewrite holds, and state is treated as ``state`` says."""
        with (
            state_policy.handled(self.module, self.state),
            self._block(self._rewrite, judge),
        ):
            yield self.module

    @nowrap
    def _block(self, rewrite: rules.Rewrite, judge: bool) -> extents.Extent:
        owner = self.module if self.within is None else self.within
        judged = extents.EXISTENCE if judge else extents.NOTHING
        return extents.Extent(rewrite, owner.scope, judged)

    @nowrap
    def _around(self, name: str, judge: bool) -> wrappers.Extent:
        """A block: the module is not bound yet, so it is the root of its tree."""
        if self.state != state_policy.UPDATE:
            raise _bound_method(self, name)
        return self._block(self._rewrite, judge)

    @nowrap
    def _part(self, part: Any, module: Any) -> Any:
        """A wrapper of a part of ``module``, with the same paths."""
        within = module if self.within is None else self.within
        return self.clone(module=part, within=within, name=None)


class Frozen(Rewritten):
    """A module whose parameters get no gradient through it.

    What is read through the wrapper (calls, methods, attributes, submodules) is read
    through ``jax.lax.stop_gradient``. Parameter names, initial values, random streams
    and outputs are those of the bare module, wherever it stands: checkpoints fit both
    ways. Gradients flow *through* it to its input. Another use of the same module is
    not touched: ``l`` and ``Frozen(l)`` may stand in one model.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> model = nn.Sequential([nn.Frozen(nn.Dense(3)), nn.relu, nn.Dense(1)])
    >>> x = jnp.ones((4, 2))
    >>> params = model.init(jax.random.key(0), x)['params']
    >>> grads = jax.grad(lambda p: jnp.sum(model.apply({'params': p}, x)))(params)
    >>> {name: bool(jnp.any(g['kernel'] != 0)) for name, g in grads.items()}
    {'layers_0': False, 'layers_2': True}

    Around a finished model, some of its parameters; and what it forwards:

    >>> tuned = nn.Frozen(model, 'layers_2/bias')
    >>> embed = nn.Frozen(nn.Embed(num_embeddings=5, features=2))
    >>> variables = embed.init(jax.random.key(0), jnp.array([1, 2]))
    >>> embed.apply(variables, x, method='attend').shape
    (4, 5)
    >>> embed.bind(variables).embedding.shape
    (5, 2)

    ``isinstance(Frozen(dense), nn.Dense)`` is False: it is a wrapper, and the module
    is its attribute ``module``, which is not under the rule. A field of the wrapper
    hides an attribute of the same name, and special methods other than ``__call__``
    are not forwarded. ``__call__`` has the signature of the module's, and an ``apply``
    or ``init`` that the module overrides is called. ``nn.vjp``, ``nn.jvp`` and
    ``nn.custom_vjp`` take no module with a module in it: wrap inside of them.

    Args:
        module: a Module instance, bound or not.
        where: the parameters to freeze, by paths relative to ``module``: any kind of
            filter, see ``nn.stop_gradient``. All of them by default, those of modules
            that it merely uses (``nn.RNN(self.cell)``) included.
        collections: the collections that ``where`` looks at, ``'params'`` by default.
        state: what happens to batch statistics and other state of **all** of
            ``module``, whatever ``where`` selects. To hold the state of a part, wrap
            that part. State is every mutable collection but ``'params'``,
            ``'intermediates'`` and ``'perturbations'``. What the module sows
            (``self.sow``), there or in other collections, is no state but a result,
            and is kept:

            * ``'update'``: it is updated, as without the wrapper;
            * ``'hold'``: each call works on a copy that is dropped when it ends. What
              it computes is the same, with normalization by the batch;
            * ``'use_running_average'``: held, and layers that can (an argument or
              field ``use_running_average``, or ``update_stats``) use what is stored,
              whatever they are told. What is created, at init, is created as ever.
        unused: ``'raise'`` if a part of ``where`` took no variable by the end of a
            call, ``'ignore'`` to let that pass.
        rule: what a reader sees instead of the stored value, ``rules.StopGradient()``
            by default; ``rewrite(module)`` makes a wrapper with the rewrite's rule.

    Raises:
        ArgumentTypeError: if ``module`` is no module: None, a function, a class. When
            ``apply`` or ``init`` is called that the module overrides, if ``state`` is
            not ``'update'``.
        ArgumentValueError: if it is given another name than the module has already.
        UnusedFilterError: at the end of a call, if a part of ``where`` took nothing.

    Note:
        In the body of ``nn.scan`` the stacked weights are no residual of every step, as
        they are where ``stop_gradient`` is written into the body by hand; a call with a
        function that uses other modules of the body warns (``ScanMemoryWarning``).
        Flux.jl #1931 asks for the same in Julia.
    """


def _bound_method(wrapper: Any, method: str) -> errors.ArgumentTypeError:
    """The error for a module that overrides ``apply`` or ``init``."""
    call = {'Mirror': 'mirror'}.get(type(wrapper).__name__, 'Frozen')
    name = type(wrapper.module).__name__
    return errors.ArgumentTypeError(
        f'nn.{call}({name}(...), state={wrapper.state!r}): {name} defines its own '
        f'{method}, which the wrapper calls in a block.\n'
        'A block stops gradients; it does not hold state or show other variables.\n'
        f'Open the block yourself: with nn.stop_gradient(where): '
        f'{name}(...).{method}(...).',
    )
