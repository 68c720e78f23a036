"""Finds the user's frames on the Python stack, and the names of their files."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types

import flax
import jax
from flax import traceback_util

_OURS, _FLAX, _JAX = (
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), flax.__file__, jax.__file__)
)
_NOT_OF_USERS = (_OURS, _FLAX, _JAX)
# Hooks run between a program and Flax. Tracebacks, and the lines that JAX notes for
# each operation, leave the hooks out, as they leave out Flax's own files.
traceback_util.register_exclusion(_OURS)
_STANDARD = sysconfig.get_path('stdlib') + os.sep


def is_of_user(code: types.CodeType) -> bool:
    """Whether code belongs to the user's program."""
    if code.co_filename == '<string>':
        # ``python -c``, but not what dataclasses and namedtuple compile.
        is_generated = code.co_qualname.startswith('__create_fn__')
        return not is_generated and code.co_varnames[:1] != ('_cls',)
    return _is_file_of_user(code.co_filename)


def is_installed(file: str) -> bool:
    """Whether a file belongs to a package that was installed, such as optax."""
    return 'site-packages' in file or 'dist-packages' in file


@functools.lru_cache(4096)
def _is_file_of_user(file: str) -> bool:
    # ``site-packages`` may lie inside the folder of the standard library.
    is_standard = file.startswith(_STANDARD) and not is_installed(file)
    return not is_standard and not file.startswith(_NOT_OF_USERS)


def frame_of_user(depth: int) -> types.FrameType:
    """Returns the innermost frame of the user's program, starting at ``depth``."""
    frame = sys._getframe(depth + 1)
    while frame.f_back is not None and not is_of_user(frame.f_code):
        frame = frame.f_back
    return frame


def file_name(file: str) -> str:
    """Returns the name of a source file as the user knows it.

    A notebook cell is compiled under a generated file name. IPython knows the name that
    its own tracebacks show, such as ``'In[3]'``.
    """
    ipython = sys.modules.get('IPython')
    shell = ipython and ipython.get_ipython()
    cell = shell and shell.compile.format_code_name(file)
    return cell[1] if cell else os.path.basename(file)
