"""``sg.tabulate``: the table of ``nn.tabulate``, with what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flax import linen
from flax.core.scope import CollectionFilter

from flax_sg import errors
from flax_sg.internals import tables
from flax_sg.summary import programs, rows, text

FIT = 'fit'
_LINES = 150
_DEPTHS = {
    FIT: f'as deep as fits into {_LINES} lines',
    'an int': 'so many submodules deep',
    None: 'all submodules',
}


def tabulate(
    module: linen.Module,
    rngs: Any,
    depth: int | str | None = FIT,
    show_repeated: bool = False,
    mutable: CollectionFilter = programs.MUTABLE,
    console_kwargs: Mapping[str, Any] | None = None,
    table_kwargs: Mapping[str, Any] = MappingProxyType({}),
    column_kwargs: Mapping[str, Any] = MappingProxyType({}),
    compute_flops: bool = True,
    compute_vjp_flops: bool = True,
    **kwargs: Any,
) -> Callable[..., str]:
    """Returns a function that shows a module as a table, with what is trained of it.

    The table is that of ``nn.tabulate``. Added are, for each module with all that is in
    it, whether its parameters are trainable, partly or frozen, with counts and bytes,
    and the flops of the program as it is with its stops: a module through which no
    gradient goes has no backward pass.

    >>> import jax, jax.numpy as jnp
    >>> import flax_sg as sg
    >>> from flax_sg import linen as nn
    >>> model = nn.Sequential([nn.Frozen(nn.Dense(3)), nn.Dense(2)])
    >>> show = sg.tabulate(model, jax.random.key(0), console_kwargs={'width': 120})
    >>> table = show(jnp.ones((4, 8)))
    >>> [name for name in ('gradient', 'flops', 'backward_flops') if name in table]
    ['gradient', 'flops', 'backward_flops']

    Below the table stands the total, here of the model of two layers:

    >>> plain = sg.tabulate(
    ...     model, jax.random.key(0), console_kwargs={'force_terminal': False}
    ... )
    >>> print(plain(jnp.ones((4, 8))).splitlines()[-1])
    Trainable: 8 (32 B)   Frozen: 27 (108 B)

    Args:
        module: the module.
        rngs: random keys, as for ``init``.
        depth: how many submodules deep the table goes: an int, ``None`` for all of
            them, or ``'fit'``, the default: as deep as fits into 150 lines, at least
            one. Modules that are left out are counted in those around them.
        show_repeated: whether to show each call of a module; flops of all of them are
            in the first row.
        mutable: the collections that are written.
        console_kwargs: arguments of ``rich.console.Console``, such as ``width``.
        table_kwargs: arguments of ``rich.table.Table``.
        column_kwargs: arguments of its ``add_column``.
        compute_flops: whether to count those of the forward pass.
        compute_vjp_flops: whether to count those that the backward pass adds. The
            derivative is that of the outputs by the parameters that they train.
        **kwargs: further arguments of ``init``; ``method=`` says what is called. What
            is trained is judged by its outputs alone, so give a method that returns the
            loss if something in the loss trains more.

    Returns:
        A function of the arguments of the method, which returns the table as text.
        Nothing is compiled or run.

    Raises:
        ArgumentTypeError: if ``module`` is none.
        ArgumentValueError: if ``depth`` is none of these.
        TypeError: if something that is differentiated cannot be, as JAX says it; pass
            ``compute_vjp_flops=False``.

    Note:
        ``nn.tabulate`` counts the flops of each module alone, every one as if all of it
        were trained. A module lifted by ``nn.jit`` and called twice is traced once, and
        flops go to the first call.
    """
    if not isinstance(module, linen.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _no_module(module)
    if depth not in (FIT, None) and not isinstance(depth, int):
        raise errors.unknown_choice('depth', depth, _DEPTHS)
    columns = [
        'gradient',
        *['flops'] * compute_flops,
        *['backward_flops'] * compute_vjp_flops,
    ]

    def show(*args: Any, **call_kwargs: Any) -> str:
        given = {**call_kwargs, **kwargs}
        options = {**given, **programs.init_options(mutable)}
        table = tables.module_rows(module, show_repeated, rngs, *args, **options)
        program = programs.program_of(module, rngs, mutable, args, given)
        found = rows.collect(table, program, compute_flops, compute_vjp_flops)

        def as_text(depth: int | None) -> str:
            part = rows.collapsed(found, depth)
            return text.render(
                part, columns, console_kwargs, table_kwargs, column_kwargs
            )

        return (
            as_text(depth) if not isinstance(depth, str) else _fitting(as_text, found)
        )

    return show


def _fitting(as_text: Callable[[int | None], str], found: rows.Summary) -> str:
    """The text of the deepest table that is short enough to be read."""
    shown = as_text(1)
    for depth in range(2, 1 + max((len(row.path) for row in found.rows), default=0)):
        deeper = as_text(depth)
        if deeper.count('\n') > _LINES:
            break
        shown = deeper
    return shown


def _no_module(target: object) -> errors.ArgumentTypeError:
    """Something that is no module is to be shown as a table."""
    what = f'{target!r} of type {type(target).__name__}'
    if isinstance(target, type):
        what = f'the class {target.__name__}'
    return errors.ArgumentTypeError(
        f'tabulate() takes a Module instance, and was given {what}.\n'
        'Make the module: sg.tabulate(Model(...), rngs)(x).'
    )
