"""Lists the supported versions of Flax and JAX, and makes the error for others.

Newer releases are allowed. The import checks all names that gradients depend on, see
``required.py``. A name that one feature needs is checked when that feature is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax
import jax

from flax_sg import errors

# The oldest and newest versions tested by ``python3 dev.py versions``.
SUPPORTED = {'flax': ('0.12.0', '0.12.12'), 'jax': ('0.7.2', '0.12.0.1')}


def check(programs: Mapping[str, Callable[[], bool]], who: str = 'flax_sg') -> None:
    """Checks what the library needs of Flax and JAX, with one program per statement.

    Args:
        programs: for each statement, a function that returns whether it holds.
        who: the feature that needs them, for the error.

    Raises:
        UnsupportedVersionError: if a program returns False or raises.
    """
    faults = []
    for stated, program in programs.items():
        try:
            holds, reason = program(), ''
        except Exception as error:  # A missing name may cause any error.
            holds, reason = False, f' ({type(error).__name__}: {error})'
        if not holds:
            faults.append(stated + reason)
    if faults:
        raise unsupported(faults, who)


def call(who: str, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a private function of Flax or JAX that one feature needs.

    Raises:
        UnsupportedVersionError: if it is missing, or takes other arguments.
    """
    try:
        fn = getattr(owner, name)
        if inspect.isfunction(fn):
            inspect.signature(fn).bind(*args, **kwargs)
    except (AttributeError, TypeError) as error:
        fault = f'{owner.__name__}.{name} ({error})'
        raise unsupported([fault], who) from None
    return fn(*args, **kwargs)


def unsupported(
    faults: Sequence[str], who: str = 'flax_sg'
) -> errors.UnsupportedVersionError:
    """Makes the error for private names of Flax or JAX that are missing or changed."""
    installed = f'flax {flax.__version__} and jax {jax.__version__}'
    ranges = [f'{name} {old} to {new}' for name, (old, new) in SUPPORTED.items()]
    pins = [f"'{name}>={old},<={new}'" for name, (old, new) in SUPPORTED.items()]
    lines = [
        f'{who} needs what this installation does not have:',
        *(f'  {fault}' for fault in faults),
        f'Found {installed}; supported are {" with ".join(ranges)}.',
        f'Fix: pip install {" ".join(pins)}',
    ]
    return errors.UnsupportedVersionError('\n'.join(lines))


def load_once(namespace: dict[str, Any]) -> None:
    """Makes a module with process-wide state raise an error when it is reloaded.

    Args:
        namespace: the module's ``globals()``. A reload reuses the same dict, which is
            how the second load is detected.
    """
    if namespace.setdefault('_loads', 0):
        raise errors.UnsupportedVersionError(
            f'{namespace["__name__"]} cannot be reloaded: open blocks, and what JAX '
            'keeps of compiled programs, rest on what it holds.\n'
            'Start Python anew; flax_sg and flax_sg.linen can be reloaded.'
        )
    namespace['_loads'] = 1
