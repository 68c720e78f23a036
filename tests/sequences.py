"""Runs programs step by step in threads, and predicts the result of each step.

A worker is a thread that takes commands: open a block, enter a module or a compiled
function, call one, leave by an exception. The blocks are real ``with`` statements,
since the worker calls itself for their bodies. Some blocks are inside a suspended
generator. ``test_stateful`` draws the steps and compares the results with three models.
``Stack`` says which blocks are open. ``Caches`` says what must be traced and what must
not. ``ByHand`` computes gradients on weights that were stopped by hand.
"""

import contextlib
import dataclasses
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
from jax import lax

import oracle
import stepwise
from flax_sg import filters
from flax_sg import linen as nn
from flax_sg.engine import cache_keys

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)
DEEPEST = 6  # Maximum nesting of a worker.
WAIT = 300  # Seconds. A timeout for busy machines; no step has to wait.


# The functions that workers call. Each calls ``note`` when its Python runs.

Note = Callable[[], None]


def silent() -> None:
    """Notes nothing."""


def net_class(note: Note) -> type[fnn.Module]:
    class Net(fnn.Module):
        @fnn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            note()
            x = self.activation(fnn.Dense(2, name='enc')(x))
            return fnn.Dense(2, name='head')(x)

        def activation(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(x)

    return Net


def another(net: Any) -> Any:
    """Another network with the same paths."""

    class Another(net):
        def activation(self, x: jax.Array) -> jax.Array:
            return jnp.sin(x)

    return Another


def _apply(net: Any) -> Callable[..., Any]:
    model = net(parent=None)
    return lambda params, x: model.apply({'params': params}, x)


def _scan(fn: Callable[..., Any]) -> Callable[..., Any]:
    def body(carry: Any, _: None) -> Any:
        params, x = carry
        return (params, fn(params, x)), None

    return lambda params, x: lax.scan(body, (params, x), None, length=2)[0][1]


def _cond(fn: Callable[..., Any]) -> Callable[..., Any]:
    def other(params: Any, x: Any) -> Any:
        del params
        return x

    return lambda params, x: lax.cond(x[0, 0] < 5.0, fn, other, params, x)


def _custom_vjp(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose rule reads the parameters when the block has closed."""
    out = jax.custom_vjp(fn)

    def forward(params: Any, x: Any) -> Any:
        return fn(params, x), (params, x)

    def backward(given: Any, ct: Any) -> Any:
        return jax.vjp(fn, *given)[1](ct)

    out.defvjp(forward, backward)
    return out


def _jitted_method(net: type[fnn.Module]) -> Callable[..., Any]:
    class Method(net):
        @fnn.jit
        def jitted(self, x: jax.Array) -> jax.Array:
            return self(x)

    def call(params: Any, x: Any) -> Any:
        return Method(parent=None).apply({'params': params}, x, method='jitted')

    return call


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to call a network.

    Attributes:
        make: from the class of the network to a function of its parameters and input.
        cached: whether JAX or Flax traces it once only.
        eager: whether a part of it runs in Python at every call. The stops are then in
            that part, and all answers may share the compiled part.
        late: whether a rule of it runs in the backward pass, which is not counted.
        recovers: whether JAX caches the function after a trace of it has raised. Plain
            JAX does not for functions that a cache holds by weak reference.
    """

    make: Callable[[Any], Callable[..., Any]]
    cached: bool = True
    eager: bool = False
    late: bool = False
    recovers: bool = True


KINDS: dict[str, Kind] = {
    'jit': Kind(lambda net: jax.jit(_apply(net))),
    'checkpoint': Kind(lambda net: jax.checkpoint(_apply(net)), recovers=False),
    'scan': Kind(lambda net: _scan(_apply(net)), recovers=False),
    'cond': Kind(lambda net: _cond(_apply(net)), recovers=False),
    'checkpoint of jit': Kind(lambda net: jax.checkpoint(jax.jit(_apply(net)))),
    'jit of scan': Kind(lambda net: jax.jit(_scan(_apply(net)))),
    'nn.jit': Kind(lambda net: _apply(fnn.jit(net)), eager=True),
    'nn.jit method': Kind(_jitted_method, eager=True),
    'nn.remat': Kind(lambda net: _apply(fnn.remat(net)), cached=False, eager=True),
    'nn.remat of nn.jit': Kind(lambda net: _apply(fnn.remat(fnn.jit(net))), eager=True),
    'plain': Kind(_apply, cached=False, eager=True),
    'jit of another model': Kind(lambda net: jax.jit(_apply(another(net)))),
    'jit of custom_vjp': Kind(lambda net: jax.jit(_custom_vjp(_apply(net))), late=True),
}

# The children of each part of a pair, and how these are called.
CHILDREN: dict[str, Kind] = {
    'net': Kind(lambda net: net, cached=False),
    'jitted': Kind(fnn.jit),
    'rematted': Kind(fnn.remat, cached=False),
    'both': Kind(lambda net: fnn.remat(fnn.jit(net))),
}

# What a function of ``x`` that reads a bound module is wrapped in.
RAW: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    'jit': jax.jit,
    'checkpoint': jax.checkpoint,
    'scan': lambda fn: _scan_input(fn),
}


def _scan_input(fn: Callable[..., Any]) -> Callable[..., Any]:
    def body(x: Any, _: None) -> Any:
        return fn(x), None

    return lambda x: lax.scan(body, x, None, length=2)[0]


def pair_class(net: type[fnn.Module]) -> type[fnn.Module]:
    """Two equal parts, in whose methods a worker can be."""
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
            # Otherwise the trace of a scan would make, and leave behind, what a part
            # keeps.
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


# The blocks around the calls: values, spellings, and selected variables.


class Names:
    """An object that a filter reads."""

    def __init__(self, *names: str) -> None:
        self.names = names


def _named(*names: str) -> Callable[[Any], bool]:
    return lambda path: path.name in names


def _named_by_list(names: list[str]) -> Callable[[Any], bool]:
    return lambda path: path.name in names


def _within(config: Names) -> Callable[[Any], bool]:
    return lambda path: path.parts[-2:][0] in config.names


@dataclasses.dataclass(frozen=True)
class What:
    """A rewrite that is written in several ways, all of them equal.

    Attributes:
        spellings: make it anew, objects and all.
        selects: by hand, from the path of the owner and the names of a variable.
        anywhere: whether it selects something in every tree, for every owner.
        constant: whether it may select nothing without an error.
        changing: whether ``selects`` is called with the names in ``SWITCH``, too.
    """

    spellings: tuple[Callable[..., Any], ...]
    selects: Callable[..., bool]
    anywhere: bool = True
    constant: bool = False
    changing: bool = False


def _relative(owner: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """The names after those of the owner; () outside of it."""
    return names[len(owner) :] if names[: len(owner)] == owner else ()


stop, only = nn.stop_gradient, nn.train_only
SWITCH = Names('enc')  # Changes between steps.

WHATS: dict[str, What] = {
    'kernels': What(
        (
            lambda **k: stop('**/kernel', **k),
            lambda **k: stop(['**/kernel'], **k),
            lambda **k: only(~filters.as_filter('**/kernel'), **k),
        ),
        lambda owner, names: names[-1] == 'kernel',
    ),
    'kernels by a lambda': What(
        (
            lambda **k: stop(_named('kernel'), **k),
            lambda **k: only(~filters.as_filter(_named('kernel')), **k),
        ),
        lambda owner, names: names[-1] == 'kernel',
    ),
    'biases by a list': What(
        (lambda **k: stop(_named_by_list(['bias']), **k),),
        lambda owner, names: names[-1] == 'bias',
    ),
    'enc by an object': What(
        (lambda **k: stop(_within(Names('enc')), **k),),
        lambda owner, names: names[-2] == 'enc',
    ),
    'head by an object': What(
        (lambda **k: stop(_within(Names('head')), **k),),
        lambda owner, names: names[-2] == 'head',
    ),
    'what the switch names': What(
        (
            lambda **k: stop(_within(SWITCH), **k),
            lambda **k: only(~filters.as_filter(_within(SWITCH)), **k),
        ),
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
    'either': What(
        (
            lambda **k: stop(['**/enc/bias', '**/head/kernel'], **k),
            lambda **k: stop({'**/head/kernel', '**/enc/bias'}, **k),
        ),
        lambda owner, names: names[-2:] in (('enc', 'bias'), ('head', 'kernel')),
    ),
    'all': What((lambda **k: stop(True, **k),), lambda *_: True, constant=True),
    'nothing': What(
        (lambda **k: stop(False, **k), lambda **k: only(True, **k)),
        lambda *_: False,
        constant=True,
    ),
    # Depends on the owner: a part's own variables; for other owners none.
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


# The workers, which execute the steps.


def forget_contexts() -> None:
    """Forgets what was traced and judged before, as in a new process."""
    cache_keys.NONE.inside.clear()


class LeaveError(Exception):
    """Raised to leave a given number of blocks, modules and functions."""

    def __init__(self, levels: int) -> None:
        super().__init__(f'leaves {levels}')
        self.levels = levels


def in_one(_: Any, pair: Any, *rest: Any) -> jax.Array:
    """All parameters of a pair in one vector."""
    del rest
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(pair)])


class Functions:
    """What a whole sequence calls, and how often the Python of each has run.

    Attributes:
        runs: how often Python ran, by what was being called.
        failing: if not None, how many levels to leave when Python runs.
    """

    def __init__(self) -> None:
        self.runs: Counter[Any] = Counter()
        self.calling: Any = None
        self.failing: int | None = None
        self.of = {
            name: kind.make(net_class(self.note)) for name, kind in KINDS.items()
        }
        self.pair = pair_class(net_class(self.note))()
        self.step = jax.jit(_grads_of(_apply(net_class(self.note))))

    def renew(self, kind: str) -> None:
        """Takes a new function in place of one that has raised."""
        self.of[kind] = KINDS[kind].make(net_class(self.note))

    def note(self) -> None:
        self.runs[self.calling] += 1
        if self.failing is not None:
            raise LeaveError(self.failing)

    @contextlib.contextmanager
    def counted(self, calling: Any, failing: int | None = None) -> Iterator[None]:
        """Counts what runs, under the name of the function that is called."""
        self.calling, self.failing = calling, failing
        try:
            yield
        finally:
            self.calling = self.failing = None


def _grads_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: jax.grad(lambda p, x: jnp.sum(fn(p, x) ** 2), (0, 1))(
        params, x
    )


@dataclasses.dataclass
class Place:
    """Where a worker is: what it can call there, and what that has returned."""

    args: tuple[Any, ...]
    pair: Any = None
    raw: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def inside(self, **changes: Any) -> 'Place':
        return dataclasses.replace(self, outputs={}, **changes)


class Worker:
    """A thread that does what it is told, in the blocks that it was told to open."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._orders: queue.Queue[Any] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def tell(self, order: str, *args: Any) -> Any:
        """Runs a step in the worker. Returns its result or its exception."""
        self._orders.put((order, args))
        answer = self._answers.get(timeout=WAIT)
        if isinstance(answer, _Fault):
            raise answer.error
        return answer

    def end(self) -> None:
        self._orders.put(('end', ()))
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def _live(self) -> None:
        with contextlib.suppress(_End):
            self._serve(None)

    def _serve(self, place: Place | None) -> None:
        """Does what is told until told to leave: the body of a block."""
        while True:
            order, args = self._orders.get(timeout=WAIT)
            if order == 'leave':
                return
            if order == 'end':
                raise _End
            try:
                answer = getattr(self, f'_{order}')(place, *args)
            except LeaveError as error:
                if error.levels:
                    error.levels -= 1
                    raise
                answer = error
            except Exception as error:
                answer = _Fault(error)
            self._answers.put(answer)

    def _raise(self, place: Place | None, levels: int) -> None:
        raise LeaveError(levels)

    def _open(self, place: Place | None, block: Any, held: bool = False) -> Any:
        try:
            with _held(block) if held else block:
                self._answers.put(None)
                self._serve(place)
        except Exception as error:
            if isinstance(error, LeaveError):
                raise
            return error
        return None

    def _session(self, place: Place | None) -> Any:
        """What is called inside is differentiated when it is left."""

        def fn(*args: Any) -> Any:
            inside = Place(args)
            self._answers.put(None)
            self._serve(inside)
            return inside.outputs

        assert place is None
        return traced(fn, *ARGS)

    def _jit(self, place: Place) -> None:
        @jax.jit
        def fn(*args: Any) -> Any:
            inside = place.inside(args=args)
            self._answers.put(None)
            self._serve(inside)
            return inside.outputs

        place.outputs.update(fn(*place.args))

    def _pair(self, place: Place, number: int, mutable: bool) -> None:
        def body(pair: Any) -> Any:
            inside = place.inside(pair=pair, raw={})
            self._answers.put(None)
            self._serve(inside)
            return inside.outputs

        out, written = self._functions.pair.apply(
            {'params': place.args[0]},
            body,
            method='run',
            mutable=['params'] if mutable else ['no collection'],
        )
        place.outputs.update(out)
        if mutable:
            place.outputs[f'written in {number}'] = in_one(None, written['params'])

    def _part(self, place: Place, name: str) -> None:
        def body() -> Any:
            inside = place.inside()
            self._answers.put(None)
            self._serve(inside)
            return inside.outputs

        place.outputs.update(getattr(place.pair, name).run(body))

    def _call(self, place: Place | None, kind: str, as_: str, failing: Any) -> Any:
        functions = self._functions
        with functions.counted(kind, failing):
            if place is None:
                fn = functions.of[kind]
                return traced(lambda *args: {'y': fn(*args)}, NET_PARAMS, X)
            place.outputs[as_] = functions.of[kind](*place.args[1:])
        return None

    def _step(self, place: None, failing: Any) -> Any:
        with self._functions.counted('step', failing):
            return self._functions.step(NET_PARAMS, X)

    def _child(
        self, place: Place, part: str, child: str, as_: str, failing: Any
    ) -> None:
        with self._functions.counted(child, failing):
            module = getattr(getattr(place.pair, part), child)
            place.outputs[as_] = module(place.args[2])

    def _kept(self, place: Place, part: str, as_: str) -> None:
        place.outputs[as_] = getattr(place.pair, part).use_kept(place.args[2])

    def _raw(self, place: Place, wrap: str, part: str, as_: str, failing: Any) -> None:
        if (wrap, part) not in place.raw:
            module = getattr(place.pair, part)
            place.raw[wrap, part] = RAW[wrap](lambda x: module.net(x))
        with self._functions.counted(wrap, failing):
            try:
                place.outputs[as_] = place.raw[wrap, part](place.args[2])
            except LeaveError:
                del place.raw[wrap, part]  # As for those that do not recover.
                raise


class _held:  # noqa: N801
    """Holds a block by a generator that is suspended inside of it."""

    def __init__(self, block: Any) -> None:
        self._generator = self._hold(block)

    def _hold(self, block: Any) -> Iterator[None]:
        with block:
            yield

    def __enter__(self) -> None:
        next(self._generator)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            next(self._generator, None)
        else:
            with contextlib.suppress(type(error)):
                self._generator.throw(error)


class _End(BaseException):
    """Ends a worker, wherever it is."""


@dataclasses.dataclass
class _Fault:
    """An exception that no step may raise."""

    error: Exception


# The expected result of each step.


@dataclasses.dataclass(eq=False)
class Open:
    """A block that is open.

    Attributes:
        what: a key of ``WHATS``.
        owner: the path of the module that opened it; None at top level.
        judged: whether it raises or warns if nothing that it selects is read in it.
        spelling: which of the spellings it is.
        block: the value that was opened.
        switched: the names in ``SWITCH`` when it was opened.
        called: whether a function was called in it that reads what it selects.
    """

    what: str
    owner: tuple[str, ...] | None
    judged: bool
    spelling: int = 0
    block: Any = None
    switched: tuple[str, ...] = dataclasses.field(default_factory=lambda: SWITCH.names)
    called: bool = False

    def selects(self, names: tuple[str, ...], of_owner: bool) -> bool:
        owner = self.owner if of_owner and self.owner is not None else ()
        return self.says(owner, names)

    def says(self, owner: tuple[str, ...], names: tuple[str, ...]) -> bool:
        what = WHATS[self.what]
        return what.selects(owner, names, *([self.switched] if what.changing else []))

    @property
    def label(self) -> Any:
        """What is equal for blocks that surely give the same answers."""
        owner = None if WHATS[self.what].anywhere else self.owner
        return self.what, self.spelling, self.switched, owner


@dataclasses.dataclass
class Call:
    """A call in a session: what is differentiated when that is left.

    Attributes:
        name: of its output.
        fn: from the arguments of a session to the output, by hand.
        stopped: which parameters are stopped, as '/'-joined names.
    """

    name: str
    fn: Callable[..., Any]
    stopped: frozenset[str]


@dataclasses.dataclass
class Frame:
    """A session, or a compiled function or module in one, that a worker is in.

    Attributes:
        kind: ``'session'``, ``'jit'``, ``'pair'`` or ``'part'``.
        path: of the module.
        number: no other has it.
        mutable: whether the parameters are mutable in it, and returned.
        calls: what was called in it.
    """

    kind: str
    path: tuple[str, ...] | None
    number: int
    mutable: bool = False
    calls: list[Call] = dataclasses.field(default_factory=list)


def names_in(tree: Any, *above: str) -> list[tuple[str, ...]]:
    if not isinstance(tree, Mapping):
        return [above]
    return [n for key, value in tree.items() for n in names_in(value, *above, key)]


NET_NAMES, PAIR_NAMES = names_in(NET_PARAMS), names_in(PAIR_PARAMS)


class Stack(list[Any]):
    """What a worker is in, outermost first."""

    @property
    def blocks(self) -> list[Open]:
        return [entry for entry in self if isinstance(entry, Open)]

    @property
    def frames(self) -> list[Frame]:
        return [entry for entry in self if isinstance(entry, Frame)]

    @property
    def module(self) -> tuple[str, ...] | None:
        """The path of the module whose method is running."""
        return self.frames[-1].path if self.frames else None

    def is_in(self, kind: str) -> bool:
        return any(frame.kind == kind for frame in self.frames)

    @property
    def pair(self) -> Frame:
        """The pair that it is in."""
        [pair] = [frame for frame in self.frames if frame.kind == 'pair']
        return pair

    def has_room(self) -> bool:
        return len(self) < DEEPEST

    @property
    def owners(self) -> tuple[Any, ...]:
        return tuple(block.owner for block in self.blocks)

    def stopped(self, in_pair: bool) -> frozenset[str]:
        """The parameters that the open blocks stop in a tree: the union."""
        return frozenset(
            '/'.join(names)
            for names in (PAIR_NAMES if in_pair else NET_NAMES)
            if any(block.selects(names, in_pair) for block in self.blocks)
        )


class Caches:
    """Records traces: which ones JAX must find in its caches, and which it must not.

    JAX must trace a program that was never traced with these parameters stopped. It
    must not trace the program again in the same open blocks. The same holds in equal
    blocks, if one worker alone opens blocks and all answers of other filters differ
    early. In other cases both are right: another worker may use the number, or the
    number may have taken other answers.
    """

    def __init__(self) -> None:
        self.renewed: Counter[Any] = Counter()
        self._for_stopped: set[Any] = set()
        self._in_blocks: set[Any] = set()
        self._in_equal_blocks: set[Any] = set()
        self._opened_by: set[int] = set()
        self._opened: dict[Any, Open] = {}
        self._raw_called = False

    def opened(self, stack: Stack) -> None:
        """Notes who has opened a block, and which one."""
        self._opened_by.add(id(stack))
        self._opened[stack.blocks[-1].label] = stack.blocks[-1]

    def note(self, key: Any, stack: Stack, stopped: Any) -> None:
        """Notes that a function was traced, or found."""
        self._for_stopped.add((key, stopped))
        self._in_blocks.add((key, _same(stack)))
        self._in_equal_blocks.add((key, _equal(stack)))

    def note_raw(self) -> None:
        """Notes a program that depends on a tree, which other trees do not find."""
        self._raw_called = True

    def must_trace(self, key: Any, stopped: Any) -> bool:
        return (key, stopped) not in self._for_stopped

    def must_find(self, key: Any, stack: Stack) -> bool:
        if (key, _same(stack)) in self._in_blocks:
            return True
        alone = len(self._opened_by) <= 1 and not self._raw_called
        known = (key, _equal(stack)) in self._in_equal_blocks
        return alone and known and all(map(self._differs_early, stack.blocks))

    def _differs_early(self, block: Open) -> bool:
        """Whether filters that agree with it on one tree agree with it on the other."""
        return all(
            _answers(block, PAIR_NAMES) == _answers(other, PAIR_NAMES)
            for other in self._opened.values()
            if _answers(block, NET_NAMES) == _answers(other, NET_NAMES)
        )


def _same(stack: Stack) -> Any:
    """The blocks that are open, each for itself."""
    return tuple(stack.blocks)


def _equal(stack: Stack) -> Any:
    return tuple(block.label for block in stack.blocks)


def _answers(block: Open, names: list[tuple[str, ...]]) -> list[list[bool]]:
    owners: list[tuple[str, ...]] = [(), ('a',), ('b',)]
    return [[block.says(owner, n) for n in names] for owner in owners]


def stopped_by_hand(params: Any, stopped: frozenset[str]) -> Any:
    return oracle.stopped(params, lambda path: path in stopped)


class ByHand:
    """The same calls without flax_sg: on weights that were stopped one by one."""

    def __init__(self) -> None:
        self._of = {n: kind.make(net_class(silent)) for n, kind in KINDS.items()}
        self._step = jax.jit(_grads_of(_apply(net_class(silent))), static_argnums=())
        self._known: dict[Any, Any] = {}
        net = net_class(silent)
        self._children = {n: _apply(kind.make(net)) for n, kind in CHILDREN.items()}

    def call(self, kind: str, stopped: frozenset[str]) -> Any:
        """The output and gradients of one call."""

        def fn(params: Any, x: Any) -> Any:
            return {'y': self._of[kind](stopped_by_hand(params, stopped), x)}

        if (kind, stopped) not in self._known:
            self._known[kind, stopped] = traced(fn, NET_PARAMS, X)()
        return self._known[kind, stopped]

    def step(self, stopped: frozenset[str]) -> Any:
        """The gradients of the compiled step."""
        fn = _apply(net_class(silent))

        def loss(params: Any, x: Any) -> Any:
            return fn(stopped_by_hand(params, stopped), x)

        if ('step', stopped) not in self._known:
            self._known['step', stopped] = jax.jit(_grads_of(loss))(NET_PARAMS, X)
        return self._known['step', stopped]

    def session(self, calls: list[Call]) -> Any:
        """The outputs and gradients of the calls in a session."""

        def fn(pair: Any, net: Any, x: Any) -> Any:
            return {call.name: call.fn(call.stopped, pair, net, x) for call in calls}

        return traced(fn, *ARGS)()

    def in_session(self, kind: str) -> Callable[..., Any]:
        return lambda stopped, pair, net, x: self._of[kind](
            stopped_by_hand(net, stopped), x
        )

    def child(self, part: str, child: str) -> Callable[..., Any]:
        return lambda stopped, pair, net, x: self._children[child](
            stopped_by_hand(pair, stopped)[part][child], x
        )

    def kept(self, part: str) -> Callable[..., Any]:
        return lambda stopped, pair, net, x: (
            x * jnp.tanh(stopped_by_hand(pair, stopped)[part]['w'])
        )

    def raw(self, wrap: str, part: str) -> Callable[..., Any]:
        def fn(stopped: Any, pair: Any, net: Any, x: Any) -> Any:
            params = stopped_by_hand(pair, stopped)[part]['net']
            return RAW[wrap](lambda x: self._children['net'](params, x))(x)

        return fn
