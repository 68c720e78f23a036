"""Exceptions of rules for cotangents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flax_sg.errors.base import FlaxSGError
from flax_sg.errors.trees import shown


class ForwardModeError(FlaxSGError, TypeError):
    """A derivative forwards was asked for of a parameter whose cotangent is mapped.

    A function of cotangents says what happens on the way back, and nothing of the way
    forward::

        with nn.clip_gradient('encoder/**', norm=1.0):
            jax.jvp(loss, (params,), (direction,))  # raises; so do jax.jacfwd and
            jax.grad(loss)(params)                  # jax.linearize; this is right

    ``nn.scale_gradient``, ``nn.reverse_gradient`` and ``nn.stop_gradient`` work in both
    directions. A derivative forwards *of a gradient* is right too.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f'{what} has no derivative forwards (jax.jvp, jax.jacfwd, jax.linearize): '
            'what is to happen is known for cotangents, on the way back.\n'
            'Use jax.grad, jax.vjp or jax.jacrev (for a Hessian jax.jacrev twice, or '
            'jax.jacfwd of jax.grad), or leave the parameter out of what is '
            'differentiated forwards.'
        )


class CotangentShapeError(FlaxSGError, TypeError):
    """What takes the place of a cotangent has another shape or dtype than that.

    ::

        nn.map_cotangent('w', lambda path, ct: jnp.sum(ct))        # wrong: a scalar
        nn.map_cotangent('w', lambda path, ct: ct / jnp.sum(ct))
    """

    def __init__(self, path: str, what: str, expected: Any, found: Any) -> None:
        super().__init__(
            f'the cotangent of {str(path)!r} is {shown(expected)}, and {what} is '
            f'{shown(found)}.\n'
            'A cotangent has the shape and the dtype of its parameter.'
        )


class NoCotangentError(FlaxSGError, TypeError):
    """A rule for cotangents was asked for on a variable that has none.

    ::

        nn.scale_gradient('steps', 0.5)  # raises if it holds an integer
        nn.scale_gradient(True, 0.5)     # takes real and complex variables only
    """

    def __init__(self, path: str, leaf: Any, rule: object) -> None:
        super().__init__(
            f'{rule} selects {str(path)!r}, which has no cotangent: it holds '
            f'{shown(leaf)}.\n'
            'Select real or complex variables; True takes those and no others.'
        )


class CopyCycleError(FlaxSGError, ValueError):
    """Cotangents are to be copied in a circle.

    ::

        nn.copy_cotangent({'a': 'b', 'b': 'a'})  # raises: which one is first?
        nn.copy_cotangent({'a': 'b', 'b': 'c'})  # b takes that of c, a that of b then
    """

    def __init__(self, cycle: Sequence[str]) -> None:
        super().__init__(
            'cotangents are copied in a circle: '
            f'{" <- ".join(map(repr, [*cycle, cycle[0]]))}.\n'
            'Each target is given with its source, {target: source}; leave one out.'
        )


class CotangentValueError(FlaxSGError, ValueError):
    """A rule for cotangents was given a number or a choice that means nothing.

    ::

        nn.clip_gradient('encoder/**')                        # wrong: clip what?
        nn.clip_gradient('encoder/**', norm=1.0)
        nn.scale_gradient('encoder/**', jnp.array([1., 2.]))  # wrong: one number
    """


class MissingVariableError(FlaxSGError, KeyError):
    """A variable whose value shall be a cotangent is not there.

    ::

        nn.replace_cotangent('w', variable='targt')  # raises when it is differentiated
    """

    def __init__(self, path: str, collection: str, known: Iterable[str]) -> None:
        super().__init__(
            f'there is no variable {path!r} in the collection {collection!r}, whose '
            f'value was to be a cotangent; nearest: {", ".join(map(repr, known))}.'
        )

    # A KeyError shows its message as a key.
    __str__ = Exception.__str__


class TracerInRuleError(FlaxSGError, TypeError):
    """A function of cotangents reads a traced value that it was not handed.

    What it does is part of the keys of JAX's caches, where no traced value may be::

        @jax.jit
        def step(params, factor):
            nn.map_cotangent('w', lambda path, ct: factor * ct)             # raises
            nn.map_cotangent('w', lambda path, ct, f: f * ct, factor)
    """

    def __init__(self, fn: str, problem: str) -> None:
        super().__init__(
            f'{fn} reads {problem}\n'
            'Hand it over: nn.map_cotangent(where, fn, value) calls '
            'fn(path, cotangent, value).'
        )


class SplitSelectionError(FlaxSGError, RuntimeError):
    """Parameters that a rule takes together are not known at one place.

    A block was opened in the body of a transform, and selects variables of modules
    that come there by different ways: the body's own, one that was handed in, one that
    a function closes over::

        with nn.clip_gradient(True, global_norm=1.0):  # raises in the body of nn.scan,
            y = self.cell(self.shared(x))              # if ``shared`` was handed in

    Open the block around the transform, or select the one or the other.
    """

    def __init__(self, rewrite: object, path: str) -> None:
        super().__init__(
            f'{rewrite!r} takes its parameters together, and {str(path)!r} lies in a '
            'module that came into the transform around the block by another way.\n'
            'Open the block around the transform, or leave that module out.'
        )
