"""Which outputs of a jaxpr are zero, whatever its inputs are.

One question is followed through a program: *which elements of this value are known to
be zero?* Nothing about derivatives is known here, only which operations make zeros of
zeros. An operation that is not listed makes anything.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from numpy.typing import NDArray

from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import type_of
from flax_sg.internals.types import AnyJaxpr, Array, Atom
from flax_sg.programs import primitives
from flax_sg.programs.bodies import Bodies
from flax_sg.programs.primitives import Kind

# Elements of a value. A mask has the rank of its value, and length 1 along axes where
# all elements are alike.
Mask: TypeAlias = NDArray[np.bool_]

# Turns after which what a loop still changes counts as unknown: most settle in a few.
_MOST_TURNS = 16


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
        zero: the elements that are zero.
        nonzero: the elements that are True, of a constant mask of booleans.
    """

    zero: Mask
    nonzero: Mask = np.array(False)

    @classmethod
    def of_constant(cls, value: Array) -> Value:
        """What is known of a constant."""
        try:
            zero = small(np.asarray(value) == 0)
        except (TypeError, RuntimeError):  # Tracers, keys, arrays of other processes.
            return nothing(np.ndim(value))
        return cls(zero, ~zero & (np.asarray(value).dtype == bool))

    @classmethod
    def of_closed_over(cls, value: Array) -> Value:
        """What is known of an array that a function of the user closes over.

        One of zeros may be a queue that is filled later, or an example in place of
        data: nothing is known of it. Masks are bools, or have other elements, too.
        """
        known = cls.of_constant(value)
        is_mask = getattr(value, 'dtype', None) == np.bool_
        return nothing(np.ndim(value)) if known.zero.all() and not is_mask else known

    @property
    def key(self) -> Hashable:
        """Equal if the same is known."""
        return tuple((mask.shape, mask.tobytes()) for mask in self)

    def of_variable(self, var: Atom) -> Value:
        """The value, with masks for a variable of a jaxpr."""
        rank, is_mask = _rank(var), getattr(var.aval, 'dtype', None) == np.bool_
        zero, nonzero = (np.array(mask, ndmin=rank) for mask in self)
        return Value(zero, nonzero & is_mask)

    def everywhere(self) -> Value:
        """The value, without knowledge of single elements."""
        return Value(np.asarray(self.zero.all()))


@functools.cache
def nothing(rank: int) -> Value:
    """Nothing is known of a value."""
    return Value(np.zeros((1,) * rank, bool), np.zeros((1,) * rank, bool))


def small(mask: Mask) -> Mask:
    """A mask with length 1 along the axes where all elements are alike."""
    if mask.all() or not mask.any():
        return np.full((1,) * mask.ndim, mask.all())
    for axis in range(mask.ndim):
        first = mask.take([0], axis)
        if (mask == first).all():
            mask = first
    return mask


_IN_PLACE = primitives.names_of(Kind.ZEROS_STAY)
_EACH = primitives.names_of(Kind.ZEROS_OF_ZEROS)
_PRODUCTS = primitives.names_of(Kind.PRODUCT)
# All zeros if these operands are.
_TOGETHER = {
    'clamp': slice(None),
    **dict.fromkeys(('dynamic_update_slice', 'scatter_add'), slice(2)),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-mul'), slice(0, 3, 2)),
    'select_and_gather_add': slice(1),
    'triangular_solve': slice(1, 2),
}


def zeros_of(
    program: ClosedJaxpr, constant: Callable[[Array], Value] = Value.of_constant
) -> list[Mask]:
    """The elements of each output of a closed jaxpr that are zero.

    Args:
        program: the jaxpr.
        constant: what is known of an array that it closes over.
    """
    inputs = [nothing(_rank(var)) for var in program.jaxpr.invars]
    return [small(out.zero) for out in Zeros(constant).of(program, inputs)]


class Zeros:
    """Follows zeros through programs; remembers what it has seen."""

    def __init__(self, constant: Callable[[Array], Value]) -> None:
        self._constant = constant
        # By the id of the jaxpr and what is known of its inputs. The jaxpr is kept, so
        # that no other one gets its id.
        self._seen: dict[Hashable, tuple[AnyJaxpr, list[Value]]] = {}

    def of(self, jaxpr: AnyJaxpr, inputs: Sequence[Value]) -> list[Value]:
        """What is known of the outputs of a jaxpr.

        Args:
            jaxpr: a jaxpr, open or closed.
            inputs: what is known of its inputs.
        """
        key = id(jaxpr), tuple(value.key for value in inputs)
        if key not in self._seen:
            self._seen[key] = jaxpr, self._walk(jaxpr, inputs)
        return self._seen[key][1]

    def _walk(self, jaxpr: AnyJaxpr, inputs: Sequence[Value]) -> list[Value]:
        opened, consts = jaxprs.opened(jaxpr), getattr(jaxpr, 'consts', ())
        constants = zip(opened.constvars, map(self._constant, consts), strict=False)
        pairs = (*zip(opened.invars, inputs, strict=True), *constants)
        values_of = {var: value.of_variable(var) for var, value in pairs}

        def read(var: Atom) -> Value:
            if isinstance(var, Literal):
                return Value.of_constant(var.val)
            return values_of.get(var) or nothing(_rank(var))

        for eqn in opened.eqns:
            ins = [read(var) for var in eqn.invars]
            for var, out in zip(eqn.outvars, self._through(eqn, ins), strict=True):
                if any(mask.any() for mask in out):
                    values_of[var] = out.of_variable(var)
        return [read(var) for var in opened.outvars]

    def _through(self, eqn: JaxprEqn, ins: Sequence[Value]) -> Sequence[Value]:
        """What is known of the outputs of an equation."""
        name = eqn.primitive.name
        if name == 'shard_map':  # Each device has a part.
            outs = self.of(jaxprs.body_of(eqn), [x.everywhere() for x in ins])
            return [x.everywhere() for x in outs]
        if name in jaxprs.CALLS or name in jaxprs.CUSTOM_CALLS:
            return self.of(jaxprs.closed_body_of(eqn), ins)
        if name in ('scan', 'while'):
            return self._loop(Bodies.of(eqn), ins)
        if name == 'cond':
            outs = (self.of(branch, ins[1:]) for branch in eqn.params['branches'])
            return [Value(_all(values)) for values in zip(*outs, strict=True)]
        if name in _IN_PLACE:
            return ins
        if name in _MEET:
            return [Value(_MEET[name](eqn, ins))]
        if name in _MOVES:
            return [Value(*(_MOVES[name](mask, eqn) for mask in ins[0]))]
        if name in _PARTS:
            return [Value(mask) for mask in _PARTS[name](ins[0].zero, eqn)]
        if name == 'not':
            return [Value(ins[0].nonzero, ins[0].zero)]
        zeros, count = [value.zero.all() for value in ins], len(eqn.outvars)
        outs = [np.array(False)] * count
        if name in _EACH:
            outs = [*zeros, *outs][:count]
        elif name in _TOGETHER:
            outs = [np.all(zeros[_TOGETHER[name]])] * count
        elif name in _PRODUCTS:
            outs = [np.any(zeros[:2])]
        elif name == 'custom_linear_solve':
            outs = [np.all(zeros[-count:])] * count
        return [Value(np.asarray(zero)) for zero in outs]

    def _turns(
        self,
        turn: Callable[[list[Value]], Sequence[Value]],
        carry: Sequence[Value],
    ) -> list[Value]:
        """What is known of the carry of a loop, after any number of turns."""
        now = [Value(small(value.zero)) for value in carry]
        for turns in itertools.count():
            pairs = zip(now, turn(now), strict=True)
            after = [Value(small(_all(pair))) for pair in pairs]
            both = [*zip(now, after, strict=True)]
            if all(old.key == new.key for old, new in both):
                break
            now = after
            if turns >= _MOST_TURNS:  # This ends it: each turn for one value at least.
                now = [
                    new if old.key == new.key else _unknown(new) for old, new in both
                ]
        return now

    def _loop(self, bodies: Bodies, ins: Sequence[Value]) -> Sequence[Value]:
        """What is known of the outputs of a scan; a while has neither xs nor ys."""
        [body], carried = bodies.jaxprs, bodies.carry
        consts = ins[bodies.first : carried.start]
        each = [Value(np.asarray(x.zero.all(0))) for x in ins[carried.stop :]]

        def run(carry: Sequence[Value]) -> Sequence[Value]:
            return self.of(body, [*consts, *carry, *each])

        start = ins[carried.start : carried.stop]
        carry = self._turns(lambda now: run(now)[: len(carried)], start)
        ys = run(carry)[len(carried) :]
        return [*carry, *(Value(y.zero[None]) for y in ys)]


def _unknown(value: Value) -> Value:
    return Value(np.zeros((1,) * value.zero.ndim, bool))


def _rank(var: Atom) -> int:
    return len(getattr(var.aval, 'shape', ()))


def _all(values: Sequence[Value]) -> Mask:
    """The elements that are zero in all of several values."""
    return functools.reduce(np.logical_and, (value.zero for value in values))


def _any(values: Sequence[Value]) -> Mask:
    """The elements that are zero in any of several values."""
    return functools.reduce(np.logical_or, (value.zero for value in values))


# How primitives that move elements change a mask.


def _spread(mask: Mask, eqn: JaxprEqn) -> Mask:
    axes = [1] * len(eqn.params['shape'])
    for axis, size in zip(eqn.params['broadcast_dimensions'], mask.shape, strict=True):
        axes[axis] = size
    return mask.reshape(axes)


def _reshaped(mask: Mask, eqn: JaxprEqn) -> Mask:
    [operand, *_], shape = eqn.invars, type_of(eqn.outvars[0]).shape
    if mask.size <= 1 or eqn.params.get('dimensions') is not None:
        return np.full((1,) * len(shape), mask.all())
    return small(np.broadcast_to(mask, type_of(operand).shape).reshape(shape))


def _cut(mask: Mask, parts: Sequence[slice]) -> Mask:
    """A part of a mask; an axis along which all elements are alike stays as it is."""
    pairs = zip(mask.shape, parts, strict=True)
    return small(mask[tuple(slice(None) if n == 1 else part for n, part in pairs)])


def _sliced(mask: Mask, eqn: JaxprEqn) -> Mask:
    params, ones = eqn.params, (1,) * mask.ndim
    steps = params['strides'] or ones
    bounds = zip(params['start_indices'], params['limit_indices'], steps, strict=True)
    return _cut(mask, [slice(*bound) for bound in bounds])


def _split(mask: Mask, eqn: JaxprEqn) -> list[Mask]:
    axis, ends = eqn.params['axis'], np.cumsum(eqn.params['sizes'])
    parts = map(slice, (0, *ends[:-1]), ends)
    whole = [slice(None)] * mask.ndim
    return [_cut(mask, [*whole[:axis], part, *whole[axis + 1 :]]) for part in parts]


def _unstacked(mask: Mask, eqn: JaxprEqn) -> list[Mask]:
    axis, count = eqn.params['axis'], len(eqn.outvars)
    size = mask.shape[axis]  # 1 if all rows are alike.
    return [small(mask.take(n % size, axis)) for n in range(count)]


# How primitives that return parts of their operand divide a mask.
_PARTS: dict[str, Callable[[Mask, JaxprEqn], list[Mask]]] = {
    'split': _split,
    'unstack': _unstacked,
}
_MOVES: dict[str, Callable[[Mask, JaxprEqn], Mask]] = {
    'reshape': _reshaped,
    'slice': _sliced,
    'rev': lambda mask, eqn: np.flip(mask, eqn.params['dimensions']),
    'broadcast_in_dim': _spread,
    'transpose': lambda mask, eqn: mask.transpose(eqn.params['permutation']),
    'squeeze': lambda mask, eqn: mask.squeeze(eqn.params['dimensions']),
    'expand_dims': lambda mask, eqn: np.expand_dims(mask, eqn.params['dimensions']),
}


def _reduced(eqn: JaxprEqn, ins: Sequence[Value]) -> Mask:
    return np.asarray(ins[0].zero.all(tuple(eqn.params['axes'])))


def _reduced_some(eqn: JaxprEqn, ins: Sequence[Value]) -> Mask:
    # The product of an empty array is one, and its maximum the least number.
    return _reduced(eqn, ins) & (0 not in type_of(eqn.invars[0]).shape)


def _gathered(eqn: JaxprEqn, ins: Sequence[Value]) -> Mask:
    # Elements out of bounds are the fill value: by default the least integer, or NaN.
    # NaN counts as zero here: nobody trains by it.
    fill, dtype = eqn.params['fill_value'], type_of(eqn.outvars[0]).dtype
    if eqn.params['mode'] is not jax.lax.GatherScatterMode.FILL_OR_DROP:
        fill = 0
    is_zero = jnp.issubdtype(dtype, np.inexact) if fill is None else fill == 0
    return ins[0].zero.all() & np.array(is_zero)


def _joined(eqn: JaxprEqn, ins: Sequence[Value]) -> Mask:
    axis = eqn.params['dimension']
    sizes = [type_of(var).shape[axis] for var in eqn.invars]
    return _concatenated([value.zero for value in ins], sizes, axis)


def _stacked(eqn: JaxprEqn, ins: Sequence[Value]) -> Mask:
    axis = eqn.params['axis']
    parts = [np.expand_dims(value.zero, axis) for value in ins]
    return _concatenated(parts, [1] * len(parts), axis)


def _concatenated(masks: Sequence[Mask], lengths: Sequence[int], axis: int) -> Mask:
    """The masks of arrays of these lengths along an axis, one behind the other."""
    if all(mask.all() for mask in masks) or not any(mask.any() for mask in masks):
        return functools.reduce(np.logical_and, masks)  # The mask stays small.
    sizes = np.max([mask.shape for mask in masks], 0)
    shapes = ((*sizes[:axis], n, *sizes[axis + 1 :]) for n in lengths)
    return np.concatenate([*map(np.broadcast_to, masks, shapes)], axis)


def _select(eqn: JaxprEqn, ins: Sequence[Value]) -> Mask:
    chooser, *cases = ins
    if len(cases) != 2:
        return _all(cases)
    first, second = (case.zero for case in cases)
    return (chooser.nonzero | first) & (chooser.zero | second)


def _padded(eqn: JaxprEqn, ins: Sequence[Value]) -> Mask:
    operand, fill = ins
    config, shape = eqn.params['padding_config'], type_of(eqn.invars[0]).shape
    if not fill.zero.all():
        return fill.zero & operand.zero.all()
    # Axes that are not padded stay small.
    axes = zip(shape, operand.zero.shape, config, strict=True)
    sizes = [size if max(padding) > 0 else short for size, short, padding in axes]
    # First the elements are spread and padded, then cut where a padding is negative.
    spread = [
        n + max(n - 1, 0) * gap for n, (*_, gap) in zip(sizes, config, strict=True)
    ]
    axes = [*zip(spread, config, strict=True)]
    out = np.ones([n + max(low, 0) + max(high, 0) for n, (low, high, _) in axes], bool)
    inner = [slice(at := max(low, 0), at + n, gap + 1) for n, (low, _, gap) in axes]
    out[tuple(inner)] = operand.zero
    axes = zip(out.shape, config, strict=True)
    return _cut(
        out, [slice(max(-low, 0), n + min(high, 0)) for n, (low, high, _) in axes]
    )


_MEET: dict[str, Callable[[JaxprEqn, Sequence[Value]], Mask]] = {
    **dict.fromkeys(
        ('add', 'sub', 'add_any', 'max', 'min', 'or', 'complex'),
        lambda eqn, ins: _all(ins),
    ),
    **dict.fromkeys(('mul', 'and'), lambda eqn, ins: _any(ins)),
    **dict.fromkeys(('div', 'rem'), lambda eqn, ins: ins[0].zero),
    'integer_pow': lambda eqn, ins: ins[0].zero & (eqn.params['y'] > 0),
    'reduce_sum': _reduced,
    **dict.fromkeys(('reduce_prod', 'reduce_max', 'reduce_min'), _reduced_some),
    'concatenate': _joined,
    'stack': _stacked,
    'gather': _gathered,
    'select_n': _select,
    'pad': _padded,
}
