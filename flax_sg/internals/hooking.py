"""Hooks on the attributes of Flax and JAX by which variables are read."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    'has_variable': (Scope, 'has_variable'),
    'param': (Scope, 'param'),
    'put_variable': (Scope, 'put_variable'),
    'make_rng': (Scope, 'make_rng'),
    'invalidate': (Scope, 'invalidate'),
    'partial_pack': (lift, '_partial_pack'),
    'post_init': (modules.Module, '__post_init__'),
    'try_setup': (modules.Module, '_try_setup'),
    'custom_jvp': (jax.custom_jvp, '__call__'),
    'custom_vjp': (jax.custom_vjp, '__call__'),
    'custom_vmap': (custom_batching.custom_vmap, '__call__'),
}

# What the hooks replace on each Module class that has a ``setup``. On ``Module`` itself
# it would slow down every attribute of every module, and take longer than all the rest.
HOOKED_WITH_SETUP = 'getattribute', '__getattribute__'

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

_before: dict[tuple[Any, str], Any] = {}  # What is to be put back.

_complete = False  # Whether all hooks are installed.

_INHERITED = object()


class _Hook(NamedTuple):
    """One hook: where it is installed, what was there before, and the hook."""

    owner: weakref.ref[Any]
    name: str
    before: Any
    hook: Any

    @classmethod
    def of(cls, key: str, owner: Any, name: str) -> _Hook:
        """The hook for an attribute, which a class may inherit."""
        holders = [
            base for base in getattr(owner, '__mro__', [owner]) if name in vars(base)
        ]
        found = (_before.get((base, name), vars(base)[name]) for base in holders)
        original = next(value for value in found if value is not _INHERITED)
        before = vars(owner).get(name, _INHERITED)
        return cls(weakref.ref(owner), name, before, _make[key](original))


_planned: tuple[Any, Any, list[_Hook]] = None, None, []  # The hooks of the last time.


def acquire_hooks(
    user: object, make: Mapping[str, Callable[[Any], Any]] | None = None
) -> None:
    """Installs hooks on Flax's reads for the first of their users.

    Args:
        user: who needs them, an object that tells it from others.
        make: for each name in ``HOOKED``, and that in ``HOOKED_WITH_SETUP``, a function
            from the original to its hook; by default those of the last time.
    """
    global _make, _complete
    with _lock:
        _make = make or _make
        _users.add(user)
        if _complete:
            return
        root = running_apply()
        _install(_plan())
        _complete = True
        # Once will do for all blocks in an ``apply``.
        if root is not None:
            _applies.append(weakref.ref(root))


def _install(plan: Sequence[_Hook]) -> None:
    for ref, name, before, hook in plan:
        owner = ref()
        if owner is None or (owner, name) in _before:
            continue
        if owner.__dict__.get(name, _INHERITED) is not before:
            # Somebody else has replaced it since the plan was made.
            return _install(_plan(anew=True))
        _before[owner, name] = before
        setattr(owner, name, hook)


def _plan(anew: bool = False) -> list[_Hook]:
    """The hooks of the last time, if there are no new classes and no new functions."""
    global _planned
    classes = modules.classes_with_setup()
    make, known, plan = _planned
    if make is not _make or known is not classes or anew:
        key, name = HOOKED_WITH_SETUP
        plan = [_Hook.of(key, *where) for key, where in HOOKED.items()]
        plan += [_Hook.of(key, cls, name) for ref in classes if (cls := ref())]
        _planned = _make, classes, plan
    return plan


def watch(module: Any) -> None:
    """Hooks the attributes of a module that is made, if its class is a new one."""
    key, name = HOOKED_WITH_SETUP
    cls = type(module)
    if (cls, name) not in _before and modules.has_setup(cls):
        with _lock:
            if _complete:
                _install([_Hook.of(key, cls, name)])


def users_of_hooks() -> list[object]:
    """The users of the hooks, in whatever threads they are."""
    with _lock:
        return list(_users)


def release_hooks(user: object) -> None:
    """Leaves Flax as it was when the last user is gone, and with it its ``apply``.

    An exception may have come while hooks were installed, or removed: whatever has been
    done by then, this completes it.
    """
    global _complete
    with _lock:
        _users.discard(user)
        _applies[:] = [ref for ref in _applies if goes_on(ref())]
        if _users or _applies:
            return
        _complete = False
        for (owner, name), before in tuple(_before.items()):
            if (owner, name) not in _before:  # The garbage collector came in between.
                continue
            if before is not _INHERITED:
                setattr(owner, name, before)
            elif name in owner.__dict__:
                delattr(owner, name)
            _before.pop((owner, name), None)


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


_APPLY = next(
    code
    for code in flax_scope.apply.__code__.co_consts
    if getattr(code, 'co_name', '') == 'wrapper'
)


def goes_on(root: Scope | None) -> bool:
    """Whether the ``apply`` with this root is running; Flax says so to the root."""
    return root is not None and not root._invalid


def running_apply() -> Scope | None:
    """The root of the outermost ``apply`` or ``init`` that is running, if any."""
    user_frame, found = sys._getframe(1), None
    while user_frame is not None:
        found = user_frame if user_frame.f_code is _APPLY else found
        user_frame = user_frame.f_back
    return None if found is None else found.f_locals.get('root')
