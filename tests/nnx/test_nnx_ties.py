"""Random graphs of modules that share modules and Variables, against all paths."""

import random
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from flax_sg import errors, filters, nnx
from flax_sg.filters.paths import Path
from flax_sg.graphs.asking import ask, parameters
from flax_sg.graphs.walks import Walk
from tests.helpers import oracle
from tests.helpers.profile import LONG


class Node(nnx.Module):
    """It holds whatever a test puts into it."""


def variable() -> Any:
    return nnx.Param(jnp.ones(2))


def graph_of(draw: random.Random) -> Any:
    """Modules and lists, each of which may stand at several places."""
    variables = [variable() for _ in range(3)]
    nodes: list[Any] = []
    for _ in range(draw.randint(1, 6)):
        node, inside = Node(), nodes or variables
        for name in draw.sample('abc', draw.randint(1, 3)):
            several = [draw.choice(inside), draw.choice(variables)]
            child = draw.choice([*several, nnx.List(several)])
            setattr(node, name, child)
        nodes.append(node)
    return nodes[-1]


def all_paths(node: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(node, nnx.Variable):
        yield '/'.join(names), node
        return
    pairs = enumerate(node) if isinstance(node, nnx.List) else vars(node).items()
    for name, child in pairs:
        if isinstance(child, (nnx.Variable, nnx.Module)):
            yield from all_paths(child, (*names, str(name)))


def expression(draw: random.Random) -> Any:
    names = ['a', 'b', 'c', '*', '**', '?', '0', '1', '[ab]']
    one, two = (
        filters.as_filter('/'.join(draw.choices(names, k=draw.randint(1, 5))))
        for _ in range(2)
    )
    return draw.choice([one, ~one, one & two, one | two, one & ~two])


@pytest.mark.parametrize('seed', range(200 if LONG else 8))
def test_a_glob_takes_a_variable_by_any_of_its_paths(seed: int):
    draw = random.Random(seed)
    model = graph_of(draw)
    walk, paths = Walk(model), dict[int, list[Path]]()
    for path, one in all_paths(model):
        paths.setdefault(id(one), []).append(Path(path))
    flat = nnx.to_flat_state(nnx.state(model))
    assert {id(leaf.value): leaf.keys for leaf in walk.leaves} == {
        id(one): keys for keys, one in flat
    }
    for where in (expression(draw) for _ in range(8)):
        for leaf, _, said in ask('', walk, where, parameters, 'ignore'):
            own = paths[id(leaf.value)]
            taken = {atom: True for atom in where.atoms if any(map(atom, own))}
            assert said == [where.evaluate(taken)], (where, own)


def tree_of(draw: random.Random, depth: int, share: float) -> Any:
    """All of a depth have the same paths; their ties differ."""
    pool: dict[int, list[Any]] = {}

    def make(depth: int) -> Any:
        known = pool.setdefault(depth, [])
        if known and draw.random() < share:
            return draw.choice(known)
        node: Any = nnx.Param(jnp.full(2, draw.random())) if depth < 0 else Node()
        for name in 'ab' * (depth >= 0):
            setattr(node, name, make(depth - 1))
        known.append(node)
        return node

    return make(depth)


@pytest.mark.parametrize('seed', range(200 if LONG else 8))
def test_values_with_other_ties(seed: int):
    draw = random.Random(seed)
    depth = draw.randint(1, 3)
    model, target = (tree_of(draw, depth, draw.choice([0, 0.3, 0.6])) for _ in range(2))
    mine, theirs = dict(all_paths(model)), dict(all_paths(target))
    values: dict[int, set[int]] = {}
    for path, one in mine.items():
        values.setdefault(id(one), set()).add(id(theirs[path]))
    if any(len(several) > 1 for several in values.values()):
        with pytest.raises(errors.StructureError, match='are one Variable'):
            nnx.substitute(model, target)
        return
    seen = dict(all_paths(nnx.substitute(model, target)))
    oracle.assert_same(*({k: x[k][...] for k in mine} for x in (seen, theirs)))
    ties = [{path: id(x[path]) for path in mine} for x in (mine, seen)]
    by_id = [[*map(list(of.values()).index, of.values())] for of in ties]
    assert by_id[0] == by_id[1]
