"""``sg.tabulate`` shows the modules of a model, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from flax import linen
from flax.core.scope import DenyList

from flax_sg import errors
from flax_sg.errors.texts import brief, unknown_choice
from flax_sg.filters.inputs import inputs_explained
from flax_sg.filters.paths import Path
from flax_sg.flow.analysis import report_on
from flax_sg.flow.report import by_condition
from flax_sg.flow.traced import trace_of
from flax_sg.internals.optional import is_nnx_model
from flax_sg.internals.types import Model, PyTree
from flax_sg.rendering import text
from flax_sg.rendering.shown import InNotebooks
from flax_sg.summary.programs import classes_of, variables_of
from flax_sg.trees.leaves import leaves_of
from flax_sg.trees.trainable import DECLARED

_LINES = 50
# Parameters are immutable here: written collections do not count as outputs.
_STATE = DenyList(('params', 'intermediates'))


def tabulate(
    model: Model,
    *args: Any,
    rngs: PyTree = None,
    depth: int | Literal['fit'] | None = 'fit',
    **kwargs: Any,
) -> ModuleTable:
    """Shows which modules of a model are trained.

    A module's row counts the parameters of its submodules too. Equal neighbouring
    layers share one row. A partly frozen module is marked ``partly``. A table wider
    than 80 columns leaves out the classes.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> layers = [nn.Frozen(nn.Dense(8)), nn.Frozen(nn.Dense(8)), nn.Dense(2)]
    >>> model = nn.Sequential(layers)
    >>> print(sg.tabulate(model, jnp.ones((4, 8))))
    module           class        parameters   trainable   gradient
    ────────────────────────────────────────────────────────────────
    (model)          Sequential          162          18   partly
      layers_[0-1]   Dense               144           0   frozen
      layers_2       Dense                18          18   trainable
    <BLANKLINE>
    Trainable: 18 (72 B)   Frozen: 144 (576 B)

    Args:
        model: the module, of linen or NNX.
        *args: the arguments of the module, arrays or their shapes.
        rngs: random keys, as for ``init``, or their shapes; one key by default. An NNX
            module needs none.
        depth: how many submodules deep the table goes, or ``None`` for all of them. The
            default ``'fit'`` goes as deep as fits into 50 lines, at least one deep. The
            last lines say if the table leaves modules out.
        **kwargs: further arguments of the module (``train=True``) and of ``init``;
            ``method=`` chooses the method, ``mutable=`` the collections that a call
            may write: by default all but parameters and intermediates. Only the
            method's outputs decide what is trained. If the loss trains more, give
            a method that returns the loss.

    Returns:
        A ``ModuleTable``, which prints as a table. Nothing is compiled or run.

    Raises:
        ArgumentTypeError: if ``model`` is not a Module instance, has no inputs, or gets
            a random key, variables or a filter in their place.
        ArgumentValueError: if ``depth`` is not an int from 0 on, ``None`` or ``'fit'``.

    Note:
        Modules without parameters are left out. For flops and the shapes of inputs and
        outputs see ``nn.tabulate``; for the running statistics that a call updates,
        ``testing.moves(variables, new_variables)``.
    """
    is_graph = is_nnx_model(model)
    if not is_graph and not isinstance(model, linen.Module):
        raise errors.ArgumentTypeError(
            f'tabulate() takes a Module instance, and was given {brief(model)}.\n'
            'Make the module: sg.tabulate(Model(...), x).'
        )
    if depth < 0 if isinstance(depth, int) else depth not in ('fit', None):
        raise unknown_choice('depth', depth, ('fit', 1, 2, None))
    has_method, options = 'method' in kwargs, {**kwargs}
    if is_graph:
        run = options.pop('method', type(model).__call__)
        tree, classes = model, classes_of(model)
    else:
        mutable = options.pop('mutable', _STATE)  # For ``apply``: init makes all.
        rngs = jax.eval_shape(lambda: jax.random.key(0)) if rngs is None else rngs
        run = model
        with inputs_explained('sg.tabulate({})', model, args, kwargs):
            tree, classes = variables_of(model, rngs, args, options)
        options |= {'rngs': rngs, 'mutable': mutable}
    parameters: list[Counted] = []
    notes: list[str] = []
    if leaves_of(tree).values:
        with inputs_explained('sg.tabulate({})', model, args, kwargs):
            call = 'sg.tabulate(model, x)', run, (tree, *args)
            trace = trace_of(*call, 0, False, DECLARED, options)
            report = report_on(trace, together=True)
        for n, (path, shape) in enumerate(
            zip(report.parameters, report.shapes, strict=True)
        ):
            count = report.count(n)
            parameters.append((path, shape.dtype, (count, shape.size - count)))
        notes = by_condition(report.conditions, report.parameters)
    parameters = [x for x in parameters if x[0].collection == 'params']
    # A view of the model is a model: nothing tells what is stopped in it.
    head = f'What {type(model).__name__} trains when it is called. '
    head += 'Of a loss: sg.tabulate(model, method=loss)\n\n'
    head = head if is_graph and not has_method else ''
    return ModuleTable.of(_rows(classes, parameters), parameters, depth, head, notes)


# How many values are trained, and how many are not: stopped, not used, or integers.
Counts: TypeAlias = tuple[int, int]
# A parameter, its dtype, and its counts.
Counted: TypeAlias = tuple[Path, Any, Counts]


class ModuleRow(NamedTuple):
    """A module or equal neighbouring modules, with their submodules.

    Attributes:
        names: the names in the path.
        cls: the name of the class, ``''`` for a module that is not called.
        counts: of the values of its parameters.
    """

    names: tuple[str, ...]
    cls: str
    counts: Counts

    def as_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        trained, frozen = self.counts
        word = 'partly' if trained and frozen else 'trainable' if trained else 'frozen'
        return {
            'module': '/'.join(self.names),
            'class': self.cls,
            'parameters': trained + frozen,
            'trainable': trained,
            'gradient': word if trained or frozen else '',
        }


class ModuleTable(InNotebooks, str):
    """A table of modules: text, and plain data for other formats."""

    modules: Sequence[ModuleRow] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[ModuleRow],
        parameters: Sequence[Counted],
        depth: Any,
        head: str,
        notes: Iterable[str],
    ) -> ModuleTable:
        """The table of some modules, as deep as ``tabulate`` says, between lines."""
        deepest = max(len(row.names) for row in rows)
        if depth == 'fit':
            fits = (n for n in range(deepest, 1, -1) if len(_joined(rows, n)) <= _LINES)
            depth = next(fits, 1)
        lines = [_as_text(_joined(rows, deepest if depth is None else depth)), '']
        if depth is not None and depth < deepest:
            lines.append(f'Shown to depth={depth}; depth=None shows all modules.')
        trained, frozen = (
            text.amount([(counts[n], dtype) for _, dtype, counts in parameters])
            for n in (0, 1)
        )
        total = f'Trainable: {trained}   Frozen: {frozen}'
        table = cls(head + '\n'.join([*lines, total, *notes]))
        table.modules = rows
        return table

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each module, as deep as the model goes.

        Its keys are ``'module'`` (the path, ``''`` for the model), ``'class'``,
        ``'parameters'`` and ``'trainable'`` (numbers of values), and ``'gradient'``.
        """
        return [row.as_dict() for row in self.modules]


def _rows(
    classes: Mapping[tuple[str, ...], str], parameters: Iterable[Counted]
) -> list[ModuleRow]:
    """A row for the model, and for each submodule with parameters.

    Submodules follow their module, in the order of the first calls.
    """
    prefixes = (names[:n] for names in classes for n in range(len(names) + 1))
    order = {names: position for position, names in enumerate(dict.fromkeys(prefixes))}
    inside: dict[tuple[str, ...], list[Counts]] = {(): [(0, 0)]}
    for path, _, counts in parameters:
        for names in (path.parts[:n] for n in range(len(path.parts))):
            if not names or names in order:
                inside.setdefault(names, []).append(counts)
    rows = [
        ModuleRow(x, classes.get(x, ''), _total(counts)) for x, counts in inside.items()
    ]
    return sorted(
        rows,
        key=lambda row: [order[row.names[: n + 1]] for n in range(len(row.names))],
    )


def _joined(rows: Sequence[ModuleRow], depth: int) -> list[ModuleRow]:
    """Keeps rows to a depth; joins equal repeated layers and adds up their counts."""
    shown = [row for row in rows if len(row.names) <= depth]
    repeated = text.repeated([row.names for row in shown], [row[1:] for row in shown])
    return [
        ModuleRow(names, shown[same[0]].cls, _total(shown[n].counts for n in same))
        for names, same in repeated
    ]


def _total(counts: Iterable[Counts]) -> Counts:
    trained, frozen = map(sum, zip(*counts, strict=True))
    return trained, frozen


def _as_text(rows: Sequence[ModuleRow]) -> str:
    right = ['parameters', 'trainable']
    head = ['module', 'class', *right, 'gradient']
    cells: list[list[str]] = []
    for row in rows:
        name = '  ' * len(row.names) + (row.names[-1] if row.names else '(model)')
        _, *values = row.as_dict().values()
        cells.append([name, *(x if isinstance(x, str) else f'{x:,}' for x in values)])
    widths = (max(map(text.width, column)) for column in zip(head, *cells, strict=True))
    if sum(widths) + 3 * (len(head) - 1) > text.WIDTH:
        head, *cells = ([name, *columns] for name, _, *columns in (head, *cells))
    return text.table(head, cells, right)
