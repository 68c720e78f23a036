"""``ABSENT``, the sentinel in place of a leaf that was taken out of a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from flax import serialization

from flax_sg import errors
from flax_sg.internals import frames


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise _no_leaf()


class _NamedInErrors(type):
    """Makes JAX's own error of two trees that differ say what to do."""

    def __repr__(cls) -> str:
        return (
            'ABSENT: no gradient was computed for this leaf. Wrap the optimizer, '
            'sg.freeze(tx, where), and use sg.apply_updates'
        )


class Absent(metaclass=_NamedInErrors):
    """Marks a leaf that is not in this part of a tree. ``sg.ABSENT`` is the only one.

    ``ABSENT`` is a pytree node without leaves. It is not None, which many trees hold
    for reasons of their own. Arithmetic, indexing, attributes and conversions raise.

    >>> import jax, flax_sg as sg
    >>> sg.ABSENT, jax.tree.leaves({'a': sg.ABSENT, 'b': 1.0})
    (ABSENT, [1.0])
    >>> sg.ABSENT + 1.0
    Traceback (most recent call last):
        ...
    flax_sg.errors.AbsentLeafError: ABSENT is no array: ...

    Raises:
        AbsentLeafError: when it is used as a value.
    """

    __slots__ = ()
    _only: Absent | None = None
    __array_priority__ = 1000

    def __new__(cls) -> Absent:
        """The one there is."""
        if cls._only is None:
            cls._only = object.__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return 'ABSENT'

    def __reduce__(self) -> str:
        return 'ABSENT'

    def __copy__(self) -> Absent:
        return self

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):  # Python, numpy and JAX ask what an object can do.
            raise AttributeError(name)
        raise _no_leaf()

    __call__: Callable[..., Any] = _refuse
    __array__ = __jax_array__ = __bool__ = __float__ = __int__ = __complex__ = (
        __index__
    ) = _refuse
    __len__ = __iter__ = __getitem__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __neg__ = __pos__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


ABSENT = Absent()

jax.tree_util.register_pytree_node(Absent, lambda _: ((), None), lambda *_: ABSENT)
serialization.register_serialization_state(Absent, lambda _: {}, lambda *_: ABSENT)


def is_absent(leaf: Any) -> bool:
    """Whether something is ``ABSENT``; an ``is_leaf`` that keeps it in a tree."""
    return leaf is ABSENT


def _no_leaf() -> errors.AbsentLeafError:
    """A leaf was asked for that is not in this part of the tree."""
    updates = frames.argument_of('optax', 'apply_updates', 'updates')
    pairs, _ = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_absent)
    for keys, leaf in pairs:
        if is_absent(leaf):  # The first one is the one that is added.
            path = jax.tree_util.keystr(keys, simple=True, separator='/')
            return errors.AbsentLeafError(
                f'optax.apply_updates adds ABSENT to {path!r}: no gradient was '
                'computed for this parameter.\n'
                'Write sg.apply_updates(params, updates), and sg.freeze(tx, where) for '
                'tx.'
            )
    return errors.AbsentLeafError(
        'ABSENT is no array: this leaf was not selected, or is in another part of the '
        'tree.\n'
        'With optax, write sg.freeze(tx, where) for tx, and sg.apply_updates.\n'
        "For a value, select the leaf in wrt= or where=, or pass absent='zeros' to "
        'the gradient call.'
    )


def missing_leaf(what: str, path: str, why: str, fix: str) -> errors.StructureError:
    """A leaf is needed, and ``ABSENT`` (or None, or a ``MaskedNode``) stands there."""
    return errors.StructureError(
        f'there is nothing at {str(path)!r} in {what}, and it {why}.\n{fix}'
    )
