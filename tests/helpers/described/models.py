"""Descriptions of random models, and Hypothesis strategies that draw them.

``real_models.py`` makes modules of Flax with flax_sg of a description;
``models_by_hand.py`` makes a function of the parameters, with stops by hand. All models
map an array of shape (2, 4) to one of that shape, so that modules can be combined in
any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from hypothesis import assume
from hypothesis import strategies as st

from tests.helpers.described.language import (
    EVERYTHING,
    Block,
    Interpreter,
    Leave,
    Program,
    Residual,
    Use,
    Where,
    without_blocks,
)
from tests.helpers.described.modules import LEAVES

# Names that variables and modules in the models have.
VARIABLES = ('w', 'b', 'kernel', 'bias', 'scale', 'A', 'p0', 'p1')
MODULES = ('k0', 'k1', 'k2', 'base', 'cell', 'shared')

# The rules that are drawn. Others, which are not linear, depend on which cotangents are
# added up first: see ``test_placing``.
RULES = ('stop', 'stop', 'function', 'collection', 'scale', 'read_only')

WRAPS = ('remat', 'jit', 'scan', 'vmap', 'stop')
LIFTS = (
    *('remat', 'jit', 'scan', 'vmap', 'cond', 'while_loop'),
    *('map_variables', 'custom_vjp', 'vjp'),
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A module that holds no blocks.

    Attributes:
        kind: one of ``LEAVES``.
    """

    kind: str


@dataclasses.dataclass(frozen=True)
class Kid:
    """A submodule of a composite module.

    Attributes:
        spec: what it is.
        wraps: transforms of its class, innermost first; ``'stop'`` is a lifted class.
        where: what the lifted class, or ``Frozen``, stops.
        rule: what they do instead, one of ``RULES``.
        frozen: whether ``Frozen`` is around it.
        shares: whether it is handed the composite's shared module in a field.
    """

    spec: Leaf | Composite
    wraps: tuple[str, ...] = ()
    where: Where = EVERYTHING
    shares: bool = False
    frozen: bool = False
    rule: str = 'stop'


@dataclasses.dataclass(frozen=True)
class Own:
    """Reads a parameter of the module itself: ``'p0'`` or ``'p1'``."""

    name: str


@dataclasses.dataclass(frozen=True)
class Shared:
    """Calls the module that was handed in, if there is one."""


@dataclasses.dataclass(frozen=True)
class Composite:
    """A module with submodules and statements.

    Attributes:
        style: ``'setup'`` or ``'compact'``.
        kids: its submodules.
        body: its statements.
    """

    style: str
    kids: tuple[Kid, ...]
    body: Program


def plain(spec: Any) -> Any:
    """The same model, without all that flax_sg does."""
    if isinstance(spec, Leaf):
        return spec
    kids = tuple(
        Kid(
            plain(kid.spec),
            tuple(w for w in kid.wraps if w != 'stop'),
            shares=kid.shares,
        )
        for kid in spec.kids
    )
    return Composite(spec.style, kids, without_blocks(spec.body))


def statements(it: Any) -> list[Any]:
    """All statements in a model or a statement, those inside others included."""
    found = []
    for item in getattr(it, 'body', ()):
        found += [item, *statements(item)]
    for kid in getattr(it, 'kids', ()):
        found += statements(kid.spec)
    return found


def lifts(spec: Composite, name: str) -> bool:
    """Whether a function is lifted with this transform anywhere in a model."""
    return any(getattr(item, 'lift', '') == name for item in statements(spec))


class OnValue(Interpreter):
    """Statements that change a value, with blocks or by hand.

    Attributes:
        x: the value.
    """

    x: jax.Array

    def result(self, body: Program, x: jax.Array, place: Any = None) -> jax.Array:
        """Runs statements on a value."""
        self.x = x
        self.run(body, place)
        return self.x

    def residual(self, item: Residual, place: Any) -> None:
        before = self.x
        self.run(item.body, place)
        self.x = before + self.x


# Draws.


def wheres() -> st.SearchStrategy[Where]:
    """Filters."""

    def some(kind: str, names: Sequence[str]) -> st.SearchStrategy[Where]:
        lists = st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)
        styles = st.sampled_from(['predicate', 'glob', 'regex'])
        chosen = lists.map(sorted).map(tuple)
        return st.builds(Where, st.just(kind), chosen, styles, st.booleans())

    return st.one_of(
        st.just(EVERYTHING), some('name', VARIABLES), some('under', MODULES)
    )


@st.composite
def kids(draw: st.DrawFn, depth: int) -> Kid:
    """Submodules."""
    if depth and draw(st.booleans()):
        spec: Any = draw(composites(depth - 1))
    else:
        spec = Leaf(draw(st.sampled_from(list(LEAVES))))
    wraps = draw(st.lists(st.sampled_from(WRAPS), max_size=2).map(tuple))
    mapped = [wrap for wrap in wraps if wrap in ('scan', 'vmap')]
    # Each copy of a module that is passed in would create its inner modules.
    shares = isinstance(spec, Composite) and not mapped and draw(st.booleans())
    frozen = draw(st.integers(0, 3)) == 0
    rule = draw(st.sampled_from(RULES))
    return Kid(spec, wraps, draw(wheres()), shares, frozen, rule)


@st.composite
def bodies(draw: st.DrawFn, kids: Sequence[Kid], nesting: int) -> Program:
    """Statements."""

    def use() -> Use:
        index = draw(st.integers(0, len(kids) - 1))
        kid = kids[index]
        mirror = draw(wheres()) if draw(st.integers(0, 2)) == 0 else None
        lift = ''
        # In a lifted function Flax runs ``setup`` before the class maps over the
        # module.
        mapped = {'scan', 'vmap'} & set(kid.wraps)
        if not (kid.shares or mapped):
            possible = set(LIFTS if 'jit' not in kid.wraps else ('remat', 'jit'))
            if kid.frozen or mirror is not None:
                # These two take no module that has a module in a field.
                possible -= {'vjp', 'custom_vjp'}
            if isinstance(kid.spec, Composite):
                possible -= {'custom_vjp'}  # Flax itself leaks tracers of scans.
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
            out.append(Shared())
        elif choice == 6:
            out.append(Residual(draw(bodies(kids, nesting - 1))))
        else:
            body = draw(bodies(kids, nesting - 1))
            rule, where = draw(st.sampled_from(RULES)), draw(wheres())
            leaves = (Leave(),) if draw(st.booleans()) else ()
            out.append(Block(where, (*body, *leaves), rule))
    return tuple(out)


@st.composite
def composites(draw: st.DrawFn, depth: int) -> Composite:
    """Modules with submodules."""
    made = draw(st.lists(kids(depth), min_size=1, max_size=3).map(tuple))
    style = draw(st.sampled_from(['setup', 'compact']))
    return Composite(style, made, draw(bodies(made, 2)))


@st.composite
def models(draw: st.DrawFn, depth: int = 2) -> Composite:
    """Models with at least one block."""
    model = draw(composites(depth))
    if not any(isinstance(item, Block) for item in statements(model)):
        everything = Block(draw(wheres()), model.body)
        model = dataclasses.replace(model, body=(*model.body, everything))
    # One has no reverse mode; the others need reverse mode.
    backwards = lifts(model, 'vjp') or lifts(model, 'custom_vjp')
    assume(not (backwards and lifts(model, 'while_loop')))
    return model
