"""Numbers in the keys of JAX's caches, as plain values: when they are told apart."""

import collections
import dataclasses
import weakref
from collections.abc import Hashable

import pytest

from flax_sg import contexts

A, B, C = ('a',), ('b',), ('c',)


@pytest.fixture(autouse=True)
def _none_known(monkeypatch):
    """Each test begins with no numbers; those of blocks elsewhere come back."""
    monkeypatch.setattr(contexts, '_contexts', collections.OrderedDict())
    monkeypatch.setattr(contexts, '_told_apart', set())
    monkeypatch.setattr(contexts, '_in_use', weakref.WeakValueDictionary())


def value(rewrites: Hashable, owners: Hashable = 'o') -> int:
    """The number that is found where nobody keeps it."""
    return contexts.number_of(rewrites, owners).value


def test_equal_rewrites_have_one_number_whoever_opens_them():
    assert value(A, 'o') == value(A, 'p') == value(('a',), 'o')
    assert len({value(A), value(B), value(('a', 'b')), value(('b', 'a'))}) == 4


def test_a_number_in_use_is_used_for_one_owner():
    o, p, q = (contexts.number_of(A, owners) for owners in 'opq')
    assert len({o.value, p.value, q.value}) == 3
    assert [contexts.number_of(A, owners) for owners in 'opq'] == [o, p, q]
    assert (q.rewrites, q.owners, q.is_apart) == (A, 'q', False)
    first, second = o.value, p.value
    del o, p, q
    again = contexts.number_of(A, 'r')
    assert (again.value, value(A, 's')) == (first, second)


def test_what_is_told_apart_keeps_the_number_of_those_that_use_it():
    o, p, gone = (contexts.number_of(A, owners) for owners in 'opq')
    of_gone, of_b = gone.value, value(B)
    del gone
    contexts.tell_apart(o)
    assert o.is_apart and not p.is_apart
    contexts.tell_apart(p)
    assert p.is_apart
    of = {'o': o.value, 'p': p.value, 'r': value(A, 'r')}
    assert [contexts.number_of(A, owners) for owners in 'op'] == [o, p]
    del o, p
    assert {owners: value(A, owners) for owners in of} == of
    assert len({*of.values(), of_gone, value(A, 'q')}) == 5
    assert value(B, 'o') == value(B, 'p') == of_b


def test_what_is_forgotten_is_not_found_again():
    gone, other = {value(('a', 'b')), value(B)}, value(C)
    contexts.forget('b')
    assert not gone & {value(('a', 'b')), value(B)}
    assert value(C) == other


def test_as_many_are_known_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr(contexts, '_SIZE', 2)
    a, b = value(A), value(B)
    assert value(A) == a
    c = value(C)  # Takes the place of what was not asked for the longest.
    assert (value(A), value(C)) == (a, c)
    assert value(B) not in (a, b, c)


@dataclasses.dataclass(eq=False)
class Block:
    """What a number depends on, of an open block."""

    key: Hashable
    owner_key: Hashable = 'o'


def test_a_thread_uses_the_numbers_of_its_blocks_until_these_close():
    mine, theirs, later = (contexts.InUse() for _ in range(3))
    a, b = Block('a'), Block('b')
    number = mine((a,))
    assert len({number, mine((a, b)), mine((b,))}) == 3
    contexts.forget('a')  # Others do not find it, it goes on to be used here.
    assert mine((a,)) == number
    of_b = mine((b,))
    assert theirs((Block('b', 'p'),)) != of_b
    assert theirs((Block('b', 'o'),)) == of_b
    theirs.forget(a)
    assert len(theirs._of) == 2
    mine.forget(b)
    assert list(mine._of) == [(a,)]
    mine.forget(a)
    assert mine._of == {}
    assert later((Block('b', 'q'),)) not in (of_b, theirs((Block('b', 'p'),)))


def test_what_a_thread_tells_apart_it_and_others_find_again():
    mine, theirs = contexts.InUse(), contexts.InUse()
    a = Block('a')
    number = mine((a,)), mine((a, a))
    mine.tell_apart()
    mine.tell_apart()
    mine.forget(a)
    other = Block('a', 'p')
    assert not {theirs((other,)), theirs((other, other))} & {*number}
    assert (mine((a,)), mine((a, a))) == number
