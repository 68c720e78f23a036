"""Floating point operations of a traced program, by the module that they are done for.

XLA counts those of a whole program. Here each method of a module puts a mark into JAX's
name stack, and XLA counts each equation: so what the backward pass of a program really
does is known for each module.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
from flax import linen
from jax.extend import core
from jax.interpreters import partial_eval

from flax_sg.internals import jaxprs, tracing

# The paths of the modules that an equation runs in, the outermost first.
Modules: TypeAlias = tuple[str, ...]

_MARK = re.compile(r'flax_sg\[(.*?)\]')


def of(fun: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Traces a function and counts the flops in each module, its submodules included.

    Args:
        fun: a function in which modules are called.
        *args: its arguments, arrays or their shapes.

    Returns:
        Flops by path; the root, ``''``, has all of them. A scan counts as often as it
        runs, a ``while`` loop once, of branches the one with the most.
    """

    def mark(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        with jax.named_scope(f'flax_sg[{"/".join(context.module.path)}]'):
            return next_fun(*args, **kwargs)

    with tracing.traced_anew(), linen.intercept_methods(mark):
        jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    # As XLA does, before it counts.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    out: collections.Counter[str] = collections.Counter()
    for modules, flops in _count(jaxpr, (), {}).items():
        for path in {'', *modules}:
            out[path] += flops
    return dict(out)


def _count(
    jaxpr: Any, outside: Modules, known: dict[Any, int]
) -> collections.Counter[Modules]:
    """Flops by the modules that equations run in."""
    counts: collections.Counter[Modules] = collections.Counter()
    for equation in jaxpr.eqns:
        marks = _MARK.findall(jaxprs.name_stack_of(equation))
        modules = tuple(dict.fromkeys([*outside, *marks]))
        inner = list(_inner(equation))
        if not inner:
            counts[modules] += _flops(equation, known)
            continue
        bodies = [(_count(body, modules, known), times) for body, times in inner]
        if equation.primitive.name == 'cond':
            bodies = [max(bodies, key=lambda body: body[0].total())]
        for body, times in bodies:
            for key, flops in body.items():
                counts[key] += times * flops
    return counts


def _inner(equation: Any) -> Iterator[tuple[Any, int]]:
    """The jaxprs that an equation runs, and how often."""
    name, params = equation.primitive.name, equation.params
    if name == 'scan':
        yield params['jaxpr'].jaxpr, params['length']
    elif name == 'while':
        yield params['cond_jaxpr'].jaxpr, 1
        yield params['body_jaxpr'].jaxpr, 1
    elif name == 'cond':
        for branch in params['branches']:
            yield branch.jaxpr, 1
    elif name in jaxprs.CALLS | jaxprs.CUSTOM_CALLS:
        yield jaxprs.body_of(equation), 1


def _flops(equation: Any, known: dict[Any, int]) -> int:
    """What XLA counts for an equation without jaxprs in it."""
    if equation.effects:
        return 0
    shapes = [v.aval for v in equation.invars]
    key = str(equation), tuple(map(str, shapes))
    if key not in known:
        literal = {
            n: v.val
            for n, v in enumerate(equation.invars)
            if isinstance(v, core.Literal)
        }

        def run(*values: Any) -> Any:
            given = iter(values)
            slots = range(len(shapes))
            operands = [literal[n] if n in literal else next(given) for n in slots]
            return jaxprs.bind(equation, operands)

        arrays = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            for n, aval in enumerate(shapes)
            if n not in literal
        ]
        cost: Any = jax.jit(run).lower(*arrays).cost_analysis() or {}
        known[key] = int(cost.get('flops', 0))
    return known[key]
