"""``live``: the filter of what a function trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, listed
from flax_sg.flow.analysis import report_on
from flax_sg.flow.report import STOPPED, GradientFlow
from flax_sg.flow.traced import Traced, trace_of
from flax_sg.internals.optional import is_nnx_model
from flax_sg.internals.places import Place, warn_once
from flax_sg.internals.types import PyTree
from flax_sg.trees.leaves import arguments_of, is_array
from flax_sg.trees.trainable import DECLARED, Declared


def live(
    fun: Callable[..., Any],
    params: PyTree,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: filters.Where | Declared = DECLARED,
    **kwargs: Any,
) -> filters.Filter:
    """Returns the filter of the parameters that a function trains.

    Freeze parameters once, in the model. The optimizer and the gradients follow:

    >>> import jax, jax.numpy as jnp, optax, flax_sg as sg
    >>> def loss(params, x):
    ...     features = x @ jax.lax.stop_gradient(params['body'])
    ...     return jnp.sum(features @ params['head'])
    >>> params, x = {'body': jnp.ones((2, 2)), 'head': jnp.ones(2)}, jnp.ones((3, 2))
    >>> live = sg.live(loss, params, x)
    >>> live
    <live: 'head'>
    >>> tx = sg.freeze(optax.adamw(1e-3), ~live)
    >>> value, grads = sg.value_and_grad(loss, wrt=live)(params, x)
    >>> grads
    {'body': ABSENT, 'head': Array([6., 6.], dtype=float32)}
    >>> sg.mask(params, frozen=~live)
    {'body': True, 'head': False}

    The function is traced here, on shapes, and again when it is differentiated. The
    filter is used at all steps, so numbers and arrays among the arguments may be any,
    as under ``jax.jit``. In doubt a parameter counts as trained. If a number of Python
    decides in Python what is trained, as in ``range(n)`` or ``f'layer_{n}'``, bind it:
    ``functools.partial(fun, n=12)``.

    Args:
        fun: a function of pytrees, or an unbound module for its ``apply``:
            ``sg.live(model, variables, x)`` leaves out its ``Frozen`` parts. A
            parameter is selected if any output trains it.
            Arrays that it closes over count as they are now, but for arrays of zeros,
            such as a queue that is filled later. Give as an argument what changes.
        params: its first argument, or the shapes. Paths begin in it.
        *args: its other arguments, or their shapes.
        argnums: which arguments hold the parameters, as for ``sg.gradient_flow`` and
            ``sg.grad``, which is then given the filter.
        has_aux: whether ``fun`` returns ``(outputs, aux)``; ``aux`` trains nothing.
            Default False. If it is forgotten, and statistics beside the loss depend on
            parameters that the loss does not train, a warning names these.
        wrt: the parameters to ask about, as for ``sg.gradient_flow``.
        **kwargs: keyword arguments of the function: ``train=True``, and for a module
            also ``rngs=``, ``mutable=`` and ``method=``. Collections that a module
            writes train nothing.

    Returns:
        A filter for ``wrt=``, ``where=``, blocks, and ``~ & |``. If the function trains
        nothing, it selects nothing, and a warning tells what stops the gradients.
        It knows that it names what is trained: ``sg.freeze(tx, live)``, without ``~``,
        raises, and so does ``wrt=~live``.
        Two of these are equal if they select the same of the same parameters. All
        variables in one box are selected together. If a part of an array is stopped
        (``sg.at``, ``frozen_layers=``), exactly the rest is selected. A parameter that
        a condition stops for a while, ``where & (step < k)``, is selected. The printed
        filter names it.

    Raises:
        UnknownNameError: when the filter is asked for a variable that was not in
            ``params``.
        PartError: when ``~live`` is used, if a part is stopped that depends on what
            comes in.
        ArgumentTypeError: as ``sg.gradient_flow``.
    """
    if is_nnx_model(fun) and is_array(params):
        raise errors.ArgumentTypeError(
            f'sg.live: {type(fun).__name__} is a model, and {brief(params)} holds none '
            'of its parameters.\n'
            'The filter names parameters of the first argument: give the model there.\n'
            'Write sg.live(loss, model, x), with a function loss(model, x).'
        )
    call = 'sg.live(loss, params)'
    trace = trace_of(call, fun, (params, *args), argnums, has_aux, wrt, kwargs)
    report = report_on(trace, together=True)
    trees = arguments_of((params, *args), argnums).values()
    asked = frozenset(path.place for tree in trees for path in tree.paths)
    parts = [*_parts(report, asked)]
    for doubt in _doubts(trace, report):
        warn_once(doubt, Place.here(), UserWarning)
    return filters.Trained(tuple(parts) or (filters.Derived(frozenset(), asked),))


def _parts(
    report: GradientFlow, asked: frozenset[tuple[str, tuple[str, ...]]]
) -> Iterator[filters.Filter]:
    """Yields the filters of what is trained: of whole variables, and of each part.

    Args:
        report: the report on the function.
        asked: the place of each variable.
    """
    # Leaves in one box share a place.
    decisions: dict[Any, bool | filters.Part] = {}
    for n, path in enumerate(report.parameters):
        decisions[path.place] = decisions.get(path.place, False) | report.trained(n)
    columns = zip(*report.conditions, strict=True)
    pairs = zip(report.parameters, columns, strict=True)
    conditional = {path.place for path, lines in pairs if any(lines)}
    for decision in dict.fromkeys(filter(filters.is_meant, decisions.values())):
        places = {place for place, other in decisions.items() if other == decision}
        variables = filters.Derived(
            frozenset(places), asked, conditional=frozenset(places & conditional)
        )
        is_part = isinstance(decision, filters.Part)
        yield variables & decision.elements if is_part else variables


def _doubts(trace: Traced, report: GradientFlow) -> Iterator[str]:
    """Yields what is to be said of a filter that may be another one at a later step."""
    every = range(len(report.names))
    if trace.returns_parameters:
        yield (
            'sg.live: the function returns a tree like its parameters, as '
            'jax.grad(loss) does.\n'
            'The filter names what gradients depend on, and not what a loss trains.\n'
            'Write sg.live(loss, params), with the function that jax.grad is given.'
        )
    elif not any(report.live):
        yield _nothing(report)
    by_rest = [n for n in every if report.trained(n) != report.trained(n, [0])]
    if trace.may_have_aux and by_rest:
        yield _by_rest(trace, [report.names[n] for n in by_rest])


def _by_rest(trace: Traced, names: Sequence[str]) -> str:
    """What to say if only what stands behind the first output trains a parameter."""
    return (
        f'sg.live: {trace.name} returns a tuple, and its first output alone does not '
        f'train {listed(names)}.\n'
        'If this is the loss, and statistics or metrics stand behind it, '
        'sg.freeze(tx, ~live) leaves to the optimizer what has no gradient.\n'
        'Write sg.live(..., has_aux=True). If all are losses, return a dict of them.'
    )


def _nothing(report: GradientFlow) -> str:
    """What to say of a function that trains nothing: what stops its parameters."""
    pairs = itertools.product(report.outputs, report.names)
    used = [pair for pair in pairs if report.status_of(*pair) == STOPPED]
    lines = [f'sg.live: the function trains none of {listed(report.names)}.']
    if used:
        why = report.why(*used[0])
        by = (
            f'stopped by {why.by}'
            if why.by
            else 'an integer or a factor of zeros, or its output is an integer'
        )
        lines.append(f'{why.parameter!r} is {by}.')
    else:
        lines.append('No output uses them.')
    lines.append(
        'So wrt=live differentiates nothing, and sg.freeze(tx, ~live) freezes all.\n'
        "To train a part, stop the others alone, as in nn.Frozen(model, 'encoder/**')."
    )
    return '\n'.join(lines)
