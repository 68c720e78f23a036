"""Which versions of Flax and JAX are supported, and what is said of others.

A newer release is tried, not refused. What gradients depend on is checked by the
import, see ``required.py``. A name that one feature needs is checked when that feature
is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax
import jax

from flax_sg import errors

# The oldest and newest that the tests have run on, by ``python3 dev.py versions``.
SUPPORTED = {'flax': ('0.12.0', '0.12.12'), 'jax': ('0.7.2', '0.12.0.1')}


def check(programs: Mapping[str, Callable[[], bool]], who: str = 'flax_sg') -> None:
    """Runs programs, each of which says whether Flax or JAX do what its name states.

    Raises:
        UnsupportedVersionError: if one of them says no, or fails.
    """
    faults = []
    for stated, program in programs.items():
        try:
            holds, reason = program(), ''
        except Exception as error:  # Whatever a name that is gone leads to.
            holds, reason = False, f' ({type(error).__name__}: {error})'
        if not holds:
            faults.append(stated + reason)
    if faults:
        raise unsupported(faults, who)


def call(who: str, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a private function of Flax or JAX that one feature needs.

    Raises:
        UnsupportedVersionError: if it is gone, or takes other arguments.
    """
    place = f'{owner.__name__}.{name}'
    try:
        found = getattr(owner, name)
        if inspect.isfunction(found):
            inspect.signature(found).bind(*args, **kwargs)
    except (AttributeError, TypeError) as error:
        raise unsupported([f'{place} ({error})'], who) from None
    return found(*args, **kwargs)


def unsupported(
    faults: Sequence[str], who: str = 'flax_sg'
) -> errors.UnsupportedVersionError:
    """Flax or JAX lack a name that the library rests on, or it means something else."""
    found = f'flax {flax.__version__} and jax {jax.__version__}'
    ranges = [f'{name} {old} to {new}' for name, (old, new) in SUPPORTED.items()]
    pins = [f"'{name}>={old},<={new}'" for name, (old, new) in SUPPORTED.items()]
    lines = [
        f'{who} needs what this installation does not have:',
        *(f'  {fault}' for fault in faults),
        f'Found {found}; supported are {" with ".join(ranges)}.',
        f'Fix: pip install {" ".join(pins)}',
    ]
    return errors.UnsupportedVersionError('\n'.join(lines))


def load_once(namespace: dict[str, Any]) -> None:
    """The first line of a module that holds what there is once in a process.

    Args:
        namespace: ``globals()`` of the module. A reload runs its code in the same one.
    """
    if namespace.setdefault('_loads', 0):
        raise errors.UnsupportedVersionError(
            f'{namespace["__name__"]} cannot be reloaded: open blocks, and what JAX '
            'keeps of compiled programs, rest on what it holds.\n'
            'Start Python anew; flax_sg and flax_sg.linen can be reloaded.'
        )
    namespace['_loads'] = 1
