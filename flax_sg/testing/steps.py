"""What a training step did to each parameter: the trees before and after it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters, flow
from flax_sg.errors.texts import listed, raised_by
from flax_sg.filters.paths import Path
from flax_sg.internals.types import Array, PyTree
from flax_sg.rendering.matrix import Matrix, Row, Word
from flax_sg.rendering.rows import alike, index, repeated, unique
from flax_sg.rendering.shown import Shown
from flax_sg.testing.flows import named
from flax_sg.trees import leaves, matching
from flax_sg.trees.leaf_types import is_variable

MOVES, PARTLY, STUCK, DRIFTS, STILL = 'moves', 'partly', 'stuck', 'drifts', 'still'
# By whether a value changes, and whether it has a gradient.
_STATUS = {
    (True, True): MOVES,
    (False, True): STUCK,
    (True, False): DRIFTS,
    (False, False): STILL,
}
WORDS = {
    MOVES: Word(MOVES, 'its value changes'),
    PARTLY: Word(PARTLY, 'some rows of it change, and others stand still'),
    STUCK: Word(
        STUCK,
        'it has a gradient and stays: a mask, a rate of zero, or an update below the '
        'resolution of its type',
    ),
    DRIFTS: Word(
        DRIFTS,
        'it changes without a gradient: weight decay, momentum, an average, statistics',
    ),
    STILL: Word(STILL, 'its value does not change'),
}


@dataclasses.dataclass(frozen=True)
class Moves(Shown):
    """What a training step did, as returned by ``testing.moves``.

    Attributes:
        parameters: the path of each parameter.
        status: for each ``'moves'``, ``'partly'``, ``'stuck'``, ``'drifts'`` or
            ``'still'``.
        reasons: which rows of a parameter stand still; ``''`` if none do. Rows are
            those of an array of several axes.
        moved: the share of its elements that change.
    """

    title = 'What the step moves'

    parameters: tuple[Path, ...]
    status: tuple[str, ...]
    reasons: tuple[str, ...]
    moved: tuple[float, ...]

    @property
    def names(self) -> list[str]:
        """The path of each parameter, below its collection if there are several."""
        return unique(self.parameters)

    def status_of(self, parameter: str) -> str:
        """One of ``'moves'``, ``'partly'``, ``'stuck'``, ``'drifts'`` and ``'still'``.

        Raises:
            UnknownNameError: if there is no such parameter.
        """
        return self.status[index('parameter', parameter, self.names)]

    def rows(self) -> list[dict[str, Any]]:
        """A plain dict for each parameter, for JSON and ``pandas.DataFrame``."""
        names = 'parameter', 'collection', 'status', 'reason', 'moved'
        collections = [path.collection for path in self.parameters]
        rows = zip(
            self.names, collections, self.status, self.reasons, self.moved, strict=True
        )
        return [dict(zip(names, row, strict=True)) for row in rows]

    def matrix(self, depth: int | None = None) -> Matrix:
        """The report as rows: one for a module whose parameters do all the same.

        Args:
            depth: the number of names of a module's path to group by. Default all.
                Parameters of one group that do different things have a row each.
        """
        contents = [*zip(self.status, self.reasons, strict=True)]
        rows = repeated(alike(self.parameters, contents, depth))
        lines = [Row(name, (status,), reason) for name, (status, reason) in rows]
        notes = 'why' if any(self.reasons) else ''
        return Matrix(('the step',), tuple(lines), WORDS, notes)

    def __repr__(self) -> str:
        counts = ', '.join(f'{self.status.count(word)} {word}' for word in WORDS)
        return f'Moves({counts})'


def moves(before: PyTree, after: PyTree, gradients: PyTree = None) -> Moves:
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
    body drifts |
    head moves |
    low stuck |

    Args:
        before: the parameters before the step: a dict of them or of collections, an NNX
            module or its state, any pytree of arrays. If the step donates them or
            changes them in place, as NNX does, give a copy made before:
            ``jax.tree.map(jnp.copy, params)``.
        after: the parameters after one step or several.
        gradients: the gradients of the parameters, as ``jax.grad`` or ``sg.grad``
            returns them, or the report of ``sg.gradient_flow`` on the loss. Without
            them nothing is known of gradients, and a parameter moves or stands still.

    Returns:
        A report of the real and complex leaves. A name begins with the collection if
        there are several. If rows of a parameter stand still, the report names them:
        frozen rows and layers do, but also rows that a batch does not read.

    Raises:
        ArgumentValueError: if both trees have the same Variables, which a step changes
            in place; if no gradient belongs to a parameter.
        StructureError: if the trees have other leaves, or leaves of other shapes.
    """
    old, new = _parameters(before), _parameters(after)
    paths = [path for path, _ in old]
    if [path.place for path in paths] != [path.place for path, _ in new]:
        names = 'the tree before the step', 'the tree after it'
        trees = leaves.leaves_of(before), leaves.leaves_of(after)
        raise matching.different_structures(*names, *trees)
    if not _variables(before).isdisjoint(_variables(after)):
        raise errors.ArgumentValueError(
            'Both trees have the same Variables, which the step changes in place.\n'
            'Copy before it: before = jax.tree.map(jnp.copy, nnx.state(model)).'
        )
    by_place = _gradients(gradients)
    if by_place and not by_place.keys() & {path.place for path in paths}:
        raise errors.ArgumentValueError(
            f'gradients= has none of {listed(unique(paths))}.\n'
            'Give the gradients of the same tree, or the same part of both trees.'
        )
    # JAX's arrays are compared where they lie; all results are fetched at once.
    compared: list[Any] = []
    for (path, value), (_, now) in zip(old, new, strict=True):
        if leaves.shape_of(value) != leaves.shape_of(now):
            raise matching.other_shape('the tree after the step', path, value, now)
        gradient, *by_place[path.place] = by_place.get(path.place) or [False]
        compared.append(_compared(value, now, gradient))
    compared = jax.device_get(compared)
    status: list[str] = []
    reasons: list[str] = []
    for share, has, rows in compared:
        moves, reason = bool(share), ''
        status.append(_STATUS[moves, moves if gradients is None else bool(has)])
        if moves and not rows.all():
            reason = _rows(~rows, 'stands still', 'stand still')
            status[-1] = PARTLY if status[-1] == MOVES else status[-1]
        reasons.append(reason)
    shares = (float(row[0]) for row in compared)
    return Moves(tuple(paths), tuple(status), tuple(reasons), tuple(shares))


def assert_moves_only(
    before: PyTree, after: PyTree, where: filters.Where, gradients: PyTree = None
) -> None:
    """Asserts that a training step moves every selected parameter and no other one.

    ``where`` names what is **moved**.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg.testing import assert_moves_only
    >>> def step(params, x):
    ...     grads = jax.grad(lambda p: jnp.sum(p['head'] * x))(params)
    ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    >>> params = {'body': 1.0, 'head': 2.0}
    >>> assert_moves_only(params, step(params, 3.0), 'head')

    Args:
        before: the parameters before the step, as for ``testing.moves``.
        after: the parameters after the step.
        where: the parameters, a filter of any kind, such as ``sg.live`` makes. Of a
            parameter of which it means some rows or elements, one of these has to
            move, and none of the others. Running statistics move, too: name them, or
            compare the parameters alone.
        gradients: the gradients, as for ``testing.moves``. The message then tells more.

    Raises:
        ExpectationError: an ``AssertionError`` that says which parameters do otherwise.
        UnusedFilterError: if a part of ``where`` selects no parameter.
        PartError: if a part that ``where`` means does not fit its parameter.
    """
    with raised_by('testing.assert_moves_only(before, after, where)'):
        who, where = named(where), filters.as_filter(where)
    report = moves(before, after, gradients)
    [decisions] = leaves.selected([report.parameters], where)
    trees = [*zip(_parameters(before), _parameters(after), strict=True)]
    reasons_of: dict[str, list[tuple[int, str]]] = {'does not move': [], 'moves': []}
    for n, decision in enumerate(decisions):
        changes = report.status[n] in (MOVES, PARTLY, DRIFTS)
        why = report.reasons[n] or WORDS[report.status[n]].meaning
        if isinstance(decision, filters.Part) and changes:
            (path, old), (_, new) = trees[n]
            changed = np.asarray(_differ(old, new))
            inside = changed & decision.mask(changed.shape, path)
            changes, outside = bool(inside.any()), changed & ~inside
            why = why if changes else 'what is named of it stands still'
            if outside.any():
                verbs = 'changes, and was not named', 'change, and were not named'
                reasons_of['moves'].append((n, _rows(outside, *verbs)))
        if filters.is_meant(decision) != changes:
            reasons_of['moves' if changes else 'does not move'].append((n, why))
    lines: list[str] = []
    for verb, said in reasons_of.items():
        for n, why in said[:1]:
            names = [report.names[n] for n, _ in said]
            lines += [f'It {verb} {listed(names)}.', f'{report.names[n]}: {why}.']
    if lines:
        lines = [f'Expected the step to move {who} and nothing else.', *lines]
        raise errors.ExpectationError(
            '\n'.join([*lines, 'To keep some as they are: sg.freeze(tx, where).'])
        )


def _rows(elements: Array, singular: str, plural: str) -> str:
    """What the rows do in which there is one of the elements; '' if there is none.

    >>> _rows(np.array([[True], [True], [True], [False], [True]]), 'moves', 'move')
    'rows 0 to 2 and 4 move'
    """
    rows = np.flatnonzero(elements.reshape(len(elements), -1).any(axis=1))
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    ends = [(run[0], run[-1]) for run in runs if run.size]
    texts = [str(a) if a == b else f'{a} to {b}' for a, b in ends]
    if texts[3:]:
        texts[3:] = [f'{sum(b - a + 1 for a, b in ends[3:])} more']
    text = ' and '.join(filter(None, [', '.join(texts[:-1]), *texts[-1:]]))
    if not texts:
        return ''
    return f'rows {text} {plural}' if len(rows) > 1 else f'row {text} {singular}'


def _parameters(tree: PyTree) -> list[tuple[Path, Any]]:
    """The leaves that can be trained."""
    return [row for row in leaves.leaves_of(tree) if leaves.is_differentiable(row[1])]


def _variables(tree: PyTree) -> set[int]:
    """The Variables of an NNX module or state, by their identity."""
    nodes = jax.tree.leaves(leaves.leaves_of(tree).tree, is_leaf=is_variable)
    return {id(node) for node in nodes if is_variable(node)}


def _gradients(gradients: PyTree) -> dict[Any, list[Any]]:
    """Gradients by the places of parameters: arrays, or whether there is one."""
    pairs: Any = _parameters(gradients)
    if isinstance(gradients, flow.GradientFlow):
        pairs = zip(gradients.parameters, gradients.live, strict=True)
    by_place: dict[Any, list[Any]] = {}
    for path, gradient in pairs:  # Leaves in one box share a place.
        by_place.setdefault(path.place, []).append(gradient)
    return by_place


def _differ(old: Array, new: Array) -> Array:
    """The elements that change."""
    dtype = jnp.result_type(old)
    # What a wider type tells apart is a change, too.
    wide = dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
    old, new = jnp.asarray(old, wide), jnp.asarray(new, wide)
    return (new != old) & ~(jnp.isnan(new) & jnp.isnan(old))


@jax.jit
def _compared(old: Array, new: Array, gradient: Array) -> tuple[Any, ...]:
    """What became of an array.

    Returns:
        The share of the elements that change, whether there is a gradient, and for each
        row whether it changes.
    """
    differ = _differ(old, new)
    share = jnp.mean(differ) if differ.size else jnp.zeros(())
    # An array of one axis has no rows.
    rows = jnp.any(differ, axis=range(differ.ndim > 1, differ.ndim))
    return share, jnp.any(jnp.asarray(gradient).astype(bool)), rows
