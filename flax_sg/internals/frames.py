"""Frames of the stack: which are the user's."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
import sys
import types

import flax
import jax

# Frames in these are not of the user's program.
LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), flax.__file__)
)

DEMO = os.path.join(LIBRARIES[0], 'demo') + os.sep


def frame(depth: int) -> types.FrameType:
    """A frame of the stack: 0 is that of the caller."""
    return sys._getframe(depth + 1)


# Files of this library, of Flax and JAX, and of the constructors of dataclasses.
_NOT_OF_USERS = (
    *LIBRARIES,
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,
    '<string>',
)


def frame_of_user(depth: int) -> types.FrameType:
    """The innermost frame of the user's program, from a depth on."""
    found = sys._getframe(depth + 1)
    while found.f_back is not None and found.f_code.co_filename.startswith(
        _NOT_OF_USERS
    ):
        found = found.f_back
    return found
