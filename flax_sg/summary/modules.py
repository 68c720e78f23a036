"""``sg.tabulate`` shows the modules of a model, and which of them are trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import linen
from flax.core.scope import DenyList

from flax_sg import errors
from flax_sg.errors.texts import brief, unknown_choice
from flax_sg.filters.paths import Path
from flax_sg.flow.analysis import Analysis
from flax_sg.internals import tracing
from flax_sg.internals.optional import is_of_nnx
from flax_sg.rendering import text
from flax_sg.trees import leaves
from flax_sg.trees.trainable import declared

TRAINABLE, PARTLY, FROZEN = 'trainable', 'partly', 'frozen'
UPDATED, HELD = 'updated', 'held'
_LINES, _WIDTH = 50, 80


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
    module          class        parameters   trainable   gradient
    ───────────────────────────────────────────────────────────────
    (model)         Sequential          162          18   partly
      layers_[0-1]   Dense               144           0   frozen
      layers_2      Dense                18          18   trainable
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
            analysis = Analysis.of(run, (module, *args), kwargs=options)
            own = itertools.compress(leaves.leaves_of(module).paths, declared(module))
            meant = {path.place for path in own}
            found = [one for one in _trained(analysis) if one.path.place in meant]
            rows = rows_of(classes_of(module), found)
        else:
            program = program_of(module, rngs, args, options)
            found = program.counted()
            rows = rows_of(program.classes, found)
        deepest = max(len(row.names) for row in rows)
        shown_to = deepest if depth is None else depth
        if isinstance(shown_to, str):
            fits = (n for n in range(deepest, 1, -1) if len(joined(rows, n)) <= _LINES)
            shown_to = next(fits, 1)
        lines = [_as_text(joined(rows, shown_to)), '']
        if shown_to < deepest:
            lines.append(f'Shown to depth={shown_to}; depth=None shows all modules.')
        trained, frozen, updated, held = (
            text.amount([(one.counts[n], one.dtype) for one in found]) for n in range(4)
        )
        lines.append(f'Trainable: {trained}   Frozen: {frozen}')
        if rows[0].state:
            lines.append(f'Updated state: {updated}   Held state: {held}')
        table = ModuleTable('\n'.join(lines))
        table.modules = rows
        return table

    return show


class Counted(NamedTuple):
    """A variable, and how many of its values are what.

    Attributes:
        path: its path.
        dtype: its dtype.
        counts: the numbers of ``Row``: trained, frozen, updated and held.
    """

    path: Path
    dtype: Any
    counts: tuple[int, int, int, int]


class Row(NamedTuple):
    """A module or equal neighbouring modules, with their submodules.

    Attributes:
        names: the names in the path.
        cls: the name of the class, ``''`` for a module that is not called.
        trainable: the number of parameter values that the outputs train.
        frozen: the number without a gradient: stopped, not used, or integers.
        updated: the number of values of running statistics that a call changes.
        held: the number that it leaves.
    """

    names: tuple[str, ...]
    cls: str
    trainable: int = 0
    frozen: int = 0
    updated: int = 0
    held: int = 0

    @property
    def gradient(self) -> str:
        """``'trainable'``, ``'partly'`` or ``'frozen'``; ``''`` without parameters."""
        if self.trainable and self.frozen:
            return PARTLY
        return TRAINABLE if self.trainable else FROZEN if self.frozen else ''

    @property
    def state(self) -> str:
        """``'updated'``, ``'partly'`` or ``'held'``; ``''`` without state."""
        if self.updated and self.held:
            return PARTLY
        return UPDATED if self.updated else HELD if self.held else ''


class ModuleTable(str):
    """A table of modules: text, and plain data for other formats."""

    modules: Sequence[Row] = ()

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
                'parameters': row.trainable + row.frozen,
                'trainable': row.trainable,
                'gradient': row.gradient,
                'state': row.state,
            }
            for row in self.modules
        ]


def rows_of(
    classes: Mapping[tuple[str, ...], str], variables: Iterable[Counted]
) -> list[Row]:
    """Returns a row for the model, and for each submodule with variables.

    Submodules follow their module, in the order of the first calls.

    Args:
        classes: as in ``Program``.
        variables: as ``Program.counted`` returns them.
    """
    prefixes = (names[:n] for names in classes for n in range(len(names) + 1))
    order = {names: number for number, names in enumerate(dict.fromkeys(prefixes))}
    inside: dict[tuple[str, ...], list[tuple[int, ...]]] = {(): [(0,) * 4]}
    for one in variables:
        for n in range(len(one.path.parts)):
            if one.path.parts[:n] in order:
                inside.setdefault(one.path.parts[:n], []).append(one.counts)
    rows = [
        Row(names, classes.get(names, ''), *map(sum, zip(*counts, strict=True)))
        for names, counts in inside.items()
    ]
    return sorted(
        rows,
        key=lambda row: [order[row.names[: n + 1]] for n in range(len(row.names))],
    )


def joined(rows: Sequence[Row], depth: int) -> list[Row]:
    """Keeps rows to a depth; joins equal repeated layers and adds up their counts."""
    shown = [row for row in rows if len(row.names) <= depth]
    repeated = text.repeated([row.names for row in shown], [row[1:] for row in shown])
    return [
        Row(names, row.cls, *(len(same) * count for count in row[2:]))
        for names, same in repeated
        for row in [shown[same[0]]]
    ]


def _as_text(rows: Sequence[Row]) -> str:
    counts = ['parameters', 'trainable']
    has_state = any(row.state for row in rows)
    head = ['module', 'class', *counts, 'gradient', *['state'] * has_state]
    cells = [
        [
            '  ' * len(row.names) + (row.names[-1] if row.names else '(model)'),
            row.cls,
            f'{row.trainable + row.frozen:,}',
            f'{row.trainable:,}',
            row.gradient,
            *[row.state] * has_state,
        ]
        for row in rows
    ]
    table = text.table(head, cells, right=counts)
    if max(map(len, table.splitlines())) <= _WIDTH:
        return table
    without = [[name, *rest] for name, _, *rest in (head, *cells)]
    return text.table(without[0], without[1:], right=counts)


# Parameters are immutable here: written collections do not count as outputs.
_STATE = DenyList(('params', 'intermediates'))


class Program(NamedTuple):
    """A module's method on some arguments.

    Attributes:
        variables: the shapes of the variables, as ``init`` makes them.
        classes: the class name of each module that is called, by the names in its
            path, in the order of the first calls.
        forward: maps parameters and ``rest`` to the outputs and the written state.
        rest: all other arrays: state, random keys, arguments.
    """

    variables: dict[str, Any]
    classes: Mapping[tuple[str, ...], str]
    forward: Callable[[Any, Any], tuple[Any, Any]]
    rest: Any

    def counted(self) -> list[Counted]:
        """Each variable, and how many of its values are trained, or updated.

        A parameter is trained by the outputs. State is updated if a call gives back
        another value than it was given.
        """
        params = self.variables.get('params', {})
        state, *_ = self.rest
        updated: list[bool] = []

        def forward(params: Any, rest: Any) -> Any:
            given, *_ = rest
            y, written = self.forward(params, rest)
            before, after = map(leaves.leaves_of, (given, written))
            now = dict(zip(after.key_paths, after.values, strict=True))
            pairs = zip(before.key_paths, before.values, strict=True)
            updated[:] = (not _same(now.get(keys, leaf), leaf) for keys, leaf in pairs)
            return y

        found: list[Counted] = []
        if jax.tree.leaves(params):
            found = _trained(Analysis.of(forward, (params, self.rest)))
        elif jax.tree.leaves(state):
            jax.eval_shape(forward, params, self.rest)
        tree = leaves.leaves_of({'params': {}, **state})
        return found + [
            Counted(path, leaf.dtype, (0, 0, leaf.size * new, leaf.size * (not new)))
            for (path, leaf), new in zip(tree, updated, strict=True)
        ]


def _same(one: Any, other: Any) -> bool:
    """Whether two leaves, which may be ``NonDifferentiable``, are the same arrays."""
    return list(map(id, jax.tree.leaves(one))) == list(map(id, jax.tree.leaves(other)))


def _trained(analysis: Analysis) -> list[Counted]:
    """Parameters, and how many values of each are trained."""
    report = analysis.report()
    counts = [report.count(number) for number in range(len(report.parameters))]
    return [
        Counted(path, shape.dtype, (count, shape.size - count, 0, 0))
        for path, shape, count in zip(
            report.parameters, report.shapes, counts, strict=True
        )
    ]


def classes_of(model: Any) -> dict[tuple[str, ...], str]:
    """The class name of each module in an NNX model, by the names in its path."""
    from flax import nnx  # Models of linen do not wait for it.

    modules = nnx.iter_modules(model)
    return {tuple(map(str, names)): type(one).__name__ for names, one in modules}


def program_of(
    module: linen.Module, rngs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Program:
    """Returns the program of ``module.apply`` on the variables that ``init`` makes.

    Nothing is compiled or run.

    Args:
        module: the module.
        rngs: as for ``init``, or their shapes.
        args: as for ``init``. Arrays are traced; other values are passed on.
        kwargs: as for ``init``, including ``method=``; and ``mutable=``, as for
            ``apply``.
    """
    kwargs = dict(kwargs)
    mutable = kwargs.pop('mutable', _STATE)  # For ``apply``: ``init`` makes all.
    flat, treedef = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in flat if _is_array(leaf)]

    def call(run: Callable[..., Any], arrays: Any, *first: Any, **options: Any) -> Any:
        given = iter(arrays)
        values = [next(given) if _is_array(leaf) else leaf for leaf in flat]
        args, kwargs = treedef.unflatten(values)
        return run(*first, *args, **kwargs, **options)

    classes: dict[tuple[str, ...], str] = {}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        called = context.module
        if called.scope is not None:
            # A lifted class calls its methods on clones, the last one of the bare
            # class. Some clones have the empty path of the root.
            bare = type(called if called.path else module)
            classes[called.path] = bare.__name__
        return next_fun(*args, **kwargs)

    def init(rngs: Any, arrays: Any) -> Any:
        return call(module.init, arrays, rngs)

    # On a cache hit, a function of nn.jit would call no modules.
    with tracing.traced_anew(), linen.intercept_methods(note):
        variables = dict(jax.eval_shape(init, rngs, arrays))

    def forward(params: Any, rest: Any) -> tuple[Any, Any]:
        state, rngs, arrays = rest
        variables = {**state, 'params': params}
        y = call(module.apply, arrays, variables, rngs=rngs, mutable=mutable)
        return y if mutable else (y, {})

    state = {name: tree for name, tree in variables.items() if name != 'params'}
    return Program(variables, classes, forward, (state, rngs, arrays))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
