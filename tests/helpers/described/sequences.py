"""Programs of blocks, modules and calls that test JAX's caches.

A program is a tree: blocks and modules have bodies, and calls are leaves. ``Runner``
runs it with real blocks. It compares each result with the same call by hand, and asks
``Caches`` what must be traced and what must not. ``test_stateful`` draws programs at
random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from flax_sg import errors
from tests.helpers import oracle, stepwise
from tests.helpers.described import nets
from tests.helpers.described.by_hand import Values
from tests.helpers.described.caches import Caches, Open
from tests.helpers.described.language import (
    EVERYTHING,
    Block,
    LeaveError,
    Path,
    Program,
    Where,
    left,
)
from tests.helpers.described.nets import (
    CHILDREN,
    KINDS,
    NET_PARAMS,
    PAIR_PARAMS,
    RAW,
    X,
)
from tests.helpers.described.real import SWITCH, Real

KERNELS = Where('name', ('kernel',), 'glob')
ENC = Where('under', ('enc',), 'regex')
# These depend on the owner: a part's own variables; for other owners none.
ENC_OF_OWNER = Where('second', ('enc',), 'glob')
PART_A = Where('root', ('a',))

_SAME_KERNELS = dataclasses.replace(KERNELS, style='predicate')
_ALL_BUT_HEADS = Where('under', ('head',), 'glob', negated=True)

# Blocks without a body: in each row one filter, written in several ways.
SPELLINGS: list[tuple[Block, ...]] = [
    (Block(KERNELS), Block(_SAME_KERNELS), Block(_SAME_KERNELS, rule='only')),
    (Block(Where('under', ('head',), 'object')),),
    (Block(Where('under', style='switch')),),
    (Block(ENC),),
    (Block(_ALL_BUT_HEADS, rule='only'), Block(_ALL_BUT_HEADS)),
    (Block(EVERYTHING),),
    (Block(ENC_OF_OWNER),),
    (Block(PART_A),),
]


# Statements, beside those that all programs have.


@dataclasses.dataclass(frozen=True)
class Thread:
    """A body that another thread runs, while this one waits in its blocks."""

    body: Program


@dataclasses.dataclass(frozen=True)
class Session:
    """A body whose calls are differentiated together."""

    body: Program


@dataclasses.dataclass(frozen=True)
class Pair:
    """A body in a method of the pair. ``mutable``: its parameters are returned."""

    body: Program
    mutable: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """A body in a method of a part of the pair, ``'a'`` or ``'b'``."""

    name: str
    body: Program


@dataclasses.dataclass(frozen=True)
class Switch:
    """Changes what a filter reads."""

    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """Calls a function of ``KINDS``, or ``'step'``: a compiled step of training."""

    kind: str


@dataclasses.dataclass(frozen=True)
class Child:
    """Calls a net of a part, or ``'use_kept'``: what ``setup`` of the part has kept."""

    part: str
    child: str

    def __call__(self, pair: Any, x: jax.Array) -> jax.Array:
        return getattr(getattr(pair, self.part), self.child)(x)


@dataclasses.dataclass(frozen=True)
class Raw:
    """Calls a compiled function that reads a bound module."""

    part: str
    wrap: str

    def make(self, pair: Any) -> Callable[[jax.Array], jax.Array]:
        """The function."""
        part = getattr(pair, self.part)
        return RAW[self.wrap](lambda x: part.net(x))


# Results.


def traced(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Traces outputs and gradients here and now; computes them when called."""

    def vectors(*args: Any) -> Any:
        return jax.tree.map(jnp.ravel, fn(*args)), ()

    return stepwise.trace_outputs_and_grads(vectors, *args)


def call_of_net(kind: str, fn: Callable[..., Any]) -> Callable[[], Any]:
    """Calls a function of a net outside of a session."""
    if kind == 'step':
        result = fn(NET_PARAMS, X)
        return lambda: result
    return traced(lambda *args: {'y': fn(*args)}, NET_PARAMS, X)


def _in_one(params: Any) -> jax.Array:
    """All parameters in one vector."""
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])


@dataclasses.dataclass
class Calls:
    """What is called in a session.

    Attributes:
        args: the parameters of a pair and of a net, and the input.
        results: those of the calls, each beside a function of the arguments that makes
            it by hand.
    """

    args: tuple[Any, ...] = ()
    results: list[tuple[Any, Callable[..., Any]]] = dataclasses.field(
        default_factory=list
    )


@dataclasses.dataclass(frozen=True)
class Here:
    """Where a program is: the open blocks, and what it can call.

    Attributes:
        blocks: the open blocks, outermost first.
        session: the session; None outside of one.
        pair, owner: the bound pair, and the path of the module whose method runs.
        mutable: whether the parameters of the pair are mutable.
        number: of the pair; no other has it.
    """

    blocks: tuple[Open, ...] = ()
    session: Calls | None = None
    pair: Any = None
    owner: Path | None = None
    mutable: bool = False
    number: int = 0

    @property
    def around_net(self) -> tuple[Open, ...]:
        """The blocks that cover a net: in a method of a pair its apply is in none."""
        return self.blocks if self.pair is None else ()


def seen(params: Any, blocks: tuple[Open, ...]) -> Any:
    """The parameters of a tree, by hand, as readers in the blocks see them."""
    values = Values(params)
    for one in blocks:
        values = values.rewritten(one.owner or (), one.block.where, one.block.rule)
    return values.params


def stopped(paths: list[Path], blocks: tuple[Open, ...]) -> frozenset[Path]:
    """The parameters of a tree that the blocks stop: the union."""
    return frozenset(path for path in paths if any(b.takes(path) for b in blocks))


# What calls of a net outside of sessions give by hand.
_known: dict[Any, Any] = {}


class Runner(Real):
    """Runs programs, and compares each result and each trace.

    Attributes:
        runs: how often Python ran, by what was being called.
    """

    def __init__(self) -> None:
        SWITCH.names = ('enc',)
        self.runs: Counter[Any] = Counter()
        self._seen: Counter[Any] = Counter()
        self._calling: Any = None
        kinds = {**KINDS, 'step': nets.STEP}
        net = nets.net_class(self._note)
        self._of = {name: kind.make(net) for name, kind in kinds.items()}
        self._model = nets.pair_class(net)()
        self._caches = Caches()
        self._numbers = itertools.count()
        self._traced_in: set[Any] = set()
        self._raw: dict[Raw, Callable[..., Any]] = {}  # Those that read the pair.
        # Comparisons that wait until no block is open, or JAX would compile them anew.
        self._checks: list[tuple[Callable[[], Any], Callable[[], Any]]] = []

    def _note(self) -> None:
        self.runs[self._calling] += 1

    def check(self, program: Program) -> None:
        """Runs a program, and then compares its results."""
        with contextlib.suppress(LeaveError):
            self.run(program, Here())
        # A block that is left open is not open in another thread.
        with ThreadPoolExecutor(1) as pool:
            for found, by_hand in self._checks:
                results = pool.map(lambda call: call(), (found, by_hand))
                oracle.assert_same(*results)
        self._checks.clear()

    def switch(self, item: Switch, here: Here) -> None:
        SWITCH.names = (item.name,)

    def block(self, item: Block, here: Here) -> None:
        if item.where.style == 'switch':
            where = dataclasses.replace(item.where, names=SWITCH.names)
            item = dataclasses.replace(item, where=where)
        opened = Open(item, here.owner)
        self._caches.opened(opened)
        try:
            blocks = (*here.blocks, opened)
            super().block(item, dataclasses.replace(here, blocks=blocks))
        except (errors.UnusedFilterError, UserWarning):
            # Something may have read a variable all the same. Of everything there is
            # none if only a net is applied, in a method of the pair.
            assert item.judged and not opened.called
            assert item.where != EVERYTHING or here.pair is not None

    def thread(self, item: Thread, here: Here) -> None:
        def work() -> None:
            with left():
                self.run(item.body, Here())

        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()

    def session(self, item: Session, here: Here) -> None:
        calls = Calls()

        def fn(*args: Any) -> Any:
            calls.args = args
            with left():
                self.run(item.body, dataclasses.replace(here, session=calls))
            return {i: output for i, (output, _) in enumerate(calls.results)}

        def by_hand(*args: Any) -> Any:
            return {i: call(*args) for i, (_, call) in enumerate(calls.results)}

        args = PAIR_PARAMS, NET_PARAMS, X
        self._checks.append((traced(fn, *args), lambda: traced(by_hand, *args)()))

    def pair(self, item: Pair, here: Here) -> None:
        def body(pair: Any) -> None:
            number = next(self._numbers)
            inside = Here(here.blocks, here.session, pair, (), item.mutable, number)
            with left():
                self.run(item.body, inside)

        mutable = ['params'] if item.mutable else ['no collection']
        variables = {'params': here.session.args[0]}
        _, written = self._model.apply(variables, body, method='run', mutable=mutable)
        self._raw.clear()
        if item.mutable:
            output = _in_one(written['params'])
            here.session.results.append((output, lambda pair, net, x: _in_one(pair)))

    def part(self, item: Part, here: Here) -> None:
        def body() -> None:
            with left():
                self.run(item.body, dataclasses.replace(here, owner=(item.name,)))

        getattr(here.pair, item.name).run(body)

    def call(self, item: Call, here: Here) -> None:
        name, blocks = item.kind, here.around_net
        fn, halted = self._of[name], stopped(nets.NET_PATHS, blocks)

        def by_hand(params: Any, x: Any) -> Any:
            plain = nets.BY_HAND['plain' if name == 'step' else name]
            return plain(seen(params, blocks), x)

        def known() -> Any:
            if (name, halted) not in _known:
                hand = nets.step(by_hand) if name == 'step' else by_hand
                _known[name, halted] = call_of_net(name, hand)()
            return _known[name, halted]

        # Inside of another apply no block covers it, which is a part of JAX's keys.
        covered = blocks == here.blocks
        kind = KINDS.get(name, nets.STEP)
        with self._counted(here, name, kind, halted, (name, covered), covered):
            if here.session is None:
                self._checks.append((call_of_net(name, fn), known))
            else:
                output = fn(*here.session.args[1:])
                result = output, lambda pair, net, x: by_hand(net, x)
                here.session.results.append(result)

    def child(self, item: Child, here: Here) -> None:
        place = here.number, item
        # Flax traces a module again after the apply in which it was traced first. What
        # a jitted body may write is rewritten in its trace, by the names it has there.
        again = place in self._traced_in
        owners = tuple(block.owner for block in here.blocks)
        named = (item.part, owners) if here.mutable and owners else None
        key, kind = (item.child, again, here.mutable, named), CHILDREN.get(item.child)
        counted = self._counted(here, item.child, kind, None, key, not again)
        with counted if kind else contextlib.nullcontext():
            output = item(here.pair, here.session.args[2])
        self._traced_in.add(place)
        self._note_of_pair(here, output, item)

    def raw(self, item: Raw, here: Here) -> None:
        fn = self._raw.setdefault(item, item.make(here.pair))
        self._caches.raw_called = True
        paths = [path for path in nets.PAIR_PATHS if path[:2] == (item.part, 'net')]
        own, key = stopped(paths, here.blocks), (item, here.number)
        with self._counted(here, 'raw', KINDS['jit'], own, key):
            output = fn(here.session.args[2])
        self._note_of_pair(here, output, lambda pair, x: item.make(pair)(x))

    def _note_of_pair(self, here: Here, output: Any, fn: Callable[..., Any]) -> None:
        """Notes a result of a pair: by hand it is that of a pair of other weights."""
        blocks = here.blocks  # And not the pair, which has to go.

        def by_hand(pair: Any, net: Any, x: Any) -> Any:
            return fn(nets.PAIR.bind({'params': seen(pair, blocks)}), x)

        here.session.results.append((output, by_hand))

    @contextlib.contextmanager
    def _counted(
        self,
        here: Here,
        name: str,
        kind: Any,
        halted: Any,
        key: Any,
        reads: bool = True,
    ) -> Iterator[None]:
        """Checks how often Python ran in a call.

        Args:
            here: where the function is called.
            name: what it is counted under.
            kind: how it is cached.
            halted: which of the parameters that it reads are stopped.
            key: tells it apart from others that are counted together.
            reads: whether the open blocks are sure to see what it reads.
        """
        self._calling = name
        try:
            yield
        finally:
            self._calling = None
        count = self.runs[name] - self._seen[name]
        self._seen[name] += count
        others = self.runs - self._seen
        assert not others.keys() - {None}, f'traced: {others} beside {name}'
        if not kind.cached:
            assert count == 1, f'traced: {name} ran {count} times'
        elif not kind.late:
            assert count <= 1, f'traced: {name} ran {count} times'
            if self._caches.must_find(key, here.blocks):
                assert not count, f'traced: {name} again in {here.blocks}'
            if not kind.eager and self._caches.must_trace(key, halted):
                assert count, f'traced: {name} not at all in {here.blocks}'
        self._caches.note(key, here.blocks, halted)
        for block in here.blocks if reads else ():
            block.called = True
