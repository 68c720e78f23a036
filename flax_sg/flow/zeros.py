"""Which outputs of a jaxpr are zero, whatever its inputs are.

One question is followed through a program: *which elements of this value are known to
be zero?* Nothing about derivatives is known here, only which operations make zeros of
zeros. An operation that is not listed makes anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal
from numpy.typing import NDArray

from flax_sg.internals import jaxprs

# True or False for all elements. A mask has the rank of its value, and length 1 along
# axes where all elements are alike.
Mask: TypeAlias = 'bool | NDArray[np.bool_]'

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
            zero = np.asarray(value) == 0
        except (TypeError, RuntimeError):  # Keys, float0, arrays of other processes.
            return NOTHING
        return cls(small(zero), exact=value.dtype == bool)

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


# Zeros stay where they are, in each operand for itself.
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
# All zeros of all zeros, in each operand for itself.
_EACH = frozenset(
    (
        *('psum', 'psum2', 'psum_invariant', 'pmax', 'pmin', 'pbroadcast', 'ppermute'),
        *('all_gather', 'all_gather_invariant', 'all_gather_reduced', 'all_to_all'),
        *('reduce_scatter', 'unreduced_psum', 'sort', 'cumsum', 'cumprod', 'cummax'),
        *('cummin', 'fft', 'rev', 'reduce_window_sum', 'reduce_max', 'reduce_min'),
        *('reduce_prod', 'reshape', 'slice', 'dynamic_slice', 'gather', 'top_k'),
        *('select_and_scatter_add', 'tile'),
    )
)
# All zeros if these operands are.
_TOGETHER = {
    **dict.fromkeys(('concatenate', 'stack', 'clamp'), slice(None)),
    **dict.fromkeys(('dynamic_update_slice', 'scatter_add'), slice(2)),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-mul'), slice(0, 3, 2)),
    'select_and_gather_add': slice(1),
    'triangular_solve': slice(1, 2),
}
# All zeros if one of these operands is.
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

    def _through(self, eqn: Any, ins: Sequence[Known]) -> Sequence[Known]:
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
            outs = (self.of(branch, ins[1:]) for branch in eqn.params['branches'])
            return [
                functools.reduce(_common, several)
                for several in zip(*outs, strict=True)
            ]
        if not any(one.zero is not False or one.exact for one in ins):
            return [NOTHING] * len(eqn.outvars)
        return self._operation(name, eqn, ins)

    def _operation(self, name: str, eqn: Any, ins: Sequence[Known]) -> Sequence[Known]:
        count = len(eqn.outvars)
        if name in _IN_PLACE:
            return ins
        if name in _MEET:
            return [Known(_MEET[name](eqn, ins))]
        if name in _MOVES:
            zero, exact = ins[0].zero, ins[0].exact and name != 'reduce_sum'
            moved = zero if isinstance(zero, bool) else _MOVES[name](zero, eqn)
            return [Known(moved, exact)]
        if name == 'not' and ins[0].exact:
            return [Known(opposite(ins[0].zero), exact=True)]
        zeros = [one.zero is True for one in ins]
        if name in _EACH:
            return [Known(n < len(zeros) and zeros[n]) for n in range(count)]
        if name in _TOGETHER:
            return [Known(all(zeros[_TOGETHER[name]]))]
        if name in _PRODUCTS:
            return [Known(any(zeros[:2]))]
        if name == 'split':
            return [Known(zeros[0])] * count
        if name == 'custom_linear_solve':
            return [Known(all(zeros[-count:]))] * count
        return [NOTHING] * count

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

    def _scan(self, eqn: Any, ins: Sequence[Known]) -> Sequence[Known]:
        carried, body = jaxprs.carried_by(eqn), eqn.params['jaxpr']
        consts, xs = ins[: carried.start], ins[carried.stop :]
        each = [Known(_reduced(x.zero, (0,))) for x in xs]

        def turn(carry: list[Known]) -> Sequence[Known]:
            return self.of(body, [*consts, *carry, *each])[: len(carried)]

        carry = self._turns(turn, ins[carried.start : carried.stop])
        ys = self.of(body, [*consts, *carry, *each])[len(carried) :]
        stacked = [
            Known(y.zero if isinstance(y.zero, bool) else y.zero[None]) for y in ys
        ]
        return [*carry, *stacked]

    def _while(self, eqn: Any, ins: Sequence[Known]) -> Sequence[Known]:
        first = eqn.params['cond_nconsts']
        start = first + eqn.params['body_nconsts']
        consts, body = ins[first:start], eqn.params['body_jaxpr']
        return self._turns(lambda carry: self.of(body, [*consts, *carry]), ins[start:])


def _common(*several: Known) -> Known:
    """What is known of a value that is one of several."""
    return Known(functools.reduce(both, (one.zero for one in several)))


# What becomes of a mask.


def _spread(mask: NDArray[np.bool_], eqn: Any) -> Mask:
    axes = [1] * len(eqn.params['shape'])
    for axis, size in zip(eqn.params['broadcast_dimensions'], mask.shape, strict=True):
        axes[axis] = size
    return mask.reshape(axes)


def _reduced(mask: Mask, axes: Sequence[int]) -> Mask:
    if isinstance(mask, bool):
        return mask
    return small(np.asarray(mask.all(tuple(axes))))


_MOVES: dict[str, Callable[[NDArray[np.bool_], Any], Mask]] = {
    'broadcast_in_dim': _spread,
    'transpose': lambda mask, eqn: mask.transpose(eqn.params['permutation']),
    'squeeze': lambda mask, eqn: mask.squeeze(eqn.params['dimensions']),
    'expand_dims': lambda mask, eqn: np.expand_dims(mask, eqn.params['dimensions']),
    'reduce_sum': lambda mask, eqn: _reduced(mask, eqn.params['axes']),
}


def _sum(eqn: Any, ins: Sequence[Known]) -> Mask:
    return _common(*ins).zero


def _product(eqn: Any, ins: Sequence[Known]) -> Mask:
    return functools.reduce(either, (one.zero for one in ins))


def _select(eqn: Any, ins: Sequence[Known]) -> Mask:
    which, *cases = ins
    if not (which.exact and len(cases) == 2):
        return _sum(eqn, cases)
    first, second = (case.zero for case in cases)
    return both(either(opposite(which.zero), first), either(which.zero, second))


def _padded(eqn: Any, ins: Sequence[Known]) -> Mask:
    one, value = ins
    config, shape = eqn.params['padding_config'], eqn.invars[0].aval.shape
    if value.zero is not True or any(
        min(padding) < 0 or padding[2] for padding in config
    ):
        return value.zero is True and one.zero is True
    # Axes that are not padded stay small.
    small_shape = np.shape(one.zero) or (1,) * len(shape)
    rows = zip(shape, small_shape, config, strict=True)
    sizes = [size if low or high else other for size, other, (low, high, _) in rows]
    ends = [(low, high) for low, high, _ in config]
    return small(np.pad(np.broadcast_to(one.zero, sizes), ends, constant_values=True))


_MEET: dict[str, Callable[[Any, Sequence[Known]], Mask]] = {
    **dict.fromkeys(('add', 'sub', 'add_any', 'max', 'min', 'or', 'complex'), _sum),
    **dict.fromkeys(('mul', 'and'), _product),
    **dict.fromkeys(('div', 'rem'), lambda eqn, ins: ins[0].zero),
    'integer_pow': lambda eqn, ins: eqn.params['y'] > 0 and ins[0].zero,
    'select_n': _select,
    'pad': _padded,
}
