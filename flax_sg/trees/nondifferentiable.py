"""A value that gets no gradient, whatever differentiates it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from flax_sg import errors
from flax_sg.trees import encodings


def _unary(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: fn(self.value)


def _binary(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: fn(self.value, value_of(other))


def _reflected(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: fn(value_of(other), self.value)


@jax.tree_util.register_pytree_with_keys_class
class NonDifferentiable:
    """Stands for its value everywhere, and gets no gradient from anything.

    Plain ``jax.grad`` takes a tree with these in it, and gives them a gradient of
    zero; ``sg.grad`` leaves them out. Arithmetic, comparisons, indexing, functions of
    ``jnp``, attributes and calls are those of the value:

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> def loss(params):
    ...     return params['x'] * params['y'] ** 2
    >>> params = {'x': 2.0, 'y': sg.NonDifferentiable(100)}
    >>> grads = jax.grad(loss)(params)
    >>> float(grads['x']), int(grads['y'])
    (10000.0, 0)
    >>> sg.NonDifferentiable(jnp.zeros(3)) + 1.0
    Array([1., 1., 1.], dtype=float32)

    Numbers, arrays, keys and tracers in it are traced under ``jit``, ``vmap`` and
    ``scan``: new values need no new trace. Strings and other objects are static, a
    part of the structure. Integers are exact: they travel as floats of 16 bits each.

    ``sg.freeze``, the masks and the labels skip it by its type. A plain optimizer sees
    a gradient of zero and leaves it alone, *unless it decays its weights*: a value that
    was decayed (averaged, scaled) in that way is refused. Outside of a trace it raises;
    inside, it is NaN, and an integer the one farthest from zero. For that, an array of
    ones travels with each array: to keep large weights fixed, freeze them by path.

    JAX itself takes no such object as an index, and none as an argument of
    ``jax.lax``: write ``x[n.value]``.

    Attributes:
        value: the value, behind ``jax.lax.stop_gradient``.

    Raises:
        ChangedValueError: when a value is read that an optimizer has changed.

    Note:
        As asked for in google/jax#2588. A value stored as static metadata instead
        would compile again for each new one, and could hold no tracer (jax#2912).
    """

    __slots__ = ('_arrays', '_held', '_structure')
    __array_priority__ = 100

    def __init__(self, value: Any) -> None:
        self._held = value_of(value)
        self._arrays: list[Any] | None = None
        self._structure: Any = None

    @property
    def value(self) -> Any:
        """The value, through which no gradient flows."""
        if self._arrays is None:
            return jax.tree.map(_stopped, self._held)
        treedef, kinds = self._structure
        arrays = iter(self._arrays)
        return treedef.unflatten([_decoded(kind, arrays) for kind in kinds])

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The value as floats, numbered."""
        arrays, structure = self.tree_flatten()
        keys = map(jax.tree_util.FlattenedIndexKey, range(len(arrays)))
        return list(zip(keys, arrays, strict=True)), structure

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """The value as floats."""
        if self._arrays is not None:
            return self._arrays, self._structure
        leaves, treedef = jax.tree.flatten(self._held)
        kinds = tuple(map(encodings.encoding_of, leaves))
        arrays: list[Any] = []
        for leaf, kind in zip(leaves, kinds, strict=True):
            if isinstance(kind, encodings.Encoding):
                arrays.extend(encodings.encode(leaf, kind))
        return arrays, (treedef, kinds)

    @classmethod
    def tree_unflatten(cls, structure: Any, arrays: Any) -> NonDifferentiable:
        """Any children will do; what they mean is asked when the value is read."""
        self = object.__new__(cls)
        self._held = None
        self._arrays = list(arrays)
        self._structure = structure
        return self

    def __repr__(self) -> str:
        try:
            return f'NonDifferentiable({self.value!r})'
        except Exception:  # Of a tree that holds something else: shapes, shardings.
            return f'NonDifferentiable(<{self._arrays!r}>)'

    def __str__(self) -> str:
        return str(self.value)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype, copy=copy)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return np.shape(self.value)

    @property
    def ndim(self) -> int:
        """The number of axes of the value."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return int(np.prod(self.shape, dtype=int))

    @property
    def dtype(self) -> Any:
        """The type of the value as an array."""
        return jnp.result_type(self.value)

    def __getattr__(self, name: str) -> Any:
        # Not for what Python asks objects for, while they are copied for instance.
        if name.startswith('__') or name in NonDifferentiable.__slots__:
            raise AttributeError(name)
        return getattr(self.value, name)

    def __reduce__(self) -> Any:
        arrays, structure = self.tree_flatten()
        if self._arrays is None:
            return NonDifferentiable, (self._held,)
        return NonDifferentiable.tree_unflatten, (structure, arrays)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value."""
        return self.value(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.value[jax.tree.map(value_of, index, is_leaf=_is_marked)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __contains__(self, item: Any) -> bool:
        return value_of(item) in self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.value, ndigits)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    __len__, __bool__, __float__ = _unary(len), _unary(bool), _unary(float)
    __int__, __complex__ = _unary(int), _unary(complex)
    __index__ = _unary(operator.index)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(abs), _unary(operator.invert)

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __divmod__, __rdivmod__ = _binary(divmod), _reflected(divmod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)


def value_of(x: Any) -> Any:
    """The value of a ``NonDifferentiable``; anything else is its own."""
    return x.value if isinstance(x, NonDifferentiable) else x


def _is_marked(x: Any) -> bool:
    return isinstance(x, NonDifferentiable)


def _stopped(leaf: Any) -> Any:
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf


def _decoded(kind: encodings.Encoding | encodings.Static, arrays: Iterator[Any]) -> Any:
    if isinstance(kind, encodings.Static):
        return kind.value
    mine = [next(arrays) for _ in range(kind.arrays)]
    if encodings.is_refused(mine, kind):
        raise _changed(mine[-1])
    return encodings.decode([jnp.asarray(array) for array in mine], kind)


def _to_state_dict(x: NonDifferentiable) -> dict[str, Any]:
    return {str(number): leaf for number, leaf in enumerate(x.tree_flatten()[0])}


def _from_state_dict(x: NonDifferentiable, state: dict[str, Any]) -> NonDifferentiable:
    arrays, structure = x.tree_flatten()
    found = [state[str(number)] for number in range(len(arrays))]
    return NonDifferentiable.tree_unflatten(structure, found)


serialization.register_serialization_state(
    NonDifferentiable, _to_state_dict, _from_state_dict
)


def _changed(witness: object) -> errors.ChangedValueError:
    """A ``NonDifferentiable`` has been changed, most likely by an optimizer's decay."""
    return errors.ChangedValueError(
        'the value of a NonDifferentiable has been changed: what travels with it, '
        f'and is always 1.0, is {witness}.\n'
        'Weight decay, averaging and scaling change parameters that have no '
        'gradient. Wrap the optimizer: sg.freeze(tx).'
    )
