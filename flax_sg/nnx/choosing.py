"""Filters of paths where NNX takes filters: ``where``, ``DiffState``, optimizers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from flax import nnx

from flax_sg import errors, filters
from flax_sg.errors.texts import wrong_argument
from flax_sg.filters.expressions import of_a_part_in_nnx
from flax_sg.filters.paths import Path
from flax_sg.internals.places import Place, warn_once
from flax_sg.internals.types import Kind, Model, Transformation
from flax_sg.nnx.asking import IN_VARIABLES, ask, parameters
from flax_sg.nnx.views import VIEWS
from flax_sg.trees.nnx_walks import Walk

M = TypeVar('M')


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chosen(filters.Derived):
    """What ``nnx.where`` has selected: a filter of flax_sg and of NNX.

    Attributes:
        kind: an NNX filter of what may be selected.
        names: what it names; ``'trained'``, unless it is made of what is frozen.
    """

    kind: Kind = parameters
    names: str = 'trained'

    @functools.cached_property
    def identity(self) -> Hashable:
        """The selected paths, and all paths that were there."""
        return self.selected, self.known

    @property
    def side(self) -> str:
        """What the filter names: ``'trained'`` or ``'frozen'``."""
        return self.names

    def __call__(self, path: Any, value: Any = None) -> Any:
        """Whether a path is selected; NNX gives the value at the path, too."""
        if not isinstance(path, tuple):
            return super().__call__(path)
        names: Any = tuple(map(str, path))
        try:
            return self.matches(Path.of('params', names))
        except errors.UnknownNameError:
            # The path is newer than ``nnx.where``. A cache or a sown value, which is of
            # another kind, is simply not selected.
            if nnx.filterlib.to_predicate(self.kind)(path, value):
                raise
        return False


def where(
    model: Model,
    where: filters.Where,
    *,
    kind: Kind = parameters,
    unused: str = 'raise',
) -> Chosen:
    """Turns a filter of flax_sg into an NNX filter, and checks its names at once.

    >>> import optax, flax_sg as sg
    >>> from flax_sg import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> kernels = nnx.where(model, '**/kernel')
    >>> [path for path, _ in nnx.to_flat_state(nnx.state(model, kernels))]
    [('layers', 0, 'kernel')]
    >>> optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=kernels)
    >>> nnx.where(model, '**/kernle')
    Traceback (most recent call last):
        ...
    flax_sg.errors.UnusedFilterError: nnx.where: Glob('**/kernle') matches none of ...

    Args:
        model: an NNX module.
        where: what is selected: any kind of filter, such as ``sg.live`` returns. Paths
            begin in the model. Tied weights are selected by any of their paths.
        kind: what may be selected, as an NNX filter: a type, a tag, or several. By
            default ``nnx.Param``, as for ``nnx.grad``; in a model without Variables its
            real and complex arrays. ``jax.Array`` is the type of arrays in no Variable.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A filter for ``nnx.DiffState``, ``nnx.Optimizer(wrt=)``, ``nnx.state``,
        ``nnx.split`` and all else that takes one, of models and of pure states. It is a
        filter of flax_sg, too, which knows that it names what is trained: write
        ``sg.freeze(tx, ~nnx.where(model, where))``. Two are equal if they select the
        same of the same paths. Variables of other kinds may be added to the model
        later, such as caches. They are not selected.

    Raises:
        ArgumentTypeError: if ``model`` is no NNX module.
        UnusedFilterError: if ``kind`` or a part of ``where`` matches nothing.
        PartError: if ``where`` means a part of a Variable, or some leaves of its value.
        UnknownNameError: later, if it is asked for a new Variable of the ``kind``.
    """
    walk = Walk(model)
    if kind is parameters and any(
        isinstance(leaf.value, nnx.Variable) for leaf in walk.leaves.values()
    ):
        # An array in no Variable may be a table, which no optimizer should move.
        kind = IN_VARIABLES
    asked = ask('nnx.where', walk, where, kind, unused)
    chosen = [each for each in asked if each.is_meant]
    for _, paths, decisions in chosen:
        if not all(decision is True for decision in decisions):
            raise of_a_part_in_nnx(paths[0], decisions[0])
    selected = frozenset(('params', leaf.names) for leaf, *_ in chosen)
    known = frozenset(('params', leaf.names) for leaf in walk.leaves.values())
    side = filters.as_filter(where).side or 'trained'
    return Chosen(selected, known, 'nnx.where', kind, side)


def for_nnx(wrt: Kind, call: str, model: Model = None) -> Any:
    """An NNX filter of whatever people give as one: filters of flax_sg, or of NNX.

    Args:
        wrt: a filter of paths, a filter of NNX, or a list with some of both.
        call: the call of the user, with ``{}`` for what names what is trained.
        model: the model, whose names are checked; None if it is not known yet.

    Raises:
        UnusedFilterError: if a path is not in the model.
        FilterTypeError: if a filter of NNX holds a glob, which Flax takes for a tag, or
            a filter is known to name what is frozen.
    """
    if isinstance(wrt, (list, tuple)):
        return tuple(for_nnx(each, call, model) for each in wrt)
    if isinstance(wrt, filters.Filter):
        wrt = filters.named(wrt, 'trained', call)
    if isinstance(wrt, str) and not re.search('[*/]', wrt):
        # It may be the tag of a kind, such as those of ``nnx.with_metadata``.
        tagged = nnx.filterlib.to_predicate(wrt)
        if model is None:
            return tagged, filters.as_filter(wrt)
        if any(tagged(leaf.keys, leaf.value) for leaf in Walk(model).leaves.values()):
            return wrt
    elif isinstance(wrt, Chosen) or not _is_of_paths(wrt):
        _check_tags(wrt)
        return wrt
    if model is not None and not Walk(model).modules:
        raise wrong_argument(model, 'NNX module', call.format("'encoder/**'"))
    return filters.as_filter(wrt) if model is None else where(model, wrt)


def _is_of_paths(where: Any) -> bool:
    if isinstance(where, (str, filters.Filter, re.Pattern, Mapping)):
        return True
    if isinstance(where, type) or not callable(where):
        return False
    # A filter of NNX is a function of the path and the value.
    parameters_of = inspect.signature(where).parameters.values()
    return sum(p.default is p.empty for p in parameters_of) == 1


def _check_tags(where: Any) -> None:
    """Raises if a filter of NNX asks for a tag that is a glob."""
    if isinstance(where, nnx.filterlib.WithTag) and re.search('[*/]', where.tag):
        raise errors.FilterTypeError(
            f'Flax takes the text {where.tag!r} for the tag of a kind, in a filter of '
            'NNX.\n'
            'So it would select nothing.\n'
            f'Write nnx.All(nnx.Param, nnx.where(model, {where.tag!r})).'
        )
    inner = getattr(where, 'predicates', (getattr(where, 'predicate', None),))
    for predicate in inner:
        if predicate is not None:
            _check_tags(predicate)


class DiffState(nnx.DiffState):
    """Flax's ``nnx.DiffState``, whose filter may be one of flax_sg.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> loss = lambda model: jnp.sum(model(jnp.ones((4, 2))))
    >>> kernels = nnx.DiffState(0, '**/kernel')
    >>> jax.tree.map(jnp.shape, nnx.grad(loss, argnums=kernels)(model))
    State({
      'layers': {
        0: {
          'kernel': Param(
            value=(2, 3)
          )
        }
      }
    })

    There is no model yet in which names could be checked: ``nnx.where(model, where)``
    checks them. A text with neither ``/`` nor ``*`` may be a path, or the tag of a
    kind, as for Flax.

    Flax refuses it with ``graph=False`` and with ``graph_updates=False``. There write
    ``nnx.grad(loss)`` of a view, and ``sg.freeze(tx, ~live)`` for the optimizer.

    Args:
        argnum: which argument is differentiated.
        filter: a glob, a filter such as ``sg.live`` returns, or any filter of NNX.

    Raises:
        FilterTypeError: if a filter of NNX holds a glob, or a filter is known to name
            what is frozen, as ``~sg.live(...)`` is.
    """

    def __init__(self, argnum: int, filter: Any) -> None:
        super().__init__(argnum, for_nnx(filter, f'nnx.DiffState({argnum}, {{}})'))


class Optimizer(nnx.Optimizer[M]):
    """Flax's ``nnx.Optimizer``, whose ``wrt=`` may be a filter of flax_sg.

    ``wrt`` names what is **trained**.

    >>> import optax, flax_sg as sg
    >>> from flax_sg import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt='**/kernel')
    >>> nnx.to_flat_state(nnx.state(model, optimizer.wrt)).paths
    (('layers', 0, 'kernel'),)

    Args:
        model: an NNX module.
        tx: a transformation of optax.
        wrt: what is optimized: a glob, a filter such as ``sg.live`` returns, or any
            filter of NNX. Paths are checked, as ``nnx.where`` does it. A text with
            neither ``/`` nor ``*`` is a tag, if it is the tag of a kind in the model.
        **how: ``graph=``, as for Flax.

    Raises:
        UnusedFilterError: if a path is not in the model.
        FilterTypeError: if a filter of NNX holds a glob, or a filter is known to name
            what is frozen, as ``~sg.live(...)`` is.

    Note:
        It warns if the model is a view, or keeps one in an attribute.
    """

    def __init__(self, model: M, tx: Transformation, *, wrt: Any, **how: Any) -> None:
        wrt = for_nnx(wrt, 'nnx.Optimizer(model, tx, wrt={})', model)
        super().__init__(model, tx, wrt=wrt, **how)
        for module in Walk(model).modules.values():
            if rule := VIEWS.get(module):
                warn_once(
                    f'nnx.Optimizer is given a view: nnx.{rule} made this '
                    f'{type(module).__name__}.\n'
                    'Its parameters are its own, and they are trained.\n'
                    'Optimize the model, and make the view where you call it.',
                    Place.here(),
                    UserWarning,
                )


class ModelAndOptimizer(Optimizer[M], nnx.ModelAndOptimizer[M]):
    """Flax's ``nnx.ModelAndOptimizer``, whose ``wrt=`` may be a filter of flax_sg.

    ``wrt`` names what is **trained**. Flax will remove this class: ``Optimizer`` is as
    short.

    >>> import jax, jax.numpy as jnp, optax
    >>> from flax_sg import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> both = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt='**/kernel')
    >>> loss = lambda model: jnp.sum(model(jnp.ones((4, 2))))
    >>> grads = nnx.grad(loss, argnums=nnx.DiffState(0, both.wrt))(both.model)
    >>> updates = both.update(grads)

    Args:
        model: an NNX module, which is kept as ``model``.
        tx: a transformation of optax.
        wrt: what is optimized, as for ``Optimizer``; ``nnx.Param`` by default.

    Raises:
        UnusedFilterError, FilterTypeError: as ``Optimizer``.
    """

    def __init__(self, model: M, tx: Transformation, *, wrt: Any = nnx.Param) -> None:
        super().__init__(model, tx, wrt=wrt)
