"""Rules that let values through unchanged and change their cotangents.

What such a rule does is a function of the cotangents, so a derivative of a gradient
differentiates that function too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors
from flax_sg.errors.texts import shown
from flax_sg.filters import predicates, tokens
from flax_sg.filters.paths import Path
from flax_sg.internals import tracing
from flax_sg.internals.types import Array, Leaf, Scalar
from flax_sg.rules import primitives, rules
from flax_sg.trees.leaves import is_differentiable


def has_to_act(rewrite: rules.Rewrite, path: Path, leaf: Leaf) -> bool:
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
                'Select real or complex variables; True selects those and no others.'
            )
        return False
    # JAX differentiates tracers only: every other array is a constant.
    return rewrite.rule.of_constants or isinstance(leaf, tracing.Tracer)


class OnCotangents(rules.Keyed):
    """A rule that lets values through.

    Args:
        name: the name of the function of ``nn`` that makes it.
        *operands: numbers and arrays that it needs. Arrays of numpy are copied.
        parts: what else tells the rule from others of its class.
    """

    acts_on = 'cotangents'

    def __init__(
        self, name: str, *operands: Array, parts: tuple[Hashable, ...] = ()
    ) -> None:
        super().__init__((name, *map(tokens.of_value, operands), *parts))
        self.name = name
        self.args = ''.join(f', {shown(x)}' for x in operands)
        self.operands = [x.copy() if isinstance(x, np.ndarray) else x for x in operands]

    def _mapped(
        self, fn: Callable[..., list[Any]], selected: rules.Selected
    ) -> list[list[Any]]:
        """The leaves of variables behind one identity, their cotangents through ``fn``.

        Args:
            fn: as for ``primitives.map_cotangents``; it gets the operands.
            selected: the variables, each with its leaves.
        """
        leaves = _leaves(selected)
        new = iter(primitives.map_cotangents(fn, leaves, self.operands))
        return [[next(new) for _ in of_path] for _, of_path in selected]


class Scale(OnCotangents):
    """Tangents and cotangents are multiplied by a number."""

    asks_path = False

    def __init__(self, factor: Scalar) -> None:
        super().__init__('scale_gradient', factor)

    def __call__(self, path: Path, leaf: Leaf) -> Array:
        """Returns the leaf, behind an identity that scales."""
        [factor] = self.operands
        return primitives.scale(leaf, factor)


class Each(OnCotangents):
    """The cotangent of each leaf goes through a function of its own.

    Args:
        name: as for ``OnCotangents``.
        fn: called as ``fn(path, cotangent, *operands)``; returns the new cotangent.
        *operands: numbers and arrays that ``fn`` needs.
    """

    def __init__(self, name: str, fn: Callable[..., Any], *operands: Array) -> None:
        super().__init__(name, *operands, parts=(tokens.of_object(fn),))
        self._fn = fn

    def __call__(self, path: Path, leaf: Leaf) -> Array:
        """Returns the leaf, behind an identity that maps its cotangent."""
        of_user = self._fn  # JAX keeps ``fn``: with ``self``, the operands as well.

        def fn(
            cotangents: Sequence[Any], _: Sequence[Array], *operands: Array
        ) -> list[Any]:
            new = [of_user(path, *cotangents, *operands)]
            name = f'what {predicates.describe(of_user)} returns'
            return _checked(path, name, cotangents, new)

        return self._mapped(fn, [(path, [leaf])])[0][0]


def replaced(path: Path, cotangent: Array, value: Array) -> Array:
    """A value in the place of a cotangent; a single number is repeated."""
    if value.ndim:
        return _checked(path, 'the value', [cotangent], [value])[0]
    return jnp.broadcast_to(value.astype(cotangent.dtype), cotangent.shape)


def clipped_by_value(_: Path, cotangent: Array, bound: Scalar) -> Array:
    """A cotangent with each number, or each part of a complex one, within a bound."""
    bound = bound.astype(cotangent.real.dtype)
    if not jnp.iscomplexobj(cotangent):
        return jnp.clip(cotangent, -bound, bound)
    parts = cotangent.real, cotangent.imag
    return jax.lax.complex(*(jnp.clip(part, -bound, bound) for part in parts))


def clipped_by_norm(_: Path, cotangent: Array, bound: Scalar) -> Array:
    """A cotangent that is scaled down to a norm."""
    return _scaled_down([cotangent], [cotangent], bound)[0]


def printed(path: Path, cotangent: Array) -> Array:
    """A cotangent that is printed whenever the program runs."""
    jax.debug.callback(functools.partial(_print, str(path)), cotangent)
    return cotangent


def _print(path: str, cotangent: Array) -> None:
    print(f'cotangent of {path}: {cotangent}')


class ClipGlobalNorm(OnCotangents):
    """All leaves are scaled down to a norm that they have together."""

    jointly: ClassVar[bool] = True
    asks_path = False

    def __init__(self, bound: Scalar) -> None:
        super().__init__('clip_gradient', bound)

    def together(self, selected: rules.Selected) -> list[list[Any]]:
        """Returns the leaves behind one identity."""

        def fn(
            cotangents: Sequence[Any], flags: Sequence[Array], bound: Scalar
        ) -> list[Any]:
            # A leaf that is not differentiated, such as a frozen one, does not count.
            counted = [ct for ct, flag in zip(cotangents, flags, strict=True) if flag]
            return _scaled_down(cotangents, counted, bound)

        return self._mapped(fn, selected)


def _scaled_down(
    cotangents: Sequence[Any], counted: Sequence[Any], bound: Scalar
) -> list[Any]:
    """Cotangents, times the factor that brings the counted ones within the bound."""
    square = functools.reduce(operator.add, map(_square, counted))
    bound = bound.astype(square.dtype)
    over = square > bound * bound
    # The root has no derivative at zero, where it is not needed.
    factor = jnp.where(over, bound / jnp.sqrt(jnp.where(over, square, 1)), 1)
    return [ct * factor.astype(ct.dtype) for ct in cotangents]


def _square(x: Array) -> Array:
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
    # A target gets the cotangent of a source that nothing differentiates, too.
    of_constants: ClassVar[bool] = True

    def __init__(self, sources: Mapping[str, str], add: bool) -> None:
        super().__init__('copy_cotangent', parts=(tuple(sources.items()), add))
        self._sources, self._add = dict(sources), add

    def together(self, selected: rules.Selected) -> list[list[Any]]:
        """Returns the leaves behind one identity."""
        if not any(isinstance(leaf, tracing.Tracer) for leaf in _leaves(selected)):
            return super().together(selected)
        pairs = self._pairs(selected)

        def fn(cotangents: Sequence[Any], _: Sequence[Array]) -> list[Any]:
            out = list(cotangents)
            for target, source in pairs:
                new = cotangents[source]
                out[target] = new + cotangents[target] if self._add else new
            return out

        return self._mapped(fn, selected)

    def _pairs(self, selected: rules.Selected) -> list[tuple[int, int]]:
        """The indices of leaves, each target with its source."""
        indices: dict[tuple[str, str], list[int]] = {}
        leaves: list[Any] = []
        for path, of_path in selected:
            numbers = range(len(leaves), len(leaves) + len(of_path))
            # A name is that of a variable, or of a leaf within one.
            for name in {str(path), str(path.variable)}:
                indices.setdefault((path.collection, name), []).extend(numbers)
            leaves += of_path
        pairs: list[tuple[int, int]] = []
        for (collection, target), targets in indices.items():
            source = self._sources.get(target)
            sources = indices.get((collection, str(source)), [])
            if source is None or not sources:
                continue  # ``init`` may make the source after the target.
            old, new = ([jax.typeof(leaves[i]) for i in x] for x in (targets, sources))
            _checked(target, f'that of {source!r}', old, new)
            pairs += zip(targets, sources, strict=True)
        return pairs


def _leaves(selected: rules.Selected) -> list[Any]:
    """The leaves of all selected variables."""
    return [leaf for _, of_path in selected for leaf in of_path]


def _checked(
    path: str, name: str, expected: Sequence[Any], cotangents: list[Array]
) -> list[Any]:
    """Cotangents, if they have the shapes and dtypes of the expected ones."""
    wanted, forms = (
        [(getattr(x, 'shape', None), getattr(x, 'dtype', None)) for x in leaves]
        for leaves in (expected, cotangents)
    )
    if forms != wanted:
        raise errors.CotangentError(
            f'the cotangent of {str(path)!r} is {", ".join(map(shown, expected))}, and '
            f'{name} is {", ".join(map(shown, cotangents))}.\n'
            'A cotangent has the shape and the dtype of its parameter.'
        )
    return cotangents
