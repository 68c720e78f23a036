"""Floating point operations of a traced program, by the module that they are done for.

XLA counts those of a whole program. Here each method of a module puts a mark into JAX's
name stack, equations with the same marks are taken together, and XLA counts these: so
what the backward pass of a program really does is known for each module.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
from flax import linen
from jax.extend import core
from jax.interpreters import partial_eval

from flax_sg import _private

# The paths of the modules that an equation runs in, the outermost first.
Modules: TypeAlias = tuple[str, ...]

_MARK = re.compile(r'flax_sg\[(.*?)\]')
_numbers = itertools.count(1)
# Equations that run a jaxpr once, with the operands and results that they have.
_CALLS = {
    'jit',
    'pjit',
    'closed_call',
    'core_call',
    'remat',
    'remat2',
    'checkpoint',
    'custom_jvp_call',
    'custom_vjp_call',
    'custom_vjp_call_jaxpr',
}


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

    with _private.summary_context(next(_numbers)), linen.intercept_methods(mark):
        jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    # As XLA does, before it counts.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    out: collections.Counter[str] = collections.Counter()
    for modules, flops in _count(jaxpr, (), {}).items():
        for path in {'', *modules}:
            out[path] += flops
    return dict(out)


def _count(
    jaxpr: Any, outside: Modules, known: dict[str, int]
) -> collections.Counter[Modules]:
    """Flops by the modules that equations run in."""
    counts: collections.Counter[Modules] = collections.Counter()
    groups: dict[Modules, list[Any]] = {}
    for equation in jaxpr.eqns:
        marks = _MARK.findall(_private.name_stack_of(equation))
        modules = tuple(dict.fromkeys([*outside, *marks]))
        inner = list(_inner(equation))
        if not inner:
            groups.setdefault(modules, []).append(equation)
            continue
        bodies = [_count(body, modules, known) for body, _ in inner]
        if equation.primitive.name == 'cond':
            bodies = [max(bodies, key=lambda body: body.total())]
        for body, (_, times) in zip(bodies, inner, strict=False):
            for key, flops in body.items():
                counts[key] += times * flops
    for modules, equations in groups.items():
        counts[modules] += _flops(equations, known)
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
    elif name in _CALLS:
        jaxpr = params.get('call_jaxpr', params.get('jaxpr', params.get('fun_jaxpr')))
        yield getattr(jaxpr, 'jaxpr', jaxpr), 1


def _flops(equations: Sequence[Any], known: dict[str, int]) -> int:
    """What XLA counts for equations without jaxprs in them."""
    equations = [equation for equation in equations if not equation.effects]
    made: set[Any] = set()
    operands: dict[Any, None] = {}
    for equation in equations:
        found = [v for v in equation.invars if not isinstance(v, core.Literal)]
        operands.update((v, None) for v in found if v not in made)
        made.update(equation.outvars)
    results = [v for v in made if not isinstance(v, core.DropVar)]
    jaxpr = core.Jaxpr((), list(operands), results, equations)
    key = str(jaxpr)
    if key not in known:
        fun = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
        cost: Any = jax.jit(fun).lower(*shapes).cost_analysis() or {}
        known[key] = int(cost.get('flops', 0))
    return known[key]
