"""Hooks on the attributes of Flax and JAX by which variables are read."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import lift
from flax.core import scope as flax_scope
from flax.core.scope import Scope
from jax import custom_batching

from flax_sg.internals import modules, versions

versions.load_once(globals())

# What the hooks replace, by (owner, name). All of them are read by Flax at call time,
# so replacing the attribute reaches code that was written and lifted before.
HOOKED: dict[str, tuple[Any, str]] = {
    'get_variable': (Scope, 'get_variable'),
    'variables': (Scope, 'variables'),
    'param': (Scope, 'param'),
    'put_variable': (Scope, 'put_variable'),
    'make_rng': (Scope, 'make_rng'),
    'invalidate': (Scope, 'invalidate'),
    'partial_pack': (lift, '_partial_pack'),
    'has_variable': (modules.Module, 'has_variable'),
    'sow': (modules.Module, 'sow'),
    'try_setup': (modules.Module, '_try_setup'),
    'getattribute': (modules.Module, '__getattribute__'),
    'getattr': (modules.Module, '__getattr__'),
    'custom_jvp': (jax.custom_jvp, '__call__'),
    'custom_vjp': (jax.custom_vjp, '__call__'),
    'custom_vmap': (custom_batching.custom_vmap, '__call__'),
}

# What JAX keeps of a function with rules of its own, and calls when it needs it.
RULES: dict[str, tuple[str, ...]] = {
    'custom_jvp': ('jvp',),
    'custom_vjp': ('fwd', 'bwd'),
    'custom_vmap': ('vmap_rule',),
}

_lock = threading.RLock()  # The garbage collector may close a block at any time.

_users: set[object] = set()

_applies: list[weakref.ref[Scope]] = []  # Roots of those that run and had users.

_make: Mapping[str, Callable[[Any], Any]] = {}

_made: dict[str, tuple[Any, Any]] = {}  # The last hooks, and what they are made of.

_before: dict[str, Any] = {}  # What is to be put back.

_INHERITED = object()


def acquire_hooks(
    user: object, make: Mapping[str, Callable[[Any], Any]] | None = None
) -> None:
    """Installs hooks on Flax's reads for the first of their users.

    Args:
        user: who needs them, an object that tells it from others.
        make: for each name in ``HOOKED`` a function from the original to its hook; by
            default those of the last time.
    """
    global _make
    with _lock:
        _make = make or _make
        _users.add(user)
        if len(_before) == len(HOOKED):
            return
        root = running_apply()
        for key, (owner, name) in HOOKED.items():
            if key not in _before:
                _before[key] = vars(owner).get(name, _INHERITED)
                parts = _make[key], getattr(owner, name)
                if key not in _made or _made[key][0] != parts:
                    _made[key] = parts, _make[key](parts[1])
                setattr(owner, name, _made[key][1])
        # To change Module is to change all its subclasses, which may be hundreds: once
        # will do for all blocks in an ``apply``.
        if root is not None:
            _applies.append(weakref.ref(root))


def users_of_hooks() -> list[object]:
    """The users of the hooks, in whatever threads they are."""
    with _lock:
        return list(_users)


def release_hooks(user: object) -> None:
    """Leaves Flax as it was when the last user is gone, and with it its ``apply``.

    An exception may have come while hooks were installed, or removed: whatever has been
    done by then, this completes it.
    """
    with _lock:
        _users.discard(user)
        _applies[:] = [ref for ref in _applies if goes_on(ref())]
        for key in () if _users or _applies else tuple(_before):
            if key not in _before:  # The garbage collector has come in between.
                continue
            owner, name = HOOKED[key]
            if _before[key] is not _INHERITED:
                setattr(owner, name, _before[key])
            elif name in vars(owner):
                delattr(owner, name)
            _before.pop(key, None)


class released:  # noqa: N801 (read as ``with released(user)``)
    """Releases the hooks of a user when the body ends, whatever comes (Ctrl-C)."""

    def __init__(self, user: object) -> None:
        self._user = user

    def __enter__(self) -> None:
        """The body may use the hooks."""

    def __exit__(self, *exception: object) -> None:
        try:
            release_hooks(self._user)
        except BaseException:
            release_hooks(self._user)
            raise


_APPLY = [
    code
    for code in flax_scope.apply.__code__.co_consts
    if getattr(code, 'co_name', '') == 'wrapper'
]


def goes_on(root: Scope | None) -> bool:
    """Whether the ``apply`` with this root is running; Flax says so to the root."""
    return root is not None and not root._invalid


def running_apply() -> Scope | None:
    """The root of the outermost ``apply`` or ``init`` that is running, if any."""
    user_frame, found = sys._getframe(1), None
    while user_frame is not None:
        found = user_frame if user_frame.f_code in _APPLY else found
        user_frame = user_frame.f_back
    return None if found is None else found.f_locals.get('root')
