"""Wraps private names of Flax's lifted transforms.

For ``nn.scan``: the functions ``linen.transforms.scan``, ``lift.scan``,
``axes_scan.scan`` and ``axes_scan.broadcast``, of which :func:`scan_with` makes copies
with another loop; the order of the variables in the loop (:func:`param_path`); its name
in ``debug_path`` (:func:`is_in_scan`). ``lift._partial_pack``, through which all
transforms go, is hooked in ``patching.py``.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from flax.core import axes_scan, lift
from flax.core.scope import Scope
from flax.linen import transforms as linen_transforms

from flax_sg.internals import versions
from flax_sg.internals.types import PyTree

# Flax's names for its transforms.
JIT, SCAN, REMAT, MAP = 'jit', 'scan', 'remat', 'map_variables'

# The body of a scan: from the carry and a slice of xs to the carry and a slice of ys.
Body: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]

# ``debug_path`` names the transforms around each module: ``remat(scan(layers))``.
_SCAN_OR_REMAT = re.compile(rf'({SCAN}|{REMAT})\(')


def is_in_scan(scope: Scope) -> bool:
    """Whether the innermost lifted scan or remat around a scope is a scan."""
    for component in reversed(tuple(scope.debug_path)):
        lifts = _SCAN_OR_REMAT.findall(component)
        if lifts:
            return lifts[0] == SCAN
    return False


def scan_with(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a ``flax.linen.scan`` that calls ``loop`` instead of ``jax.lax.scan``.

    Flax has no argument for the loop. So this copies Flax's functions with another
    global for the loop. The rest runs Flax's own code, and Flax itself stays unchanged.
    """
    _check_loop()
    names = types.SimpleNamespace(scan=_core_scan_with(loop))
    return with_names(linen_transforms.scan, lift=names)


def _core_scan_with(loop: Callable[..., Any]) -> Callable[..., Any]:
    in_axes = with_names(axes_scan.scan, lax=types.SimpleNamespace(scan=loop))
    names = types.SimpleNamespace(scan=in_axes, broadcast=axes_scan.broadcast)
    return with_names(lift.scan, axes_scan=names)


def param_path(keys: Any, side: str) -> tuple[Any, ...] | None:
    """Returns the path of a parameter among the inputs or outputs of Flax's loop.

    Args:
        keys: the key path of a leaf. The inputs are (variables, random keys,
            arguments), the outputs are (results, variables). Variables are nested by
            group and scope.
        side: ``'in'`` for the inputs, ``'out'`` for the outputs.

    Returns:
        The path within the collection; None if the leaf is no parameter.
    """
    if keys[0].idx != ('in', 'out').index(side) or keys[3].key != 'params':
        return None
    return keys[4:]


@functools.cache
def _check_loop() -> None:
    """Raises unless Flax calls our loop, with variables where ``param_path`` looks."""
    names: list[Any] = []

    def loop(body: Body, init: PyTree, xs: PyTree, **_: Any) -> Any:
        _, out = body(init, xs)
        for side, tree in (('in', xs), ('out', out)):
            for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
                names.extend(param_path(keys, side) or ())
        return init, out

    def hands_over() -> bool:
        scan = _core_scan_with(loop)(
            lambda scope, carry: (carry, None),
            variable_axes={'params': 0},
            split_rngs={'params': False},
            length=1,
            check_constancy_invariants=False,
        )
        scan(Scope({'params': {'w': np.ones(1)}}, mutable=True), ())
        return [key.key for key in names] == ['w', 'w']

    versions.check({'flax.core.axes_scan.scan': hands_over}, 'scan(frozen_layers=)')


def with_names(fn: Callable[..., Any], **names: Any) -> Any:
    """Copies a function, with other objects for some of its globals."""
    copy = types.FunctionType(
        fn.__code__,
        {**fn.__globals__, **names},
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
