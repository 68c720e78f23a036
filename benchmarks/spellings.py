"""One stop, spelled in every way: by hand, and as this library offers it.

A spelling takes a module and what is stopped in it, and returns what stands for
``module.apply``. The hand-written one knows nothing of this library.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import flax_sg as sg
from benchmarks.selections import Selection
from flax_sg import linen as nn

Apply = Callable[..., Any]
Spelling = Callable[[linen.Module, Selection], Apply]


def stopped(leaf: jax.Array, rows: tuple[int, int] | None) -> jax.Array:
    """A parameter of which some rows are stopped, or all."""
    if rows is None:
        return jax.lax.stop_gradient(leaf)
    mask = np.zeros((leaf.shape[0], *[1] * (leaf.ndim - 1)), bool)
    mask[slice(*rows)] = True
    return jnp.where(mask, jax.lax.stop_gradient(leaf), leaf)


def by_hand(module: linen.Module, selection: Selection) -> Apply:
    """A copy of the weights, stopped where they are frozen."""

    def apply(variables: Any, *args: Any, **options: Any) -> Any:
        copy = selection.map(
            lambda leaf: stopped(leaf, selection.rows), variables['params']
        )
        return module.apply({**variables, 'params': copy}, *args, **options)

    return apply


def bare(module: linen.Module, selection: Selection) -> Apply:
    """No stop but those that the module has in it."""
    del selection
    return module.apply


def block_around(module: linen.Module, selection: Selection) -> Apply:
    """A block around ``module.apply``."""

    def apply(*args: Any, **options: Any) -> Any:
        with nn.stop_gradient(where(selection)):
            return module.apply(*args, **options)

    return apply


def lifted_class(module: linen.Module, selection: Selection) -> Apply:
    """The class of the module, lifted."""

    def apply(*args: Any, method: str = '__call__', **options: Any) -> Any:
        cls = nn.stop_gradient(type(module), where(selection), methods=[method])
        return cls(**fields(module)).apply(*args, method=method, **options)

    return apply


def decorated_method(module: linen.Module, selection: Selection) -> Apply:
    """A class in which the method has a decorator."""

    def apply(*args: Any, method: str = '__call__', **options: Any) -> Any:
        base: Any = type(module)

        @nn.stop_gradient(where(selection))
        def call(self: Any, *args: Any) -> Any:
            return getattr(base, method)(self, *args)

        cls = type(base.__name__, (base,), {method: call})
        return cls(**fields(module)).apply(*args, method=method, **options)

    return apply


def fields(module: linen.Module) -> dict[str, Any]:
    """The arguments that a module was made with."""
    names = {field.name for field in dataclasses.fields(module)} - {'parent', 'name'}
    return {name: getattr(module, name) for name in names}


def frozen(module: linen.Module, selection: Selection) -> Apply:
    """The module, wrapped."""
    return nn.Frozen(module, where(selection)).apply


def mirror(module: linen.Module, selection: Selection) -> Apply:
    """A view of the module, bound to its variables."""

    def apply(variables: Any, *args: Any, method: str = '__call__') -> Any:
        view = nn.mirror(module.bind(variables), where(selection))
        return getattr(view, method)(*args)

    return apply


def where(selection: Selection) -> Any:
    """A selection as a filter of this library."""
    if selection.rows is None:
        return selection.pattern
    return sg.at(selection.pattern, np.s_[slice(*selection.rows)])
