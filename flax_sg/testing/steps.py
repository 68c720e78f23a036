"""What a training step does to each parameter: ``moves``, ``assert_moves_only``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters, flow
from flax_sg.errors.texts import listed
from flax_sg.filters.paths import Path
from flax_sg.flow.report import index
from flax_sg.rendering import text
from flax_sg.rendering.matrix import BLUE, GREY, ORANGE, RED, Matrix, Row, Word
from flax_sg.rendering.shown import Shown
from flax_sg.testing import flows, runs
from flax_sg.trees import leaves

MOVES, STUCK, DRIFTS, STILL = 'moves', 'stuck', 'drifts', 'still'
_STUCK = 'it has a gradient or an update, and most of its value does not change'

# The colours go from what trains to what stands still, as those of a gradient flow; the
# two that are most often faults are red.
WORDS = {
    MOVES: Word(MOVES, 'its value changes', *BLUE),
    STUCK: Word(STUCK, _STUCK, *RED),
    DRIFTS: Word(DRIFTS, 'it has no gradient, and its value changes', *ORANGE),
    STILL: Word(STILL, 'its value does not change', *GREY),
}


@dataclasses.dataclass(frozen=True)
class Move:
    """What a step did to one parameter.

    Attributes:
        path: its path.
        status: ``'moves'``, ``'stuck'``, ``'drifts'`` or ``'still'``.
        reason: why it is stuck, or drifts; ``''`` if there is nothing to say.
        size: the norm of its value before.
        change: the norm of the change.
        moved: the share of its elements that change.
        gradient: the norm of its gradient; True or False if only that is known; None if
            nothing is.
        shape: its shape and dtype.
    """

    path: Path
    status: str
    reason: str
    size: float
    change: float
    moved: float
    gradient: float | None  # A bool is one, too.
    shape: jax.ShapeDtypeStruct

    @property
    def said(self) -> tuple[str, str]:
        """The words of its row."""
        return self.status, self.reason


@dataclasses.dataclass(frozen=True)
class Moves(Shown):
    """What a training step did, as returned by ``testing.moves``.

    Attributes:
        parameters: what it did to each parameter.
        times: how often the step was run.
    """

    title = 'What the step moves'
    headings = 'parameters', ''

    parameters: tuple[Move, ...]
    times: int = 1

    def status_of(self, parameter: str) -> str:
        """What the step did to a parameter, one of the words of ``Move.status``.

        Raises:
            UnknownNameError: if there is no such parameter.
        """
        names = [move.path for move in self.parameters]
        return self.parameters[index('parameter', parameter, names)].status

    def rows(self) -> list[dict[str, Any]]:
        """A plain dict for each parameter, for JSON and ``pandas.DataFrame``."""
        names = 'status', 'reason', 'size', 'change', 'moved', 'gradient'
        return [
            {'parameter': str(move.path), 'collection': move.path.collection}
            | {name: getattr(move, name) for name in names}
            for move in self.parameters
        ]

    def matrix(self, depth: int | None = None) -> Matrix:
        """The report as rows: one for a module whose parameters do all the same.

        Args:
            depth: the number of names of a module's path to group by. Default all.
                Parameters of one group that do different things have a row each.
        """
        text.check_depth(depth)
        several = len({move.path.collection for move in self.parameters}) > 1
        groups: dict[tuple[str, ...], list[Move]] = {}
        for move in self.parameters:
            head = (move.path.collection,) * several
            module = (*head, *move.path.parts[:-1][:depth])
            groups.setdefault(module, []).append(move)
        rows: dict[tuple[str, ...], tuple[str, str]] = {}
        for module, some in groups.items():
            alike = len(some) > 1 and len({move.said for move in some}) == 1
            for move in some:
                own = (*module[:several], *move.path.parts)
                rows[module if alike and len(module) > several else own] = move.said
        said = list(rows.values())
        found: list[Row] = []
        for names, same in text.repeated([*rows], said):
            status, reason = said[same[0]]
            found.append(Row('/'.join(names), (status,), reason))
        heading = 'one step' if self.times == 1 else f'{self.times} steps'
        return Matrix((heading,), tuple(found), WORDS, 'why', self._totals(), True)

    def _totals(self) -> tuple[str, ...]:
        """A line for each status."""
        shapes = {status: list[tuple[int, Any]]() for status in WORDS}
        for move in self.parameters:
            shapes[move.status].append((move.shape.size, move.shape.dtype))
        return tuple(
            f'{status.capitalize()}: {text.amount(some)}'
            for status, some in shapes.items()
            if some
        )

    def __repr__(self) -> str:
        counts = Counter(move.status for move in self.parameters)
        return f'Moves({", ".join(f"{counts[word]} {word}" for word in WORDS)})'


def moves(
    step: Callable[..., Any],
    state: Any,
    *args: Any,
    grads: Any = None,
    times: int = 1,
) -> Moves:
    """Runs a training step, and tells which parameters it moved.

    ``sg.gradient_flow`` tells what a loss *can* train. A step may do less or more: an
    update may be lost in the rounding of the parameter's type, and weight decay moves
    what has no gradient.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg.testing import moves
    >>> params = {'body': jnp.ones(2), 'head': jnp.ones(2, jnp.bfloat16)}
    >>> def loss(params):
    ...     body = jax.lax.stop_gradient(params['body'])
    ...     return jnp.sum(body * params['head'].astype(jnp.float32))
    >>> def step(params):  # gradient descent with weight decay
    ...     grads = jax.grad(loss)(params)
    ...     return jax.tree.map(lambda p, g: p - 1e-3 * (g + 0.1 * p), params, grads)
    >>> found = moves(step, params, grads=jax.grad(loss)(params))
    >>> found.status_of('head'), found.status_of('body')
    ('stuck', 'drifts')
    >>> [(row['parameter'], row['reason']) for row in found.rows()]
    [('body', 'it shrinks as by weight decay'),
     ('head', 'its update is lost in the rounding of bfloat16')]

    Args:
        step: a function of the state and further arguments, jitted or not. It returns
            the new state first, or changes its arguments in place, as NNX does. If more
            of its leading arguments come back, such as the state of an optimizer, they
            are given to the next step.
        state: its first argument: a dict of parameters or of collections, a
            ``TrainState``, or any pytree of arrays.
        *args: its other arguments. All are copied, so a step may donate them.
        grads: the gradients of the parameters, as ``jax.grad`` or ``sg.grad`` returns
            them, or the report of ``sg.gradient_flow`` on the loss. Without them,
            nothing is known of the gradients: a parameter is ``'stuck'`` only if its
            update is lost in the rounding.
        times: how often the step is run, an int from 1 on. A parameter moves if one of
            the steps changes it.

    Returns:
        A report of the state's real and complex leaves, without those of an optimizer
        (``opt_state``).

    Raises:
        ArgumentTypeError: if the step returns no new state.
        ArgumentValueError: if ``times`` is less than 1.

    Note:
        Each step is followed by two norms for each parameter. If a parameter stands
        still, or most of one that is narrower than float32, the steps are run once more
        with a wider type for it. An update that shows only there is lost in the
        rounding.
    """
    if times < 1:
        raise errors.ArgumentValueError(f'times={times}: expected 1, 2, 3, ...')
    watched, known = _watched(state), _gradients(grads)
    if known and not known.keys() & {path.place for path in watched.values()}:
        raise errors.ArgumentValueError(
            'grads= has no parameter of the state: '
            f'{listed([names[-1] for _, names in known])}, and the state holds '
            f'{listed(list(watched.values()))}.\n'
            'Give the gradients of the whole first argument of the step.'
        )
    measured = runs.measured(step, (state, *args), watched, times)
    # False where there is none; None where it is not known.
    gradient: dict[int, Any] = {
        n: None if grads is None else known.get(path.place, False)
        for n, path in watched.items()
    }
    values = leaves.leaves_of(state).values
    kinds = {n: jnp.result_type(values[n]) for n in watched}
    asked = [
        n
        for n, row in measured.items()
        if runs.may_be_lost(row, kinds[n]) and gradient[n] != 0
    ]
    wide = runs.in_wider_types(step, (state, *args), asked, times) if asked else {}
    none_moves = not any(row.moved for row in measured.values())
    found: list[Move] = []
    for n, path in watched.items():
        row, status, reason = measured[n], STILL, ''
        if n in wide and wide[n].moved > 2 * row.moved:
            most = 'most of ' * bool(row.moved)
            status, reason = STUCK, f'{most}its update is {_LOST} {kinds[n]}'
        elif row.moved:
            status = DRIFTS if gradient[n] is not None and not gradient[n] else MOVES
            if not np.isfinite(row.change):
                reason = _NOT_FINITE
            elif status == DRIFTS:
                reason = _DECAY if row.cosine < -0.999 else _WRITTEN
        elif gradient[n]:
            status, reason = STUCK, _NO_STEP if none_moves else _MASKED
        shape = jax.ShapeDtypeStruct(leaves.shape_of(values[n]), kinds[n])
        numbers = float(row.size), float(row.change), float(row.moved)
        found.append(Move(path, status, reason, *numbers, gradient[n], shape))
    return Moves(tuple(found), times)


def assert_moves_only(
    step: Callable[..., Any] | Moves,
    where: filters.Where,
    *args: Any,
    grads: Any = None,
    times: int = 1,
) -> None:
    """Asserts that a training step moves every selected parameter and no other one.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg.testing import assert_moves_only
    >>> def step(params, x):
    ...     grads = jax.grad(lambda p: jnp.sum(p['head'] * x))(params)
    ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    >>> assert_moves_only(step, 'head', {'body': 1.0, 'head': 2.0}, 3.0)

    Args:
        step: the step, or the report of ``testing.moves`` on one.
        where: the parameters, a filter of any kind. Running statistics move, too: name
            them, or select by ``path.collection``.
        *args: the arguments of the step, as for ``testing.moves``. None for a report.
        grads: the gradients, as for ``testing.moves``.
        times: how often the step is run.

    Raises:
        ExpectationError: an ``AssertionError`` that says which parameters do otherwise,
            and why.
        UnusedFilterError: if a part of ``where`` selects no parameter.
        PartError: if ``where`` selects a part of a parameter.
    """
    who, where = flows.named(where), filters.as_filter(where)
    report = step
    if not isinstance(report, Moves):
        report = moves(report, *args, grads=grads, times=times)
    paths = [move.path for move in report.parameters]
    [said] = leaves.selected([paths], where)
    named = leaves.whole(said, paths, 'assert_moves_only')
    wrong: dict[bool, list[Move]] = {True: [], False: []}
    for move, is_named in zip(report.parameters, named, strict=True):
        if is_named != (move.status in (MOVES, DRIFTS)):
            wrong[is_named].append(move)
    lines = [
        f'{text} {listed([move.path for move in some])}.\n'
        f'{some[0].path}: {some[0].reason or some[0].status}. {_advice(some[0])}'
        for text, some in (
            ('It does not move', wrong[True]),
            ('It moves', wrong[False]),
        )
        if some
    ]
    if lines:
        raise errors.ExpectationError(
            f'Expected the step to move {who} and nothing else.\n' + '\n'.join(lines)
        )


# Why a parameter is stuck or drifts.
_NOT_FINITE = 'its value is not finite'
_LOST = 'lost in the rounding of'
_NO_STEP = 'its update is zero, as are all others: the rate is zero, or no step is made'
_MASKED = 'its update is zero: masked, clipped, or unknown to the optimizer'
_DECAY = 'it shrinks as by weight decay'
_WRITTEN = 'the step writes it: momentum, an average, running statistics'


def _advice(move: Move) -> str:
    if _LOST in move.reason:
        return 'Keep it in float32, or make larger steps.'
    if move.status == STUCK:
        return 'Look at the optimizer.'
    if move.status == STILL:
        return 'If it should have a gradient: sg.gradient_flow(loss, ...).'
    return 'If it should stay: sg.freeze(tx, where).'


def _watched(state: Any) -> dict[int, Path]:
    """The numbers of the leaves of a state that can be trained, with their paths."""
    tree = leaves.leaves_of(state)
    paths = tree.paths
    if hasattr(state, 'params'):  # Its fields are collections.
        paths = [Path.of(path.parts[0], path.parts[1:] or ('',)) for path in paths]
    return {
        n: path
        for n, (path, leaf) in enumerate(zip(paths, tree.values, strict=True))
        if leaves.is_differentiable(leaf)
        and 'opt_state' not in (path.collection, *path.parts)
    }


def _gradients(grads: Any) -> dict[Any, Any]:
    """What is known of gradients by the places of parameters: norms, or yes and no."""
    if isinstance(grads, flow.GradientFlow):
        pairs = enumerate(grads.parameters)
        return {path.place: bool(grads.trained(n)) for n, path in pairs}
    norms = {
        path.place: runs.compared(leaf, leaf).size
        for path, leaf in leaves.leaves_of(grads)
        if leaves.is_differentiable(leaf)
    }
    return jax.tree.map(float, jax.device_get(norms))
