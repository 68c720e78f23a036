"""Installs and removes the hooks on functions of Flax and JAX."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.core
import jax
from flax.core import lift
from flax.core import scope as flax_scope
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
    'invalidate': (Scope, 'invalidate'),
    'temporary': (Scope, 'temporary'),
    'bind': (flax.core, 'bind'),
    'bind_to_apply': (flax_scope, 'bind'),
    'partial_pack': (lift, '_partial_pack'),
    'post_init': (modules.Module, '__post_init__'),
    'try_setup': (modules.Module, '_try_setup'),
    'custom_jvp': (jax.custom_jvp, '__call__'),
    'custom_vjp': (jax.custom_vjp, '__call__'),
    'custom_vmap': (custom_batching.custom_vmap, '__call__'),
}

# The attribute that is hooked on each Module class that keeps values. On ``Module``,
# the hook would slow down all attributes of all modules, more than all other hooks.
HOOKED_THAT_KEEP = 'getattribute', '__getattribute__'

# The attributes in which JAX stores custom rules of a function, to call them later.
RULES: dict[str, tuple[str, ...]] = {
    'custom_jvp': ('jvp',),
    'custom_vjp': ('fwd', 'bwd'),
    'custom_vmap': ('vmap_rule',),
}

_lock = threading.RLock()  # The garbage collector may close a block at any time.

_users: set[object] = set()

_applies: list[weakref.ref[Scope]] = []  # Roots of running applies that used hooks.

_hooks: Mapping[str, Callable[..., Any]] = {}

# What the hooked attributes were, by their keys in ``HOOKED``.
originals: dict[str, Any] = {}

_installed: dict[Any, _Hook] = {}  # By the hooking function.

_complete = False  # Whether all hooks are installed.

_INHERITED = object()


class _Hook(NamedTuple):
    """One hook: the owner and name of an attribute, its old value, and the hook."""

    owner: weakref.ref[Any]
    name: str
    before: Any
    hook: Any

    @classmethod
    def of(cls, key: str, owner: Any, name: str) -> _Hook:
        """Returns the hook for an attribute that a class has or inherits."""
        current = _installed.values()
        hooked = {(hook.owner(), hook.name): hook.before for hook in current}
        found = (
            hooked.get((base, name), vars(base).get(name, _INHERITED))
            for base in getattr(owner, '__mro__', [owner])
        )
        original = next(value for value in found if value is not _INHERITED)
        before, hook = vars(owner).get(name, _INHERITED), _hooks[key]
        if original is hook:  # A patch of others began in a block and ended after it.
            before = original = originals[key]
        if key in HOOKED:
            originals[key] = original
        else:  # Classes differ in what they inherit.
            hook = hook(original)
        return cls(weakref.ref(owner), name, before, hook)


_planned: tuple[Any, Any, list[_Hook]] = None, None, []  # The hooks installed last.


def acquire_hooks(
    user: object, hooks: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Installs hooks on Flax's reads, unless another user already has.

    Args:
        user: a hashable object that identifies the user of the hooks.
        hooks: for each name in ``HOOKED`` the function to install, and for that of
            ``HOOKED_THAT_KEEP`` a function from the original to it; by default those
            of the previous call.
    """
    global _hooks, _complete
    with _lock:
        _hooks = hooks or _hooks
        _users.add(user)
        if _complete:
            return
        root = running_apply()
        _remove()  # An exception may have interrupted another user.
        _install(_plan())
        _complete = True
        # Keep the hooks until this ``apply`` ends: its later blocks reuse them.
        if root is not None:
            _applies.append(weakref.ref(root))


def _install(plan: Sequence[_Hook]) -> None:
    for planned in plan:
        ref, name, before, hook = planned
        owner = ref()
        if owner is None:
            continue
        current = owner.__dict__.get(name, _INHERITED)
        if current is not before and current is not hook:
            # Other code has replaced the attribute since the plan was made.
            _remove()
            return _install(_plan(anew=True))
        _installed[hook] = planned
        setattr(owner, name, hook)


def _remove() -> None:
    for ref, name, before, _ in _installed.values():
        owner = ref()
        if owner is not None and before is not _INHERITED:
            setattr(owner, name, before)
        elif name in getattr(owner, '__dict__', ()):
            delattr(owner, name)
    _installed.clear()


def _plan(anew: bool = False) -> list[_Hook]:
    """Returns the hooks to install; reuses the last ones if no class or hook is new."""
    global _planned
    refs = modules.classes_that_keep()
    hooks, known, plan = _planned
    if hooks is not _hooks or known is not refs or anew:
        key, name = HOOKED_THAT_KEEP
        plan = [_Hook.of(key, *where) for key, where in HOOKED.items()]
        plan += [_Hook.of(key, cls, name) for ref in refs if (cls := ref())]
        _planned = _hooks, refs, plan
    return plan


def watch(cls: type) -> None:
    """Hooks a class that keeps values, if the last plan did not have it."""
    key, name = HOOKED_THAT_KEEP
    if vars(cls).get(name) not in _installed:
        with _lock:
            if _complete:
                _install([_Hook.of(key, cls, name)])


def users_of_hooks() -> list[object]:
    """The users of the hooks, in all threads."""
    with _lock:
        return list(_users)


def release_hooks(user: object) -> None:
    """Removes a user, and all hooks once the last user and its ``apply`` are done.

    An exception may have interrupted the installation or the removal of hooks. A call
    then completes the removal from any intermediate state.
    """
    global _complete
    with _lock:
        _users.discard(user)
        _applies[:] = [ref for ref in _applies if goes_on(ref())]
        if _users or _applies:
            return
        _complete = False
        _remove()


class released:  # noqa: N801 (read as ``with released(user)``)
    """Releases the hooks of a user when the body ends, even after Ctrl-C."""

    def __init__(self, user: object) -> None:
        self._user = user

    def __enter__(self) -> None:
        """Does nothing: the user has already acquired the hooks."""

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
    """Whether the ``apply`` of ``root`` still runs: Flax invalidates the root after."""
    return root is not None and not root._invalid


def running_apply(innermost: bool = False) -> Scope | None:
    """The root of the outermost ``apply`` or ``init`` that is running, if any."""
    user_frame, found = sys._getframe(1), None
    while user_frame is not None and not (innermost and found):
        found = user_frame if user_frame.f_code is _APPLY else found
        user_frame = user_frame.f_back
    return None if found is None else found.f_locals.get('root')
