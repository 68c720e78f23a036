"""``freeze``: an optimizer that never sees what is frozen."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Generator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.dtypes import float0
from jax.sharding import AxisType

from flax_sg import errors, filters
from flax_sg.errors.texts import listed, raised_by, wrong_argument
from flax_sg.internals.places import Place, warn_once
from flax_sg.internals.tracing import Tracer
from flax_sg.internals.types import Array, Decision, Leaf, PyTree, Transformation
from flax_sg.optim.masks import parameters_of, trained_leaves
from flax_sg.optim.pausing import with_paused
from flax_sg.optim.selections import (
    Marked,
    Selection,
    inside,
    marks,
    names_of,
    rows_are_cut,
    structure_of,
)
from flax_sg.trees.leaves import (
    ABSENT,
    Leaves,
    check_unused,
    is_number,
    is_whole,
)
from flax_sg.trees.matching import gradient_of_each, other_shape
from flax_sg.trees.rows import Rows, rows_of
from flax_sg.trees.trainable import DECLARED, Declared


@dataclasses.dataclass(frozen=True)
class Freeze:
    """A transformation that is given the trained parameters alone.

    Attributes:
        tx: the wrapped transformation.
        where: what is frozen.
        unused: what to do with a filter that matches nothing.
    """

    tx: Transformation
    where: filters.Filter | Declared
    unused: str

    def _parameters(
        self, params: PyTree, unused: str = 'ignore'
    ) -> tuple[Leaves, list[Any]]:
        """The parameters, and for each whether it is trained, or which rows or part.

        Args:
            params: the parameters, or gradients in their place.
            unused: what to do with a filter that matches nothing.
        """
        leaves = parameters_of(params)
        with raised_by('sg.freeze'):
            # optax may ask for the state of a tree without leaves: no filter matches.
            unused = unused if leaves.values else 'ignore'
            parts = trained_leaves(leaves, self.where, unused)
        for part, path in zip(parts, leaves.paths, strict=True):
            is_of_rows = isinstance(part, filters.Part) and not part.is_of_conditions
            if is_of_rows and rows_are_cut():
                raise _rows_in_rows(path)
        return leaves, [
            rows_of(part, leaf, path) or part
            for part, (path, leaf) in zip(parts, leaves, strict=True)
        ]

    def init(self, params: PyTree) -> PyTree:
        """The state for what is trained, with ``ABSENT`` in place of the rest."""
        is_marked = marks()
        unused = 'ignore' if is_marked else self.unused
        leaves, trained = self._parameters(params, unused)
        if leaves.values and not any(map(filters.is_meant, trained)) and not is_marked:
            self._warn_of_nothing()
        with inside(trained):
            state = self.tx.init(pruned(leaves, trained))
        return Marked(state, Selection.of(leaves, trained)) if is_marked else state

    def _warn_of_nothing(self) -> None:
        """Warns that nothing is trained, unless the filter says so plainly."""
        where = self.where
        if isinstance(where, Declared) or where.may_be_empty or not where.atoms:
            return
        if self.unused != 'ignore':
            warn_once(
                f'sg.freeze(tx, {where!r}) freezes all that it is given: nothing is '
                'trained.\n'
                'sg.freeze names what is frozen, wrt= what is trained.\n'
                'Write sg.freeze(tx, ~sg.where(where)), or '
                'sg.freeze(tx, True) if that is meant.',
                Place.here(),
            )

    def _warn_of_conditions(self, leaves: Leaves, trained: Sequence[Any]) -> None:
        """Warns of parameters that a loss holds for a while, and ``tx`` updates.

        ``sg.live`` knows that there is a condition, and cannot carry it.
        """
        if isinstance(self.where, Declared):
            return
        held = filters.conditional(self.where)
        moved = [
            path
            for path, part in zip(leaves.paths, trained, strict=True)
            if path.place in held
            and filters.is_meant(part)
            and not (isinstance(part, filters.Part) and part.is_conditional)
        ]
        if moved:
            warn_once(
                f'sg.freeze(tx, ~live): a condition in the loss stops {listed(moved)} '
                'for a while, and the optimizer moves that meanwhile, by weight decay '
                'and momentum.\n'
                'In the step, give sg.freeze the condition as well: '
                'sg.freeze(tx, [~live, where & (step < k)]). The state is that of '
                'sg.freeze(tx, ~live).',
                Place.here(),
                UserWarning,
            )

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[Any, Any]:
        """Updates in the form of the parameters; without these, of the gradients."""
        for name in ('value_fn', 'grad_fn', 'obj_fn'):  # For optax's line searches.
            if name in extra:
                raise _of_all_parameters(name, extra)
        leaves, trained = self._parameters(updates if params is None else params)
        self._warn_of_conditions(leaves, trained)
        parameters = [*zip(trained, leaves.paths, leaves.values, strict=True)]
        with inside(trained):
            shown = pruned(leaves, trained)
            grads = leaves.values
            if params is not None:
                # Parameters that a freeze in ``tx`` drops may lack a gradient.
                spared = functools.cache(lambda: _frozen_in(self.tx, shown))
                grads = gradient_of_each(leaves, updates, trained, spared)
            seen = leaves.treedef.unflatten(map(_seen, parameters, grads))
            inner_params = None if params is None else shown
            extra = {k: _of_trained(v, leaves, trained) for k, v in extra.items()}
            with _foreign_states_named(self.tx, leaves, trained, shown, state):
                updates, after = self.tx.update(seen, state, inner_params, **extra)
                new = leaves.treedef.flatten_up_to(updates)
                out = leaves.restore(map(_update, parameters, new))
            if _is_broadcast(self.tx, trained, shown, state, after):
                raise _foreign(leaves, trained)
            return out, self._paused(leaves, trained, shown, state, after)

    def _paused(
        self,
        leaves: Leaves,
        trained: Sequence[Decision],
        shown: PyTree,
        state: PyTree,
        after: PyTree,
    ) -> Any:
        """The state after a step, in which the moments of frozen parts stood still."""
        parts = {
            names_of(keys): part
            for keys, part in zip(leaves.key_paths, trained, strict=True)
            if isinstance(part, filters.Part)
        }
        if not parts:
            return after
        return with_paused(self.tx, parameters_of(shown), parts, state, after)


def freeze(
    tx: Transformation,
    where: filters.Where | Declared = DECLARED,
    *,
    unused: str = 'raise',
) -> optax.GradientTransformationExtraArgs:
    """Freezes parameters in an optimizer: it never sees them.

    ``where`` names what is **frozen**: the opposite of ``wrt=``, and of optax's masks,
    which are True where a parameter is trained.

    A frozen parameter has no state, no update, no weight decay, no momentum, and no
    share in the norm of a clip inside of ``tx``. So ``freeze`` goes **outermost**: a
    clip before it would count the frozen gradients.

    >>> import jax, jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'body': jnp.array([3.0, 4.0]), 'head': jnp.array([0.0])}
    >>> grads = {'body': jnp.array([3.0, 4.0]), 'head': jnp.array([2.0])}
    >>> sgd = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    >>> tx = sg.freeze(sgd, 'body')
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> optax.apply_updates(params, updates)['head'].tolist()
    [-1.0]

    A filter may have a traced condition, ``where & (step < k)``: the page "Train in
    stages" shows a step that thaws. If the loss has a condition, give it here as well:
    ``[~live, where & (step < k)]``. The page "Optimizers" tells the rest.

    Args:
        tx: an optax transformation, or ``optax.MultiSteps``.
        where: what is **frozen**: any kind of filter. In a tree of bools, True is
            frozen: for a mask of what is trained, as optax's are, write
            ``sg.freeze(tx, ~sg.where(mask))``. By default what the classes
            in the tree declare as not trained, see ``sg.trainable``. Integers, keys and
            ``NonDifferentiable`` are frozen in any case.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A transformation. Its state has ``ABSENT`` in place of what is frozen;
        ``sg.adopt`` carries it to another selection. Of an array with frozen rows
        (``sg.at``) it has the state of the trained rows, of other parts that of the
        whole array.

        ``update`` takes full gradients, or those of ``sg.grad``. Updates have the form
        of the parameters; that of what is frozen is minus zero, which changes nothing.

    Raises:
        ArgumentTypeError: if ``tx`` is no optax transformation.
        FilterTypeError: if ``where`` is no filter, or one of what is trained, as
            ``sg.live`` makes it.
        UnusedFilterError: at ``init``, if a part of ``where`` matches no parameter. If
            ``where`` names all of them, it warns.
        StructureError: at ``update``, if a gradient lacks something that is trained, or
            the state is of another selection.
        PartError: if it names rows, and a freeze in ``tx`` does, too.
        ArgumentTypeError: at ``update``, for functions of all parameters (``value_fn``,
            ``grad_fn``, ``obj_fn``).
        ArgumentValueError: if it is given fp8 values that no optimizer may see.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not (hasattr(tx, 'init') and hasattr(tx, 'update')):
        write = "sg.freeze(optax.adam(1e-3), 'backbone/**')"
        raise wrong_argument(tx, 'optax transformation', write)
    check_unused(unused)
    if not isinstance(where, Declared):
        call = 'sg.freeze(tx, {})'
        where = filters.named(filters.as_filter(where), 'frozen', call)
    frozen = Freeze(optax.with_extra_args_support(tx), where, unused)
    return Frozen(frozen.init, frozen.update)


class Frozen(optax.GradientTransformationExtraArgs):
    """What ``sg.freeze`` returns: ``repr`` says what is frozen."""

    def __repr__(self) -> str:
        frozen: Any = self.init
        return f'sg.freeze(tx, {frozen.__self__.where!r})'


def pruned(
    leaves: Leaves, trained: Sequence[Decision], values: Sequence[Any] | None = None
) -> Any:
    """The tree with ``ABSENT`` in place of what is frozen, and rows cut out.

    Args:
        leaves: the parameters.
        trained: which of them are trained.
        values: other values; by default the parameters.
    """
    values = leaves.values if values is None else values
    return leaves.treedef.unflatten(
        part.cut(leaf, np.ndim(leaves.values[n]))
        if isinstance(part, Rows)
        else ABSENT
        if part is False
        else leaf
        for n, (part, leaf) in enumerate(zip(trained, values, strict=True))
    )


def _of_trained(value: PyTree, leaves: Leaves, trained: Sequence[Decision]) -> PyTree:
    """What an optimizer sees of another argument of ``update``, such as ``value=``.

    A tree like the parameters is pruned as they are. If the parameters are one array,
    every array is such a tree. A scalar, as the loss is, is then left as it is.
    """
    values, treedef = jax.tree.flatten(value, is_leaf=is_whole)
    if treedef != leaves.treedef:
        return value
    if jax.tree_util.treedef_is_leaf(treedef) and np.ndim(values[0]) == 0:
        return value
    return pruned(leaves, trained, values)


# A parameter: what is trained of it, its path and its value.
_Parameter: TypeAlias = tuple[Decision, filters.Path, Leaf]


def _seen(parameter: _Parameter, gradient: Array) -> Array:
    """What the optimizer sees of a gradient: no frozen rows, zeros in frozen parts.

    Gradients for each example have axes in front.
    """
    part, path, leaf = parameter
    if part is not False and gradient is ABSENT:  # A freeze in ``tx`` drops it.
        gradient = jnp.zeros_like(leaf)
    if not isinstance(part, (filters.Part, Rows)):
        return gradient if part else ABSENT
    own, shape = np.shape(leaf), np.shape(gradient)
    if shape[len(shape) - len(own) :] != own:
        raise other_shape('the gradient', path, leaf, gradient)
    if isinstance(part, Rows):
        return part.cut(gradient, len(own))
    return filters.merged(part, gradient, jnp.zeros_like(gradient), path, own)


def _update(parameter: _Parameter, update: Array) -> Array:
    """The update of a parameter: one that adds nothing to what is frozen."""
    part, path, leaf = parameter
    if part is False:
        return _no_update(leaf)
    if isinstance(part, Rows):
        return part.put(update, np.shape(leaf), -0.0)
    frozen = jnp.full_like(update, -0.0) if isinstance(part, filters.Part) else update
    return filters.merged(part, update, frozen, path, np.shape(leaf))


def _no_update(leaf: Leaf) -> Leaf:
    """The update of a frozen leaf: a constant that adds nothing, and takes no memory.

    It is minus zero, as 0.0 changes the sign of -0.0. A program makes it by itself: of
    large arrays that it captures, JAX warns. With explicit shardings XLA would add
    minus zero, and it leaves out zero, as that of ``optax.set_to_zero``.
    """

    def constant(leaf: Leaf) -> Leaf:
        if not is_number(leaf):  # A float0 stands in the gradient of an integer.
            return leaf if getattr(leaf, 'dtype', None) == float0 else ABSENT
        zero = np.zeros((), getattr(leaf, 'dtype', jnp.result_type(leaf)))
        inexact = jnp.issubdtype(zero.dtype, jnp.inexact)
        if isinstance(leaf, Tracer):
            explicit = AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types
            fill = -zero if inexact and not explicit else zero
            return jnp.full_like(leaf, fill, zero.dtype)
        return np.broadcast_to(-zero if inexact else zero, np.shape(leaf))

    return jax.tree.map(constant, leaf)


def _frozen_in(tx: Transformation, params: PyTree) -> set[Any]:
    """The places of the parameters that a freeze in a transformation leaves alone."""
    return {
        path.place
        for selection in structure_of(tx, params).freezes.values()
        for path, part in zip(selection.paths, selection.trained, strict=True)
        if part is False
    }


def _may_be_of(tx: Transformation, state: PyTree, params: PyTree) -> bool:
    """Whether a state may be that of a transformation for some parameters.

    It may have grown at the first update, as that of ``optax.monitor`` does.
    """
    try:
        initial = jax.eval_shape(tx.init, params)
    except jax.errors.JAXTypeError:  # ``tx.init`` asks for values.
        return True
    begun, now = _shapes_of(initial), _shapes_of(state)
    if begun == now:
        return jax.tree.structure(initial) == jax.tree.structure(state)
    return begun.items() < now.items()


@contextlib.contextmanager
def _foreign_states_named(
    tx: Transformation,
    leaves: Leaves,
    trained: Sequence[Decision],
    shown: PyTree,
    state: PyTree,
) -> Generator[None]:
    """Says of an error in the body if the state is that of another selection."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        is_of_all = False in trained and _is_of_all(tx, state, leaves)
        if is_of_all or not _may_be_of(tx, state, shown):
            raise _foreign(leaves, trained, is_of_all) from error
        raise


def _is_of_all(tx: Transformation, state: PyTree, leaves: Leaves) -> bool:
    """Whether a state has the shapes of one in which nothing is frozen."""
    try:
        initial = jax.eval_shape(tx.init, leaves.restore(leaves.values))
    except jax.errors.JAXTypeError:  # It asks for values.
        return False
    return _shapes_of(initial) == _shapes_of(state)


def _is_broadcast(
    tx: Transformation,
    trained: Sequence[Decision],
    params: PyTree,
    state: PyTree,
    after: PyTree,
) -> bool:
    """Whether moments of one row became those of several.

    A state may grow at the first update, as that of ``optax.monitor`` does. What the
    update brings to the shape that ``tx.init`` makes had another one before.
    """
    if not any(isinstance(part, Rows) for part in trained):
        return False
    was, now = _shapes_of(state), _shapes_of(after)
    if was == now:
        return False
    changed = {keys for keys in was.keys() & now.keys() if was[keys] != now[keys]}
    initial = _shapes_of(jax.eval_shape(tx.init, params)) if changed else {}
    return any(initial.get(keys) == now[keys] for keys in changed)


def _shapes_of(state: PyTree) -> dict[Any, tuple[int, ...]]:
    """The shape of each array of a state, by its place."""
    pairs = jax.tree_util.tree_leaves_with_path(state)
    return {keys: np.shape(leaf) for keys, leaf in pairs}


def _foreign(
    leaves: Leaves, trained: Sequence[Decision], is_of_all: bool = False
) -> errors.StructureError:
    pairs = zip(leaves.paths, trained, strict=True)
    paths = [path for path, part in pairs if filters.is_meant(part)]
    shown = listed([*map(repr, paths)]) or 'nothing'
    problem = f'the state does not belong to what sg.freeze trains: {shown}.\n'
    if any(isinstance(part, filters.Part) and part.is_conditional for part in trained):
        return errors.StructureError(
            f'{problem}A condition in its filter is traced, so the state is that of '
            'all that it may train.\n'
            'Make it without the condition: sg.freeze(tx, False).init(params), or keep '
            'what it knows: sg.adopt(tx, params, state).'
        )
    if is_of_all:
        problem = (
            f'{problem}It is a state of all parameters, as a traced condition needs '
            'it; a bool that is known, as without jax.jit, leaves out what it freezes.'
            '\n'
        )
    return errors.StructureError(
        f'{problem}Make it with tx.init(params), or keep what it knows: '
        'sg.adopt(tx, params, state, old=old_tx).'
    )


def _rows_in_rows(path: str) -> errors.PartError:
    return errors.PartError(
        f'sg.freeze names rows of {path!r}, and an sg.freeze around it has cut rows of '
        'an array already.\n'
        'Rows would be counted in what is left of the array.\n'
        'Name all of them in one: sg.freeze(tx, [sg.at(where, np.s_[:2]), '
        'sg.at(where, np.s_[4:])]).'
    )


def _of_all_parameters(name: str, extra: Collection[str]) -> errors.ArgumentTypeError:
    fn = 'jax.grad(of_part)' if name == 'grad_fn' else 'of_part'
    arguments = ', '.join([f'{k}={k}' for k in extra if k != name] + [f'{name}={fn}'])
    return errors.ArgumentTypeError(
        f'tx.update got {name}=, a function of all parameters, and sg.freeze shows its '
        'optimizer the trained ones only.\n'
        'Give optax the trained part, and the optimizer without sg.freeze:\n'
        'part, rest = sg.partition(params, ~sg.where(where))\n'
        'of_part = lambda part: loss(sg.combine(part, rest))\n'
        f'updates, state = tx.update(grads, state, part, {arguments})\n'
        'params = sg.combine(optax.apply_updates(part, updates), rest)'
    )
