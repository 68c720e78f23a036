"""``sg.paths`` lists the paths that filters can name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen

from flax_sg import filters
from flax_sg.errors.texts import shown, wrong_argument
from flax_sg.filters.inputs import inputs_explained
from flax_sg.filters.paths import Path, natural_key
from flax_sg.internals.optional import is_nnx_model
from flax_sg.internals.types import Decision, Model, PyTree
from flax_sg.rendering import text
from flax_sg.rendering.shown import InNotebooks
from flax_sg.summary.programs import classes_of, variables_of
from flax_sg.trees import leaves
from flax_sg.trees.absent import ABSENT, Absent
from flax_sg.trees.trainable import states, variable_types


@dataclasses.dataclass(frozen=True)
class Variable:
    """One variable of a model, or one leaf of a tree.

    Attributes:
        path: the path; ``path.collection`` is the name of the collection.
        module: the class name of the variable's module, ``''`` if unknown.
        shape: dtype and shape, such as ``'float32[3, 4]'``.
        selected: the filter's answer: a bool, a part of the variable (see ``sg.at``),
            or None without a filter. Of a model of NNX a filter selects parameters,
            as views do without ``kind=``.
        kind: in a model of NNX the class of the Variable, such as ``'BatchStat'``, or
            ``'array'`` for an array that is in none. ``''`` elsewhere.
        is_parameter: whether views take it without ``kind=``.
    """

    path: Path
    module: str
    shape: str
    selected: Decision = None
    kind: str = ''
    is_parameter: bool = True


class Paths(InNotebooks, tuple[Variable, ...]):
    """The variables of a model; prints as a table."""

    def __repr__(self) -> str:
        rows = text.repeated(
            [(x.path.collection, *x.path.parts) for x in self],
            [(x.module, x.shape, str(x.selected), x.kind) for x in self],
        )
        last = 'kind' if any(x.kind for x in self) else 'collection'
        head = ['selected', 'path', 'module', 'shape', last]
        cells: list[list[str]] = []
        for (collection, *names), same in rows:
            x = self[same[0]]
            path = '/'.join(names)
            group = x.kind or collection
            cells.append([_word(x.selected), path, x.module, x.shape, group])
        if all(x.selected is None for x in self):
            return text.table(head[1:], [row[1:] for row in cells])
        count = sum(filters.is_meant(x.selected) for x in self)
        lines = [f'The filter selects {count} of {len(self)} variables.']
        kinds = dict.fromkeys(x.kind for x in self if not x.is_parameter)
        if kinds:
            line = f'Views take parameters, and by kind=: {", ".join(kinds)}.'
            lines.append(text.wrapped(line))
        return '\n'.join([text.table(head, cells), '', *lines])

    __str__ = __repr__


def paths(
    model: Model,
    *args: Any,
    where: filters.Where | Absent = ABSENT,
    rngs: PyTree = None,
    **kwargs: Any,
) -> Paths:
    """Shows the paths that a filter can name, and which of them it selects.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> model = nn.Sequential([nn.Dense(8), nn.Dense(8), nn.Dense(2)])
    >>> print(sg.paths(model, jnp.ones((4, 8)), where='*/kernel'))
    selected   path                  module   shape           collection
    ────────────────────────────────────────────────────────────────────
    -          layers_[0-1]/bias     Dense    float32[8]      params
    yes        layers_[0-1]/kernel   Dense    float32[8, 8]   params
    -          layers_2/bias         Dense    float32[2]      params
    yes        layers_2/kernel       Dense    float32[8, 2]   params
    <BLANKLINE>
    The filter selects 3 of 6 variables.
    >>> sg.paths(model, jnp.ones((4, 8)))[0].path
    'layers_0/bias'

    Args:
        model: a module of linen or NNX, or a tree of variables (shown without classes).
        *args: a linen module's arguments, arrays or their shapes; none for others.
        where: a filter of any kind.
        rngs: random keys, as for ``init``, or their shapes; one key by default.
        **kwargs: further arguments of the module (``train=True``) and of ``init``;
            ``method=`` chooses the method.

    Returns:
        A tuple with a ``Variable`` for each path. It prints as a table. Nothing is
        compiled or run.

    Raises:
        UnusedFilterError: if a part of the filter matches no variable.
        ArgumentTypeError: if a tree is given inputs, a filter is given without its
            name, or a module of linen has no inputs.
    """
    tree, classes = model, {}
    if isinstance(model, linen.Module):
        rngs = jax.eval_shape(lambda: jax.random.key(0)) if rngs is None else rngs
        kwargs.pop('mutable', None)  # ``init`` makes all.
        with inputs_explained('sg.paths({})', model, args, kwargs):
            tree, classes = variables_of(model, rngs, args, kwargs)
    elif args or kwargs:
        pattern = args[0] if args and isinstance(args[0], str) else 'encoder/**'
        name = 'model' if is_nnx_model(model) else 'tree'
        write = f'sg.paths({name}, where={pattern!r})'
        if any(isinstance(arg, linen.Module) for arg in args):
            write = 'sg.paths(model, x): the model comes first'
        raise wrong_argument(
            (*args, kwargs)[0], f'input: this {name} takes none', write
        )
    elif is_nnx_model(model):
        classes = classes_of(model)
    rows = leaves.leaves_of(tree)
    selected = [None] * len(rows.paths)
    if not isinstance(where, Absent):
        [selected] = leaves.selected([rows.paths], filters.as_filter(where))
    types, is_state = [''] * len(selected), [False] * len(selected)
    if is_nnx_model(model):
        types = [cls.__name__ if cls else 'array' for cls in variable_types(rows.tree)]
        is_state = states(rows.tree)
    columns = zip(rows, selected, types, is_state, strict=True)
    out = [
        Variable(
            path,
            _class_of(path, classes),
            shown(leaf),
            False if of_state and answer is not None else answer,
            type_,
            not of_state,
        )
        for (path, leaf), answer, type_, of_state in columns
    ]
    return Paths(sorted(out, key=_order))


def _order(variable: Variable) -> Any:
    """Parameters come first; each collection stays together, in natural order."""
    collection = variable.path.collection
    return collection != 'params', collection, natural_key(variable.path)


def _class_of(path: Path, classes: Mapping[tuple[str, ...], str]) -> str:
    """The class of the innermost module that has a variable in it."""
    if not classes:
        return ''
    prefixes = (path.parts[:n] for n in reversed(range(len(path.parts))))
    return next((classes[names] for names in prefixes if names in classes), '')


def _word(selected: Decision) -> str:
    if isinstance(selected, filters.Part):
        return 'partly'
    return 'yes' if selected else '-'
