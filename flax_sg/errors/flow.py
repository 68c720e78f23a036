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


class ValueNeededError(FlaxSGError, TypeError):
    """A function needs values to run, and the analysis has shapes alone.

    Shapes that depend on values, ``if`` on an array, and the like::

        def loss(params, x):
            return jnp.sum(params['w'][jnp.nonzero(x)])  # raises

        def loss(params, x):
            return jnp.sum(jnp.where(x != 0, params['w'], 0.0))
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f'{name} needs the values of its arguments, and is run on their shapes.\n'
            'What JAX says of it stands above. Numbers in arguments that are not '
            'differentiated stay what they are; or bind the value, as a number or an '
            'array of numpy: functools.partial(fun, ...).'
        )


class NoOutputError(FlaxSGError, TypeError):
    """A function has no output that could be differentiated, or one that is no array.

    ::

        sg.gradient_flow(lambda p: jnp.argmax(p), params)  # raises: an integer
        sg.gradient_flow(lambda p: (p.sum(), 'ok'), params)  # raises: a string
        sg.gradient_flow(lambda p: (p.sum(), 'ok'), params, has_aux=True)
    """

    def __init__(self, name: str, outputs: Sequence[tuple[str, str]]) -> None:
        found = [f'  {path!r}: {what}' for path, what in outputs] or ['  none at all']
        super().__init__(
            f'the outputs of {name} cannot be differentiated:\n'
            + '\n'.join(found)
            + '\nReturn real or complex arrays, and all else beside them: '
            'return outputs, aux with has_aux=True.'
        )


class NotTracedError(FlaxSGError, NotImplementedError):
    """A parameter goes where it cannot be followed.

    Into a host callback, a mutable array, a primitive without a derivative::

        def loss(params):
            return jax.pure_callback(np.sin, params['w'], params['w'])  # raises

    Stop what goes in, or give it a rule (``jax.custom_jvp``, ``jax.custom_vjp``)::

        w = jax.lax.stop_gradient(params['w'])
    """

    def __init__(
        self, parameters: Sequence[str], equations: Sequence[tuple[str, str]]
    ) -> None:
        places = [f'  {name}, at {source}' for name, source in equations]
        super().__init__(
            f'{", ".join(map(repr, parameters[:3]))}'
            f'{" and others" * (len(parameters) > 3)} goes where no report can follow '
            'it (a host callback, a mutable array, what has no derivative):\n'
            + '\n'.join(places)
            + '\nIf no gradient comes back from there, stop it '
            'before, with jax.lax.stop_gradient. Otherwise give that part a rule: '
            'jax.custom_jvp, jax.custom_vjp.'
        )


class DerivedFilterError(FlaxSGError, LookupError):
    """A filter from ``sg.live`` is asked for a variable that it has not seen.

    ::

        live = sg.live(loss, params)
        sg.freeze(tx, ~live).init(other_params)  # raises
        sg.freeze(tx, ~live).init(params)
    """

    def __init__(self, path: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(path, known, 3, cutoff=0.0)
        super().__init__(
            f'there was no {path!r} in the parameters that this filter was derived '
            f'from by sg.live.\nNearest: {", ".join(map(repr, near)) or "none"}.\n'
            'Derive it again, from the tree that it is used for.'
        )
