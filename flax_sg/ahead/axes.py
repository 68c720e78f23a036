"""Which axes of its operands each axis of an operation's output comes from.

An axis ``(operand, axis)`` is a source of an axis of the output if element *i* of the
output along this axis reads element *i* of this operand, and no other. Operands without
a source are read whole. ``()`` is an axis along which all is the same. ``None`` says
that nothing is known: elements may be mixed, or depend on positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn

from flax_sg.internals.jaxprs import type_of
from flax_sg.programs import primitives
from flax_sg.programs.primitives import Kind

Shape: TypeAlias = tuple[int, ...]
# The parameters of an equation.
Params: TypeAlias = Mapping[str, Any]
Source: TypeAlias = tuple[int, int]
Axes: TypeAlias = list[tuple[Source, ...] | None]

ELEMENTWISE = primitives.names_of(Kind.ELEMENTWISE)
# The parameter with the axes along which values meet. The others stay as they are.
_ALONG = {
    **dict.fromkeys(('cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp'), 'axis'),
    **dict.fromkeys(('concatenate', 'sort', 'iota'), 'dimension'),
    **dict.fromkeys(('split', 'top_k'), 'axis'),
    'rev': 'dimensions',
}
# The parameter with the axes that are left out.
_REDUCED = {
    **dict.fromkeys(('argmax', 'argmin', 'reduce_and', 'reduce_max'), 'axes'),
    **dict.fromkeys(('reduce_min', 'reduce_or', 'reduce_prod', 'reduce_sum'), 'axes'),
    **dict.fromkeys(('reduce_xor',), 'axes'),
    **dict.fromkeys(('reduce', 'squeeze'), 'dimensions'),
    'unstack': 'axis',
}
# How many of the last axes of the first operand belong together.
_MATRICES = {
    **dict.fromkeys(('cholesky', 'eigh', 'lu', 'qr', 'svd', 'triangular_solve'), 2),
    **dict.fromkeys(('random_bits', 'random_split', 'random_unwrap'), 0),
    'random_wrap': 1,
}


def axes_of(eqn: JaxprEqn) -> list[Axes] | None:
    """Where each axis of each output comes from; None if nothing is known."""
    name = eqn.primitive.name
    ins = [tuple(type_of(var).shape) for var in eqn.invars]
    outs = [tuple(type_of(var).shape) for var in eqn.outvars]
    if name in ELEMENTWISE:
        return [_in_place(ins, out) for out in outs]
    if name in _ALONG:
        along = _as_set(eqn.params.get(_ALONG[name], len(outs[0]) - 1))
        return [_in_place(ins, out, along) for out in outs]
    if name in _REDUCED:
        left = _as_set(eqn.params[_REDUCED[name]])
        kept = [axis for axis in range(len(ins[0])) if axis not in left]
        arrays = [n for n, shape in enumerate(ins) if shape == ins[0]]
        return [[tuple((n, axis) for n in arrays) for axis in kept] for _ in outs]
    if name in _MATRICES:
        count = len(ins[0]) - _MATRICES[name]
        return [_in_place(ins, out, {*range(count, len(out))}) for out in outs]
    rule = _RULES.get(name)
    return [rule(eqn.params, ins, outs[0])] if rule and len(outs) == 1 else None


def _as_set(axes: int | Collection[int]) -> set[int]:
    return {*axes} if isinstance(axes, Collection) else {axes}  # jnp.roll: of numpy.


def _in_place(
    ins: Sequence[Shape],
    out: Shape,
    mixed: Collection[int] = (),
) -> Axes:
    """Each axis comes from the same one of all operands that have it."""

    def has(shape: Shape, axis: int) -> bool:
        return axis < len(shape) and shape[axis] == out[axis]

    return [
        None if j in mixed else tuple((n, j) for n, x in enumerate(ins) if has(x, j))
        for j in range(len(out))
    ]


Rule: TypeAlias = Callable[[Params, list[Shape], Shape], Axes]


def _broadcast(params: Params, ins: list[Shape], out: Shape) -> Axes:
    axes: Axes = [()] * len(out)
    for axis, j in enumerate(params['broadcast_dimensions']):
        if ins[0][axis] == out[j]:
            axes[j] = ((0, axis),)
    return axes


def _transpose(params: Params, ins: list[Shape], out: Shape) -> Axes:
    return [((0, axis),) for axis in params['permutation']]


def _reshape(params: Params, ins: list[Shape], out: Shape) -> Axes:
    """An axis stays one if as many elements lie before it, and in it."""

    def places(shape: Shape) -> list[tuple[int, int]]:
        before = itertools.accumulate((1, *shape), lambda a, b: a * b)
        return [*zip(before, shape, strict=False)]

    axis_at = {place: axis for axis, place in enumerate(places(ins[0]))}
    return [
        ((0, axis_at[place]),) if place in axis_at else None if place[1] > 1 else ()
        for place in places(out)
    ]


def _whole(params: Params, ins: list[Shape], out: Shape) -> Axes:
    """Slices: an axis that is as long as before is whole."""
    strides = params.get('strides') or (1,) * len(out)
    return [
        ((0, j),) if size == ins[0][j] and strides[j] == 1 else None
        for j, size in enumerate(out)
    ]


def _tile(params: Params, ins: list[Shape], out: Shape) -> Axes:
    reps = enumerate(zip(params['reps'], ins[0], strict=True))
    return [((0, j),) if n == 1 else () if size == 1 else None for j, (n, size) in reps]


def _stack(params: Params, ins: list[Shape], out: Shape) -> Axes:
    axes: Axes = [tuple((n, j) for n in range(len(ins))) for j in range(len(ins[0]))]
    axes.insert(params['axis'], None)
    return axes


def _updated(params: Params, ins: list[Shape], out: Shape) -> Axes:
    return [((0, j), (1, j)) if n == ins[1][j] else None for j, n in enumerate(out)]


def _pad(params: Params, ins: list[Shape], out: Shape) -> Axes:
    padding = map(tuple, params['padding_config'])
    return [((0, j),) if n == (0, 0, 0) else None for j, n in enumerate(padding)]


def _window(params: Params, ins: list[Shape], out: Shape) -> Axes:
    names = 'window_dimensions', 'window_strides', 'base_dilation', 'window_dilation'
    windows = zip(*(params[name] for name in names), params['padding'], strict=True)
    return [
        ((0, j),) if (*sizes, *padding) == (1, 1, 1, 1, 0, 0) else None
        for j, (*sizes, padding) in enumerate(windows)
    ]


def _dot_general(params: Params, ins: list[Shape], out: Shape) -> Axes:
    contracted, batch = params['dimension_numbers']
    axes: Axes = [((0, left), (1, right)) for left, right in zip(*batch, strict=True)]
    for n in range(2):
        bound = {*contracted[n], *batch[n]}
        axes += [((n, axis),) for axis in range(len(ins[n])) if axis not in bound]
    return axes


def _convolution(params: Params, ins: list[Shape], out: Shape) -> Axes:
    numbers = params['dimension_numbers']
    axes: Axes = [None] * len(out)
    if params['batch_group_count'] == 1:
        axes[numbers.out_spec[0]] = ((0, numbers.lhs_spec[0]),)
    return axes


def _gather(params: Params, ins: list[Shape], out: Shape) -> Axes:
    numbers, sizes = params['dimension_numbers'], params['slice_sizes']
    pairs = zip(
        numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True
    )
    batched = dict(pairs)
    left_out = {*numbers.collapsed_slice_dims, *batched.values()}
    windows = iter(axis for axis in range(len(ins[0])) if axis not in left_out)
    indices = itertools.count()
    axes: Axes = []
    for j in range(len(out)):
        if j in numbers.offset_dims:
            axis = next(windows)
            is_whole = (
                sizes[axis] == ins[0][axis] and axis not in numbers.start_index_map
            )
            axes.append(((0, axis),) if is_whole else None)
        else:
            n = next(indices)
            of_operand = ((0, batched[n]),) if n in batched else ()
            axes.append(((1, n), *of_operand))
    return axes


def _scatter(params: Params, ins: list[Shape], out: Shape) -> Axes:
    numbers = params['dimension_numbers']
    windows = iter(numbers.update_window_dims)
    indexed = [j for j in range(len(ins[2])) if j not in numbers.update_window_dims]
    batched = [*numbers.operand_batching_dims]
    axes: Axes = []
    for j, size in enumerate(out):
        if j in batched:
            n = numbers.scatter_indices_batching_dims[batched.index(j)]
            axes.append(((0, j), (1, n), (2, indexed[n])))
        elif j in numbers.inserted_window_dims:
            axes.append(None)
        else:
            axis = next(windows)
            is_whole = ins[2][axis] == size
            is_whole = is_whole and j not in numbers.scatter_dims_to_operand_dims
            axes.append(((0, j), (2, axis)) if is_whole else None)
    return axes


def _fft(params: Params, ins: list[Shape], out: Shape) -> Axes:
    count = len(out) - len(params['fft_lengths'])
    return [((0, j),) if j < count else None for j in range(len(out))]


def _bits(params: Params, ins: list[Shape], out: Shape) -> Axes:
    return _in_place(ins, out) if len(ins[0]) == len(out) else [None] * len(out)


_RULES: dict[str, Rule] = {
    'bitcast_convert_type': _bits,
    'broadcast_in_dim': _broadcast,
    'conv_general_dilated': _convolution,
    'dot_general': _dot_general,
    'dynamic_slice': _whole,
    'dynamic_update_slice': _updated,
    'fft': _fft,
    'gather': _gather,
    'pad': _pad,
    'reshape': _reshape,
    'slice': _whole,
    'stack': _stack,
    'tile': _tile,
    'transpose': _transpose,
    **{f'reduce_window{kind}': _window for kind in ('', '_max', '_min', '_sum')},
    **{f'scatter{kind}': _scatter for kind in ('', '-add', '-max', '-min', '-mul')},
    'scatter_add': _scatter,
}
