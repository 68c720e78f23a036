"""Which indices along the first axis of a value change.

Some layers of a stack are trained, and others are not. The stack changes, and a slice
of frozen layers does not. For each operation that moves rows, or works on each of them
by itself, a rule says which rows of its output change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# A bool for each index of the first axis; one bool for a scalar.
Mask: TypeAlias = NDArray[np.bool_]


class Rows(NamedTuple):
    """A value of which some rows change.

    Attributes:
        changes: the rows that do.
        twin: the number of a value that is known ahead. Its other rows are those of the
            value; the rows that change hold anything.
    """

    changes: Mask
    twin: int


class Operation(NamedTuple):
    """An equation, with what is known of its inputs.

    Attributes:
        eqn: the equation.
        masks: for each input the rows that change.
        constant: returns the value of an input that is a constant; None for others.
    """

    eqn: Any
    masks: Sequence[Mask]
    constant: Callable[[int], Any]

    @property
    def all(self) -> Mask:
        """The rows that change of inputs that have the same rows, or are scalars."""
        return np.logical_or.reduce([*np.broadcast_arrays(*self.masks)])

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of an input."""
        return self.eqn.invars[number].aval.shape

    def spread(self, changes: Any) -> Mask:
        """One answer for all rows of the output."""
        return np.full(self.eqn.outvars[0].aval.shape[:1], changes)

    def is_steady(self, *numbers: int) -> bool:
        """Whether some inputs do not change."""
        return not any(self.masks[n].any() for n in numbers)


def changing_rows(operation: Operation) -> list[Mask] | None:
    """For each output of an equation the rows that change; None if it may be all."""
    name = operation.eqn.primitive.name
    if name in _EACH:
        return [*operation.masks]
    shapes = operation.shape(0), operation.eqn.outvars[0].aval.shape
    # A scalar of a scalar changes as a whole.
    rule = _RULES.get(name) if any(shapes) else None
    found = rule(operation) if rule else None
    return found if found is None or isinstance(found, list) else [found]


# Each input for itself.
_EACH = frozenset(('optimization_barrier', 'device_put'))
# Each row by itself, in all inputs.
_IN_PLACE = (
    *('abs', 'add', 'add_any', 'and', 'atan2', 'cbrt', 'ceil', 'clamp', 'copy', 'cos'),
    *('convert_element_type', 'div', 'eq', 'erf', 'exp', 'exp2', 'expm1', 'floor'),
    *('ge', 'gt', 'integer_pow', 'is_finite', 'le', 'log', 'log1p', 'logistic', 'lt'),
    *('max', 'min', 'mul', 'name', 'ne', 'neg', 'not', 'or', 'pow', 'reduce_precision'),
    *('rem', 'round', 'rsqrt', 'sharding_constraint', 'sign', 'sin', 'sqrt', 'square'),
    *('stop_gradient', 'sub', 'tan', 'tanh', 'xor'),
)


def _reshaped(op: Operation) -> Mask | None:
    [mask], out = op.masks, op.eqn.outvars[0].aval.shape
    if not mask.shape or not out or 0 in out:
        return op.spread(mask.any())
    before, after = math.prod(op.shape(0)[1:]), math.prod(out[1:])
    if before % after == 0:
        return np.repeat(mask, before // after)
    if after % before:
        return None
    return np.asarray(mask.reshape(out[0], -1).any(1))


def _sliced(op: Operation) -> Mask:
    params = op.eqn.params
    step = (params['strides'] or (1,))[0]
    return op.masks[0][params['start_indices'][0] : params['limit_indices'][0] : step]


def _rows_at(op: Operation, number: int, size: int) -> slice | None:
    """The rows that begin at a constant index, as many as fit."""
    start = op.constant(number)
    if start is None or not op.is_steady(*range(number, len(op.masks))):
        return None
    start = min(max(int(start), 0), len(op.masks[0]) - size)
    return slice(start, start + size)


def _sliced_at(op: Operation) -> Mask | None:
    rows = _rows_at(op, 1, op.eqn.params['slice_sizes'][0])
    return None if rows is None else op.masks[0][rows]


def _updated_at(op: Operation) -> Mask | None:
    rows = _rows_at(op, 2, op.shape(1)[0])
    if rows is None:
        return None
    out, is_whole = op.masks[0].copy(), op.shape(0)[1:] == op.shape(1)[1:]
    out[rows] = op.masks[1] | (out[rows] & (not is_whole))
    return out


def _squeezed(op: Operation) -> Mask:
    is_first = 0 in op.eqn.params['dimensions']
    return op.spread(op.masks[0].any()) if is_first else op.masks[0]


def _broadcast(op: Operation) -> Mask:
    params, [mask, *_] = op.eqn.params, op.masks
    keeps = params['broadcast_dimensions'][:1] == (0,)
    same = keeps and params['shape'][0] == len(mask)
    return mask if same else op.spread(mask.any())


def _transposed(op: Operation) -> Mask:
    keeps = op.eqn.params['permutation'][:1] in ((), (0,))
    return op.masks[0] if keeps else op.spread(op.masks[0].any())


def _reversed(op: Operation) -> Mask:
    return op.masks[0][::-1] if 0 in op.eqn.params['dimensions'] else op.masks[0]


def _joined(op: Operation) -> Mask:
    return op.all if op.eqn.params['dimension'] else np.concatenate(op.masks)


def _stacked(op: Operation) -> Mask:
    return op.all if op.eqn.params['axis'] else np.array([m.any() for m in op.masks])


def _split(op: Operation) -> list[Mask]:
    params, [mask] = op.eqn.params, op.masks
    if params['axis']:
        return [mask] * len(params['sizes'])
    return np.split(mask, np.cumsum(params['sizes'])[:-1])


def _unstacked(op: Operation) -> list[Mask]:
    [mask], outs = op.masks, op.eqn.outvars
    if op.eqn.params['axis']:
        return [mask] * len(outs)
    shapes = (var.aval.shape[:1] for var in outs)
    return [np.full(shape, row) for shape, row in zip(shapes, mask, strict=True)]


def _padded(op: Operation) -> Mask | None:
    low, _, gap = op.eqn.params['padding_config'][0]
    out = op.spread(False)
    places = low + np.arange(len(op.masks[0])) * (gap + 1)
    is_in = (places >= 0) & (places < len(out))
    out[places[is_in]] = op.masks[0][is_in]
    return out if op.is_steady(1) else None


def _selected(op: Operation) -> Mask:
    which, *cases = op.masks
    if which.any():
        return op.all
    chosen = op.constant(0)
    if chosen is None or not chosen.ndim or not op.eqn.outvars[0].aval.shape:
        return np.logical_or.reduce(cases)
    chosen = _small(chosen)
    axes = tuple(range(1, chosen.ndim))
    return np.logical_or.reduce(
        [case & (chosen == n).any(axes) for n, case in enumerate(cases)]
    )


def _gathered(op: Operation) -> Mask | None:
    params, indices = op.eqn.params, op.constant(1)
    dims, rank = params['dimension_numbers'], len(op.shape(0))
    is_of_rows = (
        *(dims.start_index_map, dims.collapsed_slice_dims, dims.offset_dims),
        dims.operand_batching_dims,
    ) == ((0,), (0,), tuple(range(1, rank)), ())
    if indices is None or not is_of_rows or np.ndim(indices) != 2:
        return None
    return op.masks[0][np.clip(indices[:, 0], 0, len(op.masks[0]) - 1)]


def _scattered(op: Operation) -> Mask | None:
    indices, dims = op.constant(1), op.eqn.params['dimension_numbers']
    is_of_rows = dims.scatter_dims_to_operand_dims == (0,)
    is_of_rows &= dims.operand_batching_dims == () and op.is_steady(1)
    if indices is None or not is_of_rows:
        return None
    windows, inserted = dims.update_window_dims, dims.inserted_window_dims
    size = 1 if inserted else op.shape(2)[windows[0]]
    out = op.masks[0].copy()
    if len(out):  # By its mode, a row that is not there is the nearest one, or none.
        first = np.clip(indices.reshape(-1, 1), 0, len(out) - size)
        out[first + np.arange(size)] |= op.masks[2].any()
    return out


def _small(array: Any) -> Any:
    """One index along each axis but the first along which an array was broadcast."""
    rest = zip(array.shape[1:], array.strides[1:], strict=True)
    return array[:, *(slice(size if step else 1) for size, step in rest)]


_RULES: dict[str, Callable[[Operation], Mask | list[Mask] | None]] = {
    **dict.fromkeys(_IN_PLACE, lambda op: op.all),
    'reshape': _reshaped,
    'slice': _sliced,
    'dynamic_slice': _sliced_at,
    'dynamic_update_slice': _updated_at,
    'squeeze': _squeezed,
    'broadcast_in_dim': _broadcast,
    'transpose': _transposed,
    'rev': _reversed,
    'concatenate': _joined,
    'stack': _stacked,
    'split': _split,
    'unstack': _unstacked,
    'pad': _padded,
    'select_n': _selected,
    'gather': _gathered,
    **dict.fromkeys(('scatter', 'scatter-add'), _scattered),
}
