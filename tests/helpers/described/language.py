"""Programs as data: models with blocks in them, and calls of these in other blocks.

A program is a tuple of statements. For each kind there are two interpreters: those of
``real.py`` and ``real_models.py`` open blocks with ``with``, those of ``by_hand.py``
change the weights one by one instead. ``drawn.py`` draws programs at random.

All models map an array of shape (2, 4) to one of that shape, so that they can be
combined in any order. This file and ``by_hand.py`` do not import flax_sg.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.helpers import stepwise

Path = tuple[str, ...]
Program = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Where:
    """A filter.

    Attributes:
        kind: ``'all'``, or what has to be one of the names: ``'name'`` (the variable's
            own), ``'under'`` (a module above it), ``'second'`` (the second component of
            a path of three in the owner), ``'root'`` (the first one from the root).
        names: the names.
        style: how it is written for flax_sg, one of those in ``real.py``.
        negated: whether all other variables are meant.
        when: 1 or -1 if they are meant only while the sum of ``x`` has this sign, where
            the block opens or the view is called.
    """

    kind: str = 'all'
    names: tuple[str, ...] = ()
    style: str = 'predicate'
    negated: bool = False
    when: int = 0

    @property
    def everywhere(self) -> bool:
        """Whether its answers do not depend on which module opens the block."""
        return self.kind not in ('second', 'root')

    def takes(self, path: Path, owner: Path = ()) -> bool:
        """Whether a variable is meant, in a block of the module at ``owner``."""
        inside = path[: len(owner)] == owner
        seen = path[len(owner) :] if inside else path
        looked_at = {
            'all': self.names,
            'name': seen[-1:],
            'under': seen[:-1],
            'second': seen[1:2] if inside and len(seen) == 3 else (),
            'root': path[:1],
        }[self.kind]
        taken = self.kind == 'all' or any(part in self.names for part in looked_at)
        return taken != self.negated


EVERYTHING = Where()


@dataclasses.dataclass(frozen=True)
class Block:
    """A block around statements.

    Attributes:
        where: what its rule is for.
        body: the statements.
        rule: ``'stop'`` for gradients; ``'only'``, which is the same, written as
            ``train_only`` of all else; ``'function'`` or ``'collection'`` for values
            from there instead; ``'scale'`` for cotangents times a negative number;
            ``'read_only'`` to raise for writes.
        judged: whether it raises if its filter takes nothing.
    """

    where: Where
    body: Program = ()
    rule: str = 'stop'
    judged: bool = False


@dataclasses.dataclass(frozen=True)
class Leave:
    """Leaves the block or module around it by an exception, and more ``levels``."""

    levels: int = 0


@dataclasses.dataclass(frozen=True)
class Use:
    """Calls a module.

    Attributes:
        kid: which, of several.
        lift: a transform of a function of the module, or ``''``.
        mirror: what a view that is called instead stops, None without a view.
    """

    kid: int = 0
    lift: str = ''
    mirror: Where | None = None


@dataclasses.dataclass(frozen=True)
class Residual:
    """Adds what the statements make to what they were given."""

    body: Program


@dataclasses.dataclass(frozen=True)
class Own:
    """Reads a parameter of the module itself: ``'p0'`` or ``'p1'``."""

    name: str


@dataclasses.dataclass(frozen=True)
class Shared:
    """Calls the module that was handed in, if there is one."""


@dataclasses.dataclass(frozen=True)
class Inner:
    """Applies another model to the module's own parameters, compiled once for all."""


# Models.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A module without blocks. ``kind``: one of ``modules.LEAVES``."""

    kind: str


@dataclasses.dataclass(frozen=True)
class Composite:
    """A module with submodules and statements.

    Attributes:
        style: ``'setup'`` or ``'compact'``.
        kids: its submodules.
        body: its statements.
    """

    style: str
    kids: tuple[Part, ...]
    body: Program


@dataclasses.dataclass(frozen=True)
class Part:
    """A submodule of a composite module, or a model.

    Attributes:
        spec: what it is.
        wraps: transforms of its class, innermost first; ``'stop'`` is a lifted class.
        where: what the lifted class, or ``Frozen``, stops.
        shares: whether it is handed the composite's shared module in a field.
        frozen: whether ``Frozen`` is around it.
        rule: what these do to what they stop, as in ``Block``.
    """

    spec: Leaf | Composite
    wraps: tuple[str, ...] = ()
    where: Where = EVERYTHING
    shares: bool = False
    frozen: bool = False
    rule: str = 'stop'


# Statements outside of models.


@dataclasses.dataclass(frozen=True)
class Ahead:
    """That a function is split by ``sg.precompute``.

    Attributes:
        trained: which parameters are trained. The others have no gradient.
        each: whether ``x`` changes at each step. Otherwise it has no gradient.
    """

    trained: Where
    each: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """Calls a model.

    Attributes:
        model: which, of several.
        how: how the function of its parameters is compiled, one of ``HOWS``.
        mutable: whether its parameters are returned, too.
        ahead: how it is split in two, None if it is not.
    """

    model: int = 0
    how: str = 'plain'
    mutable: bool = False
    ahead: Ahead | None = None


@dataclasses.dataclass(frozen=True)
class Session:
    """A body whose calls are differentiated together."""

    body: Program


@dataclasses.dataclass(frozen=True)
class Thread:
    """A body that another thread runs, while this one waits in its blocks."""

    body: Program


def without_blocks(body: Program) -> Program:
    """The same statements, with no block or view around any."""
    out: list[Any] = []
    for item in body:
        match item:
            case Block():
                out += without_blocks(item.body)
            case Residual():
                out.append(Residual(without_blocks(item.body)))
            case Use():
                out.append(dataclasses.replace(item, mirror=None))
            case Leave():
                pass
            case _:
                out.append(item)
    return tuple(out)


def plain(part: Part) -> Part:
    """The same model, without all that flax_sg does."""
    wraps, spec = tuple(w for w in part.wraps if w != 'stop'), part.spec
    if isinstance(spec, Composite):
        kids = tuple(map(plain, spec.kids))
        spec = Composite(spec.style, kids, without_blocks(spec.body))
    return Part(spec, wraps, shares=part.shares)


def statements(it: Any) -> list[Any]:
    """All statements in a model or a statement, those inside others included."""
    found = statements(it.spec) if isinstance(it, Part) else []
    for item in getattr(it, 'body', ()):
        found += [item, *statements(item)]
    for kid in getattr(it, 'kids', ()):
        found += statements(kid)
    return found


def has_lift(part: Part, name: str) -> bool:
    """Whether a function is lifted with this transform anywhere in a model."""
    return any(getattr(item, 'lift', '') == name for item in statements(part))


class LeaveError(Exception):
    """Raised to leave a given number of blocks and modules more."""

    def __init__(self, levels: int) -> None:
        super().__init__(f'leaves {levels}')
        self.levels = levels


@contextlib.contextmanager
def left() -> Iterator[None]:
    """The end of a block or module, which an exception may leave."""
    try:
        yield
    except LeaveError as error:
        if error.levels:
            error.levels -= 1
            raise


class Interpreter:
    """Runs statements. For each kind there is a method of the same name.

    Attributes:
        x: what conditions of filters are about.
    """

    x: Any = None

    def run(self, body: Program, place: Any = None) -> None:
        """Runs statements one after the other.

        Args:
            body: the statements.
            place: what is known of the place where they are, for the methods.
        """
        for item in body:
            getattr(self, type(item).__name__.lower())(item, place)

    def leave(self, item: Leave, place: Any) -> None:
        raise LeaveError(item.levels)


class OnValue(Interpreter):
    """Statements in a model, which change ``x``."""

    def result(self, body: Program, x: jax.Array, place: Any = None) -> jax.Array:
        """Runs statements on a value."""
        self.x = x
        self.run(body, place)
        return self.x

    def residual(self, item: Residual, place: Any) -> None:
        before = self.x
        self.run(item.body, place)
        self.x = before + self.x


# How a function of parameters and ``x`` is called.


def _scan(fn: Any) -> Any:
    def body(carry: Any, _: None) -> Any:
        params, x = carry
        return (params, fn(params, x)), None

    return lambda params, x: lax.scan(body, (params, x), None, length=2)[0][1]


def _custom_vjp(fn: Any) -> Any:
    """A function whose rule reads the parameters when the block has closed."""
    out = jax.custom_vjp(fn)

    def forward(params: Any, x: Any) -> Any:
        return fn(params, x), (params, x)

    def backward(given: Any, ct: Any) -> Any:
        return jax.vjp(fn, *given)[1](ct)

    out.defvjp(forward, backward)
    return out


def _step(fn: Any) -> Any:
    """A compiled step of training, up to the gradients."""
    return jax.jit(jax.grad(lambda params, x: jnp.sum(fn(params, x) ** 2), (0, 1)))


def _forward(fn: Any) -> Any:
    def results(params: Any, x: Any) -> Any:
        primals = params, x
        return jax.jvp(fn, primals, jax.tree.map(jnp.ones_like, primals))

    return results


HOWS: dict[str, Callable[[Any], Any]] = {
    'plain': lambda fn: fn,
    'jit': jax.jit,
    'checkpoint of jit': lambda fn: jax.checkpoint(jax.jit(fn)),
    'jit of scan': lambda fn: jax.jit(_scan(fn)),
    'jit of custom_vjp': lambda fn: jax.jit(_custom_vjp(fn)),
    'step': _step,
    'forward': _forward,
}
# What these return is not differentiated, and they can be in no session.
DERIVATIVES = 'step', 'forward'


@dataclasses.dataclass(eq=False)
class Open:
    """A block that is open.

    Attributes:
        block: the block.
        x: what its condition is about.
        called: whether what it takes was read in it.
    """

    block: Block
    x: Any
    called: bool = False


class Calls(Interpreter):
    """Statements outside of models. Their place is the blocks that are open.

    Attributes:
        models: what is called.
        params: the parameters of each.
        x: what each is called with.
        results: a function for each session, and for each call outside of one. It
            returns values and gradients; what it runs is traced already.
    """

    def __init__(self, models: tuple[Part, ...], params: Any, x: jax.Array) -> None:
        self.models, self.params, self.x = models, params, x
        self.results: list[Callable[[], Any]] = []
        self._session: tuple[Any, dict[str, Any]] | None = None

    def start(self, program: Program) -> None:
        """Runs a program, in no block."""
        self.results.clear()
        with contextlib.suppress(LeaveError):
            self.run(program, ())

    def function(self, item: Call, place: tuple[Open, ...]) -> Any:
        """What is called: a function of parameters and ``x``."""
        raise NotImplementedError

    def block(self, item: Block, place: tuple[Open, ...]) -> None:
        with left():
            self.run(item.body, (*place, Open(item, self.x)))

    def call(self, item: Call, place: tuple[Open, ...]) -> None:
        fn = self.function(item, place)
        if self._session is not None:
            params, outputs = self._session
            outputs[str(len(outputs))] = _vector(fn(params[item.model], self.x))
        elif item.how in DERIVATIVES:
            self.results.append(self.derivative(fn, self.params[item.model]))
        else:
            vectors = lambda *args: ({'': _vector(fn(*args))}, ())  # noqa: E731
            args = self.params[item.model], self.x
            self.results.append(stepwise.trace_outputs_and_grads(vectors, *args))

    def derivative(self, fn: Any, params: Any) -> Callable[[], Any]:
        return stepwise.trace(fn, params, self.x)

    def session(self, item: Session, place: tuple[Open, ...]) -> None:
        def outputs(params: Any, x: Any) -> Any:
            self._session, self.x, outside = (params, {}), x, self.x
            try:
                with left():
                    self.run(item.body, place)
                return self._session[1], ()
            finally:
                self._session, self.x = None, outside

        both = stepwise.trace_outputs_and_grads(outputs, self.params, self.x)
        self.results.append(both)

    def thread(self, item: Thread, place: tuple[Open, ...]) -> None:
        def work() -> None:
            with left(), jax.numpy_rank_promotion('allow'):
                self.run(item.body, ())

        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()


def _vector(tree: Any) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])
