"""Random graphs of modules that share modules and Variables, against all paths."""

import random
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from flax_sg import errors, filters, nnx
from flax_sg.filters.paths import Path
from flax_sg.nnx.asking import ask, parameters
from flax_sg.trees.leaves import leaves_of, selected
from flax_sg.trees.nnx_walks import Walk
from tests.helpers import oracle
from tests.helpers.profile import LONG


class Node(nnx.Module):
    """It holds whatever a test puts into it."""


class Unknown(nnx.Module, pytree=False):
    """JAX does not know it."""


def variable() -> Any:
    return nnx.Param(jnp.ones(2))


def graph_of(draw: random.Random, is_cyclic: bool) -> Any:
    """Modules and lists, each of which may stand at several places, or in itself."""
    variables = [variable() for _ in range(3)]
    nodes: list[Any] = []
    for _ in range(draw.randint(1, 6)):
        node, inside = draw.choice([Node, Unknown])(), nodes or variables
        for name in draw.sample('abc', draw.randint(1, 3)):
            several = [draw.choice(inside), draw.choice(variables)]
            child = draw.choice([*several, nnx.List(several)])
            setattr(node, name, child)
        nodes.append(node)
    for _ in range(draw.randint(1, 3) * is_cyclic):
        setattr(draw.choice(nodes[:-1] or nodes), draw.choice('cd'), draw.choice(nodes))
    return nodes[-1]


def all_paths(node: Any, names: tuple[str, ...] = (), *around: Any) -> Iterator[Any]:
    """The path of each Variable, and the Variable; through no module twice."""
    if isinstance(node, nnx.Variable):
        yield '/'.join(names), node
        return
    pairs = enumerate(node) if isinstance(node, nnx.List) else vars(node).items()
    for name, child in () if any(x is node for x in around) else pairs:
        if isinstance(child, (nnx.Variable, nnx.Module)):
            yield from all_paths(child, (*names, str(name)), node, *around)


def expression(draw: random.Random) -> Any:
    names = [*'abcd01?*', '**', '[ab]', '{a,b}', '{b/c,a}', '{b/a,0,c}']
    globs = ['/'.join(draw.choices(names, k=draw.randint(1, 5))) for _ in range(2)]
    name = draw.choice('abcd')
    others = [lambda path: name in path.parts, re.compile(f'.*{name}/.')]
    one, two = map(filters.as_filter, [globs[0], draw.choice([globs[1], *others])])
    return draw.choice([one, ~one, one & two, one | two, one & ~two])


@pytest.mark.parametrize('seed', range(200 if LONG else 8))
def test_a_filter_takes_a_variable_by_any_of_its_paths(seed: int):
    """A view, and a report on a tree with the model in it."""
    draw = random.Random(seed)
    model = graph_of(draw, seed % 2 == 1)
    tree, names, walk = (model, {'a': (model,)}), ('0', '1/a/0'), Walk(model)
    paths: list[dict[int, list[Path]]] = [{}, {}]
    for path, one in all_paths(model):
        paths[0].setdefault(id(one), []).append(Path(path))
        several = paths[1].setdefault(id(one), [])
        several.extend(Path(f'{name}/{path}') for name in names)
    flat = nnx.to_flat_state(nnx.state(model))
    assert {id(leaf.value): leaf.keys for leaf in walk.leaves.values()} == {
        id(one): keys for keys, one in flat
    }

    def expected(where: Any, own: list[Path]) -> Any:
        return where.answer(own[0], lambda atom, _: any(map(atom, own)))

    for where in (expression(draw) for _ in range(8)):
        for leaf, _, said in ask('', walk, where, parameters, 'ignore'):
            own = paths[0][id(leaf.value)]
            assert said == [expected(where, own)], (where, own)
        leaves = leaves_of(tree)
        restored, again = leaves.restore(leaves.values), ([], [])
        for some, several in zip((tree, restored), again, strict=True):
            rows = [*all_paths(some[0]), *all_paths(some[1]['a'][0])]
            rows.sort(key=lambda row: row[0])
            met = [id(one) for _, one in rows]
            several += [(path, met.index(id(one))) for path, one in rows]
        assert again[0] == again[1] and type(restored[0]) is type(model)
        [found] = selected([leaves.paths], where, 'ignore')
        by_path = {f'0/{path}': id(one) for path, one in all_paths(model)}
        for path, said in zip(leaves.paths, found, strict=True):
            own = paths[1][by_path[path]]
            assert said == expected(where, own), (where, own)


def test_modules_that_hold_each_other():
    """By ``a/n`` the module ``m`` is around, by ``z`` it is not."""
    model, m, n = Node(), Node(), Node()
    model.a, model.z, m.n, n.m, n.top = m, n, n, m, model
    m.kernel, model.m = variable(), nnx.Dict(kernel=variable())
    # Each name in braces takes something, by whichever path.
    for where in '**/m/kernel', '{z/m,m}/kernel', '{m,**/z/m}/*':
        view = nnx.stop_gradient(model, where)
        assert view.a.kernel is not m.kernel and view.a.kernel is view.z.m.kernel
        assert view.m.kernel is not model.m.kernel
        assert view.z.top is view and model.z.top is model


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
