"""Installs the hooks on functions of Flax and JAX."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
from flax.core import lift
from flax.core.scope import Scope
from jax import custom_batching

from flax_sg.internals import modules, versions

versions.load_once(globals())

# The hooked attributes, as (owner, name). All of them are looked up at call time, so a
# hook also reaches code that was defined and lifted before.
HOOKED: dict[str, tuple[Any, str]] = {
    'get_variable': (Scope, 'get_variable'),
    'variables': (Scope, 'variables'),
    'param': (Scope, 'param'),
    'put_variable': (Scope, 'put_variable'),
    'make_rng': (Scope, 'make_rng'),
    'temporary': (Scope, 'temporary'),
    'make_scope': (Scope, '__init__'),
    'bind': (flax.core, 'bind'),
    'partial_pack': (lift, '_partial_pack'),
    'getattr': (modules.Module, '__getattr__'),
    'try_setup': (modules.Module, '_try_setup'),
    'custom_jvp': (jax.custom_jvp, '__call__'),
    'custom_vjp': (jax.custom_vjp, '__call__'),
    'custom_vmap': (custom_batching.custom_vmap, '__call__'),
}

# The attributes in which JAX stores custom rules of a function, to call them later. Of
# ``defremat`` (jax 0.12) it stores several in a tuple.
RULES: dict[str, tuple[str, ...]] = {
    'custom_jvp': ('jvp',),
    'custom_vjp': ('fwd', 'bwd', 'remat_rules'),
    'custom_vmap': ('vmap_rule',),
}

# The functions of Flax and JAX that were replaced, by their keys in ``HOOKED``.
originals: dict[str, Any] = {}


def install(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Puts the hooks in place, once and for good.

    While no block is open, a hook calls the function that it has replaced. A second
    call does nothing: otherwise hooks would replace, and call, themselves.

    Args:
        hooks: for each name in ``HOOKED`` the function to install.
    """
    if originals:
        return
    for key, (owner, name) in HOOKED.items():
        originals[key] = vars(owner)[name]
        # Whoever asks for a signature or the documentation gets those of Flax.
        setattr(owner, name, functools.wraps(originals[key])(hooks[key]))
