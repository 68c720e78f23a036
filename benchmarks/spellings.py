"""Spells one stop in every way: by hand, and with each form of flax_sg.

A spelling takes a module and a selection, and returns a replacement for
``module.apply``. ``by_hand`` does not use flax_sg.
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
    """Stops all rows of a parameter, or some."""
    if rows is None:
        return jax.lax.stop_gradient(leaf)
    mask = np.zeros((leaf.shape[0], *[1] * (leaf.ndim - 1)), bool)
    mask[slice(*rows)] = True
    return jnp.where(mask, jax.lax.stop_gradient(leaf), leaf)


def by_hand(module: linen.Module, selection: Selection) -> Apply:
    """Applies the module to a copy of the weights with the frozen ones stopped."""

    def apply(variables: Any, *args: Any, **options: Any) -> Any:
        copy = selection.map(
            lambda leaf: stopped(leaf, selection.rows), variables['params']
        )
        return module.apply({**variables, 'params': copy}, *args, **options)

    return apply


def bare(module: linen.Module, selection: Selection) -> Apply:
    """Adds no stop to those inside the module."""
    del selection
    return module.apply


def block_around(module: linen.Module, selection: Selection) -> Apply:
    """Opens a block around ``module.apply``."""

    def apply(*args: Any, **options: Any) -> Any:
        with nn.stop_gradient(where(selection)):
            return module.apply(*args, **options)

    return apply


def lifted_class(module: linen.Module, selection: Selection) -> Apply:
    """Lifts the class of the module."""

    def apply(*args: Any, method: str = '__call__', **options: Any) -> Any:
        cls = nn.stop_gradient(type(module), where(selection), methods=[method])
        return cls(**fields(module)).apply(*args, method=method, **options)

    return apply


def decorated_method(module: linen.Module, selection: Selection) -> Apply:
    """Decorates the method in a subclass."""

    def apply(*args: Any, method: str = '__call__', **options: Any) -> Any:
        base: Any = type(module)

        @nn.stop_gradient(where(selection))
        def call(self: Any, *args: Any) -> Any:
            return getattr(base, method)(self, *args)

        cls = type(base.__name__, (base,), {method: call})
        return cls(**fields(module)).apply(*args, method=method, **options)

    return apply


def fields(module: linen.Module) -> dict[str, Any]:
    """Returns the arguments that a module was made with."""
    names = {field.name for field in dataclasses.fields(module)} - {'parent', 'name'}
    return {name: getattr(module, name) for name in names}


def frozen(module: linen.Module, selection: Selection) -> Apply:
    """Wraps the module in ``nn.Frozen``."""
    return nn.Frozen(module, where(selection)).apply


def mirror(module: linen.Module, selection: Selection) -> Apply:
    """Calls a ``nn.mirror`` view of the bound module."""

    def apply(variables: Any, *args: Any, method: str = '__call__') -> Any:
        view = nn.mirror(module.bind(variables), where(selection))
        return getattr(view, method)(*args)

    return apply


def where(selection: Selection) -> Any:
    """Returns a selection as a filter of flax_sg."""
    if selection.rows is None:
        return selection.pattern
    return sg.at(selection.pattern, np.s_[slice(*selection.rows)])
