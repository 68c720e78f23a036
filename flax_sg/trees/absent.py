"""``ABSENT``: what stands in a tree in place of a leaf that was taken out."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from flax import serialization
from jax import export

from flax_sg import errors
from flax_sg.internals import frames
from flax_sg.trees.operators import operators

# What to write in place of functions of optax that read a whole tree.
_OF_OPTAX = {
    'tree_map_params': 'Give it trees of the trained part: '
    'sg.partition(specs, ~where)[0], if sg.freeze(tx, where) made the state.',
    'schedule_free_eval_params': 'Give it the trained part alone: '
    'part, rest = sg.partition(params, ~where), and '
    'sg.combine(optax.contrib.schedule_free_eval_params(state, part), rest).',
    'value_and_grad_from_state': 'Give it a function of the trained part: '
    'part, rest = sg.partition(params, ~where), and '
    'optax.value_and_grad_from_state(lambda part: loss(sg.combine(part, rest)))'
    '(part, state=state).',
}


def _advice() -> tuple[str, str]:
    """Why there is no array, and what to write, given what is running."""
    outermost: dict[str, Any] = {}
    for name, frame in frames.functions_of('optax'):
        if name in _OF_OPTAX:
            return f'optax reads a leaf that is frozen, in {name}', _OF_OPTAX[name]
        if 'updates' in frame.f_locals:
            outermost = frame.f_locals
    if frames.is_running('flax_sg', 'Freeze'):
        return (
            'it is frozen, and the transformation in sg.freeze reads it',
            'Write the transformation with jax.tree.map, which passes over ABSENT.',
        )
    path, of_state = (_absent_in(outermost.get(name)) for name in ('updates', 'state'))
    if of_state and not path:
        return (
            f'the optimizer state has nothing at {of_state!r}, which was frozen',
            'Take it along to what is trained now: sg.adopt(tx, params, state).',
        )
    if of_state:
        return (
            f'sg.freeze stands inside a transformation, which reads {path!r}',
            'sg.freeze goes outermost: sg.freeze(optax.chain(...), where), '
            'sg.freeze(optax.MultiSteps(tx, 2), where).',
        )
    if frames.is_running('flax', 'TrainState'):
        return (
            "no gradient was computed for this leaf, and Flax's TrainState reads it",
            'Write sg.TrainState, and sg.freeze(tx, where) for tx. Full gradients, of '
            'jax.grad, and sg.freeze(tx, where) fit every TrainState.',
        )
    if path:
        return (
            f'no gradient was computed for {path!r}, and optax reads it',
            'Write sg.apply_updates(params, updates), and sg.freeze(tx, where) for tx.',
        )
    return (
        'this leaf is frozen, was not selected, or is in another part of the tree',
        "For zeros, pass absent='zeros' to the gradient call; to join trees, write "
        'sg.combine.',
    )


def _absent_in(tree: Any) -> str | None:
    """The path of the first leaf that is absent, if one is."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_absent)
    for keys, leaf in pairs:
        if is_absent(leaf):
            return jax.tree_util.keystr(keys, simple=True, separator='/')
    return None


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    why, fix = _advice()
    raise errors.AbsentLeafError(f'ABSENT is no array: {why}.\n{fix}')


class _NamedInErrors(type):
    """Makes JAX's own error of two trees that differ say what to do."""

    def __repr__(cls) -> str:
        why, fix = _advice()
        return f'ABSENT: {why}. {fix}'.replace('\n', ' ')


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


def is_absent(leaf: Any) -> bool:
    """Whether something is ``ABSENT``; an ``is_leaf`` that keeps it in a tree."""
    return leaf is ABSENT
