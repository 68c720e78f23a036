"""Exceptions of the analysis of gradient flow: programs and names it refuses."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from flax_sg.errors.base import FlaxSGError


class FlowNameError(FlaxSGError, LookupError):
    """A report is asked for an output or a parameter that is not in it.

    ::

        flow = sg.gradient_flow(losses, params)
        flow.status_of('gln', 'gln_0/kernal')  # raises
        flow.status_of('gln', 'gln_0/kernel')
    """

    def __init__(self, kind: str, name: str, names: Sequence[str]) -> None:
        near = difflib.get_close_matches(name, list(map(str, names)), 3, cutoff=0.0)
        shown = ', '.join(map(repr, near)) or 'none at all'
        super().__init__(
            f'there is no {kind} {name!r} among the {len(names)} of the report.\n'
            f'Nearest: {shown}.'
        )
