"""Which outputs of a jaxpr are zero, whatever its inputs are.

One question is followed through a program: *which elements of this value are known to
be zero?* Nothing about derivatives is known here, only which operations make zeros of
zeros. An operation that is not listed makes anything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal
from numpy.typing import NDArray

from flax_sg.internals import jaxprs

# True or False for all elements. A mask has the rank of its value, and length 1 along
# axes where all elements are alike.
Mask: TypeAlias = 'bool | NDArray[np.bool_]'

# Larger masks are not spread out.
_LARGEST = 1 << 24
# Turns of a loop after which no more is learnt of what it carries.
_MOST_TURNS = 16


class Known(NamedTuple):
    """What is known of a value.

    Attributes:
        zero: the elements that are zero.
        exact: whether the others are known not to be zero, as in a mask.
    """

    zero: Mask
    exact: bool = False

    @classmethod
    def of_constant(cls, value: Any) -> Known:
        """What is known of a constant."""
        if isinstance(value, Tracer) or getattr(value, 'dtype', None) is None:
            return cls(bool(np.isscalar(value) and value == 0))
        try:
            array = np.asarray(value)
        except (TypeError, RuntimeError):  # Keys, and arrays of other processes.
            return NOTHING
        return cls(small(array == 0), exact=array.dtype == bool)

    @property
    def key(self) -> Hashable:
        """Equal if the same is known."""
        zero = self.zero
        if isinstance(zero, bool):
            return zero, self.exact
        return zero.shape, zero.tobytes(), self.exact

    def everywhere(self) -> Known:
        """The same, without knowing of single elements."""
        if isinstance(self.zero, bool):
            return self
        return NOTHING


NOTHING = Known(zero=False)
ZERO = Known(zero=True)


def small(mask: NDArray[np.bool_]) -> Mask:
    """A mask with length 1 along the axes where all elements are alike."""
    if not mask.size or mask.all():
        return True
    if not mask.any():
        return False
    for axis in range(mask.ndim):
        first = mask.take([0], axis)
        if mask.shape[axis] > 1 and (mask == first).all():
            mask = first
    return mask


def both(one: Mask, other: Mask) -> Mask:
    """What is zero in two values."""
    if isinstance(one, bool):
        return other if one else False
    if isinstance(other, bool):
        return one if other else False
    return small(one & other)


def either(one: Mask, other: Mask) -> Mask:
    """What is zero in one of two values."""
    return opposite(both(opposite(one), opposite(other)))


def opposite(mask: Mask) -> Mask:
    """The other elements."""
    return not mask if isinstance(mask, bool) else ~mask


# Operations of one operand, or of several that do not meet: zeros stay where they are.
_IN_PLACE = frozenset(
    (
        *('neg', 'sign', 'floor', 'ceil', 'round', 'abs', 'real', 'imag', 'conj'),
        *('sin', 'tan', 'asin', 'atan', 'sinh', 'tanh', 'asinh', 'atanh', 'expm1'),
        *('log1p', 'sqrt', 'cbrt', 'square', 'erf', 'erf_inv', 'copy', 'copy_p'),
        *('convert_element_type', 'reduce_precision', 'stop_gradient', 'name'),
        *('sharding_constraint', 'reshard', 'pvary', 'pcast', 'device_put'),
        *('optimization_barrier', 'mesh_cast', 'layout_constraint'),
    )
)
# All zeros of all zeros, each operand for itself.
_OF_ALL = frozenset(
    (
        *('psum', 'psum2', 'psum_invariant', 'pmax', 'pmin', 'pbroadcast', 'ppermute'),
        *('all_gather', 'all_gather_invariant', 'all_gather_reduced', 'all_to_all'),
        *('reduce_scatter', 'psum_scatter', 'unreduced_psum', 'pgather', 'sort'),
        *('cumsum', 'cumprod', 'cummax', 'cummin', 'reduce_prod', 'fft', 'rev'),
        *('reduce_window_sum', 'reduce_max', 'reduce_min'),
        *('dynamic_slice', 'gather', 'top_k'),
    )
)
# All zeros if one of the first operands is zero.
_PRODUCTS = frozenset(('dot_general', 'conv_general_dilated', 'ragged_dot_general'))


class Zeros:
    """Follows zeros through programs; remembers what it has seen."""

    def __init__(self) -> None:
        # By id, with the object, and by what is known of the inputs.
        self._seen: dict[Hashable, tuple[Any, list[Known]]] = {}

    def of(self, jaxpr: Any, inputs: Sequence[Known]) -> list[Known]:
        """What is known of the outputs of a jaxpr.

        Args:
            jaxpr: a jaxpr, open or closed.
            inputs: what is known of its inputs.
        """
        key = id(jaxpr), tuple(one.key for one in inputs)
        if key not in self._seen:
            self._seen[key] = jaxpr, self._walk(jaxpr, inputs)
        return self._seen[key][1]

    def _walk(self, jaxpr: Any, inputs: Sequence[Known]) -> list[Known]:
        opened, consts = jaxprs.opened(jaxpr), getattr(jaxpr, 'consts', ())
        known: dict[Any, Known] = dict(zip(opened.invars, inputs, strict=True))
        for var, value in zip(opened.constvars, consts, strict=False):
            known[var] = Known.of_constant(value)

        def read(var: Any) -> Known:
            if isinstance(var, Literal):
                return Known.of_constant(var.val)
            return known.get(var, NOTHING)

        for eqn in opened.eqns:
            ins = [read(var) for var in eqn.invars]
            for var, out in zip(eqn.outvars, self._through(eqn, ins), strict=True):
                if out.zero is not False or out.exact:
                    known[var] = out
        return [read(var) for var in opened.outvars]

    def _through(self, eqn: JaxprEqn, ins: Sequence[Known]) -> Sequence[Known]:
        """What is known of the outputs of an equation."""
        name = eqn.primitive.name
        if name in jaxprs.CALLS or name in jaxprs.CUSTOM_CALLS:
            if name == 'shard_map':  # Each device has a part.
                outs = self.of(jaxprs.body_of(eqn), [x.everywhere() for x in ins])
                return [x.everywhere() for x in outs]
            return self.of(jaxprs.closed_body_of(eqn), ins)
        if name == 'scan':
            return self._scan(eqn, ins)
        if name == 'while':
            return self._while(eqn, ins)
        if name == 'cond':
            outs = [self.of(branch, ins[1:]) for branch in eqn.params['branches']]
            return [functools.reduce(_common, several) for several in zip(*outs)]
        if not any(one.zero is not False or one.exact for one in ins):
            return [NOTHING] * len(eqn.outvars)
        return self._operation(name, eqn, ins)

    def _operation(
        self, name: str, eqn: JaxprEqn, ins: Sequence[Known]
    ) -> Sequence[Known]:
        if name in _IN_PLACE:
            return ins
        if name in _MOVES:
            [one, *_] = ins
            if isinstance(one.zero, bool):
                return [one]
            shape = eqn.invars[0].aval.shape
            exact = one.exact and name != 'reduce_sum'
            return [Known(_MOVES[name](one.zero, shape, eqn.params), exact)]
        if name in _OF_ALL:
            found = [ZERO if one.zero is True else NOTHING for one in ins]
            return [*found, *[NOTHING] * len(eqn.outvars)][: len(eqn.outvars)]
        if name == 'split':
            return [ins[0].everywhere()] * len(eqn.outvars)
        if name == 'custom_linear_solve':
            solved = ins[len(ins) - len(eqn.outvars) :]
            return [ZERO if all(x.zero is True for x in solved) else NOTHING] * len(solved)
        if name == 'not' and ins[0].exact:
            return [Known(opposite(ins[0].zero), exact=True)]
        if name in _PRODUCTS:
            return [ZERO if any(one.zero is True for one in ins[:2]) else NOTHING]
        if name in _MEET:
            return [Known(_MEET[name](eqn, ins))]
        return [NOTHING] * len(eqn.outvars)

    def _turns(
        self, turn: Callable[[list[Known]], Sequence[Known]], carry: Sequence[Known]
    ) -> list[Known]:
        """What is known of the carry of a loop, after any number of turns."""
        now = [Known(one.zero) for one in carry]
        for number in range(len(now) + 1):
            after = [_common(*pair) for pair in zip(now, turn(now), strict=True)]
            if [one.key for one in now] == [one.key for one in after]:
                break
            if number >= _MOST_TURNS:
                after = [NOTHING] * len(now)
            now = after
        return now

    def _scan(self, eqn: JaxprEqn, ins: Sequence[Known]) -> Sequence[Known]:
        carried, body = jaxprs.carried_by(eqn), eqn.params['jaxpr']
        consts, xs = ins[: carried.start], ins[carried.stop :]
        each = [Known(_reduced(x.zero, (0,)), x.exact and _one(x.zero)) for x in xs]

        def turn(carry: list[Known]) -> Sequence[Known]:
            return self.of(body, [*consts, *carry, *each])[: len(carried)]

        carry = self._turns(turn, ins[carried.start : carried.stop])
        ys = self.of(body, [*consts, *carry, *each])[len(carried) :]
        stacked = [
            Known(y.zero if isinstance(y.zero, bool) else y.zero[None]) for y in ys
        ]
        return [*carry, *stacked]

    def _while(self, eqn: JaxprEqn, ins: Sequence[Known]) -> Sequence[Known]:
        first = eqn.params['cond_nconsts']
        start = first + eqn.params['body_nconsts']
        consts, body = ins[first:start], eqn.params['body_jaxpr']
        return self._turns(lambda carry: self.of(body, [*consts, *carry]), ins[start:])


def _common(one: Known, other: Known) -> Known:
    """What is known of a value that is one of two."""
    return Known(both(one.zero, other.zero))


def _one(mask: Mask) -> bool:
    """Whether all slices along the first axis are alike."""
    return isinstance(mask, bool) or mask.shape[0] == 1


# Operations that move elements: what becomes of a mask.


def _spread(mask: NDArray[np.bool_], shape: Sequence[int]) -> NDArray[np.bool_] | None:
    if math.prod(shape) > _LARGEST:
        return None
    return np.broadcast_to(mask, shape)


def _reshaped(mask: NDArray[np.bool_], shape: Any, params: Any) -> Mask:
    whole = _spread(mask, shape)
    if whole is None or params.get('dimensions') is not None:
        return False
    return small(whole.reshape(params['new_sizes']))


def _broadcast(mask: NDArray[np.bool_], shape: Any, params: Any) -> Mask:
    axes = [1] * len(params['shape'])
    for axis, size in zip(params['broadcast_dimensions'], mask.shape, strict=True):
        axes[axis] = size
    return mask.reshape(axes)


def _sliced(mask: NDArray[np.bool_], shape: Any, params: Any) -> Mask:
    strides = params['strides'] or (1,) * mask.ndim
    rows = zip(
        mask.shape,
        params['start_indices'],
        params['limit_indices'],
        strides,
        strict=True,
    )
    index = tuple(
        slice(None) if size == 1 else slice(*of_axis) for size, *of_axis in rows
    )
    return small(mask[index])


def _reduced(mask: Mask, axes: Iterable[int]) -> Mask:
    return mask if isinstance(mask, bool) else small(mask.all(tuple(axes)))


_MOVES: dict[str, Callable[[NDArray[np.bool_], Any, Any], Mask]] = {
    'reshape': _reshaped,
    'broadcast_in_dim': _broadcast,
    'slice': _sliced,
    'transpose': lambda mask, _, params: mask.transpose(params['permutation']),
    'squeeze': lambda mask, _, params: mask.squeeze(params['dimensions']),
    'expand_dims': lambda mask, _, params: np.expand_dims(mask, params['dimensions']),
    'reduce_sum': lambda mask, _, params: _reduced(mask, params['axes']),
}


# Operations in which several operands meet.


def _sum(eqn: JaxprEqn, ins: Sequence[Known]) -> Mask:
    return functools.reduce(both, (one.zero for one in ins))


def _product(eqn: JaxprEqn, ins: Sequence[Known]) -> Mask:
    return functools.reduce(either, (one.zero for one in ins))


def _first(eqn: JaxprEqn, ins: Sequence[Known]) -> Mask:
    return ins[0].zero


def _select(eqn: JaxprEqn, ins: Sequence[Known]) -> Mask:
    which, *cases = ins
    if which.exact and len(cases) == 2 and eqn.invars[0].aval.dtype == bool:
        first, second = (case.zero for case in cases)
        return both(either(opposite(which.zero), first), either(which.zero, second))
    return _sum(eqn, cases)


def _concatenated(eqn: JaxprEqn, ins: Sequence[Known]) -> Mask:
    axis = eqn.params['dimension']
    if all(isinstance(one.zero, bool) for one in ins) and len({x.zero for x in ins}) == 1:
        return ins[0].zero
    shapes = [var.aval.shape for var in eqn.invars]
    if sum(map(math.prod, shapes)) > _LARGEST:
        return False
    pairs = zip(ins, shapes, strict=True)
    return small(np.concatenate([np.broadcast_to(x.zero, s) for x, s in pairs], axis))


def _padded(eqn: JaxprEqn, ins: Sequence[Known]) -> Mask:
    one, value = ins
    out, config = eqn.outvars[0].aval.shape, eqn.params['padding_config']
    if value.zero is not True or one.zero is True:
        return one.zero is True and value.zero is True
    shape = eqn.invars[0].aval.shape
    if any(low < 0 or high < 0 for low, high, _ in config):
        return False
    # Axes that are not padded stay small.
    mask = np.atleast_1d(one.zero) if isinstance(one.zero, bool) else one.zero
    mask = np.broadcast_to(mask, [1] * len(shape)) if mask.ndim != len(shape) else mask
    sizes = [n if any(c) else m for n, c, m in zip(shape, config, mask.shape)]
    ends = [n if any(c) else m for n, c, m in zip(out, config, mask.shape)]
    if math.prod(ends) > _LARGEST:
        return False
    found = np.ones(ends, bool)
    index = tuple(
        slice(low, low + max(0, (n - 1) * (gap + 1) + 1) if n else low, gap + 1)
        if low or high or gap
        else slice(None)
        for n, (low, high, gap) in zip(sizes, config, strict=True)
    )
    found[index] = np.broadcast_to(mask, sizes)
    return small(found)


def _updated(eqn: JaxprEqn, ins: Sequence[Known]) -> Mask:
    """Scattered or updated: the operand, and in it the other."""
    number = 2 if eqn.primitive.name.startswith('scatter') else 1
    return ins[0].zero is True and ins[number].zero is True


_MEET: dict[str, Callable[[JaxprEqn, Sequence[Known]], Mask]] = {
    **dict.fromkeys(('add', 'sub', 'add_any', 'max', 'min', 'or', 'atan2', 'complex'), _sum),
    **dict.fromkeys(('mul', 'and'), _product),
    **dict.fromkeys(('div', 'rem', 'cumsum'), _first),
    'integer_pow': lambda eqn, ins: eqn.params['y'] > 0 and ins[0].zero,
    'select_n': _select,
    'concatenate': _concatenated,
    'pad': _padded,
    **dict.fromkeys(
        ('dynamic_update_slice', 'scatter', 'scatter-add', 'scatter_add', 'scatter_mul'),
        _updated,
    ),
    'select_and_scatter_add': _first,
    'select_and_gather_add': lambda eqn, ins: ins[0].zero is True,
    'triangular_solve': lambda eqn, ins: ins[1].zero is True,
    'clamp': lambda eqn, ins: all(one.zero is True for one in ins),
}
