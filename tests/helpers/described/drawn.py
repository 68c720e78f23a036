"""Hypothesis strategies that draw models, and programs that call them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from tests.helpers.described.language import (
    DERIVATIVES,
    EVERYTHING,
    HOWS,
    Ahead,
    Block,
    Call,
    Composite,
    Inner,
    Leaf,
    Leave,
    Own,
    Part,
    Program,
    Residual,
    Session,
    Shared,
    Thread,
    Use,
    Where,
    has_lift,
    statements,
)
from tests.helpers.described.modules import LEAVES

# Names that variables and modules in the models have.
VARIABLES = ('w', 'b', 'kernel', 'bias', 'scale', 'A', 'p0', 'p1')
COMMON = ('w', 'b', 'kernel', 'p0', 'p1', 'k0', 'k1')
MODULES = ('k0', 'k1', 'k2', 'base', 'cell', 'shared')

# The rules that are drawn. Others, which are not linear, depend on which cotangents are
# added up first: see ``test_placing``.
RULES = ('stop', 'stop', 'only', 'function', 'collection', 'scale', 'read_only')

WRAPS = ('remat', 'jit', 'scan', 'vmap', 'stop')
LIFTS = (
    *('remat', 'jit', 'scan', 'vmap', 'cond', 'while_loop'),
    *('map_variables', 'custom_vjp', 'vjp', 'jax.jit', 'jax.checkpoint'),
)
ALL = (*WRAPS, *LIFTS)
# Those of which JAX keeps programs. The others take longer to trace.
KEPT = ('remat', 'jit', 'stop', 'jax.jit', 'jax.checkpoint')
# How the filters of a kind can be written. The last two kinds depend on the owner.
STYLES = {
    'name': ('glob', 'regex', 'predicate'),
    'under': ('glob', 'regex', 'predicate', 'object'),
    'second': ('glob',),
    'root': ('predicate',),
}
# Of it the names are those of an object that changes.
CHANGING = Where('under', style='switch')


@st.composite
def wheres(draw: st.DrawFn, common: bool = False) -> Where:
    """Filters. ``common``: only of names that nearly all models have."""
    kind = draw(st.sampled_from(['all', 'name', 'name', 'under', 'under', *STYLES]))
    if kind == 'all':
        return EVERYTHING
    known = VARIABLES if kind == 'name' else MODULES
    names = st.sampled_from([name for name in known if name in COMMON or not common])
    some = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    style = draw(st.sampled_from(STYLES[kind]))
    return Where(kind, tuple(sorted(some)), style, draw(st.booleans()))


@st.composite
def conditional(draw: st.DrawFn, where: Where, rule: str = 'stop') -> Where:
    """The same filter, perhaps with a condition."""
    when = draw(st.sampled_from([0, 0, 0, 1, -1]))
    return dataclasses.replace(where, when=when * (rule != 'read_only'))


@st.composite
def parts(draw: st.DrawFn, depth: int, lifts: Sequence[str]) -> Part:
    """Submodules."""
    if depth and draw(st.booleans()):
        spec: Any = draw(composites(depth - 1, lifts))
    else:
        spec = Leaf(draw(st.sampled_from(list(LEAVES))))
    possible = st.sampled_from([wrap for wrap in WRAPS if wrap in lifts])
    wraps = draw(st.lists(possible, max_size=2).map(tuple))
    mapped = [wrap for wrap in wraps if wrap in ('scan', 'vmap')]
    # Each copy of a module that is passed in would create its inner modules.
    shares = isinstance(spec, Composite) and not mapped and draw(st.booleans())
    frozen = draw(st.integers(0, 3)) == 0
    rule = draw(st.sampled_from(RULES))
    return Part(spec, wraps, draw(wheres()), shares, frozen, rule)


@st.composite
def bodies(
    draw: st.DrawFn, kids: Sequence[Part], nesting: int, lifts: Sequence[str]
) -> Program:
    """Statements."""

    def use() -> Use:
        index = draw(st.integers(0, len(kids) - 1))
        kid = kids[index]
        mirror, lift = None, ''
        if draw(st.integers(0, 2)) == 0:
            mirror = draw(wheres().flatmap(conditional))
        # In a lifted function Flax runs ``setup`` before the class maps over the
        # module.
        mapped = {'scan', 'vmap'} & set(kid.wraps)
        if not (kid.shares or mapped):
            possible = {*LIFTS} & {*lifts}
            if 'jit' in kid.wraps:
                possible = {'remat', 'jit'}
            if kid.frozen or mirror is not None:
                # These two take no module that has a module in a field.
                possible -= {'vjp', 'custom_vjp'}
            if isinstance(kid.spec, Composite):
                possible -= {'custom_vjp'}  # Flax itself leaks tracers of scans.
            if kid.wraps or kid.frozen or mirror or isinstance(kid.spec, Composite):
                # What setup makes would leak.
                possible -= {'jax.jit', 'jax.checkpoint'}
            lift = draw(st.sampled_from(('', *sorted(possible))))
        return Use(index, lift, mirror)

    out: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        choice = draw(st.integers(0, 9))
        if choice < 4 or (not nesting and choice > 5):
            out.append(use())
            if out[-1].mirror and draw(st.booleans()):  # And the module itself.
                out.append(dataclasses.replace(out[-1], mirror=None))
        elif choice == 4:
            out.append(Own(draw(st.sampled_from(['p0', 'p1']))))
        elif choice == 5:
            out.append(draw(st.sampled_from([Shared(), Inner(), Inner()])))
        elif choice == 6:
            out.append(Residual(draw(bodies(kids, nesting - 1, lifts))))
        else:
            body = draw(bodies(kids, nesting - 1, lifts))
            rule = draw(st.sampled_from(RULES))
            where = draw(conditional(draw(wheres()), rule))
            leaves = (Leave(),) if draw(st.booleans()) else ()
            out.append(Block(where, (*body, *leaves), rule))
    return tuple(out)


@st.composite
def composites(draw: st.DrawFn, depth: int, lifts: Sequence[str]) -> Composite:
    """Modules with submodules."""
    size = 3 if depth else 2
    made = draw(st.lists(parts(depth, lifts), min_size=1, max_size=size).map(tuple))
    style = draw(st.sampled_from(['setup', 'compact']))
    return Composite(style, made, draw(bodies(made, size - 1, lifts)))


@st.composite
def models(draw: st.DrawFn, depth: int, lifts: Sequence[str] = ALL) -> Part:
    """Models with at least one block, and with some of the transforms."""
    model = draw(composites(depth, lifts))
    if not any(isinstance(item, Block) for item in statements(model)):
        everything = Block(draw(wheres()), model.body)
        model = dataclasses.replace(model, body=(*model.body, everything))
    part = Part(model, draw(st.sampled_from([(), ('jit',), ('jit', 'remat')])))
    # One has no reverse mode; the others need reverse mode.
    backwards = has_lift(part, 'vjp') or has_lift(part, 'custom_vjp')
    assume(not (backwards and has_lift(part, 'while_loop')))
    return part


def calls(models: Sequence[Part], hows: Collection[str] = HOWS) -> list[Call]:
    """The calls of models that are possible, in some ways."""
    found: list[Call] = []
    for i, model in enumerate(models):
        if has_lift(model, 'while_loop'):
            found.append(Call(i, 'forward'))
            continue
        special = has_lift(model, 'custom_vjp')
        found += [Call(i, how) for how in hows if not special or how != 'forward']
        # nn.custom_vjp gives no gradient to the parameters that it returns.
        both = [how for how in hows if how in ('plain', 'jit') and not special]
        found += [Call(i, how, True) for how in both]
    return found


@st.composite
def ahead(draw: st.DrawFn, call: Call) -> Call:
    """The same call, of the two functions that ``sg.precompute`` makes."""
    split = Ahead(draw(wheres(common=True)), draw(st.booleans()))
    return dataclasses.replace(call, ahead=split)


@st.composite
def programs(draw: st.DrawFn, models: Sequence[Part], deepest: int = 3) -> Program:
    """Programs of few filters, rules and calls, so that the same come again."""
    rules = draw(st.lists(st.sampled_from(RULES), min_size=1, max_size=2))
    some_filters = st.lists(wheres(common=True), min_size=2, max_size=3, unique=True)
    palette = [CHANGING, *draw(some_filters)]
    possible = calls(models, (*HOWS, 'jit', 'jit', 'step'))
    one = st.sampled_from(possible)
    one = one | one | one.flatmap(ahead)
    some = draw(st.lists(one, min_size=1, max_size=3))
    of_session = [one for one in some if one.how not in DERIVATIVES]

    def body(calls: Sequence[Call], depth: int) -> Program:
        return tuple(item(calls, depth) for _ in range(draw(st.integers(1, 3))))

    def item(calls: Sequence[Call], depth: int) -> Any:
        choice = draw(st.integers(0, 9)) if depth else 9
        if choice < 4:
            where, rule = draw(st.sampled_from(palette)), draw(st.sampled_from(rules))
            if where is CHANGING:
                where = dataclasses.replace(where, names=names)
            elif draw(st.booleans()):  # The same filter, written in another way.
                style = draw(st.sampled_from(STYLES.get(where.kind, ('predicate',))))
                where = dataclasses.replace(where, style=style)
            where = draw(conditional(where, rule))
            # Each glob of several is judged.
            judged = draw(st.integers(0, 3)) == 0
            judged &= where.style != 'glob' or len(where.names) < 2
            return Block(where, body(calls, depth - 1), rule, judged)
        if choice == 4 and calls is some:
            return Thread(body(some, depth - 1))
        if choice == 5 and calls is some and of_session:
            return Session(body(of_session, depth - 1))
        if choice == 6 and depth < deepest:
            return Leave(draw(st.integers(0, 2)))
        return draw(st.sampled_from(calls))

    # One call in each block, and then whatever comes.
    program: list[Any] = [Block(where, (some[0],), rules[0]) for where in palette[1:]]
    for _ in range(draw(st.integers(2, 4))):
        # What an object holds that filters read; it is the same in all open blocks.
        names = draw(st.sampled_from([('k0',), ('k1',), ('k0', 'k1')]))
        program.append(item(some, deepest))
    return tuple(program)
