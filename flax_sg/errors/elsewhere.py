"""Names that people look for in the wrong place, and what to write instead."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from pathlib import Path

from flax import linen

_LINEN = ', from flax_sg import linen as nn'

# Names of other libraries, or of another module of this one.
_COMMON = {
    'no_grad': 'nn.stop_gradient(True)' + _LINEN,
    'requires_grad': "sg.grad(loss, wrt='head/**')",
    'as_filter': 'sg.where',
    'of_type': 'sg.filters.of_type',
    'thaw': 'sg.adopt(tx, params, state), where tx freezes less',
    'unfreeze': 'sg.adopt(tx, params, state), where tx freezes less',
}


def missing(module: str, name: str, own: Mapping[str, str] | None = None) -> str:
    """The text of the AttributeError for a name that a module of ours lacks.

    >>> missing('flax_sg', 'Frozen')
    "module 'flax_sg' has no attribute 'Frozen': write nn.Frozen, from flax_sg import \
linen as nn"
    >>> missing('flax_sg.linen', 'Densse')
    "module 'flax_sg.linen' has no attribute 'Densse'"

    Args:
        module: the name of the module.
        name: the name that was asked for.
        own: what to write instead of names that are meant otherwise in this module.
    """
    instead = {**_COMMON, **(own or {})}
    is_of_linen = module != 'flax_sg.linen' and name in _names_of_linen()
    if name not in instead and is_of_linen:
        instead[name] = f'nn.{name}{_LINEN}'
    write = f': write {instead[name]}' if name in instead else ''
    return f'module {module!r} has no attribute {name!r}{write}'


@functools.cache
def _names_of_linen() -> frozenset[str]:
    """The names of ``flax_sg.linen``: those of Flax, and what its text imports as such.

    The import of linen, to look, would replace methods of Flax.
    """
    text = ''
    with contextlib.suppress(OSError):  # A package in an archive has no files.
        text = (Path(__file__).parents[1] / 'linen.py').read_text(encoding='utf-8')
    return frozenset([*dir(linen), *re.findall(r' as ([A-Za-z]\w+)$', text, re.M)])
