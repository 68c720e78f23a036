"""``live``: the filter of what a function trains, derived from the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax_sg import filters
from flax_sg.flow.analysis import Analysis
from flax_sg.trees.leaves import leaves_of


def live(
    fun: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    wrt: filters.Where | None = None,
) -> filters.Derived:
    """The filter of the parameters that a function trains, found in its program.

    So what is frozen is said once, in the model, and everything else follows it:

    >>> import jax, jax.numpy as jnp, optax, flax_sg as sg
    >>> def loss(params, x):
    ...     features = x @ jax.lax.stop_gradient(params['body'])
    ...     return jnp.sum(features @ params['head'])
    >>> params, x = {'body': jnp.ones((2, 2)), 'head': jnp.ones(2)}, jnp.ones((3, 2))
    >>> live = sg.live(loss, params, x)
    >>> live
    <live: 'head'>
    >>> tx = sg.freeze(optax.adamw(1e-3), ~live)
    >>> value, grads = sg.value_and_grad(loss, wrt=live)(params, x)
    >>> grads
    {'body': ABSENT, 'head': Array([6., 6.], dtype=float32)}
    >>> sg.mask(params, frozen=~live)
    {'body': True, 'head': False}

    The function is traced once here, on shapes, and again where it is differentiated.

    Args:
        fun: a function of pytrees, of which any output may train; or an unbound
            module, for what its outputs train, which leaves out its ``Frozen`` parts:
            ``sg.live(model, variables, x)``.
        params: its first argument, or shapes in its place. Paths begin in it.
        *args: its other arguments, or their shapes.
        has_aux: whether ``fun`` returns a pair, the second not looked at.
        wrt: what is asked about, as for ``sg.gradient_flow``.

    Returns:
        A filter: with a hash, equal for equal selections from equal sets of
        parameters, for ``wrt=``, ``where=``, ``~ & |``, and, since paths in it begin at
        the root, for blocks too. It may select nothing. Variables in one box are
        selected together. It raises for variables that were not in ``params``.

    Raises:
        UnknownNameError: when it is asked for a variable that it has not seen.
        ArgumentTypeError: as ``sg.gradient_flow``.
    """
    analysis = Analysis.of(fun, (params, *args), 0, has_aux, wrt)
    analysis.check_outputs()
    pairs = zip(analysis.parameters, analysis.trained(), strict=True)
    paths = [parameter.path for parameter, is_trained in pairs if is_trained]
    known = leaves_of(params).paths
    return filters.Derived(
        frozenset((path.collection, path.absolute) for path in paths),
        frozenset((path.collection, path.absolute) for path in known),
    )
