"""``ABSENT``: what stands in a tree in place of a leaf that was taken out."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from flax import serialization
from jax import export

from flax_sg import errors
from flax_sg.internals.types import Leaf
from flax_sg.trees.operators import operators

_ADVICE = (
    'this leaf is frozen, was not selected, or is in another part of the tree.\n'
    "For zeros, pass absent='zeros' to the gradient call; to join parts of a tree, "
    'write sg.combine.\n'
    'An optimizer passes over it inside of sg.freeze(tx, where), which goes '
    'outermost.\n'
    'The state of such an optimizer goes on in a plain one, or in that of another '
    'selection: sg.adopt(tx, params, state).'
)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise errors.AbsentLeafError(f'ABSENT is no array: {_ADVICE}')


class _NamedInErrors(type):
    """Makes JAX's own error of two trees that differ say what to do."""

    def __repr__(cls) -> str:
        return f'ABSENT: {_ADVICE}'.replace('\n', ' ')


class Absent(operators(_refuse), metaclass=_NamedInErrors):
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
    __array_priority__ = 1000

    def __repr__(self) -> str:
        return 'ABSENT'

    def __reduce__(self) -> str:
        return 'ABSENT'

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):  # Python, numpy and JAX ask what an object can do.
            raise AttributeError(name)
        _refuse(self)

    __call__ = __array__ = __jax_array__ = _refuse
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__
    __str__, __format__ = object.__str__, object.__format__


ABSENT = Absent()

jax.tree_util.register_pytree_node(Absent, lambda _: ((), None), lambda *_: ABSENT)
serialization.register_serialization_state(Absent, lambda _: {}, lambda *_: ABSENT)
export.register_pytree_node_serialization(
    Absent,
    serialized_name='flax_sg.ABSENT',
    serialize_auxdata=lambda _: b'',
    deserialize_auxdata=lambda _: None,
)


def is_absent(leaf: Leaf) -> bool:
    """Whether a node is ``ABSENT``; an ``is_leaf`` that keeps it in a tree."""
    return leaf is ABSENT
