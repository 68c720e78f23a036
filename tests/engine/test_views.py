"""Views as plain dict code: leaves are objects, rules wrap them, no block is open."""

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import pytest
from flax import linen
from flax.core import FrozenDict
from hypothesis import given
from hypothesis import strategies as st

from flax_sg import filters
from flax_sg.engine import askers, cache_keys, views
from flax_sg.engine.blocks import Block, Root, thread
from flax_sg.filters.paths import Path
from flax_sg.internals import places, tracing
from flax_sg.rules import rules
from flax_sg.rules.rules import AS_IT_IS
from flax_sg.trees import variables
from flax_sg.trees.variables import Key


class Leaf:
    """Something stored, known by identity."""


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """What a block's rule makes of a leaf."""

    leaf: Any
    by: str


@dataclasses.dataclass(frozen=True, eq=False)
class Wraps(rules.Rule):
    """What a reader sees names the block that has shown it."""

    by: str
    of_leaf: Callable[[Any, str], Any]
    of_variable: Callable[[Any], Any]
    name: ClassVar[str] = 'wraps'
    brings: ClassVar[bool] = True

    def __call__(self, path: Path, leaf: Any) -> Any:
        return self.of_leaf(leaf, self.by)

    def instead(self, path: Path, value: Any, find: rules.Find) -> Any:
        return self.of_variable(value)


def new_block(
    name: str = 'block',
    takes: Callable[[Path], bool] = lambda path: True,
    collections: tuple[str, ...] = ('params',),
    rule: Callable[[Any, str], Any] = Seen,
    whole: Callable[[Any], Any] = lambda value: AS_IT_IS,
    asked: list[Key] | None = None,
) -> Block:
    """A block that takes the variables it is told to, and wraps their leaves.

    Args:
        name: the block in ``Seen.by``.
        takes: which variables.
        collections: the collections that it looks at.
        rule: what a reader sees of a leaf.
        whole: what a reader sees of a variable.
        asked: notes the variables that the filter is asked for.
    """

    def where(path: Path) -> bool:
        if asked is not None:
            asked.append((path.collection, path.parts))
        return takes(path)

    rewrite = rules.Rewrite(
        filters.as_filter(where), Wraps(name, rule, whole), collections
    )
    return Block(
        rewrite=rewrite,
        outer=(),
        owner=None,
        owner_path=(),
        tree=None,
        asker=askers.Asker(rewrite, (), None),
        number=cache_keys.fresh(),
        level=tracing.current_trace(),
        kept_trace=tracing.kept_trace(),
        place=places.Place.here(),
    )


def named(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.parts[-1] in names


TOP: Key = ('params', ())


@pytest.fixture
def root() -> Root:
    return Root(object())


def test_selected_variables_are_rewritten_and_others_are_the_stored_ones(root):
    a, b, c = Leaf(), Leaf(), Leaf()
    stored = {'a': a, 'm': {'a': b, 'c': c}}
    seen = views.view(root, [new_block(takes=named('a'))], TOP, stored)
    assert seen['a'].leaf is a
    assert seen['m']['a'].leaf is b
    assert seen['m']['c'] is c
    assert stored == {'a': a, 'm': {'a': b, 'c': c}}


def test_a_collection_that_no_block_wants_is_the_stored_object(root):
    stored = {'a': Leaf()}
    asked: list[Key] = []
    block = new_block(asked=asked)
    assert views.view(root, [block], ('batch_stats', ()), stored) is stored
    assert views.view(root, [], TOP, stored) is stored
    assert asked == []


def test_each_block_looks_at_its_own_collections(root):
    params, state = new_block('p'), new_block('s', collections=('state',))
    leaf = Leaf()
    assert views.view(root, [params, state], ('state', ('x',)), leaf).by == 's'
    assert views.view(root, [params, state], ('params', ('x',)), leaf).by == 'p'


def test_a_filter_is_asked_with_the_collection_and_the_whole_path(root):
    asked: list[Key] = []
    stored = {'m': {'a': Leaf(), 't': (Leaf(), {'x': Leaf()})}, 1: Leaf()}
    views.view(root, [new_block(asked=asked)], ('params', ('enc',)), stored)
    paths = [('enc', 'm', 'a'), ('enc', 'm', 't', '0')]
    paths += [('enc', 'm', 't', '1', 'x'), ('enc', '1')]
    assert asked == [('params', path) for path in paths]


@pytest.mark.parametrize(
    'cls', [dict, FrozenDict, collections.OrderedDict, type('Own', (dict,), {})]
)
def test_dicts_keep_their_type_and_order(root, cls):
    inner = cls({'z': Leaf(), 'a': Leaf()})
    seen = views.view(root, [new_block()], TOP, cls({'n': inner, 'b': Leaf()}))
    assert type(seen) is cls
    assert list(seen) == ['n', 'b']
    assert list(seen['n']) == ['z', 'a']
    if cls is not FrozenDict:  # One that shows its insides as dicts.
        assert type(seen['n']) is cls


def test_a_default_dict_keeps_its_default(root):
    seen = views.view(root, [new_block()], TOP, collections.defaultdict(list, a=Leaf()))
    assert seen['b'] == []


def test_a_mapping_that_jax_takes_for_a_leaf_is_one(root):
    stored = types.MappingProxyType({'x': Leaf()})
    asked: list[Key] = []
    block = new_block(asked=asked)
    assert views.view(root, [block], ('params', ('m',)), stored).leaf is stored
    assert asked == [('params', ('m',))]


def test_leaves_of_one_variable_have_paths_in_it_and_keep_their_structure(root):
    a, b, c = Leaf(), Leaf(), Leaf()
    box = linen.Partitioned(c, names=('in',))
    asked: list[Key] = []
    key = ('params', ('m', 'w'))
    seen = views.view(root, [new_block(asked=asked)], key, (a, [b, None], box))
    assert seen[0].leaf is a and seen[1][0].leaf is b and seen[1][1] is None
    assert isinstance(seen[2], linen.Partitioned)
    assert seen[2].value.leaf is c and seen[2].names == ('in',)
    paths = [('m', 'w', '0'), ('m', 'w', '1', '0'), ('m', 'w', '2')]
    assert asked == [('params', path) for path in paths]


def test_a_dict_inside_a_variable_keeps_its_order(root):
    stored = ({'z': Leaf(), 'a': Leaf()},)
    seen = views.view(root, [new_block()], ('params', ('t',)), stored)
    assert [(n, s.leaf) for n, s in seen[0].items()] == list(stored[0].items())


def test_one_leaf_is_rewritten_once(root):
    """Whether it is read by itself or as part of a tree, and how often."""
    leaf, block = Leaf(), new_block()
    first = views.view(root, [block], ('params', ('m', 'a')), leaf)
    tree = views.view(root, [block], TOP, {'m': {'a': leaf}})
    subtree = views.view(root, [block], ('params', ('m',)), FrozenDict({'a': leaf}))
    assert first is tree['m']['a'] is subtree['a']


def test_one_array_in_two_variables_is_judged_for_each(root):
    leaf = Leaf()
    seen = views.view(root, [new_block(takes=named('a'))], TOP, {'a': leaf, 'b': leaf})
    assert seen['a'].leaf is leaf
    assert seen['b'] is leaf


def test_the_outer_rule_is_applied_first(root):
    leaf = Leaf()
    seen = views.view(
        root, [new_block('outer'), new_block('inner')], ('params', ('a',)), leaf
    )
    assert (seen.by, seen.leaf.by, seen.leaf.leaf) == ('inner', 'outer', leaf)


def test_an_inner_block_keeps_what_the_outer_one_has_made(root):
    outer, inner = new_block('outer'), new_block('inner')
    key = ('params', ('a',))
    leaf = Leaf()
    before = views.view(root, [outer], key, leaf)
    both = views.view(root, [outer, inner], key, leaf)
    assert both.leaf is before
    root.forget(inner)
    assert views.view(root, [outer], key, leaf) is before


def test_a_block_that_is_forgotten_leaves_nothing(root):
    block, key, leaf = new_block(), ('params', ('a',)), Leaf()
    first = views.view(root, [block], key, leaf)
    root.joint[block], root.setup_values[block] = object(), {}
    root.forget(block)
    assert not (root.seen or root.joint or root.setup_values)
    assert views.view(root, [block], key, leaf) is not first
    root.forget(block)
    assert views.stored(root, [block], key, first) is first


def test_trees_do_not_share_what_is_rewritten():
    block, key, leaf = new_block(), ('params', ('a',)), Leaf()
    one, other = (views.view(Root(object()), [block], key, leaf) for _ in '12')
    assert one is not other


def test_what_is_rewritten_is_counted_and_what_is_not_is_not(root):
    same = new_block(rule=lambda leaf, name: leaf)
    before = thread.rewritten
    views.view(root, [same], TOP, {'a': Leaf()})
    assert thread.rewritten == before
    block = new_block(takes=named('a'))
    stored = {'a': (Leaf(), Leaf()), 'b': Leaf()}
    views.view(root, [block], TOP, stored)
    assert thread.rewritten == before + 2
    views.view(root, [block], TOP, stored)
    assert thread.rewritten == before + 4, 'a reader of the memo saw it too'


# The body of a lifted transform: what it begins with was rewritten outside.


def body(block: Block, handed: dict[Key, Any]) -> Root:
    return Root(object(), (block,), handed, frozenset(handed))


def test_what_was_handed_in_is_not_rewritten_again():
    key, block = ('params', ('a',)), new_block()
    leaf, written = Leaf(), Leaf()
    root = body(block, {key: (leaf, None)})
    assert views.view(root, [block], key, (leaf, None))[0] is leaf
    assert views.view(root, [block], key, (written, None))[0].leaf is written


def test_what_came_in_is_not_asked_for_by_its_name_in_there():
    """``nn.map_variables`` gives names of which the filter shall not be asked."""
    key, one, other = ('params', ('a',)), Leaf(), Leaf()
    asked: list[Key] = []
    block = new_block(
        whole=lambda value: pytest.fail('it was rewritten outside'), asked=asked
    )
    root = body(block, {key: (one, [other])})
    made_anew = (one, [other])
    assert views.view(root, [block], key, made_anew) is made_anew
    assert asked == []


def test_of_what_came_in_the_leaves_that_were_written_are_rewritten():
    key, leaf, written = ('params', ('a',)), Leaf(), Leaf()
    asked: list[Key] = []
    block = new_block(asked=asked)
    root, before = body(block, {key: (leaf, Leaf())}), thread.rewritten
    seen = views.view(root, [block], key, (leaf, written))
    assert seen[0] is leaf and seen[1].leaf is written
    assert asked == [('params', ('a', '0')), ('params', ('a', '1'))]
    assert thread.rewritten == before + 1


def test_a_body_of_several_modules_begins_with_the_variables_of_all():
    block, leaves, tree = new_block(), [Leaf(), Leaf()], object()
    outer = Root(tree)
    outer.initializing = outer.scratch = outer.from_nothing = True
    outer.level, outer.kept_trace = object(), object()
    root = outer.within((block,))
    keys = [('params', (name, 'w')) for name in 'ab']
    parts = [
        ((name,), {'params': {'w': leaf}})
        for name, leaf in zip('ab', leaves, strict=True)
    ]
    for key, (path, held), leaf in zip(keys, parts, leaves, strict=True):
        root.begin(path, held, {key: leaf}, frozenset([key]))
    assert root.tree is outer.tree is tree
    assert root.initializing and root.scratch and root.from_nothing
    assert root.level is outer.level and root.kept_trace is outer.kept_trace
    assert root.pending is outer.pending, 'judged when the whole tree is complete'
    assert root.parts == parts and root.selected == set(keys)
    for key, leaf in zip(keys, leaves, strict=True):
        assert views.view(root, [block], key, leaf) is leaf


def test_what_was_handed_in_for_another_variable_is_rewritten():
    key, block, leaf = ('params', ('a',)), new_block(), Leaf()
    root = body(block, {('params', ('b',)): leaf})
    assert views.view(root, [block], key, leaf).leaf is leaf


def test_a_block_opened_in_the_body_rewrites_what_was_handed_in():
    key, leaf = ('params', ('a',)), Leaf()
    outside, inside = new_block('outside'), new_block('inside')
    seen = views.view(body(outside, {key: leaf}), [outside, inside], key, leaf)
    assert (seen.by, seen.leaf) == ('inside', leaf)


# The way back: what to store for what is written.


def test_what_was_read_is_stored_as_it_was(root):
    block, key = new_block(), ('params', ('t',))
    stored = (Leaf(), Leaf())
    seen = views.view(root, [block], key, stored)
    more = Leaf()
    back = views.stored(root, [block], key, (*seen, more))
    assert all(a is b for a, b in zip(back, (*stored, more), strict=True))
    assert views.stored(root, [block], key, (seen[0], more)) == (stored[0], more)


def test_it_is_the_same_through_two_blocks(root):
    blocks, leaf = [new_block('outer'), new_block('inner')], Leaf()
    tree = {'m': {'a': leaf}}
    seen = views.view(root, blocks, TOP, tree)
    assert views.stored(root, blocks, TOP, seen)['m']['a'] is leaf


def test_what_was_read_of_another_variable_stays_rewritten(root):
    """A parameter copied in a block into another variable stays stopped."""
    block, leaf = new_block(collections=('params', 'state')), Leaf()
    seen = views.view(root, [block], ('params', ('a',)), leaf)
    for key in (('params', ('b',)), ('state', ('a',)), ('params', ('m', 'a'))):
        assert views.stored(root, [block], key, seen) is seen


def test_a_written_value_is_rewritten_for_readers_in_the_block(root):
    block, key = new_block(), ('params', ('a',))
    views.view(root, [block], key, Leaf())
    written = Leaf()
    assert views.stored(root, [block], key, written) is written
    assert views.view(root, [block], key, written).leaf is written


def test_a_block_that_showed_nothing_has_no_way_back(root):
    blocks = [new_block('a', takes=named('a')), new_block('b', takes=named('b'))]
    for names in ('a', 'b'):
        key, leaf = ('params', (names,)), Leaf()
        seen = views.view(root, blocks, key, leaf)
        assert views.stored(root, blocks, key, seen) is leaf


def test_what_stands_for_a_whole_variable_finds_its_way_back(root):
    key, stored, shown = ('params', ('t',)), (Leaf(), Leaf()), [Leaf(), Leaf()]
    block = new_block(whole=lambda value: tuple(shown) if value is stored else None)
    before = thread.rewritten
    seen = views.view(root, [block], key, stored)
    assert seen == tuple(shown) and thread.rewritten == before + 1
    written = Leaf()
    assert views.stored(root, [block], key, seen) == stored
    back = views.stored(root, [block], key, (seen[1], written, seen[0]))
    assert back == (stored[1], written, stored[0])


def test_what_stands_for_a_variable_has_as_many_leaves(root):
    block = new_block(whole=lambda value: (value, value))
    with pytest.raises(ValueError, match='zip'):
        views.view(root, [block], ('params', ('a',)), Leaf())


def test_without_views_what_is_written_is_stored_untouched(root):
    value = {'a': Leaf()}
    assert views.stored(root, [new_block()], TOP, value) is value


def test_two_leaves_that_look_alike_are_stored_as_they_were(root):
    """A rule may give one array for several: a substituted constant, say."""
    constant = Leaf()
    block = new_block(rule=lambda leaf, name: constant)
    key, stored = ('params', ('t',)), (Leaf(), Leaf())
    seen = views.view(root, [block], key, stored)
    assert seen == (constant, constant)
    back = views.stored(root, [block], key, seen)
    assert back[0] is stored[0] and back[1] is stored[1]


# Roots travel in flags that ``nn.jit`` hashes.


def test_roots_are_equal_to_each_other_and_to_nothing_else(root):
    assert root == Root('other') and hash(root) == hash(Root('other'))
    assert root != 'root'


def test_a_scratch_tree_shares_views_and_nothing_that_is_kept(root):
    block, key, leaf = new_block(), ('params', ('a',)), Leaf()
    seen = views.view(root, [block], key, leaf)
    root.setup_values[block] = {}
    assert not root.initializing
    root.initializing, root.level, root.kept_trace = True, object(), object()
    scratch = root.as_scratch(from_nothing=True)
    assert scratch.tree is root.tree
    assert views.view(scratch, [block], key, leaf) is seen
    assert scratch.setup_values == {}
    assert scratch.level is root.level and scratch.kept_trace is root.kept_trace
    assert scratch.parts is root.parts and scratch.joint is root.joint
    assert scratch.scratch and scratch.from_nothing and scratch.initializing
    assert not (root.scratch or root.from_nothing)


def test_a_scratch_tree_of_a_body_begins_with_the_same():
    block, key, leaf = new_block(), ('params', ('a',)), Leaf()
    scratch = body(block, {key: leaf}).as_scratch(from_nothing=False)
    assert views.view(scratch, [block], key, leaf) is leaf
    assert scratch.selected == {key} and not scratch.from_nothing


# What is where.


def test_the_variables_of_a_tree_have_their_names_from_its_root():
    tree = {'m': FrozenDict({'b': 1, 'a': (2, {'x': 3})}), 4: 5, 'none': {}}
    names = [('m', 'b'), ('m', 'a'), ('4',)]
    values = [1, (2, {'x': 3}), 5]
    found = list(variables.iter_variables(('params', ('top',)), tree))
    assert found == [
        (('params', ('top', *path)), value)
        for path, value in zip(names, values, strict=True)
    ]


def test_a_variable_is_found_by_its_names_or_there_is_none():
    leaf = Leaf()
    collections = {'params': FrozenDict({'m': {'a': leaf}})}
    assert variables.find(collections, 'params', ('m', 'a')) is leaf
    assert variables.find(collections, 'params', ('m',)) == {'a': leaf}
    for absent in (('m', 'b'), ('a',), ('m', 'a', 'b')):
        assert variables.find(collections, 'params', absent) is AS_IT_IS
    for names in ((), ('m',)):
        assert variables.find(collections, 'state', names) is AS_IT_IS


# Any tree, any blocks.

leaves = st.builds(Leaf)
values = st.one_of(leaves, st.tuples(leaves, leaves), st.lists(leaves, max_size=2))
names = st.sampled_from('abc')
trees = st.recursive(
    st.dictionaries(names, values, max_size=3),
    lambda children: st.dictionaries(names, st.one_of(children, values), max_size=3),
    max_leaves=6,
)
taken = st.lists(st.frozensets(names), min_size=1, max_size=3)


@given(trees, taken)
def test_views_are_a_pure_rewriting_and_their_way_back(tree, taken):
    blocks = [new_block(str(i), takes=named(*t)) for i, t in enumerate(taken)]
    root = Root(object())
    before = jax.tree_util.tree_leaves_with_path(tree)
    seen = views.view(root, blocks, TOP, tree)

    keys = [key for key, _ in variables.iter_variables(TOP, tree)]
    stored, viewed = (dict(variables.iter_variables(TOP, t)) for t in (tree, seen))
    assert list(viewed) == keys == list(stored)
    for key in keys:
        by = [str(i) for i, names in enumerate(taken) if key[1][-1] in names]
        of_key = jax.tree.leaves(viewed[key]), jax.tree.leaves(stored[key])
        for view, leaf in zip(*of_key, strict=True):
            for name in reversed(by):
                assert view.by == name
                view = view.leaf
            assert view is leaf

    back = views.stored(root, blocks, TOP, seen)
    for now in (tree, back):
        after = jax.tree_util.tree_leaves_with_path(now)
        assert [path for path, _ in after] == [path for path, _ in before]
        assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
