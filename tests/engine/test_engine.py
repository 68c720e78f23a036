"""Numbers in the keys of JAX's caches, as plain values: who finds which again."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flax_sg import errors, filters
from flax_sg.engine import cache_keys
from flax_sg.engine.askers import Asker
from flax_sg.engine.blocks import Tree
from flax_sg.engine.cache_keys import Number
from flax_sg.filters.paths import Path
from flax_sg.rules import rules

STOP = rules.StopGradient()


@pytest.fixture
def around() -> Number:
    """The number of what is open around; nobody else has it."""
    return cache_keys.fresh()


def asker(
    where: Any,
    owner_path: tuple[str, ...] = (),
    tree: Tree | None = None,
    rule: rules.Rule = STOP,
    collections: Any = 'params',
) -> Asker:
    rewrite = rules.Rewrite(filters.as_filter(where), rule, collections)
    return Asker(rewrite, owner_path, weakref.ref(tree) if tree else None)


def aside() -> Any:
    return contextlib.nullcontext()


@contextlib.contextmanager
def leased(around: Number, who: Asker) -> Iterator[Number]:
    number = cache_keys.lease(around, who, aside)
    try:
        yield number
    finally:
        number.give_back(who)


def reads(number: Number, who: Asker, *names: str) -> None:
    """A trace under the number reads parameters of a tree that was made in it."""
    for name in names:
        path = Path.of('params', tuple(name.split('/')))
        number.note(who, path, who.ask(path))
        if who.ask(path):
            number.brought = who.rewrite.rule.values()


def opened(around: Number, where: Any, *names: str, **more: Any) -> Number:
    """Opens a block, reads in it and closes it."""
    who = asker(where, **more)
    with leased(around, who) as number:
        reads(number, who, *names)
    return number


def named(*names: str) -> Callable[[str], bool]:
    return lambda path: path in names


def test_the_same_answers_find_the_same_number(around):
    one = opened(around, named('a'), 'a', 'b')
    assert opened(around, named('a'), 'a', 'b') is one
    assert opened(around, named('a', 'c'), 'a') is one  # Nobody has asked for 'c'.
    assert opened(around, 'a') is one
    assert opened(around, ['a', 'd']) is one
    assert opened(around, {'a': True, 'b': False}) is one


def test_other_answers_find_another_number(around):
    one = opened(around, named('a'), 'a', 'b')
    two = opened(around, named('b'), 'a', 'b')
    assert two is not one
    assert [opened(around, named(n)) for n in 'abab'] == [one, two, one, two]
    assert opened(around, 'b') is two
    assert opened(around, named('a', 'b')) not in (one, two)
    # An answer that says no is an answer too.
    assert opened(around, named()) not in (one, two)
    # A tree of bools without an answer disagrees.
    assert opened(around, {'a': True}) is not one


def test_a_rule_collections_and_the_blocks_around_have_numbers_of_their_own(around):
    one = opened(around, 'a')
    assert opened(around, 'a', rule=rules.ReadOnly()) is not one
    assert opened(around, 'a', collections=True) is not one
    assert opened(one, 'a') is not one
    assert opened(cache_keys.fresh(), 'a') is not one


def test_a_number_is_held_by_one_filter_whose_answers_nobody_knows(around):
    first, second = asker(named('a')), asker(named('a'))
    with leased(around, first) as one, leased(around, second) as two:
        assert one is not two
        # The table of each grows.
        reads(one, first, 'a')
        reads(two, second, 'b')
    assert opened(around, named('a')) in (one, two)


def test_a_number_is_held_by_several_that_surely_say_the_same(around):
    with leased(around, asker('a')) as one, leased(around, asker('a')) as two:
        assert one is two
        with leased(around, asker('b')) as three:
            assert three is not one
    assert not one.is_held


def test_an_owner_below_the_top_is_sure_in_its_own_tree_alone(around):
    tree, other = Tree(), Tree()
    mine = asker('w', ('m',), tree)
    with leased(around, mine) as one:
        for path, its in ((('n',), tree), (('m',), other)):
            with leased(around, asker('w', path, its)) as two:
                assert two is not one
        with leased(around, asker('w', ('m',), tree)) as two:
            assert two is one


def test_a_variable_that_is_older_than_the_trace_is_asked_for_by_its_owner(around):
    tree, key = Tree(), ('params', ('m', 'w'))
    mine = asker('w', ('m',), tree)
    with leased(around, mine) as number:
        path = mine.path_in(weakref.ref(tree), key)
        assert path == 'w'
        number.note_older(mine, key, weakref.ref(tree), path)
    same = asker(['w', 'v'], ('m',), tree)
    with leased(around, same) as found:
        assert found is number
    # For others it has other names.
    for owner_path, of in ((('n',), tree), (('m',), Tree()), ((), None)):
        with leased(around, asker('w', owner_path, of)) as found:
            assert found is not number
    # In another tree it is seen by its path from the root.
    other = Tree()
    with leased(around, asker('m/w', ('m',), other)) as found:
        assert found is number
    # When the tree is gone nobody can be asked; at the top paths are the same.
    del tree
    gc.collect()
    with leased(around, asker(named('m/w'), ('m',), other)) as found:
        assert found is not number
    with leased(around, asker('m/w')) as found:
        assert found is number


def test_a_filter_that_raises_disagrees(around):
    one = opened(around, named('a'), 'a')

    def only_c(path: str) -> bool:
        return {'c': True}[path]

    two = opened(around, only_c, 'c')
    assert two is not one
    assert opened(around, only_c) is two
    assert opened(around, {'a': False, 'b': True}) not in (one, two)


def test_a_function_is_not_asked_for_what_other_functions_were_asked(around):
    one = opened(around, named('a'), 'a', 'b')
    assert opened(around, lambda path: path == 'a') is not one
    assert opened(around, ['a', 'c']) is one  # Nobody sees what a glob is asked for.


def test_what_a_function_has_said_holds_for_the_block(around):
    answers, asked = {'a': True, 'b': True, 'c': True}, list[str]()

    def where(path: str) -> bool:
        asked.append(path)
        return answers[path]

    opened(around, where, 'a', 'b')
    asked.clear()
    answers['a'] = False
    who = asker(where)
    with leased(around, who) as number:
        assert asked == ['a', 'b']  # It disagrees.
        reads(number, who, 'b', 'a', 'c')
    assert asked == ['a', 'b', 'c']


@pytest.mark.parametrize('negated', [False, True])
def test_a_filter_is_asked_each_question_once(around, negated):
    asked: list[str] = []

    def where(path: str) -> bool:
        asked.append(path)
        return path == 'a'

    chosen = ~filters.as_filter(where) if negated else where
    names = [f'w{i}' for i in range(50)]
    one = opened(around, chosen, 'a', *names)
    asked.clear()
    assert opened(around, chosen) is one
    assert asked == ['a', *names]


def test_a_value_is_judged_by_new_answers_alone(around, monkeypatch):
    one = opened(around, '**/a', 'a', 'b')
    asked: list[str] = []
    matches = filters.Glob._matches

    def counted(self: Any, path: Any) -> bool:
        asked.append(path)
        return matches(self, path)

    monkeypatch.setattr(filters.Glob, '_matches', counted)
    assert opened(around, '[a]') is one
    assert asked == ['a', 'b']
    reads(one, asker('**/a'), 'c')
    asked.clear()
    for _ in range(3):
        assert opened(around, '[a]') is one
    assert asked == ['c']


def test_what_a_rule_brings_is_a_part_of_the_answer(around):
    class Brings(rules.Rule):
        name = 'brings'

        def __init__(self, values: Any) -> None:
            self._values = values

        def __call__(self, path: Path, leaf: Any) -> Any:
            return leaf

        def key(self) -> Any:
            return Brings

        def values(self) -> Any:
            return self._values

    one = opened(around, 'a', rule=Brings(1))
    assert opened(around, 'a', rule=Brings(2)) is one  # Nobody has read them.
    assert opened(around, 'a', 'b', rule=Brings(2)) is one
    assert opened(around, 'a', 'a', rule=Brings(2)) is one
    assert opened(around, 'a', rule=Brings(1)) is not one
    assert opened(around, 'b', rule=Brings(1)) is not one
    assert opened(around, 'a', rule=Brings(2)) is one


def test_numbers_are_bounded(around):
    for i in range(500):
        opened(around, named(f'w{i}'), *(f'w{j}' for j in (i, i + 1)))
    assert sum(map(len, around.inside.values())) <= 64
    for i in range(1000):
        with leased(around, asker('a', collections=f'c{i}')):
            pass
    assert len(around.inside) <= 256


def test_what_is_held_is_not_forgotten(around):
    held = asker('held')
    with leased(around, held) as number:
        reads(number, held, 'held')
        for i in range(200):
            opened(around, named(f'w{i}'), f'w{i}', 'held')
        assert opened(around, 'held') is number


def test_a_late_question_raises_where_another_function_has_used_the_number(around):
    first = asker(named('a'))
    with leased(around, first) as number:
        reads(number, first, 'a')
        number.expect_late_questions(first)
    b, c = (Path.of('params', (name,)) for name in 'bc')
    number.note(first, b, first.ask(b), late=True)  # Nobody else.
    with leased(around, asker(named('a'))) as found:
        assert found is number
    number.note(first, b, first.ask(b), late=True)  # It was known.
    with pytest.raises(errors.BlockError):
        number.note(first, c, first.ask(c), late=True)


def test_a_number_with_late_questions_is_for_those_who_surely_say_the_same(around):
    first = asker('a')
    with leased(around, first) as number:
        reads(number, first, 'a')
        number.expect_late_questions(first)
    assert opened(around, named('a')) is not number
    assert opened(around, ['a', 'b']) is not number
    assert opened(around, 'a') is number
    b = Path.of('params', ('b',))
    number.note(first, b, first.ask(b), late=True)


def test_nothing_is_asked_late_where_no_rule_runs_late(around):
    first = asker(named('a'))
    with leased(around, first) as number:
        reads(number, first, 'a')
    opened(around, named('a', 'b'))
    b = Path.of('params', ('b',))
    number.note(first, b, first.ask(b), late=True)
    assert opened(around, named('a')) is number
