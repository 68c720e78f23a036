"""``adopt``: the state of one selection, taken along to another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, wrong_argument
from flax_sg.filters.paths import SUBTREES
from flax_sg.optim.freezing import Freeze, pruned
from flax_sg.optim.masks import parameters_of
from flax_sg.trees.beside import children_of, is_nothing, is_vacant
from flax_sg.trees.leaves import (
    ABSENT,
    Leaves,
    is_differentiable,
    selected,
    whole,
)
from flax_sg.trees.rows import Rows

# States that remember steps of all parameters together: what they know of some of them
# is of no use beside others.
_OF_ONE_SELECTION = (
    'ScaleByLBFGSState',
    'ScaleByBacktrackingLinesearchState',
    'ScaleByZoomLinesearchState',
    'ScaleByOptimisticGradientState',
)


def adopt(
    tx: Any,
    params: Any,
    state: Any,
    *earlier: Any,
    fresh: filters.Where = False,
    report: Callable[[dict[str, list[str]]], Any] | None = None,
) -> Any:
    """Keeps the optimizer's state when you freeze or thaw parameters.

    Make ``tx`` of the new selection, and give ``adopt`` the old state. What was trained
    before keeps its moments.

    >>> import jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'body': jnp.ones(2), 'head': jnp.ones(1)}
    >>> sgd = optax.sgd(0.1, momentum=0.9)
    >>> tx = sg.freeze(sgd, 'body')
    >>> updates, state = tx.update({'head': jnp.ones(1)}, tx.init(params), params)
    >>> sg.adopt(sgd, params, state)[0].trace
    {'body': Array([0., 0.], dtype=float32), 'head': Array([1.], dtype=float32)}
    >>> thawed = sg.adopt(sgd, params, state, report=print)
    {'carried': ['head'], 'fresh': ['body'], 'dropped': []}

    Args:
        tx: a transformation from ``sg.freeze``, or the one that it wraps.
        params: the parameters.
        state: a state of the same transformation, frozen in other places or nowhere;
            also of parameters with other names among these. States of several seeds
            with an axis of their own are adopted one by one, under ``jax.vmap``.
        *earlier: more of them, for what ``state`` does not know.
        fresh: the parameters that begin anew, whatever the states know: any kind of
            filter. None by default.
        report: called with a dict of three lists, as printed above: the paths of the
            parameters whose values were carried, are fresh, or were dropped. What
            belongs to no parameter is named by its place in the state.

    Returns:
        A state of ``tx``. Each value comes from the first state that has it, and from
        ``tx.init`` if none has. What is frozen now is dropped: if it is to go on later
        from where it was, keep the state of today, and give it as ``earlier`` then. So
        are moments of rows and elements that ``sg.at`` freezes, if they have the shape
        of the parameter.

        A jitted step compiles once for each selection. What optimizers share among
        parameters goes on: Adam's count of steps does, so new moments are taken for old
        ones, and begin with larger updates. ``optax.tree_utils.tree_set(state,
        count=0)`` counts anew. The hyperparameters of ``optax.inject_hyperparams`` are
        those of ``tx``. What L-BFGS, a line search and optimistic gradients remember
        belongs to one selection: it begins anew with another.

    Raises:
        ArgumentTypeError: if ``tx`` is no transformation.
        StructureError: if a state is that of another transformation, or holds anything
            but an array of the right shape and dtype.
        StructureError: if ``tx`` keeps one array for all parameters, as
            ``optax.flatten`` does.
    """
    if not hasattr(tx, 'init'):
        write = 'sg.adopt(tx, params, state)'
        raise wrong_argument(tx, 'optax transformation', write)
    freeze = getattr(tx.init, '__self__', None)
    if isinstance(freeze, Freeze):
        leaves, trained = freeze.parameters(params)
        _check_apart(freeze.tx.init, pruned(leaves, trained))
    else:
        leaves = parameters_of(params)
        trained = [True] * len(leaves.values)
        _check_apart(tx.init, params)
    anew = filters.as_filter(fresh)
    [begin] = selected([leaves.paths], anew)
    places = {keys: number for number, keys in enumerate(leaves.key_paths)}
    new = tx.init(params)
    for old in (state, *earlier):
        if _is_hole(old) and not _is_hole(new):
            raise _misfit((), new, old, _OTHER)
    adopted = _Adopted(leaves, trained, whole(begin, leaves.paths, 'fresh='), places)
    out = adopted.merged(new, (state, *earlier), ())
    if report is not None:
        report(adopted.compared(new, out, (state, *earlier)))
    return out


class _Adopted(NamedTuple):
    """Puts a state together from others.

    Attributes:
        leaves: the parameters.
        trained: for each whether it is trained, or which part of it.
        fresh: for each whether it begins anew.
        places: the number of each, by its key path.
    """

    leaves: Leaves
    trained: Sequence[Any]
    fresh: Sequence[bool]
    places: Mapping[Any, int]

    def merged(self, new: Any, states: Sequence[Any], keys: Any) -> Any:
        """A part of the state.

        Args:
            new: what ``tx.init`` has there.
            states: what the states have there.
            keys: the key path from the root of the state.
        """
        number = self._parameter_at(keys)
        olds = [old for old in states if not _is_hole(old)]
        if not olds or is_vacant(new) or (number is not None and self.fresh[number]):
            return new
        choices = {x.choice if isinstance(x, Rows) else None for x in (new, *olds)}
        if number is not None and len(choices) > 1:
            return self._rows(new, olds, keys, number)
        children, kind = children_of(new)
        if jax.tree_util.treedef_is_leaf(kind):
            return self._leaf(new, olds[0], keys, number)
        name = type(new).__name__
        if name in _OF_ONE_SELECTION:
            same = jax.tree.structure(olds[0]) == jax.tree.structure(new)
            olds = olds[:1] if same else []
        given: list[dict[Any, Any]] = []
        for old in olds:
            its, its_kind = children_of(old)
            given.append(dict(its))
            # Parameters may have come and gone, but not all.
            are_dicts = type(old) is type(new) and issubclass(type(new), SUBTREES)
            shared = are_dicts and given[-1].keys() & dict(children).keys()
            if its_kind != kind and not shared:
                raise _misfit(keys, new, old, _OTHER)
        out: Any = kind.unflatten(
            self.merged(child, [its.get(key, ABSENT) for its in given], (*keys, *key))
            for key, child in children
        )
        if name in ('InjectHyperparamsState', 'InjectStatefulHyperparamsState'):
            return out._replace(hyperparams=new.hyperparams)
        return out

    def _rows(self, new: Any, olds: Sequence[Any], keys: Any, number: int) -> Any:
        """The moments of rows, each from the first state that has it."""
        shape = np.shape(self.leaves.values[number])
        dtype = getattr(getattr(new, 'rows', new), 'dtype', None)

        def is_of(node: Any, sizes: Any = None) -> bool:
            """Whether it is an array of these sizes, or those of a moment."""
            moment = node.choice.of_rows(shape) if isinstance(node, Rows) else shape
            its = sizes or moment, dtype
            return moment is not None and _type(getattr(node, 'rows', node)) == its

        if not is_of(new):
            return new  # One number for several rows.
        out = new.among(0.0) if isinstance(new, Rows) else new
        for old in reversed(olds):
            if not is_of(old):
                if is_of(old, (1,)):
                    return new  # As Adafactor has in place of what it does not factor.
                raise self._misshapen(new, old, keys, number)
            out = old.choice.put(old.rows, out) if isinstance(old, Rows) else old
        return new.choice.cut(out, len(shape)) if isinstance(new, Rows) else out

    def compared(
        self, new: Any, out: Any, states: Sequence[Any]
    ) -> dict[str, list[str]]:
        """The names of what was carried, is fresh, and was dropped."""
        carried, fresh = set[str](), set[str]()
        pairs = zip(self._named(out), self._named(new), strict=True)
        for (name, leaf), (_, made) in pairs:
            (fresh if leaf is made else carried).add(name)
        known = {name for state in states for name, _ in self._named(state)}
        dropped = known - carried - fresh
        found = {'carried': carried, 'fresh': fresh, 'dropped': dropped}
        return {what: sorted(names) for what, names in found.items()}

    def _named(self, state: Any) -> Iterator[tuple[str, Any]]:
        """The leaves of a state, each with the parameter or place it belongs to."""
        for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
            number = self._parameter_at(keys)
            place = jax.tree_util.keystr(keys)
            yield place if number is None else str(self.leaves.paths[number]), leaf

    def _parameter_at(self, keys: Any) -> int | None:
        """The parameter that a part of the state belongs to, if it does to one."""
        # Its key path is within, where a tree is like the parameters.
        for last in range(len(keys), 0, -1):
            for first in range(last):
                if (number := self.places.get(keys[first:last])) is not None:
                    return number
        return self.places.get(())

    def _leaf(self, new: Any, old: Any, keys: Any, number: int | None) -> Any:
        if _type(old) != _type(new):
            raise self._misshapen(new, old, keys, number)
        if number is None or np.shape(new) != np.shape(self.leaves.values[number]):
            return old
        return filters.merged(self.trained[number], old, new, self.leaves.paths[number])

    def _misshapen(
        self, new: Any, old: Any, keys: Any, number: int | None
    ) -> errors.StructureError:
        if number is None:
            return _misfit(keys, new, old, _OTHER)
        path = str(self.leaves.paths[number])
        fix = f'To begin anew there: sg.adopt(..., fresh={path!r}).'
        return _misfit(keys, getattr(new, 'rows', new), getattr(old, 'rows', old), fix)


_OTHER = (
    'It is the state of another transformation, or of other parameters: give that of '
    'what sg.freeze wraps, sg.adopt(tx, params, state).'
)


def _misfit(keys: Any, new: Any, old: Any, fix: str) -> errors.StructureError:
    is_, has = (
        f'{brief(node)} of {len(node)}' if type(node) is tuple else brief(node)
        for node in (old, new)
    )
    return errors.StructureError(
        f'sg.adopt: state{jax.tree_util.keystr(keys)} is {is_}, where the new state '
        f'has {has}.\n{fix}'
    )


def _is_hole(node: Any) -> bool:
    """Whether an old state has nothing there.

    A checkpoint of Flax or orbax has ``{}`` or None where the state had ``ABSENT``.
    """
    return is_nothing(node) or (isinstance(node, dict) and not node)


def _type(leaf: Any) -> Any:
    if hasattr(leaf, 'dtype') or isinstance(leaf, (bool, int, float, complex)):
        return np.shape(leaf), jnp.result_type(leaf)
    return type(leaf)


def _check_apart(init: Any, params: Any) -> None:
    """Raises if a state has one array for several parameters.

    If one parameter were a pair, its moments would be pairs. An array of another shape
    would belong to that parameter and to others.
    """
    flat, treedef = jax.tree.flatten(params)
    sized = (
        n for n, leaf in enumerate(flat) if np.size(leaf) and is_differentiable(leaf)
    )
    first = next(sized, None)
    twice = [(leaf, leaf) if n == first else leaf for n, leaf in enumerate(flat)]
    try:
        one = jax.eval_shape(init, params)
        pairs, kind = jax.tree_util.tree_flatten_with_path(one)
        two = kind.flatten_up_to(jax.eval_shape(init, treedef.unflatten(twice)))
    except Exception:  # The code of others, given what it need not take.
        return
    for (keys, leaf), other in zip(pairs, two, strict=True):
        if getattr(other, 'shape', leaf.shape) != leaf.shape:
            raise errors.StructureError(
                f'sg.adopt: state{jax.tree_util.keystr(keys)} is one array for several '
                'parameters, as optax.flatten makes it, and cannot be taken apart.\n'
                'Begin anew with tx.init(params), or leave optax.flatten out.'
            )
