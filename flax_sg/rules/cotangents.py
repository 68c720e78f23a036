"""Rules that let values through unchanged and change their cotangents.

What such a rule does is a function of the cotangents, so a derivative of a gradient
differentiates that function too.
"""

from __future__ import annotations

import functools
import graphlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from flax_sg import errors
from flax_sg.errors.texts import brief, shown
from flax_sg.filters import predicates
from flax_sg.filters.paths import Path
from flax_sg.rules import constants, custom_gradients, rules

# ``(path, cotangent, *brought)``; returns the cotangent to go on with.
MapOne: TypeAlias = Callable[..., Any]


# No dataclasses: ``nn.jit`` would compare the fields of a dataclass in a module's
# field, arrays and all.
class OnCotangents(rules.Rule):
    """A rule that lets values through.

    Args:
        name: the name of the function of ``nn`` that makes it.
        *brought: numbers and arrays that it needs.
        parts: what else tells it from others of its class.
    """

    in_extent: ClassVar[bool] = True

    def __init__(
        self, name: str, *brought: Any, parts: tuple[Hashable, ...] = ()
    ) -> None:
        self.name = name
        self.brought = brought
        self._key = (type(self), name, *map(constants.key_of, brought), *parts)

    def key(self) -> Hashable:
        """All that tells it from others, without arrays."""
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnCotangents) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _mapped(
        self, fn: Callable[..., list[Any]], selected: rules.Selected, *brought: Any
    ) -> list[list[Any]]:
        """The leaves of variables behind one identity, their cotangents through ``fn``.

        Args:
            fn: as for ``custom_gradients.map_cotangents``.
            selected: the variables, each with its leaves.
            *brought: arrays that ``fn`` needs.
        """
        names = [repr(str(path)) for path, _ in selected]
        more = f' and {len(names) - 3} more' if len(names) > 3 else ''
        what = f'nn.{self.name} of {", ".join(names[:3])}{more}'
        leaves = [leaf for _, of_path in selected for leaf in of_path]
        arrays = list(map(jnp.asarray, brought))
        new = iter(custom_gradients.map_cotangents(fn, what, leaves, arrays))
        return [[next(new) for _ in of_path] for _, of_path in selected]


class Scale(OnCotangents):
    """Tangents and cotangents are multiplied by a number."""

    asks_path = False

    def __init__(self, factor: Any) -> None:
        super().__init__('scale_gradient', factor)

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Returns the leaf, behind an identity that scales."""
        [factor] = self.brought
        return custom_gradients.scale(leaf, jnp.asarray(factor).astype(leaf.dtype))


class Each(OnCotangents):
    """The cotangent of each leaf goes through a function of its own.

    Args:
        name: as for ``OnCotangents``.
        fn: called as ``fn(path, cotangent, *brought)``.
        *brought: numbers and arrays that ``fn`` needs.
        asks_path: whether ``fn`` looks at the path.
    """

    def __init__(
        self, name: str, fn: MapOne, *brought: Any, asks_path: bool = False
    ) -> None:
        super().__init__(name, *brought, parts=(constants.identity_of(fn),))
        self._fn, self.asks_path = fn, asks_path

    def mapped(self, path: Path, cotangent: Any, *brought: Any) -> Any:
        """Returns the cotangent to go on with."""
        return self._fn(path, cotangent, *brought)

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Returns the leaf, behind an identity that maps its cotangent."""

        def fn(cotangents: Sequence[Any], _: Any, *brought: Any) -> list[Any]:
            return [self.mapped(path, cotangents[0], *brought)]

        return self._mapped(fn, [(path, [leaf])], *self.brought)[0][0]


class Map(Each):
    """The cotangent of each leaf goes through a function of the user."""

    def __init__(self, fn: MapOne, values: Sequence[Any]) -> None:
        traced = predicates.tracer_in(fn)
        if traced is not None:
            found = f'{brief(traced[1])} as {traced[0]!r}.'
            raise _reads_tracer(predicates.describe(fn), found)
        super().__init__('map_cotangent', fn, *values, asks_path=True)

    def mapped(self, path: Path, cotangent: Any, *brought: Any) -> Any:
        """Returns what the function returns, if that can be a cotangent."""
        described = predicates.describe(self._fn)
        try:
            out = super().mapped(path, cotangent, *brought)
        except Exception as error:
            error.add_note(f'raised by {described} for the cotangent of {str(path)!r}')
            raise
        return _checked(path, f'what {described} returns', cotangent, out)


class Fill(Each):
    """A value takes the place of the cotangent; a single number is repeated."""

    def __init__(self, value: Any) -> None:
        super().__init__('replace_cotangent', _filled, value)

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Checks the value before anything is differentiated."""
        [value] = self.brought
        if jnp.ndim(value):
            _checked(path, 'the value', leaf, value)
        return super().__call__(path, leaf)


def clip_value(bound: Any) -> Each:
    """A rule that clips each number between minus and plus a bound."""
    return Each('clip_gradient', _clipped_by_value, bound)


def clip_norm(bound: Any) -> Each:
    """A rule that scales each leaf down to a norm."""
    return Each('clip_gradient', _clipped_by_norm, bound)


def printed() -> Each:
    """A rule that prints cotangents."""
    return Each('print_cotangent', _printed, asks_path=True)


def _filled(_: Path, cotangent: Any, value: Any) -> Any:
    return jnp.broadcast_to(value.astype(cotangent.dtype), cotangent.shape)


def _clipped_by_value(_: Path, cotangent: Any, bound: Any) -> Any:
    bound = bound.astype(cotangent.real.dtype)
    clipped = [jnp.clip(part, -bound, bound) for part in _parts(cotangent)]
    return jax.lax.complex(*clipped) if len(clipped) == 2 else clipped[0]


def _clipped_by_norm(_: Path, cotangent: Any, bound: Any) -> Any:
    return _scaled_down([cotangent], [cotangent], bound)[0]


def _printed(path: Path, cotangent: Any) -> Any:
    jax.debug.callback(functools.partial(_print, str(path)), cotangent)
    return cotangent


def _print(path: str, cotangent: Any) -> None:
    print(f'cotangent of {path}: {cotangent}')


def _scaled_down(
    cotangents: Sequence[Any], counted: Sequence[Any], bound: Any
) -> list[Any]:
    """Cotangents, times what brings the norm of the counted ones down to the bound."""
    square = functools.reduce(operator.add, map(_square, counted))
    bound = bound.astype(square.dtype)
    over = square > bound * bound
    # The root has no derivative at zero, where it is not needed.
    factor = jnp.where(over, bound / jnp.sqrt(jnp.where(over, square, 1)), 1)
    return [ct * factor.astype(ct.dtype) for ct in cotangents]


def _square(x: Any) -> Any:
    """The square of a norm, summed with at least 32 bits."""
    parts = _parts(x)
    dtype = parts[0].dtype
    wide = dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
    return functools.reduce(
        operator.add, (jnp.sum(jnp.square(part.astype(wide))) for part in parts)
    )


def _parts(x: Any) -> tuple[Any, ...]:
    return (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)


class Joint(OnCotangents):
    """The cotangents of all selected leaves go through one function."""

    jointly: ClassVar[bool] = True

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Joint rules are applied by ``together``."""
        raise NotImplementedError


class ClipGlobalNorm(Joint):
    """All leaves are scaled down to a norm that they have together."""

    asks_path = False

    def __init__(self, bound: Any) -> None:
        super().__init__('clip_gradient', bound)

    def together(self, selected: rules.Selected, read: rules.Read) -> list[list[Any]]:
        """Returns the leaves behind one identity."""

        def fn(cotangents: Sequence[Any], given: Any, bound: Any) -> list[Any]:
            # A leaf that is not differentiated, a frozen one say, does not count.
            counted = [ct for ct, there in zip(cotangents, given, strict=True) if there]
            return _scaled_down(cotangents, counted, bound)

        return self._mapped(fn, selected, *self.brought)


class Copy(Joint):
    """Cotangents are handed on from one leaf to another.

    Args:
        sources: for each target the source.
        add: whether a target keeps its own cotangent as well.
    """

    def __init__(self, sources: Mapping[str, str], add: bool) -> None:
        super().__init__('copy_cotangent', parts=(tuple(sources.items()), add))
        self._sources, self._add = dict(sources), add
        order = graphlib.TopologicalSorter({t: [s] for t, s in sources.items()})
        try:
            in_order = tuple(order.static_order())
        except graphlib.CycleError as error:
            raise _cycle(error.args[1][:0:-1]) from None
        self._targets = [path for path in in_order if path in sources]

    def together(self, selected: rules.Selected, read: rules.Read) -> list[list[Any]]:
        """Returns the leaves behind one identity."""
        pairs = self._pairs(selected)

        def fn(cotangents: Sequence[Any], _: Any) -> list[Any]:
            out = list(cotangents)
            for to, of in pairs:
                out[to] = out[to] + out[of] if self._add else out[of]
            return out

        return self._mapped(fn, selected)

    def _pairs(self, selected: rules.Selected) -> list[tuple[int, int]]:
        """The numbers of leaves, each target with its source, sources first."""
        places: dict[tuple[str, str], list[int]] = {}
        leaves: list[Any] = []
        for path, of_path in selected:
            numbers = range(len(leaves), len(leaves) + len(of_path))
            # A name is that of a variable, or of a leaf within one.
            for name in {str(path), str(path.variable)}:
                places.setdefault((path.collection, name), []).extend(numbers)
            leaves += of_path
        pairs: list[tuple[int, int]] = []
        for target in self._targets:
            for collection in dict.fromkeys(collection for collection, _ in places):
                source = self._sources[target]
                to = places.get((collection, target), [])
                of = places.get((collection, source), [])
                if not (to and of):
                    continue  # At initialization one may come later than the other.
                what = f'that of {source!r}'
                if len(to) != len(of):
                    boxes = [leaves[i] for i in to], [leaves[i] for i in of]
                    raise _wrong_cotangent(target, what, *boxes)
                for one, other in zip(to, of, strict=True):
                    _checked(target, what, leaves[one], leaves[other])
                pairs += zip(to, of, strict=True)
        return pairs


class Replace(Joint):
    """The value of another variable takes the place of the cotangent.

    Args:
        variable: the path of the variable; None for the one of the same path.
        collection: the collection of the variable.
    """

    def __init__(self, variable: str | None, collection: str) -> None:
        super().__init__('replace_cotangent', parts=(variable, collection))
        self._variable, self._collection = variable, collection

    def together(self, selected: rules.Selected, read: rules.Read) -> list[list[Any]]:
        """Returns each leaf behind an identity of its own."""
        return [
            [self._behind(path, leaf, n, read) for n, leaf in enumerate(leaves)]
            for path, leaves in selected
        ]

    def _behind(self, path: Path, leaf: Any, index: int, read: rules.Read) -> Any:
        variable = str(path) if self._variable is None else self._variable
        try:
            values = self._values(variable, path, read)
        except errors.UnknownNameError as error:
            # At initialization it may come later, and nobody differentiates that.
            missing, brought = error, []
        else:
            missing, brought = None, list(values[index : index + 1])
            what = f'the value of {variable!r}'
            _checked(path, what, leaf, brought[0] if brought else None)

        def fn(_cotangents: Any, _: Any, *brought: Any) -> list[Any]:
            if missing is not None:
                raise missing
            return list(brought)

        return self._mapped(fn, [(path, [leaf])], *brought)[0][0]

    def _values(self, variable: str, path: Path, read: rules.Read) -> Sequence[Any]:
        try:
            return read(variable, self._collection)
        except errors.UnknownNameError:
            if self._variable is None or not path.is_inner:
                raise
        # A tuple for a tuple, leaf by leaf.
        return read(variable + path[len(path.variable) :], self._collection)


def _checked(path: str, what: str, expected: Any, found: Any) -> Any:
    """What was found, if it can be the cotangent of a leaf like ``expected``."""
    if not hasattr(found, 'dtype') or (
        (expected.shape, expected.dtype) != (found.shape, found.dtype)
    ):
        raise _wrong_cotangent(path, what, expected, found)
    return found


def _wrong_cotangent(
    path: str, what: str, expected: Any, found: Any
) -> errors.CotangentError:
    """What takes the place of a cotangent has another shape or dtype than that."""
    return errors.CotangentError(
        f'the cotangent of {str(path)!r} is {shown(expected)}, and {what} is '
        f'{shown(found)}.\n'
        'A cotangent has the shape and the dtype of its parameter.'
    )


def _reads_tracer(fn: str, problem: str) -> errors.ArgumentTypeError:
    """A function of cotangents reads a traced value that it was not handed."""
    return errors.ArgumentTypeError(
        f'{fn} reads {problem}\n'
        'Hand it over: nn.map_cotangent(where, fn, value) calls '
        'fn(path, cotangent, value).'
    )


def _cycle(cycle: Sequence[str]) -> errors.ArgumentValueError:
    """Cotangents are to be copied in a circle."""
    return errors.ArgumentValueError(
        'cotangents are copied in a circle: '
        f'{" <- ".join(map(repr, [*cycle, cycle[0]]))}.\n'
        'Each target is given with its source, {target: source}; leave one out.'
    )
