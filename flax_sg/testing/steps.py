"""What a training step did to each parameter: the trees before and after it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters, flow
from flax_sg.errors.texts import brief, listed
from flax_sg.filters.paths import Path, shape_and_dtype
from flax_sg.flow.report import index
from flax_sg.internals.optional import is_of_nnx
from flax_sg.rendering import text
from flax_sg.rendering.matrix import Matrix, Row, Word
from flax_sg.rendering.shown import Shown
from flax_sg.testing.flows import named
from flax_sg.trees import beside, leaves
from flax_sg.trees.trainable import states

MOVES, STUCK, DRIFTS, STILL = 'moves', 'stuck', 'drifts', 'still'
# By whether a value changes, and whether it has a gradient.
_STATUS = {
    (True, True): MOVES,
    (False, True): STUCK,
    (True, False): DRIFTS,
    (False, False): STILL,
}
WORDS = {
    MOVES: Word(MOVES, 'its value changes'),
    STUCK: Word(STUCK, 'it has a gradient, and its value does not change'),
    DRIFTS: Word(DRIFTS, 'it has no gradient, and its value changes'),
    STILL: Word(STILL, 'its value does not change'),
}


@dataclasses.dataclass(frozen=True)
class Move:
    """What a step did to one parameter.

    Attributes:
        path: its path.
        status: ``'moves'``, ``'stuck'``, ``'drifts'`` or ``'still'``.
        reason: the causes there are if it is stuck or drifts; ``''`` otherwise.
        advice: what to write if the step should have done otherwise.
        moved: the share of its elements that change.
        change: the largest change of an element.
    """

    path: Path
    status: str
    reason: str
    advice: str
    moved: float
    change: float


@dataclasses.dataclass(frozen=True)
class Moves(Shown):
    """What a training step did, as returned by ``testing.moves``.

    Attributes:
        parameters: what it did to each parameter.
    """

    title = 'What the step moves'

    parameters: tuple[Move, ...]

    @property
    def names(self) -> list[str]:
        """The path of each parameter, below its collection if there are several."""
        paths = [move.path for move in self.parameters]
        several = len({path.collection for path in paths}) > 1
        return [f'{path.collection}/' * several + path for path in paths]

    def status_of(self, parameter: str) -> str:
        """What the step did to a parameter, one of the words of ``Move.status``.

        Raises:
            UnknownNameError: if there is no such parameter.
        """
        return self.parameters[index('parameter', parameter, self.names)].status

    def rows(self) -> list[dict[str, Any]]:
        """A plain dict for each parameter, for JSON and ``pandas.DataFrame``."""
        wanted = 'status', 'reason', 'moved', 'change'
        return [
            {'parameter': name, 'collection': move.path.collection}
            | {key: getattr(move, key) for key in wanted}
            for name, move in zip(self.names, self.parameters, strict=True)
        ]

    def matrix(self, depth: int | None = None) -> Matrix:
        """The report as rows: one for a module whose parameters do all the same.

        Args:
            depth: the number of names of a module's path to group by. Default all.
                Parameters of one group that do different things have a row each.
        """
        text.check_depth(depth)
        # A module with its collection, and its parameters.
        groups: dict[tuple[str, ...], list[tuple[tuple[str, ...], Move]]] = {}
        for name, move in zip(self.names, self.parameters, strict=True):
            head = (move.path.collection,) * (name != move.path)
            module = (*head, *move.path.parts[:-1][:depth])
            own = (*head, *move.path.parts)
            groups.setdefault(module, []).append((own, move))
        rows: dict[tuple[str, ...], tuple[str, str]] = {}
        for module, some in groups.items():
            words = {(move.status, move.reason) for _, move in some}
            outside = len(some[0][0]) - len(some[0][1].path.parts)
            alike = len(module) > outside and len(some) > 1 and len(words) == 1
            rows |= {
                module if alike else own: (move.status, move.reason)
                for own, move in some
            }
        words = list(rows.values())
        joined = text.repeated([*rows], words)
        found = [
            Row('/'.join(names), (status,), reason)
            for names, same in joined
            for status, reason in [words[same[0]]]
        ]
        return Matrix(('the step',), tuple(found), WORDS, 'why')

    def __repr__(self) -> str:
        counts = Counter(move.status for move in self.parameters)
        return f'Moves({", ".join(f"{counts[word]} {word}" for word in WORDS)})'


def moves(before: Any, after: Any, gradients: Any = None) -> Moves:
    """Tells which parameters a training step moved, from the trees before and after.

    ``sg.gradient_flow`` tells what a loss *can* train. A step may do less or more: an
    update may be lost in the rounding of the parameter's type, and weight decay moves
    what has no gradient.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg.testing import moves
    >>> params = {'body': jnp.ones(2), 'head': jnp.ones(2), 'low': jnp.ones(2, 'half')}
    >>> def loss(params):
    ...     body = jax.lax.stop_gradient(params['body'])
    ...     return jnp.sum(body * params['head'] * params['low'].astype(jnp.float32))
    >>> def step(params):  # gradient descent with weight decay
    ...     grads = jax.grad(loss)(params)
    ...     return jax.tree.map(lambda p, g: p - 1e-4 * (g + 0.1 * p), params, grads)
    >>> found = moves(params, step(params), jax.grad(loss)(params))
    >>> for row in found.rows():
    ...     print(row['parameter'], row['status'], '|', row['reason'])
    body drifts | weight decay, momentum or an average
    head moves |
    low stuck | updates as large as the others are lost in the rounding of float16

    Args:
        before: the parameters before the step: a dict of them or of collections, a
            ``TrainState``, an NNX module or its state, any pytree of arrays. If the
            step donates it or changes it in place, as NNX does, copy it before:
            ``jax.tree.map(jnp.copy, params)``.
        after: the same after one step or several.
        gradients: the gradients of the parameters, as ``jax.grad`` or ``sg.grad``
            returns them, or the report of ``sg.gradient_flow`` on the loss. Without
            them nothing is known of gradients, and a parameter moves or stands still.

    Returns:
        A report of the real and complex leaves. A name begins with the collection if
        there are several.

    Raises:
        ArgumentTypeError: if ``before`` has no parameters.
        ArgumentValueError: if ``before`` was donated, or is what ``after`` is; if no
            gradient belongs to a parameter.
        StructureError: if the trees have other leaves, or leaves of other shapes.
    """
    old, is_state = _parameters(before)
    new, _ = _parameters(after)
    _check(before, after, old, new)
    known = _gradients(gradients)
    if known and not known.keys() & {path.place for path, _ in old}:
        raise errors.ArgumentValueError(
            'gradients= has no parameter of the tree before the step: '
            f'{listed([names[-1] for _, names in known])}, and the tree has '
            f'{listed([path for path, _ in old])}.\n'
            'Give the gradients of the same tree, or the same part of both.'
        )
    queues = {place: iter(several) for place, several in known.items()}
    given = [next(queues.get(path.place, iter(())), False) for path, _ in old]
    # JAX's arrays are compared where they lie; all results are fetched at once.
    rows = [
        _compared(x, y, g) for (_, x), (_, y), g in zip(old, new, given, strict=True)
    ]
    rows: list[Any] = jax.device_get(rows)
    has = [bool(row[3]) if known or gradients is not None else None for row in rows]
    changes = [row[1] for row, own in zip(rows, has, strict=True) if own and row[0]]
    largest = float(np.max(changes, initial=0.0))
    found: list[Move] = []
    for (path, value), (moved, change, finest, _), gradient, stat in zip(
        old, rows, has, is_state, strict=True
    ):
        status = _STATUS[bool(moved), bool(moved) if gradient is None else gradient]
        kind = jnp.result_type(value)
        reason, advice = '', _ADVICE[status]
        if stat and moved:
            reason, advice = 'the step writes it: it is no parameter', _STATISTICS
        elif status == DRIFTS:
            reason = 'weight decay, momentum or an average'
        elif status == STUCK and 0 < largest < finest:
            reason = (
                f'updates as large as the others are lost in the rounding of {kind}'
            )
            advice = 'Keep it in float32, or make larger steps.'
        elif status == STUCK:
            reason = (
                f'a mask, a rate of zero, or an update below the resolution of {kind}'
            )
        found.append(Move(path, status, reason, advice, float(moved), float(change)))
    return Moves(tuple(found))


def assert_moves_only(
    before: Any, after: Any, where: filters.Where, gradients: Any = None
) -> None:
    """Asserts that a training step moves every selected parameter and no other one.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg.testing import assert_moves_only
    >>> def step(params, x):
    ...     grads = jax.grad(lambda p: jnp.sum(p['head'] * x))(params)
    ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    >>> params = {'body': 1.0, 'head': 2.0}
    >>> assert_moves_only(params, step(params, 3.0), 'head')

    Args:
        before: the parameters before the step, as for ``testing.moves``.
        after: the same after it.
        where: the parameters, a filter of any kind. Running statistics move, too: name
            them, or compare the parameters alone.
        gradients: the gradients, as for ``testing.moves``. The message then tells more.

    Raises:
        ExpectationError: an ``AssertionError`` that says which parameters do otherwise.
        UnusedFilterError: if a part of ``where`` selects no parameter.
        PartError: if ``where`` selects a part of a parameter.
    """
    who, where = named(where), filters.as_filter(where)
    report = moves(before, after, gradients)
    paths = [move.path for move in report.parameters]
    [said] = leaves.selected([paths], where)
    is_named = leaves.whole(said, paths, 'assert_moves_only')
    wrong: dict[bool, list[tuple[str, Move]]] = {True: [], False: []}
    for name, move, takes in zip(
        report.names, report.parameters, is_named, strict=True
    ):
        if takes != (move.status in (MOVES, DRIFTS)):
            wrong[takes].append((name, move))
    lines = [
        f'{verb} {listed([name for name, _ in some])}.\n'
        f'{name}: {move.reason or move.status}. {move.advice}'
        for verb, some in (
            ('It does not move', wrong[True]),
            ('It moves', wrong[False]),
        )
        if some
        for name, move in some[:1]
    ]
    if lines:
        raise errors.ExpectationError(
            f'Expected the step to move {who} and nothing else.\n' + '\n'.join(lines)
        )


_STAY = 'If it should stay: sg.freeze(tx, where).'
_ADVICE = {
    MOVES: _STAY,
    DRIFTS: _STAY,
    STUCK: 'Look at the optimizer.',
    STILL: 'If it should have a gradient: sg.gradient_flow(loss, ...).',
}
_STATISTICS = 'Name it in the filter, or compare the parameters alone.'


def _parameters(tree: Any) -> tuple[list[tuple[Path, Any]], list[bool]]:
    """The leaves that can be trained, and whether each is a model's state."""
    found = leaves.leaves_of(tree)
    paths, kept = found.paths, list[tuple[Path, Any]]()
    # The fields of a TrainState are collections; a module may have any attributes.
    if hasattr(tree, 'params') and not is_of_nnx(type(tree), 'Module'):
        paths = [
            Path.of(path.parts[0], path.parts[1:] or ('',), array=shape_and_dtype(leaf))
            for path, leaf in found
        ]
    is_state: list[bool] = []
    for path, leaf, state in zip(paths, found.values, states(found.tree), strict=True):
        if leaves.is_differentiable(leaf):
            kept.append((path, leaf))
            is_state.append(state or path.collection != 'params')
    return kept, is_state


def _check(before: Any, after: Any, old: Sequence[Any], new: Sequence[Any]) -> None:
    """Raises if two trees cannot be compared."""
    if not old:
        raise errors.ArgumentTypeError(
            f'The tree before the step has no parameters: it is {brief(before)}.\n'
            'Give the parameters before and after it: moves(params, new_params).'
        )
    if [path.place for path, _ in old] != [path.place for path, _ in new]:
        names = 'the tree before the step', 'the tree after it'
        trees = leaves.leaves_of(before), leaves.leaves_of(after)
        raise beside.different_structures(*names, *trees)
    ids = [{id(node) for node in _variables(tree)} for tree in (before, after)]
    for (path, value), (_, now) in zip(old, new, strict=True):
        if leaves.shape_of(value) != leaves.shape_of(now):
            raise beside.other_shape('the tree after the step', path, value, now)
        deleted = isinstance(value, jax.Array) and value.is_deleted()
        if deleted or (ids[0] and ids[0] == ids[1]):
            what = 'was donated to it' if deleted else 'was changed in place'
            raise errors.ArgumentValueError(
                f'{str(path)!r} in the tree before the step {what}.\n'
                'Copy the tree before the step: before = jax.tree.map(jnp.copy, tree), '
                'where tree is params or nnx.state(model).'
            )


def _variables(tree: Any) -> list[Any]:
    """The Variables of an NNX module or state, which a step changes in place."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: is_of_nnx(type(x), 'Variable'))
    return [node for node in nodes if is_of_nnx(type(node), 'Variable')]


def _gradients(gradients: Any) -> dict[Any, list[Any]]:
    """Gradients by the places of parameters: arrays, or whether there is one."""
    if isinstance(gradients, flow.GradientFlow):
        rows = enumerate(gradients.parameters)
        pairs = [(path, bool(gradients.trained(n))) for n, path in rows]
    else:
        pairs, _ = _parameters(gradients)
    found: dict[Any, list[Any]] = {}
    for path, gradient in pairs:  # Leaves in one box share a place.
        found.setdefault(path.place, []).append(gradient)
    return found


@jax.jit
def _compared(old: Any, new: Any, gradient: Any) -> tuple[Any, Any, Any, Any]:
    """What became of an array.

    Returns:
        The share of the elements that change, the largest change, the largest update
        that is lost in the rounding wherever there is a gradient, and whether there is.
    """
    old, new, has = jnp.asarray(old), jnp.asarray(new), jnp.asarray(gradient)
    kind, has = old.dtype, has.astype(bool)
    wide = kind if jnp.finfo(kind).bits >= 32 else jnp.float32
    old, new = old.astype(wide), new.astype(wide)
    differ = (new != old) & ~(jnp.isnan(new) & jnp.isnan(old))
    change = jnp.max(jnp.abs(new - old), initial=0)
    # Half the distance to the next number, which is smaller below a power of two.
    eps = float(jnp.finfo(kind).eps) * jnp.isrealobj(old)  # Complex: nothing is proven.
    lost = jnp.abs(old) * (eps / 4)
    there = has if has.shape in ((), old.shape) else jnp.any(has)
    finest = jnp.min(lost, where=there, initial=jnp.inf)
    share = jnp.mean(differ) if differ.size else jnp.zeros(())
    return share, change, finest, jnp.any(has)
