"""Programs of blocks, modules and calls, and what each call in them has to give.

A program is a tree: blocks and modules have bodies, and calls are leaves. ``Runner``
runs it with real ``with`` statements. It compares each result with ``ByHand``, which
stops weights one by one, and asks ``Caches`` what must be traced and what must not.
``test_stateful`` draws programs at random.
"""

import contextlib
import dataclasses
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
from jax import lax

import oracle
import stepwise
from flax_sg import errors, filters
from flax_sg import linen as nn
from flax_sg.engine import numbers

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)


def forget_contexts() -> None:
    """Forgets what was traced and judged before, as in a new process."""
    numbers.NONE.inside.clear()


# What is called. Each function calls ``note`` when its Python runs.

Note = Callable[[], None]


def silent() -> None:
    """Notes nothing."""


def net_class(note: Note) -> type[fnn.Module]:
    class Net(fnn.Module):
        @fnn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            note()
            x = jnp.tanh(fnn.Dense(2, name='enc')(x))
            return fnn.Dense(2, name='head')(x)

    return Net


def _apply(net: Any) -> Callable[..., Any]:
    model = net(parent=None)
    return lambda params, x: model.apply({'params': params}, x)


def _scan(fn: Callable[..., Any]) -> Callable[..., Any]:
    def body(carry: Any, _: None) -> Any:
        params, x = carry
        return (params, fn(params, x)), None

    return lambda params, x: lax.scan(body, (params, x), None, length=2)[0][1]


def _custom_vjp(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose rule reads the parameters when the block has closed."""
    out = jax.custom_vjp(fn)

    def forward(params: Any, x: Any) -> Any:
        return fn(params, x), (params, x)

    def backward(given: Any, ct: Any) -> Any:
        return jax.vjp(fn, *given)[1](ct)

    out.defvjp(forward, backward)
    return out


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to call a network.

    Attributes:
        make: from the class of the network to a function of its parameters and input.
        cached: whether JAX or Flax traces it once only.
        eager: whether a part of it runs in Python at every call. The stops are then in
            that part, and all answers may share the compiled part.
        late: whether a rule of it runs in the backward pass, which is not counted.
    """

    make: Callable[[Any], Callable[..., Any]]
    cached: bool = True
    eager: bool = False
    late: bool = False


KINDS: dict[str, Kind] = {
    'jit': Kind(lambda net: jax.jit(_apply(net))),
    'checkpoint of jit': Kind(lambda net: jax.checkpoint(jax.jit(_apply(net)))),
    'jit of scan': Kind(lambda net: jax.jit(_scan(_apply(net)))),
    'nn.jit': Kind(lambda net: _apply(fnn.jit(net)), eager=True),
    'nn.remat of nn.jit': Kind(lambda net: _apply(fnn.remat(fnn.jit(net))), eager=True),
    'plain': Kind(_apply, cached=False, eager=True),
    'jit of custom_vjp': Kind(lambda net: jax.jit(_custom_vjp(_apply(net))), late=True),
}
# The children of each part of a pair, and how these are called.
CHILDREN: dict[str, Kind] = {
    'net': Kind(lambda net: net, cached=False, eager=True),
    'both': Kind(lambda net: fnn.remat(fnn.jit(net)), eager=True),
}
# What a function of ``x`` that reads a bound module is wrapped in.
RAW: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    'jit': jax.jit,
    'checkpoint': jax.checkpoint,
}


def pair_class(net: type[fnn.Module]) -> type[fnn.Module]:
    """Two equal parts, in whose methods a program can be."""
    # ``nn.jit`` and ``nn.remat`` make a new class at each call.
    classes = {name: kind.make(net) for name, kind in CHILDREN.items()}

    class Part(fnn.Module):
        def setup(self) -> None:
            for name, cls in classes.items():
                setattr(self, name, cls())
            self.kept = jnp.tanh(self.param('w', fnn.initializers.normal(), (2, 2)))

        def use_kept(self, x: jax.Array) -> jax.Array:
            return x * self.kept

        def run(self, body: Callable[[], Any]) -> Any:
            return body()

    class Pair(fnn.Module):
        def setup(self) -> None:
            self.a, self.b = Part(), Part()

        def run(self, body: Callable[[Any], Any]) -> Any:
            # Otherwise the trace of a closure would make, and leave behind, what a
            # part keeps.
            for part in (self.a, self.b):
                _ = part.kept
            return body(self)

        def __call__(self, x: jax.Array) -> list[jax.Array]:
            return [getattr(part, c)(x) for part in (self.a, self.b) for c in classes]

    return Pair


NET_PARAMS = net_class(silent)().init(jax.random.key(0), X)['params']
PAIR_PARAMS = pair_class(net_class(silent))().init(jax.random.key(1), X)['params']
ARGS = (PAIR_PARAMS, NET_PARAMS, X)


def traced(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Traces outputs and gradients here and now; computes them when called."""

    def vectors(*args: Any) -> Any:
        return jax.tree.map(jnp.ravel, fn(*args)), ()

    return stepwise.trace_outputs_and_grads(vectors, *args)


def _grads_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: jax.grad(lambda p, x: jnp.sum(fn(p, x) ** 2), (0, 1))(
        params, x
    )


# The filters of blocks: how they are written, and what they select.


@dataclasses.dataclass
class Names:
    """An object that a filter reads."""

    names: tuple[str, ...]


def _named(name: str) -> Callable[[Any], bool]:
    return lambda path: path.name == name


def _within(config: Names) -> Callable[[Any], bool]:
    return lambda path: path.parts[-2:][0] in config.names


@dataclasses.dataclass(frozen=True)
class What:
    """A rewrite that is written in several ways, all of them equal.

    Attributes:
        spellings: make it anew, objects and all.
        selects: by hand, from the path of the owner and the names of a variable.
        anywhere: whether it selects something in every tree, for every owner.
        changing: whether ``selects`` is called with the names in ``SWITCH``, too.
    """

    spellings: tuple[Callable[..., Any], ...]
    selects: Callable[..., bool]
    anywhere: bool = True
    changing: bool = False


def _relative(owner: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """The names after those of the owner; () outside of it."""
    return names[len(owner) :] if names[: len(owner)] == owner else ()


stop, only = nn.stop_gradient, nn.train_only
SWITCH = Names(('enc',))  # Changes between blocks.

WHATS: dict[str, What] = {
    'kernels': What(
        (
            lambda **k: stop('**/kernel', **k),
            lambda **k: stop(_named('kernel'), **k),
            lambda **k: only(~filters.as_filter(_named('kernel')), **k),
        ),
        lambda owner, names: names[-1] == 'kernel',
    ),
    'head by an object': What(
        (lambda **k: stop(_within(Names(('head',))), **k),),
        lambda owner, names: names[-2] == 'head',
    ),
    'what the switch names': What(
        (lambda **k: stop(_within(SWITCH), **k),),
        lambda owner, names, switched: names[-2] in switched,
        changing=True,
    ),
    'enc by a regex': What(
        (lambda **k: stop(re.compile('(.*/)?enc/.*'), **k),),
        lambda owner, names: names[-2] == 'enc',
    ),
    'all but heads': What(
        (
            lambda **k: only('**/head/*', **k),
            lambda **k: stop(~filters.as_filter('**/head/*'), **k),
        ),
        lambda owner, names: names[-2] != 'head',
    ),
    'all': What((lambda **k: stop(True, **k),), lambda *_: True),
    # These depend on the owner: a part's own variables; for other owners none.
    'enc of the owner': What(
        (lambda **k: stop('*/enc/*', **k),),
        lambda owner, names: _relative(owner, names)[1:2] == ('enc',),
        anywhere=False,
    ),
    'part a': What(
        (lambda **k: stop(lambda path: path.absolute.startswith('a/'), **k),),
        lambda owner, names: names[0] == 'a',
        anywhere=False,
    ),
}


# Programs.

Program = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """A block around a body. ``judged``: with the default for unused filters."""

    what: str
    body: Program
    spelling: int = 0
    judged: bool = False


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
class Leave:
    """Leaves the block or module around it by an exception, and more ``levels``."""

    levels: int = 0


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
    """Calls a child of a part."""

    part: str
    child: str


@dataclasses.dataclass(frozen=True)
class Raw:
    """Calls a compiled function that reads a bound module."""

    part: str
    wrap: str


@dataclasses.dataclass(frozen=True)
class Kept:
    """Uses what ``setup`` of a part has kept."""

    part: str


class LeaveError(Exception):
    """Raised to leave a given number of blocks and modules more."""

    def __init__(self, levels: int) -> None:
        super().__init__(f'leaves {levels}')
        self.levels = levels


def names_in(tree: Any, *above: str) -> list[tuple[str, ...]]:
    if not isinstance(tree, Mapping):
        return [above]
    return [n for key, value in tree.items() for n in names_in(value, *above, key)]


NET_NAMES, PAIR_NAMES = names_in(NET_PARAMS), names_in(PAIR_PARAMS)


@dataclasses.dataclass(eq=False)
class Open:
    """A block that is open.

    Attributes:
        block: the item of the program.
        owner: the path of the module that opened it; None at top level.
        switched: the names in ``SWITCH`` when it was opened.
        called: whether a function was called in it that reads what it selects.
    """

    block: Block
    owner: tuple[str, ...] | None
    switched: tuple[str, ...]
    called: bool = False

    def says(self, owner: tuple[str, ...], names: tuple[str, ...]) -> bool:
        what = WHATS[self.block.what]
        return what.selects(owner, names, *([self.switched] if what.changing else []))

    @property
    def label(self) -> Any:
        """What is equal for blocks that surely give the same answers."""
        anywhere = WHATS[self.block.what].anywhere
        owner = self.owner is None if anywhere else self.owner
        judged = self.block.judged and anywhere
        return self.block.what, self.block.spelling, judged, self.switched, owner


@dataclasses.dataclass
class Here:
    """Where a program is: the open blocks, and what it can call.

    Attributes:
        blocks: the open blocks, outermost first.
        args: those of the session; None outside of one.
        pair, owner: the bound pair, and the path of the module whose method runs.
        mutable: whether the parameters of the pair are mutable.
        number: of the pair; no other has it.
        raw: the compiled functions that read the pair.
        outputs: what was called in the session, by name.
        by_hand: the same, as functions of the arguments.
    """

    blocks: tuple[Open, ...] = ()
    args: tuple[Any, ...] | None = None
    pair: Any = None
    owner: tuple[str, ...] | None = None
    mutable: bool = False
    number: int = 0
    raw: dict[Any, Any] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_hand: dict[str, Any] = dataclasses.field(default_factory=dict)

    def stopped(self, in_pair: bool) -> frozenset[str]:
        """The parameters that the open blocks stop in a tree: the union.

        A net that is applied in a method of a pair is in no block.
        """
        if self.pair is not None and not in_pair:
            return frozenset()
        return frozenset(
            '/'.join(names)
            for names in (PAIR_NAMES if in_pair else NET_NAMES)
            if any(b.says((in_pair and b.owner) or (), names) for b in self.blocks)
        )


class Caches:
    """Records traces: which ones JAX must find in its caches, and which it must not.

    JAX must trace a program that was never traced with these parameters stopped. It
    must not trace the program again in the same open blocks. The same holds in equal
    blocks, if one thread alone opens blocks and all answers of other filters differ
    early. In other cases both are right: another thread may use the number, or the
    number may have taken other answers.
    """

    def __init__(self) -> None:
        self._for_stopped: set[Any] = set()
        self._in_blocks: set[Any] = set()
        self._in_equal_blocks: set[Any] = set()
        self._opened_by: set[int] = set()
        self._opened: dict[Any, Open] = {}
        self.raw_called = False  # Another tree does not find such a program.

    def opened(self, block: Open) -> None:
        """Notes which block was opened, and by which thread."""
        self._opened_by.add(threading.get_ident())
        self._opened[block.label] = block

    def note(self, key: Any, blocks: tuple[Open, ...], stopped: Any) -> None:
        """Notes that a function was traced, or found."""
        self._for_stopped.add((key, stopped))
        self._in_blocks.add((key, blocks))
        self._in_equal_blocks.add((key, _labels(blocks)))

    def must_trace(self, key: Any, stopped: Any) -> bool:
        return (key, stopped) not in self._for_stopped

    def must_find(self, key: Any, blocks: tuple[Open, ...]) -> bool:
        if (key, blocks) in self._in_blocks:
            return True
        alone = len(self._opened_by) <= 1 and not self.raw_called
        known = (key, _labels(blocks)) in self._in_equal_blocks
        return alone and known and all(map(self._differs_early, blocks))

    def _differs_early(self, block: Open) -> bool:
        """Whether filters that agree with it on one tree agree with it on the other."""
        return all(
            _answers(block, PAIR_NAMES) == _answers(other, PAIR_NAMES)
            for other in self._opened.values()
            if _answers(block, NET_NAMES) == _answers(other, NET_NAMES)
        )


def _labels(blocks: tuple[Open, ...]) -> Any:
    return tuple(block.label for block in blocks)


def _answers(block: Open, names: list[tuple[str, ...]]) -> list[list[bool]]:
    owners: list[tuple[str, ...]] = [(), ('a',), ('b',)]
    return [[block.says(owner, n) for n in names] for owner in owners]


def _stopped_by_hand(params: Any, stopped: frozenset[str]) -> Any:
    return oracle.stopped(params, lambda path: path in stopped)


class ByHand:
    """The same calls without flax_sg: on weights that were stopped one by one."""

    def __init__(self) -> None:
        net = net_class(silent)
        self._of = {name: kind.make(net) for name, kind in KINDS.items()}
        self._children = {n: _apply(kind.make(net)) for n, kind in CHILDREN.items()}
        self._known: dict[Any, Any] = {}

    def top(self, kind: str, stopped: frozenset[str]) -> Any:
        """The result of one call outside of a session."""
        if (kind, stopped) not in self._known:
            fn = self.call('plain' if kind == 'step' else kind, stopped)

            def of_net(params: Any, x: Any) -> Any:
                return fn(None, params, x)

            if kind == 'step':
                result = jax.jit(_grads_of(of_net))(NET_PARAMS, X)
            else:
                result = traced(lambda p, x: {'y': of_net(p, x)}, NET_PARAMS, X)()
            self._known[kind, stopped] = result
        return self._known[kind, stopped]

    # From the arguments of a session to the output.

    def call(self, kind: str, stopped: frozenset[str]) -> Callable[..., Any]:
        return lambda pair, net, x: self._of[kind](_stopped_by_hand(net, stopped), x)

    def child(self, item: Child, stopped: frozenset[str]) -> Callable[..., Any]:
        return lambda pair, net, x: self._children[item.child](
            _stopped_by_hand(pair, stopped)[item.part][item.child], x
        )

    def kept(self, item: Kept, stopped: frozenset[str]) -> Callable[..., Any]:
        return lambda pair, net, x: (
            x * jnp.tanh(_stopped_by_hand(pair, stopped)[item.part]['w'])
        )

    def raw(self, item: Raw, stopped: frozenset[str]) -> Callable[..., Any]:
        def fn(pair: Any, net: Any, x: Any) -> Any:
            params = _stopped_by_hand(pair, stopped)[item.part]['net']
            return RAW[item.wrap](lambda x: self._children['net'](params, x))(x)

        return fn


def _in_one(pair: Any, *rest: Any) -> jax.Array:
    """All parameters of a pair in one vector."""
    del rest
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(pair)])


class Runner:
    """Runs programs, and compares each result and each trace.

    Attributes:
        runs: how often Python ran, by what was being called.
    """

    def __init__(self) -> None:
        SWITCH.names = ('enc',)
        self.runs: Counter[Any] = Counter()
        self._seen: Counter[Any] = Counter()
        self._calling: Any = None
        net = net_class(self._note)
        self._of = {name: kind.make(net) for name, kind in KINDS.items()}
        self._of['step'] = jax.jit(_grads_of(_apply(net_class(self._note))))
        self._model = pair_class(net_class(self._note))()
        self._caches = Caches()
        self._names = itertools.count()
        self._traced_in: set[Any] = set()
        # Comparisons that wait until no block is open, or JAX would compile them anew.
        self._checks: list[Callable[[], None]] = []

    def _note(self) -> None:
        self.runs[self._calling] += 1

    def run(self, program: Program) -> None:
        """Runs a program, and then compares its results."""
        with contextlib.suppress(LeaveError):
            self._do(program, Here())
        # A block that is left open is not open in another thread.
        with ThreadPoolExecutor(1) as pool:
            for check in self._checks:
                pool.submit(check).result()
        self._checks.clear()

    def _do(self, body: Program, here: Here) -> None:
        for item in body:
            getattr(self, f'_do_{type(item).__name__.lower()}')(item, here)

    @contextlib.contextmanager
    def _left(self) -> Iterator[None]:
        """The end of a block or module, which an exception may leave."""
        try:
            yield
        except LeaveError as error:
            if error.levels:
                error.levels -= 1
                raise

    def _do_leave(self, item: Leave, here: Here) -> None:
        raise LeaveError(item.levels)

    def _do_switch(self, item: Switch, here: Here) -> None:
        SWITCH.names = (item.name,)

    def _do_block(self, item: Block, here: Here) -> None:
        what = WHATS[item.what]
        judged = item.judged and what.anywhere
        block = what.spellings[item.spelling](unused='raise' if judged else 'ignore')
        opened = Open(item, here.owner, SWITCH.names)
        inside = dataclasses.replace(here, blocks=(*here.blocks, opened))
        try:
            with self._left(), block:
                self._caches.opened(opened)
                self._do(item.body, inside)
        except (errors.UnusedFilterError, UserWarning):
            # Something may have read a variable all the same.
            assert judged and item.what != 'all' and not opened.called

    def _do_thread(self, item: Thread, here: Here) -> None:
        def work() -> None:
            with self._left():
                self._do(item.body, Here())

        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()

    def _do_session(self, item: Session, here: Here) -> None:
        inside = dataclasses.replace(here, outputs={}, by_hand={})

        def fn(*args: Any) -> Any:
            inside.args = args
            with self._left():
                self._do(item.body, inside)
            return inside.outputs

        def by_hand(*args: Any) -> Any:
            return {name: call(*args) for name, call in inside.by_hand.items()}

        found = traced(fn, *ARGS)
        self._check(found, lambda: traced(by_hand, *ARGS)())

    def _do_pair(self, item: Pair, here: Here) -> None:
        def body(pair: Any) -> None:
            number = next(self._names)
            changes = {'pair': pair, 'owner': (), 'raw': {}, 'number': number}
            inside = dataclasses.replace(here, mutable=item.mutable, **changes)
            with self._left():
                self._do(item.body, inside)

        mutable = ['params'] if item.mutable else ['no collection']
        variables = {'params': here.args[0]}
        _, written = self._model.apply(variables, body, method='run', mutable=mutable)
        if item.mutable:
            name = f'written in {next(self._names)}'
            here.outputs[name] = _in_one(written['params'])
            here.by_hand[name] = _in_one

    def _do_part(self, item: Part, here: Here) -> None:
        def body() -> None:
            with self._left():
                self._do(item.body, dataclasses.replace(here, owner=(item.name,)))

        getattr(here.pair, item.name).run(body)

    def _do_call(self, item: Call, here: Here) -> None:
        stopped = here.stopped(in_pair=False)
        fn, name = self._of[item.kind], item.kind
        # Inside of another apply no block covers it, which is a part of JAX's keys.
        kind = KINDS.get(name, KINDS['jit'])
        key = name, bool(here.blocks) and here.pair is not None
        with self._counted(here, name, kind, stopped, key):
            if here.args is not None:
                self._note_call(here, fn(*here.args[1:]), BY_HAND.call(name, stopped))
                return
            if name == 'step':
                result = fn(NET_PARAMS, X)
                found = lambda: result  # noqa: E731
            else:
                found = traced(lambda *args: {'y': fn(*args)}, NET_PARAMS, X)
        self._check(found, lambda: BY_HAND.top(name, stopped))

    def _do_child(self, item: Child, here: Here) -> None:
        place = here.number, item.part, item.child
        # Flax traces a module again after the apply in which it was traced first. What
        # a jitted body may write is rewritten in its trace, by the names it has there.
        owners = tuple(block.owner for block in here.blocks)
        named = (item.part, owners) if here.mutable and owners else None
        key = item.child, place in self._traced_in, here.mutable, named
        with self._counted(here, item.child, CHILDREN[item.child], None, key):
            found = getattr(getattr(here.pair, item.part), item.child)(here.args[2])
        self._traced_in.add(place)
        self._note_call(here, found, BY_HAND.child(item, here.stopped(in_pair=True)))

    def _do_raw(self, item: Raw, here: Here) -> None:
        module, stopped = getattr(here.pair, item.part), here.stopped(in_pair=True)
        fn = here.raw.setdefault(item, RAW[item.wrap](lambda x: module.net(x)))
        self._caches.raw_called = True
        own = frozenset(p for p in stopped if p.startswith(f'{item.part}/net/'))
        with self._counted(here, 'raw', KINDS['jit'], own, (item, here.number)):
            found = fn(here.args[2])
        self._note_call(here, found, BY_HAND.raw(item, stopped))

    def _do_kept(self, item: Kept, here: Here) -> None:
        found = getattr(here.pair, item.part).use_kept(here.args[2])
        self._note_call(here, found, BY_HAND.kept(item, here.stopped(in_pair=True)))

    def _note_call(self, here: Here, found: Any, by_hand: Callable[..., Any]) -> None:
        name = f'call {next(self._names)}'
        here.outputs[name], here.by_hand[name] = found, by_hand

    def _check(self, found: Callable[[], Any], by_hand: Callable[[], Any]) -> None:
        self._checks.append(lambda: oracle.assert_same(found(), by_hand()))

    @contextlib.contextmanager
    def _counted(
        self, here: Here, name: str, kind: Kind, stopped: Any, key: Any = None
    ) -> Iterator[None]:
        """Checks how often Python ran in a call.

        Args:
            here: where the function is called.
            name: what it is counted under.
            kind: how it is cached.
            stopped: which of the parameters that it reads are stopped.
            key: tells it apart from others that are counted together.
        """
        self._calling = name
        try:
            yield
        finally:
            self._calling = None
        key = key or name
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
            if not kind.eager and self._caches.must_trace(key, stopped):
                assert count, f'traced: {name} not at all in {here.blocks}'
        self._caches.note(key, here.blocks, stopped)
        for block in here.blocks if key[1] is not True else ():
            block.called = True


BY_HAND = ByHand()
