"""``jacrev``, ``jacfwd`` and ``hessian``: a tree at each leaf of the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_sg.autodiff.derivatives import Argnums, Derivative, derivative
from flax_sg.autodiff.forms import Request, Split
from flax_sg.filters import Where


def _jacobian(jac: Callable[..., Any]) -> Callable[..., Any]:
    def kind(self: Derivative, fun: Any, split: Split) -> Any:
        noted: list[Any] = []

        def noting(live: Sequence[Any]) -> Any:
            out = fun(live)
            leaves, treedef = jax.tree.flatten(out[0] if self.has_aux else out)
            noted[:] = [treedef, [jnp.shape(leaf) for leaf in leaves]]
            return out

        got = jac(noting, **self.options())(split.live)
        rows, *aux = got if self.has_aux else (got,)
        treedef, shapes = noted
        out = [
            self.shaped(split.form.fill(row, shape))
            for row, shape in zip(treedef.flatten_up_to(rows), shapes, strict=True)
        ]
        result = treedef.unflatten(out)
        return (result, *aux) if self.has_aux else result

    return kind


_jacrev, _jacfwd = _jacobian(jax.jacrev), _jacobian(jax.jacfwd)


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
    request = Request.of(wrt, absent, unused)
    return derivative(_jacrev, fun, argnums, request, has_aux, holomorphic)


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
    request = Request.of(wrt, absent, unused)
    return derivative(_jacfwd, fun, argnums, request, has_aux, holomorphic)


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
