"""Rules that let values through as they are and change what comes back.

Here are those that look at one leaf at a time, in ``joint.py`` those that look at all
selected leaves at once. What they do to cotangents is a function of these, so that a
derivative of a gradient is the true one.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flax_sg import errors
from flax_sg.errors.texts import brief, shown
from flax_sg.filters import predicates
from flax_sg.filters.paths import Path
from flax_sg.rules import constants, custom_gradients, rules


# No dataclasses: where a rule stands in a field of a module, ``nn.jit`` would look at
# the fields of the dataclass, arrays and all.
class OnCotangents(rules.Rule):
    """A rule that lets values through.

    Args:
        *brought: numbers and arrays that it needs.
        parts: what else tells it from others of its class.
    """

    in_extent: ClassVar[bool] = True

    def __init__(self, *brought: Any, parts: tuple[Hashable, ...] = ()) -> None:
        self._key = (type(self), *map(constants.key_of, brought), *parts)
        self.brought = brought

    def key(self) -> Hashable:
        """All that tells it from others, without arrays."""
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnCotangents) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Scale(OnCotangents):
    """Tangents and cotangents are multiplied by a number."""

    name: ClassVar[str] = 'scale_gradient'
    asks_path: ClassVar[bool] = False

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Returns the leaf, behind an identity that scales."""
        [factor] = self.brought
        return custom_gradients.scale(leaf, jnp.asarray(factor).astype(leaf.dtype))


class Each(OnCotangents):
    """The cotangent of each leaf goes through a function of its own."""

    @abc.abstractmethod
    def mapped(self, path: Path, cotangent: Any, *brought: Any) -> Any:
        """Returns the cotangent to go on with."""

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Returns the leaf, behind an identity with this way back."""

        def fn(cotangents: Sequence[Any], _: Any, *brought: Any) -> list[Any]:
            return [self.mapped(path, cotangents[0], *brought)]

        brought = list(map(jnp.asarray, self.brought))
        return mapped_by(fn, self, [path], [leaf], brought)[0]


class Map(Each):
    """A function of the user."""

    name: ClassVar[str] = 'map_cotangent'

    def __init__(self, fn: Callable[..., Any], values: tuple[Any, ...]) -> None:
        self._fn = fn
        traced = predicates.tracer_in(fn)
        if traced is not None:
            found = f'{brief(traced[1])} as {traced[0]!r}.'
            raise _reads_tracer(predicates.describe(fn), found)
        super().__init__(*values, parts=(constants.identity_of(fn),))

    def mapped(self, path: Path, cotangent: Any, *brought: Any) -> Any:
        """Returns what the function does."""
        described = predicates.describe(self._fn)
        try:
            out = self._fn(path, cotangent, *brought)
        except Exception as error:
            error.add_note(f'raised by {described} for the cotangent of {str(path)!r}')
            raise
        return checked(path, f'what {described} returns', cotangent, out)


class ClipValue(Each):
    """Each number is clipped."""

    name: ClassVar[str] = 'clip_gradient'
    asks_path: ClassVar[bool] = False

    def mapped(self, path: Path, cotangent: Any, *brought: Any) -> Any:
        """Returns the cotangent between plus and minus the bound."""
        del path
        bound = brought[0].astype(cotangent.real.dtype)
        if jnp.iscomplexobj(cotangent):
            parts = (
                jnp.clip(p, -bound, bound) for p in (cotangent.real, cotangent.imag)
            )
            return jax.lax.complex(*parts)
        return jnp.clip(cotangent, -bound, bound)


class ClipNorm(Each):
    """Each leaf is scaled down to a norm."""

    name: ClassVar[str] = 'clip_gradient'
    asks_path: ClassVar[bool] = False

    def mapped(self, path: Path, cotangent: Any, *brought: Any) -> Any:
        """Returns the cotangent with a norm of at most the bound."""
        del path
        return scaled_down([cotangent], [cotangent], brought[0])[0]


class Fill(Each):
    """A value takes the place of the cotangent."""

    name: ClassVar[str] = 'replace_cotangent'
    asks_path: ClassVar[bool] = False

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Checks the value before anything is differentiated."""
        [value] = self.brought
        if jnp.ndim(value):
            checked(path, 'the value', leaf, value)
        return super().__call__(path, leaf)

    def mapped(self, path: Path, cotangent: Any, *brought: Any) -> Any:
        """Returns the value; a single number is repeated."""
        del path
        value = brought[0].astype(cotangent.dtype)
        return jnp.broadcast_to(value, cotangent.shape)


class Print(Each):
    """The cotangent is printed."""

    name: ClassVar[str] = 'print_cotangent'

    def mapped(self, path: Path, cotangent: Any, *brought: Any) -> Any:
        """Returns the cotangent."""
        jax.debug.callback(functools.partial(_print, str(path)), cotangent)
        return cotangent


def mapped_by(
    fn: Callable[..., list[Any]],
    rule: rules.Rule,
    paths: Sequence[Path],
    leaves: Sequence[Any],
    brought: Sequence[Any],
) -> list[Any]:
    """Leaves behind one identity, with ``fn`` on the way back.

    Args:
        fn: as for ``custom_gradients.map_cotangents``.
        rule: whose it is, for errors.
        paths: the variables of the leaves, for errors.
        leaves: the leaves.
        brought: arrays that ``fn`` needs.
    """
    names = ', '.join(repr(str(path)) for path in paths[:3])
    more = f' and {len(paths) - 3} more' if len(paths) > 3 else ''
    what = f'nn.{rule.name} of {names}{more}'
    return custom_gradients.map_cotangents(fn, what, leaves, brought)


def checked(path: str, what: str, expected: Any, found: Any) -> Any:
    """What was found, if it can be the cotangent of a leaf like ``expected``."""
    if not hasattr(found, 'dtype') or (
        (expected.shape, expected.dtype) != (found.shape, found.dtype)
    ):
        raise wrong_cotangent(path, what, expected, found)
    return found


def scaled_down(
    cotangents: Sequence[Any], counted: Sequence[Any], bound: Any
) -> list[Any]:
    """Cotangents, times what brings the norm of some of them down to the bound."""
    square = functools.reduce(operator.add, map(_square, counted))
    bound = bound.astype(square.dtype)
    over = square > bound * bound
    # At zero the root has no derivative, and is not needed.
    factor = jnp.where(over, bound / jnp.sqrt(jnp.where(over, square, 1)), 1)
    return [ct * factor.astype(ct.dtype) for ct in cotangents]


def _square(x: Any) -> Any:
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    dtype = parts[0].dtype
    wide = dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
    return functools.reduce(
        operator.add, (jnp.sum(jnp.square(part.astype(wide))) for part in parts)
    )


def _print(path: str, cotangent: Any) -> None:
    print(f'cotangent of {path}: {cotangent}')


def wrong_cotangent(
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
