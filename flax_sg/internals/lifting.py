"""Private names of Flax's lifted transforms."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from flax.core import axes_scan, lift
from flax.core.scope import in_filter
from flax.linen import transforms as linen_transforms


def axes_of_caller() -> Callable[[str], tuple[int | None, int | None]]:
    """The axes along which the lifted transform calling ``pack`` maps a collection.

    ``nn.vmap`` and ``nn.scan`` may take a collection in along one axis and give it out
    along another. Only the inner function of the lift knows, two frames up.
    """
    names = sys._getframe(2).f_locals
    fn = names.get('fn')
    cells = getattr(fn, '__closure__', None) or ()
    free = fn.__code__.co_freevars if fn is not None and cells else ()
    closure: dict[str, Any] = {
        name: cell.cell_contents
        for name, cell in zip(free, cells, strict=True)
        if name in ('variable_in_axes', 'variable_out_axes')
    }

    def axis(collection: str, side: str) -> Any:
        axes = closure.get(f'variable_{side}_axes', ())
        filters = names[f'{side}_variable_filters']
        unmapped = len(filters) - len(axes)
        number = next(n for n, f in enumerate(filters) if in_filter(f, collection))
        return axes[number - unmapped] if number >= unmapped else None

    return lambda collection: (axis(collection, 'in'), axis(collection, 'out'))


def scan_with(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``flax.linen.scan`` that runs its loop by another function than ``jax.lax.scan``.

    Flax takes no function in its place. Its own code with other names for the loop is
    Flax's in all that is done around it, and nothing of Flax is replaced for others.
    """
    in_axes = _with_names(axes_scan.scan, lax=types.SimpleNamespace(scan=loop))
    names = types.SimpleNamespace(scan=in_axes, broadcast=axes_scan.broadcast)
    in_scopes = _with_names(lift.scan, axes_scan=names)
    return _with_names(
        linen_transforms.scan, lift=types.SimpleNamespace(scan=in_scopes)
    )


def _with_names(fn: Any, **names: Any) -> Any:
    """A function with other objects for some names of its module."""
    copy = types.FunctionType(
        fn.__code__,
        {**fn.__globals__, **names},
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
