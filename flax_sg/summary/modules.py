"""``sg.tabulate`` shows the modules of a model, and which of them are trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from flax import linen
from flax.core.scope import DenyList

from flax_sg import errors
from flax_sg.errors.texts import brief, unknown_choice
from flax_sg.filters.paths import Path
from flax_sg.flow.analysis import Analysis
from flax_sg.flow.report import PARTLY
from flax_sg.internals.optional import is_of_nnx
from flax_sg.rendering import text
from flax_sg.summary.programs import classes_of, variables_of
from flax_sg.trees import leaves
from flax_sg.trees.trainable import declared

# How many values of a variable, or of those in a module, are trained, frozen, updated
# and held.
Counts = tuple[int, int, int, int]
_LINES, _WIDTH = 50, 80
# Parameters are immutable here: written collections do not count as outputs.
_STATE = DenyList(('params', 'intermediates'))


def tabulate(
    module: Any,
    rngs: Any = None,
    depth: int | Literal['fit'] | None = 'fit',
    **kwargs: Any,
) -> Callable[..., ModuleTable]:
    """Returns a function that shows which modules of a model are trained.

    A module's row counts the parameters of its submodules too. Equal neighbouring
    layers share one row. A partly frozen module is marked ``partly``. A table wider
    than 80 columns leaves out the classes.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> layers = [nn.Frozen(nn.Dense(8)), nn.Frozen(nn.Dense(8)), nn.Dense(2)]
    >>> model = nn.Sequential(layers)
    >>> print(sg.tabulate(model, jax.random.key(0))(jnp.ones((4, 8))))
    module           class        parameters   trainable   gradient
    ────────────────────────────────────────────────────────────────
    (model)          Sequential          162          18   partly
      layers_[0-1]   Dense               144           0   frozen
      layers_2       Dense                18          18   trainable
    <BLANKLINE>
    Trainable: 18 (72 B)   Frozen: 144 (576 B)

    Args:
        module: the module, of linen or NNX.
        rngs: random keys, as for ``init``. An NNX module needs none.
        depth: how many submodules deep the table goes, or ``None`` for all of them. The
            default ``'fit'`` goes as deep as fits into 50 lines, at least one deep. The
            last lines say if the table leaves modules out.
        **kwargs: further arguments of the module (``train=True``) and of ``init``;
            ``method=`` chooses the method, ``mutable=`` the collections that a call
            may write: by default all but parameters and intermediates. Only the
            method's outputs decide what is trained. If the loss trains more, give
            a method that returns the loss.

    Returns:
        A function that takes the method's arguments, arrays or their shapes, and
        returns a ``ModuleTable``. Nothing is compiled or run. If there are running
        statistics or other state, a column tells whether a call updates them.

    Raises:
        ArgumentTypeError: if ``module`` is not a Module instance.
        ArgumentValueError: if ``depth`` is not an int from 0 on, ``None`` or ``'fit'``.

    Note:
        Modules without parameters are left out. For flops and the shapes of inputs and
        outputs see ``nn.tabulate``.
    """
    is_graph = is_of_nnx(type(module), 'Module')
    if not is_graph and not isinstance(module, linen.Module):
        raise errors.ArgumentTypeError(
            f'tabulate() takes a Module instance, and was given {brief(module)}.\n'
            'Make the module: sg.tabulate(Model(...), rngs)(x).'
        )
    if depth < 0 if isinstance(depth, int) else depth not in ('fit', None):
        raise unknown_choice('depth', depth, ('fit', 1, 2, None))

    def show(*args: Any, **call_kwargs: Any) -> ModuleTable:
        options = {**call_kwargs, **kwargs}
        if is_graph:
            run = options.pop('method', type(module).__call__)
            found = _trained(Analysis.of(run, (module, *args), kwargs=options))
            own = itertools.compress(leaves.leaves_of(module).paths, declared(module))
            meant = {path.place for path in own}
            found = [one for one in found if one.path.place in meant]
            rows = _rows(classes_of(module), found)
        else:
            mutable = options.pop(
                'mutable', _STATE
            )  # For ``apply``: ``init`` makes all.
            variables, classes = variables_of(module, rngs, args, options)
            found = _counted(module, variables, mutable, (rngs, args, options))
            rows = _rows(classes, found)
        return ModuleTable.of(rows, found, depth)

    return show


class Counted(NamedTuple):
    """A variable, and how many of its values are what."""

    path: Path
    dtype: Any
    counts: Counts


class Row(NamedTuple):
    """A module or equal neighbouring modules, with their submodules.

    Attributes:
        names: the names in the path.
        cls: the name of the class, ``''`` for a module that is not called.
        counts: the number of parameter values that the outputs train, and of those
            without a gradient: stopped, not used, or integers. Then the number of
            values of running statistics that a call changes, and of those it leaves.
    """

    names: tuple[str, ...]
    cls: str
    counts: Counts

    def cells(self) -> list[str]:
        """The class, the numbers of parameters, and the words for both kinds."""
        trained, frozen, updated, held = self.counts
        return [
            self.cls,
            f'{trained + frozen:,}',
            f'{trained:,}',
            _word(trained, frozen, 'trainable', 'frozen'),
            _word(updated, held, 'updated', 'held'),
        ]


class ModuleTable(str):
    """A table of modules: text, and plain data for other formats."""

    modules: Sequence[Row] = ()

    @classmethod
    def of(
        cls, rows: Sequence[Row], found: Sequence[Counted], depth: Any
    ) -> ModuleTable:
        """The table of some modules, as deep as ``tabulate`` says."""
        deepest = max(len(row.names) for row in rows)
        if depth == 'fit':
            fits = (n for n in range(deepest, 1, -1) if len(_joined(rows, n)) <= _LINES)
            depth = next(fits, 1)
        lines = [_as_text(_joined(rows, deepest if depth is None else depth)), '']
        if depth is not None and depth < deepest:
            lines.append(f'Shown to depth={depth}; depth=None shows all modules.')
        amounts = [
            text.amount([(x.counts[n], x.dtype) for x in found]) for n in range(4)
        ]
        lines.append('Trainable: {}   Frozen: {}'.format(*amounts))
        if any(rows[0].counts[2:]):
            lines.append('Updated state: {2}   Held state: {3}'.format(*amounts))
        table = cls('\n'.join(lines))
        table.modules = rows
        return table

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each module, as deep as the model goes.

        Its keys are ``'module'`` (the path, ``''`` for the model), ``'class'``,
        ``'parameters'`` and ``'trainable'`` (numbers of values), ``'gradient'`` and
        ``'state'``.
        """
        return [
            {
                'module': '/'.join(row.names),
                'class': row.cls,
                'parameters': row.counts[0] + row.counts[1],
                'trainable': row.counts[0],
                'gradient': row.cells()[3],
                'state': row.cells()[4],
            }
            for row in self.modules
        ]


def _word(some: int, others: int, word: str, other: str) -> str:
    if some and others:
        return PARTLY
    return word if some else other if others else ''


def _rows(
    classes: Mapping[tuple[str, ...], str], variables: Iterable[Counted]
) -> list[Row]:
    """A row for the model, and for each submodule with variables.

    Submodules follow their module, in the order of the first calls.
    """
    prefixes = (names[:n] for names in classes for n in range(len(names) + 1))
    order = {names: number for number, names in enumerate(dict.fromkeys(prefixes))}
    inside: dict[tuple[str, ...], list[Counts]] = {(): [(0, 0, 0, 0)]}
    for one in variables:
        for n in range(len(one.path.parts)):
            if one.path.parts[:n] in order:
                inside.setdefault(one.path.parts[:n], []).append(one.counts)
    rows = [Row(x, classes.get(x, ''), _total(counts)) for x, counts in inside.items()]
    return sorted(
        rows,
        key=lambda row: [order[row.names[: n + 1]] for n in range(len(row.names))],
    )


def _total(counts: Iterable[Counts]) -> Counts:
    trained, frozen, updated, held = map(sum, zip(*counts, strict=True))
    return trained, frozen, updated, held


def _joined(rows: Sequence[Row], depth: int) -> list[Row]:
    """Keeps rows to a depth; joins equal repeated layers and adds up their counts."""
    shown = [row for row in rows if len(row.names) <= depth]
    repeated = text.repeated([row.names for row in shown], [row[1:] for row in shown])
    return [
        Row(names, shown[same[0]].cls, _total(shown[n].counts for n in same))
        for names, same in repeated
    ]


def _as_text(rows: Sequence[Row]) -> str:
    right = ['parameters', 'trainable']
    head = ['module', 'class', *right, 'gradient', 'state']
    cells = [
        [
            '  ' * len(row.names) + (row.names[-1] if row.names else '(model)'),
            *row.cells(),
        ]
        for row in rows
    ]
    if not any(row[-1] for row in cells):
        head, *cells = ([*row[:-1]] for row in (head, *cells))
    table = text.table(head, cells, right)
    if max(map(text.width, table.splitlines())) <= _WIDTH:
        return table
    head, *cells = ([name, *rest] for name, _, *rest in (head, *cells))
    return text.table(head, cells, right)


def _trained(analysis: Analysis) -> list[Counted]:
    """Parameters, and how many values of each are trained."""
    report = analysis.report()
    found: list[Counted] = []
    for n, (path, shape) in enumerate(
        zip(report.parameters, report.shapes, strict=True)
    ):
        count = report.count(n)
        found.append(Counted(path, shape.dtype, (count, shape.size - count, 0, 0)))
    return found


def _counted(
    module: linen.Module, variables: Mapping[str, Any], mutable: Any, rest: Any
) -> list[Counted]:
    """Each variable of a linen model, and how many values are trained, or updated.

    A parameter is trained by the outputs. State is updated if a call gives back another
    value than it was given.

    Args:
        module: the module.
        variables: the shapes of its variables.
        mutable: what ``apply`` may write.
        rest: random keys, and the arguments of ``apply``.
    """
    params = variables.get('params', {})
    state = {name: tree for name, tree in variables.items() if name != 'params'}
    updated: list[bool] = []

    def forward(params: Any, state: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
        given = {**state, 'params': params}
        y = module.apply(given, *args, rngs=rngs, mutable=mutable, **kwargs)
        y, written = y if mutable else (y, {})
        before, after = map(leaves.leaves_of, (state, written))
        now = dict(zip(after.key_paths, after.values, strict=True))
        pairs = zip(before.key_paths, before.values, strict=True)
        updated[:] = (not _same(now.get(keys, leaf), leaf) for keys, leaf in pairs)
        return y

    has_params = bool(jax.tree.leaves(params))
    found: list[Counted] = []
    if has_params or jax.tree.leaves(state):
        # Without parameters, the trace still tells what is updated.
        analysis = Analysis.of(forward, (params, state, *rest), int(not has_params))
        found = _trained(analysis) if has_params else []
    tree = leaves.leaves_of({'params': {}, **state})
    return found + [
        Counted(path, leaf.dtype, (0, 0, leaf.size * new, leaf.size * (not new)))
        for (path, leaf), new in zip(tree, updated, strict=True)
    ]


def _same(one: Any, other: Any) -> bool:
    """Whether two leaves, which may be ``NonDifferentiable``, are the same arrays."""
    return list(map(id, jax.tree.leaves(one))) == list(map(id, jax.tree.leaves(other)))
