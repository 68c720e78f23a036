"""Parts of arrays: rows of an embedding, layers of a scanned stack, masked elements.

``sg.at(where, index)`` combines a filter with an index: *which elements of which
variables*. A tree of boolean arrays says the same by a ``Mask`` for each variable. For
one variable such a filter returns a ``Part`` in place of a bool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from flax_sg import errors
from flax_sg.errors.texts import brief, raised_by
from flax_sg.filters import tokens
from flax_sg.filters.expressions import And, Ask, Filter, Need, Not, Or
from flax_sg.filters.paths import Path
from flax_sg.internals import tracing
from flax_sg.internals.types import Array, ArrayIndex, Decision, Leaf


class Index(Filter):
    """Some elements of every variable: those that numpy takes for an index.

    Attributes:
        index: an int, a slice, ``...``, an array or list of ints or bools, or a tuple
            of these, one for each axis. ``np.s_[:100]`` writes it.
    """

    own_needs: ClassVar[frozenset[Need]] = frozenset({'part'})
    index: ArrayIndex

    def __init__(self, index: ArrayIndex) -> None:
        object.__setattr__(self, 'index', _plain(index))

    @functools.cached_property
    def identity(self) -> str:
        """The index."""
        return tokens.of_value(self.index)

    def answer(self, path: Path, ask: Ask) -> Decision:
        """The part of every variable."""
        return Part(self)

    @property
    def entries(self) -> tuple[Any, ...]:
        """The index of each axis."""
        return self.index if isinstance(self.index, tuple) else (self.index,)

    def __repr__(self) -> str:
        return f'Index(np.s_[{", ".join(map(_written, self.entries))}])'


class Mask(Filter):
    """The elements at which an array of bools is True, in a variable of its shape.

    Attributes:
        array: the array, of numpy or traced. An optimizer keeps a full state for the
            variable, since the next step may have another mask.
    """

    own_needs: ClassVar[frozenset[Need]] = frozenset({'part', 'mask'})
    array: Array

    def __init__(self, array: Array) -> None:
        if not isinstance(array, tracing.Tracer):
            array = np.array(array)
            array.setflags(write=False)
        object.__setattr__(self, 'array', array)

    @functools.cached_property
    def identity(self) -> str:
        """The bools; of a tracer which one it is."""
        return tokens.of_value(self.array)

    def answer(self, path: Path, ask: Ask) -> Decision:
        """The part of every variable."""
        return Part(self)

    def __repr__(self) -> str:
        return f'Mask(bool{[*self.array.shape]})'


@dataclasses.dataclass(frozen=True, eq=False)
class Unclear(Filter):
    """Elements that no analysis can tell.

    Attributes:
        place: the line of the program that decides which they are.
    """

    own_needs: ClassVar[frozenset[Need]] = frozenset({'part', 'unclear'})
    place: str

    def answer(self, path: Path, ask: Ask) -> Decision:
        """The part of every variable."""
        return Part(self)

    def __repr__(self) -> str:
        return f'<a part, told at {self.place}>'


@dataclasses.dataclass(frozen=True)
class Part:
    """What a filter says of a variable of which it means a part.

    Attributes:
        elements: which elements: an expression of indices.
    """

    elements: Filter

    def __bool__(self) -> bool:
        raise errors.PartError(
            f'A filter means a part of an array, {self.elements!r}: that is neither '
            'true nor false.\n'
            'Ask `where(path) is not False` for whether it means anything of the '
            'array, `is True` for the whole.'
        )

    @property
    def is_unclear(self) -> bool:
        """Whether the elements are not known."""
        return 'unclear' in self.elements.needs

    def __and__(self, other: bool | Part) -> bool | Part:
        if isinstance(other, Part):
            return Part(self.elements & other.elements)
        return self if other else False

    __rand__ = __and__

    def __or__(self, other: bool | Part) -> bool | Part:
        if isinstance(other, Part):
            return Part(self.elements | other.elements)
        return True if other else self

    __ror__ = __or__

    def __invert__(self) -> Part:
        if isinstance(self.elements, Unclear):
            raise unclear_part(self.elements)
        return Part(~self.elements)

    def settled(self, path: Path) -> bool | Part:
        """A bool where all elements of an array are meant, or none: that is the leaf.

        A mask may have other elements next time. What does not fit raises where it is
        used.
        """
        if path.array is None or self.is_mask or self.is_unclear:
            return self
        with contextlib.suppress(errors.PartError):
            mask = self.mask(path.array.shape, path)
            if mask.all() or not mask.any():
                return bool(mask.any())
        return self

    @property
    def is_mask(self) -> bool:
        """Whether a mask tells the elements, and the next one may tell others."""
        return 'mask' in self.elements.needs

    @property
    def is_conditional(self) -> bool:
        """Whether a traced condition tells the elements: all of them, or none."""
        return 'condition' in self.elements.needs

    @property
    def is_of_conditions(self) -> bool:
        """Whether nothing else tells them: it holds for any array, also some rows."""
        return _is_of_conditions(self.elements)

    def mask(self, shape: tuple[int, ...], path: str) -> NDArray[np.bool_]:
        """Which elements of an array are meant, if it is known here.

        Args:
            shape: the shape of the array.
            path: where it is, for an error.

        Returns:
            A mask with as many axes as the array; of length 1 where they all have the
            same, so that it stays small.

        Raises:
            PartError: if an index or a mask does not fit the array, an index takes
                nothing of it, or a mask is traced.
        """
        if [*_traced_in(self.elements)]:
            raise self.traced(path)
        return self.any_mask(shape, path)

    def traced(self, path: str) -> errors.PartError:
        """The error where values of masks are needed, and one is traced."""
        if self.is_conditional:
            return errors.PartError(
                f'Whether {path!r} is meant is known when the program runs: the '
                'condition is traced.\n'
                'Blocks, sg.stop_gradient, wrt=, sg.mask and the update of sg.freeze '
                'take such a condition. Here give its value: bool(step < k), outside '
                'of jax.jit.'
            )
        return errors.PartError(
            f'Which elements of {path!r} are meant is known when the program runs: '
            'the mask is traced.\n'
            'Blocks, sg.stop_gradient, wrt=, sg.mask and the update of sg.freeze take '
            'such a mask. Here give its values: numpy.asarray(mask), outside of '
            'jax.jit.'
        )

    def any_mask(self, shape: tuple[int, ...], path: str) -> Array:
        """Which elements are meant, as ``mask`` tells; a tracer if a mask is traced."""
        elements = self.elements
        if isinstance(elements, Mask):
            if elements.array.shape == ():  # A traced condition.
                return elements.array.reshape((1,) * len(shape))
            assert elements.array.shape == shape, (path, shape)  # See ``BoolTree``.
            return elements.array
        if isinstance(elements, Unclear):  # It may be any of them.
            return np.ones((1,) * len(shape), bool)
        if isinstance(elements, Not):
            return ~Part(elements.filter).any_mask(shape, path)
        if isinstance(elements, And | Or):
            masks = (Part(part).any_mask(shape, path) for part in elements.filters)
            return functools.reduce(elements.combine, masks)
        assert isinstance(elements, Index)
        return _mask_of(elements, shape, path)


def part_of(mask: NDArray[np.bool_], shape: tuple[int, ...]) -> Part:
    """The part with the elements of a mask.

    >>> part_of(np.array([[True], [False], [False]]), (3, 2))
    Part(elements=Index(np.s_[0:1]))

    Args:
        mask: the mask; of length 1 in axes where all elements are alike.
        shape: the shape of the array.
    """
    axes = [axis for axis, size in enumerate(mask.shape) if size > 1]
    first, last = axes[0], axes[-1]
    if first < last:
        whole = np.broadcast_to(mask, (*shape[: last + 1], *mask.shape[last + 1 :]))
        return Part(Index(whole.reshape(shape[: last + 1])))
    row = mask.reshape(-1)
    start, stop = np.flatnonzero(row)[[0, -1]].tolist()
    index = slice(start, stop + 1) if row[start : stop + 1].all() else row
    return Part(Index((*[slice(None)] * first, index) if first else index))


def merged(
    decision: bool | Part,
    meant: Array,
    others: Array,
    path: str,
    shape: tuple[int, ...] | None = None,
) -> Array:
    """An array of the elements that a filter means, and of others where it does not.

    Args:
        decision: what a filter says of the array.
        meant: has the elements that are meant.
        others: has the others; of the same shape and type.
        path: where they are, for an error.
        shape: the shape of the array, if these have axes in front of its own.
    """
    if meant is others or not isinstance(decision, Part):
        return others if decision is False else meant
    like = jnp.shape(others)
    mask = decision.any_mask(like if shape is None else shape, path)
    is_known = isinstance(mask, np.ndarray)
    mask = (np if is_known else jnp).broadcast_to(mask, like)
    return jnp.where(mask, meant, others)


def within(decision: bool | Part, leaf: Leaf, path: str) -> Array:
    """An array whose gradient ends at what a filter means of it.

    A rule for gradients gets zeros for the elements that are not meant, and may return
    other values there. Without this stop they would be added to the gradient of these
    elements, which comes from outside of the rule.

    Args:
        decision: what the filter says of the array.
        leaf: the array.
        path: where it is, for an error.
    """
    if not isinstance(decision, Part):
        return leaf
    return merged(decision, leaf, jax.lax.stop_gradient(leaf), path)


def _is_of_conditions(elements: Filter) -> bool:
    if elements.parts:
        return all(map(_is_of_conditions, elements.parts))
    return 'condition' in elements.needs


def _traced_in(elements: Filter) -> Iterator[Any]:
    """Yields the traced masks and conditions in an expression."""
    if isinstance(elements, Mask) and isinstance(elements.array, tracing.Tracer):
        yield elements.array
    for part in elements.parts:
        yield from _traced_in(part)


def at(where: Any, index: ArrayIndex) -> Filter:
    """A part of each array that a filter selects.

    It is a filter, and is given to all that takes one: blocks, lifts, ``nn.Frozen``,
    ``nn.mirror``, gradient calls, ``sg.freeze``; it combines with ``~ & |``.

    >>> import jax, jax.numpy as jnp, numpy as np, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> class Words(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, ids):
    ...         with nn.stop_gradient(sg.at('embed/embedding', np.s_[:2])):
    ...             return nn.Embed(4, 3, name='embed')(ids)
    >>> ids = jnp.arange(4)
    >>> v = Words().init(jax.random.key(0), ids)
    >>> grads = jax.grad(lambda v: jnp.sum(Words().apply(v, ids)))(v)
    >>> grads['params']['embed']['embedding'][:, 0].tolist()
    [0.0, 0.0, 1.0, 1.0]

    Values are what they were, to the bit; so are gradients of all other elements. The
    gradient of the whole array is computed, and dropped where it is stopped: to save
    the work for layers of a scanned stack, see ``frozen_layers`` of ``nn.scan``.

    Args:
        where: which variables: any kind of filter.
        index: which elements of each: whatever numpy takes between brackets, of ints,
            slices, ``...``, and arrays of ints or bools. It is that of the array where
            the block begins: outside a scan the first axis may be that of the layers.
            An array of bools has the shape of the array, or of its first axes.

    Returns:
        A filter. If it takes all elements of an array, it means the whole array. What
        cannot split a leaf (``sg.labels``, ``nnx.where``) refuses it.

    Raises:
        FilterTypeError: if ``where`` is no filter.
        PartError: if ``index`` is traced, or is nothing that numpy takes. Where the
            filter is asked, if the index does not fit an array, or takes nothing of it.
    """
    with raised_by('sg.at(where, index)'):
        filter_ = Filter.convert(where)
    return filter_ & Index(index)


def _plain(index: ArrayIndex) -> Any:
    ends = (index.start, index.stop, index.step) if isinstance(index, slice) else ()
    if any(isinstance(n, tracing.Tracer) for n in jax.tree.leaves((index, ends))):
        raise errors.PartError(
            'The index in sg.at is traced, and filters are asked while JAX traces.\n'
            'Pass it by static_argnames of jax.jit. Or give a tree of boolean arrays, '
            'which may be traced:\n'
            "sg.stop_gradient(params, {'embed': {'embedding': mask}})."
        )
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    if isinstance(index, slice):
        return slice(*(None if n is None else operator.index(n) for n in ends))
    if index is Ellipsis:
        return index
    array = np.array(index)
    if array.dtype != bool:
        if not np.issubdtype(array.dtype, np.integer):
            raise errors.PartError(
                f'{brief(index)} is no index: give ints, slices, ..., arrays of ints '
                'or bools, or a tuple of these.\n'
                "Write it as numpy does: sg.at('embed/embedding', np.s_[:100])."
            )
        array = array.astype(np.int64)
        if array.ndim == 0:
            return int(array)
    array.setflags(write=False)
    return array


def _written(index: ArrayIndex) -> str:
    if isinstance(index, slice):
        ends = [index.start, index.stop] + ([] if index.step is None else [index.step])
        return ':'.join('' if end is None else str(end) for end in ends)
    if isinstance(index, np.ndarray):
        return np.array2string(index, separator=', ', threshold=8)
    return '...' if index is Ellipsis else str(index)


def _mask_of(index: ArrayIndex, shape: tuple[int, ...], path: str) -> NDArray[np.bool_]:
    mask = np.zeros(_small_shape(index, shape), bool)
    try:
        mask[index.index] = True
    except IndexError as error:
        raise wrong_part(index, path, shape, str(error)) from None
    if not mask.any():
        raise wrong_part(index, path, shape, 'it selects nothing')
    return mask


def _small_shape(index: ArrayIndex, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array, of length 1 in the axes that an index takes whole."""
    # A mask of bools stands for as many axes as it has.
    axes = [
        entry.ndim if isinstance(entry, np.ndarray) and entry.dtype == bool else 1
        for entry in index.entries
    ]
    dots = [n for n, entry in enumerate(index.entries) if entry is Ellipsis]
    axes_of_dots = len(shape) - sum(axes) + len(dots)
    out: list[int] = []
    for n, (entry, count) in enumerate(zip(index.entries, axes, strict=True)):
        if n in dots:
            out += [1] * axes_of_dots
        elif isinstance(entry, slice) and entry == slice(None):
            out.append(1)
        else:
            out += shape[len(out) : len(out) + count]
    return tuple(out + [1] * (0 if dots else axes_of_dots))


def unclear_part(elements: Unclear) -> errors.PartError:
    """The other elements are meant of a part that is not known."""
    return errors.PartError(
        f'A part of a variable is stopped at {elements.place}, and sg.live cannot tell '
        'which part.\n'
        'Frozen as a whole, or not at all, the variable would train otherwise.\n'
        "Name the part: nn.stop_gradient(sg.at('embed/embedding', np.s_[:100])), or "
        "sg.freeze(tx, sg.at('embed/embedding', np.s_[:100]))."
    )


def wrong_part(
    index: ArrayIndex, path: str, shape: tuple[int, ...], problem: str
) -> errors.PartError:
    """A part of an array is meant that there is not, or that cannot be told apart."""
    return errors.PartError(
        f'{index!r} does not fit {path!r}, an array of shape {shape}: {problem}.\n'
        'Name elements that the array has, or other variables in sg.at.'
    )
