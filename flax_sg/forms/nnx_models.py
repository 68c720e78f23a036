"""Says what to write where a form of linen is used on a model of NNX.

A block of linen sees no Variable of NNX, so it stops nothing, and a plain ``True`` may
match nothing. NNX reads its Variables in too many ways to be watched. So a block that
has met no variable of linen looks at what the user's code around it names.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Sequence
from typing import Any

from flax_sg.engine.blocks import Block
from flax_sg.internals import frames, modules
from flax_sg.internals.optional import is_of_nnx
from flax_sg.internals.places import warn_once


def is_model(value: Any) -> bool:
    """Whether something is a model of NNX."""
    return is_of_nnx(type(value), 'Module')


def warn_if_missed(block: Block, values: Sequence[Any] | None = None) -> None:
    """Warns once for each line that opens a block of linen for a model of NNX.

    Args:
        block: a block that is about to close.
        values: where to look for such a model; by default all that the user's code
            around the block names. If a module of linen is there, the block may be for
            that one: a compiled program reads no variables.
    """
    nnx = sys.modules.get('flax.nnx')
    if block.decisions or nnx is None:
        return
    values = _named_in(frames.frame_of_user(2)) if values is None else values
    # By the class of classes, not by ``is_model``: this runs in each block around a
    # compiled program, and it takes a third of the time.
    meta = type(nnx.Module)
    found = [cls.__name__ for cls in map(type, values) if isinstance(cls, meta)]
    if found and not any(map(_has_linen, values)):
        warn_once(
            f'The block of {block.rewrite!r}, opened at {block.place}, met no variable '
            f'of linen. {found[0]} is a model of NNX, which it does not see.\n'
            'Write nnx.stop_gradient(model, where), from flax_sg import nnx, and call '
            'what it returns.',
            block.place,
        )


def _named_in(frame: types.FrameType) -> list[Any]:
    """The local values of a frame, and the global ones that its code names."""
    code, inner, outer = frame.f_code, frame.f_locals, frame.f_globals
    found = [*map(outer.get, code.co_names)]
    if inner is not outer:
        found += inner.values()
    # Before Python 3.13 a function's frame keeps a copy of its variables from now on,
    # and with it what the function deletes. Nobody else may have asked for the copy.
    is_copy = bool(code.co_flags & inspect.CO_OPTIMIZED) and type(inner) is dict
    if is_copy and sys.getrefcount(inner) <= 3:
        inner.clear()
    return found


def _has_linen(value: Any) -> bool:
    """Whether something is a module of linen, or a model of NNX with one in it."""
    if not is_model(value):
        return isinstance(value, modules.Module)
    parts = sys.modules['flax.nnx'].iter_graph(value)
    return any(isinstance(part, modules.Module) for _, part in parts)
