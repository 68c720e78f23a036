"""Exceptions of trees in parts: a leaf is missing, double, or in another place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from flax_sg.errors.base import FlaxSGError


def shown(leaf: Any) -> str:
    """A leaf in a few words."""
    if hasattr(leaf, 'dtype') and hasattr(leaf, 'shape'):
        return f'{leaf.dtype}{list(leaf.shape)}'
    if isinstance(leaf, list):
        return f'[{", ".join(map(shown, leaf))}]'
    text = repr(leaf)
    return text if len(text) <= 40 else f'{type(leaf).__name__} object'


class AbsentLeafError(FlaxSGError, AttributeError, TypeError):
    """A leaf was asked for that is not in this part of the tree.

    It was not selected, so nothing was computed for it::

        grads = sg.grad(loss, wrt='head/**')(params)
        grads['backbone']['w'] + 1.0  # raises

    Select it, or ask for zeros in its place::

        sg.grad(loss, wrt=['head/**', 'backbone/w'])(params)
        sg.grad(loss, wrt='head/**', absent='zeros')(params)
    """

    def __init__(self) -> None:
        super().__init__(
            'there is no leaf here: ABSENT stands for one that is in another part of '
            'the tree, or that was not selected, so that no gradient was computed.\n'
            "Select it in where= or wrt=, or pass absent='zeros' to the gradient call."
        )


class OverlapError(FlaxSGError, ValueError):
    """Two parts of a tree have a leaf at the same place.

    ::

        a, b = sg.partition(params, 'head/**')
        sg.combine(a, params)  # raises
        sg.combine(a, b)
    """

    def __init__(self, path: str, one: Any, other: Any) -> None:
        super().__init__(
            f'two parts have a leaf at {str(path)!r}: '
            f'{shown(one)} and {shown(other)}.\n'
            'Each leaf has to be in one part, and ABSENT in the others, as '
            'sg.partition makes them.'
        )


class UnclassifiedLeafError(FlaxSGError, ValueError):
    """A leaf has no label, or more than one.

    ::

        sg.partition_n(params, {'gln': 'gln_*/**'})  # raises if there is a 'dec'
        sg.partition_n(params, {'gln': 'gln_*/**', 'rest': ~as_filter('gln_*/**')})
    """

    def __init__(
        self, path: str, labels: Sequence[Any], known: Sequence[Any] | None
    ) -> None:
        if labels:
            found = f'has {len(labels)} labels: {", ".join(map(repr, labels))}'
            fix = 'Let the filters exclude each other, with & and ~.'
        elif known is None:
            found = 'has no label: the function returned None'
            fix = 'Return a label for it.'
        else:
            found = f'has no label: none of {", ".join(map(repr, known))} takes it'
            fix = 'Give a filter for it, such as the complement (~) of the others.'
        super().__init__(f'the leaf at {str(path)!r} {found}.\n{fix}')


class StructureError(FlaxSGError, ValueError):
    """Two trees that belong together have different structures.

    ::

        state = tx.init(params)
        tx.update(grads, state, other_params)  # raises
        sg.combine(live, {})  # raises

    Args:
        name_a: what the one tree is.
        name_b: what the other one is.
        a: the leaves of the one, by path.
        b: the leaves of the other, by path.
        structure_a: the structure of the one, in words.
        structure_b: the structure of the other, in words.
        pruned: whether the other may lack what the one has, and that is no fault.
    """

    def __init__(
        self,
        name_a: str,
        name_b: str,
        a: Mapping[Any, Any],
        b: Mapping[Any, Any],
        structure_a: str = '',
        structure_b: str = '',
        pruned: bool = False,
    ) -> None:
        lines = [f'{name_a} and {name_b} have different structures.']
        if not pruned:
            lines.extend(_only_in(a, b, name_a, name_b))
        lines.extend(_only_in(b, a, name_b, name_a))
        if len(lines) == 1:
            lines.append(f'  {name_a}: {structure_a}')
            lines.append(f'  {name_b}: {structure_b}')
        super().__init__('\n'.join(lines))


def _only_in(
    here: Mapping[Any, Any], there: Mapping[Any, Any], one: str, other: str
) -> list[str]:
    paths = [str(path) for path in here if path not in there]
    if not paths:
        return []
    near = difflib.get_close_matches(paths[0], list(map(str, there)), 1, cutoff=0.0)
    more = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
    hint = f'; nearest there: {near[0]!r}' if near else ''
    return [f'  {paths[0]!r}{more}: in {one}, not in {other}{hint}']


class NotDifferentiableError(FlaxSGError, TypeError):
    """What was selected by name cannot be differentiated.

    ::

        params = {'w': jnp.ones(3), 'step': jnp.array(3)}
        sg.grad(loss, wrt='step')(params)  # raises: an integer
        sg.grad(loss, wrt=True)(params)  # takes 'w' alone

    Only real and complex arrays and numbers have a gradient. A ``NonDifferentiable``
    has none by its type.
    """

    def __init__(self, where: object, leaves: Mapping[Any, Any]) -> None:
        lines = [f'{where!r} selects only what cannot be differentiated:']
        for path, leaf in list(leaves.items())[:3]:
            lines.append(f'  {str(path)!r}: {shown(leaf)}')
        if len(leaves) > 3:
            lines.append(f'  and {len(leaves) - 3} more')
        lines.append('Select real or complex leaves; True takes those and no others.')
        super().__init__('\n'.join(lines))


class ChangedValueError(FlaxSGError, ValueError):
    """A ``NonDifferentiable`` has been changed, most likely by an optimizer's decay.

    ::

        params = {'w': jnp.ones(3), 'n': sg.NonDifferentiable(100)}
        tx = optax.adamw(1e-3)  # wrong: decays every parameter
        tx = sg.freeze(optax.adamw(1e-3))  # skips it

    Where gradients of zero are all that an optimizer uses (``sgd``, ``adam``), it
    changes nothing.
    """

    def __init__(self, witness: object) -> None:
        super().__init__(
            'the value of a NonDifferentiable has been changed: what travels with it, '
            f'and is always 1.0, is {witness}.\n'
            'Weight decay, averaging and scaling change parameters that have no '
            'gradient. Wrap the optimizer: sg.freeze(tx).'
        )


class MissingLeafError(FlaxSGError, ValueError):
    """A leaf is needed, and ``ABSENT`` (or None, or a ``MaskedNode``) stands there.

    ::

        grads = sg.grad(loss, wrt='head/b')(params)
        tx = sg.freeze(optax.sgd(0.1), 'backbone/**')
        tx.update(grads, state, params)  # raises: 'head/w' is trained

        grads = sg.grad(loss, wrt='head/**')(params)
    """

    def __init__(self, what: str, path: str, why: str, fix: str) -> None:
        super().__init__(
            f'there is nothing at {str(path)!r} in {what}, and it {why}.\n{fix}'
        )


class DeclarationError(FlaxSGError, TypeError):
    """A class declares a field as trained that it does not have.

    ::

        @sg.trainable('kernal')  # raises
        class Layer(flax.struct.PyTreeNode):
            kernel: jax.Array

        @sg.trainable('kernel')
        class Layer(flax.struct.PyTreeNode): ...

    A class has to be registered with the names of its fields as keys, as flax.struct
    and ``jax.tree_util.register_dataclass`` do.
    """

    def __init__(self, cls: type, name: str, known: Sequence[str]) -> None:
        close = difflib.get_close_matches(name, known, 1)
        meant = f' Did you mean {close[0]!r}?' if close else ''
        super().__init__(
            f'{cls.__name__} declares the field {name!r} as trained; its fields are '
            f'{", ".join(map(repr, known)) or "none"}.{meant}'
        )

    @classmethod
    def no_class(cls, target: object, fields: Sequence[object]) -> DeclarationError:
        """The error for a decorator without names, or of no class."""
        error = cls.__new__(cls)
        TypeError.__init__(
            error,
            f'trainable{tuple(fields)!r} cannot be applied to {target!r}.\n'
            "Write @sg.trainable('kernel', ...) above a pytree class.",
        )
        return error


class UnboundModuleError(FlaxSGError, TypeError):
    """``of=`` is given something whose variables cannot be found.

    ::

        sg.grad(lambda: loss(model.apply(v, x)), of=model)()  # raises: not bound
        m = model.bind(v)
        sg.grad(lambda: loss(m(x)), of=m)()
    """

    def __init__(self, target: object) -> None:
        super().__init__(
            f'of={type(target).__name__}(...) has no variables: expected a bound '
            'module, such as model.bind(variables).'
        )


class NotFrozenError(FlaxSGError, TypeError):
    """Something is thawed or frozen that is no optimizer for it.

    ::

        tx = optax.chain(optax.clip(1.0), sg.freeze(optax.adam(1e-3), 'body/**'))
        sg.thaw(tx, state, params, 'body/**')  # raises: freeze goes outermost

        tx = sg.freeze(optax.chain(optax.clip(1.0), optax.adam(1e-3)), 'body/**')
        sg.thaw(tx, state, params, 'body/**')
    """

    def __init__(self, tx: object) -> None:
        super().__init__(
            f'thaw() takes what sg.freeze returned, got {type(tx).__name__}.\n'
            'Put sg.freeze outermost: sg.freeze(optax.chain(...), where).'
        )

    @classmethod
    def no_optimizer(cls, tx: object) -> NotFrozenError:
        """The error for something that is no optax transformation."""
        error = cls.__new__(cls)
        TypeError.__init__(
            error,
            f'freeze() takes an optax transformation, got {type(tx).__name__}.\n'
            "Write sg.freeze(optax.adam(1e-3), 'backbone/**').",
        )
        return error
