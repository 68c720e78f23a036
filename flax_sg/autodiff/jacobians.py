"""``jacrev``, ``jacfwd`` and ``hessian``: a tree at each leaf of the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_sg.autodiff.arguments import splitter
from flax_sg.autodiff.gradients import Argnums, Take, derivative
from flax_sg.filters import Where


def _taking(jac: Callable[..., Any], has_aux: bool, holomorphic: bool) -> Take:
    def take(fun: Any, live: Any, shaped: Callable[..., Any]) -> Any:
        noted: list[Any] = []

        def noting(live: Sequence[Any]) -> Any:
            out = fun(live)
            leaves, treedef = jax.tree.flatten(out[0] if has_aux else out)
            noted[:] = [treedef, [jnp.shape(leaf) for leaf in leaves]]
            return out

        got = jac(noting, has_aux=has_aux, holomorphic=holomorphic)(live)
        rows, *aux = got if has_aux else (got,)
        treedef, shapes = noted
        pairs = zip(treedef.flatten_up_to(rows), shapes, strict=True)
        result = treedef.unflatten([shaped(row, shape) for row, shape in pairs])
        return (result, *aux) if has_aux else result

    return take


def jacrev(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | None = None,
    absent: str = 'drop',
    unused: str = 'raise',
) -> Callable[..., Any]:
    """``jax.jacrev`` with respect to the leaves that a filter selects.

    >>> import jax.numpy as jnp, flax_sg as sg
    >>> p = {'a': jnp.array([1.0, 2.0]), 'b': 3.0}
    >>> sg.jacrev(lambda p: p['a'] * p['b'], wrt='b')(p)
    {'a': ABSENT, 'b': Array([1., 2.], dtype=float32, weak_type=True)}

    Args and errors are those of ``sg.value_and_grad``; ``fun`` returns a pytree. At
    each leaf of the output stands a tree of the form of the argument.
    """
    take = _taking(jax.jacrev, has_aux, holomorphic)
    return derivative(take, fun, argnums, splitter(wrt, absent, unused))


def jacfwd(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | None = None,
    absent: str = 'drop',
    unused: str = 'raise',
) -> Callable[..., Any]:
    """``jax.jacfwd`` with respect to the leaves that a filter selects.

    >>> import jax.numpy as jnp, flax_sg as sg
    >>> p = {'a': jnp.array([1.0, 2.0]), 'b': 3.0}
    >>> sg.jacfwd(lambda p: p['a'] * p['b'], wrt='b', absent='none')(p)
    {'a': None, 'b': Array([1., 2.], dtype=float32)}

    Args, result and errors are those of ``sg.jacrev``.
    """
    take = _taking(jax.jacfwd, has_aux, holomorphic)
    return derivative(take, fun, argnums, splitter(wrt, absent, unused))


def hessian(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Where | None = None,
    absent: str = 'drop',
    unused: str = 'raise',
) -> Callable[..., Any]:
    """``jax.hessian`` with respect to the leaves that a filter selects.

    >>> import flax_sg as sg
    >>> p = {'a': 2.0, 'b': 3.0}
    >>> h = sg.hessian(lambda p: p['a'] ** 3 * p['b'], wrt='a')(p)
    >>> float(h['a']['a']), h['b']
    (36.0, ABSENT)

    Args and errors are those of ``sg.jacrev``. It is ``jacfwd`` of ``jacrev``: at each
    leaf of the output stands a tree, at each leaf of that another one.
    """
    inner = jacrev(
        fun, argnums, has_aux, holomorphic, wrt=wrt, absent=absent, unused=unused
    )
    return jacfwd(
        inner, argnums, has_aux, holomorphic, wrt=wrt, absent=absent, unused=unused
    )
