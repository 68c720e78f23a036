"""Rules that let values through unchanged and change their cotangents.

What such a rule does is a function of the cotangents, so a derivative of a gradient
differentiates that function too.
"""

from __future__ import annotations

import functools
import graphlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flax_sg import errors
from flax_sg.errors.texts import brief, shown
from flax_sg.filters import paths, predicates
from flax_sg.filters.paths import Path
from flax_sg.filters.patterns import nearest
from flax_sg.internals import tracing
from flax_sg.rules import custom_gradients, rules
from flax_sg.trees.leaves import is_differentiable


def has_cotangent(rewrite: rules.Rewrite, path: Path, leaf: Any) -> bool:
    """Whether a rule on cotangents has to act on a leaf.

    Raises:
        CotangentError: if the leaf was selected by name and cannot have a cotangent.
    """
    if not is_differentiable(leaf):
        # As in every rule: True skips such leaves, and selecting one by name fails.
        if rewrite.where.atoms:
            raise errors.CotangentError(
                f'{rewrite} selects {str(path)!r}, which has no cotangent: it holds '
                f'{shown(leaf)}.\n'
                'Select real or complex variables; True takes those and no others.'
            )
        return False
    # JAX differentiates tracers only: every other array is a constant.
    return isinstance(leaf, tracing.Tracer)


class OnCotangents(rules.Keyed):
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
        super().__init__((name, *map(rules.key_of, brought), *parts))
        self.name, self.brought = name, brought

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
        of_user: the function of the user that ``fn`` calls.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *brought: Any,
        asks_path: bool = False,
        of_user: Any = None,
    ) -> None:
        super().__init__(name, *brought, parts=(rules.identity_of(of_user or fn),))
        self._fn, self.asks_path = fn, asks_path

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Returns the leaf, behind an identity that maps its cotangent."""

        def fn(cotangents: Sequence[Any], _: Any, *brought: Any) -> list[Any]:
            return [self._fn(path, cotangents[0], *brought)]

        return self._mapped(fn, [(path, [leaf])], *self.brought)[0][0]


def through(fn: Callable[..., Any], values: Sequence[Any]) -> Each:
    """A rule by which cotangents go through a function of the user."""
    traced = predicates.tracer_in(fn)
    if traced is not None:
        name, value = traced
        raise errors.ArgumentTypeError(
            f'{predicates.describe(fn)} reads {brief(value)} as {name!r}.\n'
            'Hand it over: nn.map_cotangent(where, fn, value) calls '
            'fn(path, cotangent, value).'
        )
    checked = functools.partial(_checked_call, fn)
    return Each('map_cotangent', checked, *values, asks_path=True, of_user=fn)


def _checked_call(
    fn: Callable[..., Any], path: Path, cotangent: Any, *brought: Any
) -> Any:
    described = predicates.describe(fn)
    try:
        out = fn(path, cotangent, *brought)
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


def _filled(_: Path, cotangent: Any, value: Any) -> Any:
    return jnp.broadcast_to(value.astype(cotangent.dtype), cotangent.shape)


def clipped_by_value(_: Path, cotangent: Any, bound: Any) -> Any:
    """A cotangent with each number, or each part of a complex one, within a bound."""
    bound = bound.astype(cotangent.real.dtype)
    if not jnp.iscomplexobj(cotangent):
        return jnp.clip(cotangent, -bound, bound)
    parts = cotangent.real, cotangent.imag
    return jax.lax.complex(*(jnp.clip(part, -bound, bound) for part in parts))


def clipped_by_norm(_: Path, cotangent: Any, bound: Any) -> Any:
    """A cotangent that is scaled down to a norm."""
    return _scaled_down([cotangent], [cotangent], bound)[0]


def printed(path: Path, cotangent: Any) -> Any:
    """A cotangent that is printed whenever the program runs."""
    jax.debug.callback(functools.partial(_print, str(path)), cotangent)
    return cotangent


def _print(path: str, cotangent: Any) -> None:
    print(f'cotangent of {path}: {cotangent}')


class ClipGlobalNorm(OnCotangents):
    """All leaves are scaled down to a norm that they have together."""

    jointly: ClassVar[bool] = True
    asks_path = False

    def __init__(self, bound: Any) -> None:
        super().__init__('clip_gradient', bound)

    def together(self, selected: rules.Selected, tree: rules.Tree) -> list[list[Any]]:
        """Returns the leaves behind one identity."""

        def fn(cotangents: Sequence[Any], given: Any, bound: Any) -> list[Any]:
            # A leaf that is not differentiated, a frozen one say, does not count.
            counted = [ct for ct, there in zip(cotangents, given, strict=True) if there]
            return _scaled_down(cotangents, counted, bound)

        return self._mapped(fn, selected, *self.brought)


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
    if jnp.finfo(x.dtype).bits < 32:
        x = x.astype(jnp.float32)
    if jnp.iscomplexobj(x):
        return _square(x.real) + _square(x.imag)
    return jnp.sum(jnp.square(x))


class Copy(OnCotangents):
    """Cotangents are handed on from one leaf to another.

    Args:
        sources: for each target the source.
        add: whether a target keeps its own cotangent as well.
    """

    jointly: ClassVar[bool] = True

    def __init__(self, sources: Mapping[str, str], add: bool) -> None:
        super().__init__('copy_cotangent', parts=(tuple(sources.items()), add))
        self._sources, self._add = dict(sources), add
        order = graphlib.TopologicalSorter({t: [s] for t, s in sources.items()})
        try:
            in_order = tuple(order.static_order())
        except graphlib.CycleError as error:
            circle = ' <- '.join(map(repr, reversed(error.args[1])))
            raise errors.ArgumentValueError(
                f'cotangents are copied in a circle: {circle}.\n'
                'Each target is given with its source, {target: source}; leave one out.'
            ) from None
        self._targets = [path for path in in_order if path in sources]

    def together(self, selected: rules.Selected, tree: rules.Tree) -> list[list[Any]]:
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


class Replace(OnCotangents):
    """The value of another variable takes the place of the cotangent.

    Args:
        variable: the path of the variable; None for the one of the same path.
        collection: the collection of the variable.
    """

    jointly: ClassVar[bool] = True

    def __init__(self, variable: str | None, collection: str) -> None:
        super().__init__('replace_cotangent', parts=(variable, collection))
        self._variable, self._collection = variable, collection

    def together(self, selected: rules.Selected, tree: rules.Tree) -> list[list[Any]]:
        """Returns each leaf behind an identity of its own."""
        return [
            [
                self._behind(path, leaf, self._found(path, n, tree))
                for n, leaf in enumerate(leaves)
            ]
            for path, leaves in selected
        ]

    def _behind(self, path: Path, leaf: Any, found: Any) -> Any:
        missing = isinstance(found, Exception)
        if not missing:
            what = f'the value of {self._variable or str(path)!r}'
            _checked(path, what, leaf, found)

        def fn(_cotangents: Any, _: Any, *brought: Any) -> list[Any]:
            if missing:
                raise found
            return list(brought)

        brought = () if missing else (found,)
        return self._mapped(fn, [(path, [leaf])], *brought)[0][0]

    def _found(self, path: Path, index: int, tree: rules.Tree) -> Any:
        """A leaf of the variable; the error if there is no such variable.

        At initialization it may come later, and nobody differentiates that.
        """
        stored, owner = tree
        variable, collection = self._variable or str(path), self._collection
        # The variable, or what is at the place of the leaf in it: a tuple for a tuple.
        for name in (variable, variable + path[len(path.variable) :]):
            names = tuple(name.strip('/').split('/'))
            absolute = names if name.startswith('/') else (*owner, *names)
            leaves = stored.get((collection, absolute))
            if leaves is not None:
                return leaves[index] if index < len(leaves) else None
        known = [paths.Path.of(*key, owner) for key in stored if key[0] == collection]
        near = ', '.join(map(repr, nearest(variable, known)))
        return errors.UnknownNameError(
            f'there is no variable {variable!r} in the collection {collection!r}, '
            f'whose value was to be a cotangent; nearest: {near}.'
        )


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
