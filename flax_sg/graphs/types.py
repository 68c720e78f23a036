"""The type that a Variable of NNX has while a block selects it.

JAX finds a cached program by its user context, and Flax by the types and metadata of
Variables. So a selected Variable gets another type. Its metadata name the block, and
the block is in the context: it finds another program than outside, and an equal block
of the same model finds the same program again. What is stored stays as it is.

What Flax makes of a selected Variable is selected, too: in ``nnx.clone``, in
``nnx.merge``, and where a transform hands a model to its body. Flax makes it by
``from_metadata``. If the block is not open there, it gets its old type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import sys
import threading
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
from flax import nnx

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.internals import frames, tracing
from flax_sg.internals.places import Place
from flax_sg.rules import cotangents, rules
from flax_sg.trees.leaves import shape_of

# The name of our metadata: which blocks select a Variable.
NAME = 'flax_sg'


class Key:
    """Stands for a block in JAX's cache keys; equal blocks of one model have the same.

    Attributes:
        modules: the modules of the model. Two of one class may be read in one closure,
            so a key is for one of them as long as it lives.
        used: whether a block on these modules had an effect.
    """

    def __init__(self) -> None:
        self.modules: list[weakref.ref[Any]] = []
        self.used = False

    def given_to(self, modules: Sequence[Any]) -> bool:
        """Gives it to a block on some modules, unless other ones have it."""
        mine = [ref() for ref in self.modules]
        if _same(mine, modules):
            return True
        if any(module is not None for module in mine):
            return False
        self.modules, self.used = list(map(weakref.ref, modules)), False
        return True


# The block that selects a Variable, and the Variable's path if the rule needs one.
Mark: TypeAlias = tuple[Key, str]


class Marks(tuple[Mark, ...]):
    """The blocks that select a Variable; also keeps what readers have seen there.

    Attributes:
        seen: for some open blocks, outermost first: the leaves, and what was seen.
    """

    seen: dict[Any, tuple[list[Any], Any]]

    def __new__(cls, marks: Iterable[Mark] = (), seen: Any = None) -> Marks:
        """Keeps what readers of the same Variable have seen, if it is given."""
        self = super().__new__(cls, marks)
        self.seen = {} if seen is None else seen
        return self

    def __reduce__(self) -> Any:
        return Marks, ()  # Elsewhere no block is open.


@dataclasses.dataclass(eq=False)
class Frame:
    """An open block.

    Attributes:
        block: the value that opened it.
        rewrite: the filter and the rule.
        key: what stands for the block in cache keys.
        answers: what the filter says of each selected Variable, and the shape of each
            of its leaves, by path.
        outer: the blocks around it.
        place: where it was opened.
        level: the trace in which it was opened.
        own: the Variables that it has to give back: the selected ones, and those made
            of them in the same trace.
        limit: how many these may be, before those are forgotten that nobody has.
        entered: what closes it.
    """

    block: object
    rewrite: rules.Rewrite
    key: Key
    answers: Mapping[str, tuple[Any, list[Any]]]
    outer: tuple[Frame, ...]
    place: Place
    level: Any
    own: list[Selected] = dataclasses.field(default_factory=lambda: [])
    limit: int = 64
    entered: Any = None

    def take(self, variable: Any) -> None:
        """Takes a Variable, which the block gives back when it closes."""
        self.own.append(variable)
        if len(self.own) > self.limit:
            # A block around a whole training would keep all old values alive.
            kept = [v for v in self.own if id(v) in _marks or sys.getrefcount(v) > 3]
            self.own, self.limit = kept, 64 + 2 * len(kept)

    def see(self, path: str, value: Any) -> Any:
        """What a reader sees instead of the value of a Variable."""
        rule, where = self.rewrite.rule, Path.of('params', tuple(path.split('/')))
        said, shapes = self.answers.get(path, (True, []))
        self.key.used = True
        if isinstance(said, filters.Part) and shapes_of(value) != shapes:
            raise errors.PartError(
                f'{self.rewrite!r} means a part of {path!r}, which has another shape '
                'here: a transform has taken it apart.\n'
                'Select all of it, or open the block in the body of the transform.'
            )
        aside = running.only(self.outer) if rule.runs_code else contextlib.nullcontext()
        with aside:
            new = rule.instead(where, value, lambda _: rules.AS_IT_IS)
            if new is rules.AS_IT_IS:
                new = jax.tree.map(lambda leaf: self._see_leaf(where, leaf), value)
        return jax.tree.map(lambda a, b: filters.merged(said, a, b, path), new, value)

    def _see_leaf(self, path: Path, leaf: Any) -> Any:
        rule = self.rewrite.rule
        if rule.acts_on == 'cotangents' and not cotangents.has_to_act(
            self.rewrite, path, leaf
        ):
            return leaf
        levels = [self.level] * (rule.acts_on == 'cotangents' or rule.brings)
        with tracing.in_innermost_trace(levels, leaf, *rule.operands, examples=False):
            return rule(path, leaf)


def shapes_of(value: Any) -> list[Any]:
    """The shape of each leaf of a Variable's value."""
    return [shape_of(leaf) for leaf in jax.tree.leaves(value)]


_context = jax.make_user_context(())


class Running(threading.local):
    """The open blocks of a thread, the innermost last."""

    frames: tuple[Frame, ...] = ()

    @contextlib.contextmanager
    def only(self, frames: tuple[Frame, ...]) -> Generator[None]:
        """Makes these the open blocks in the ``with`` body."""
        before = self.frames
        with _context(tuple(frame.key for frame in frames)):
            self.frames = frames
            try:
                yield
            finally:
                self.frames = before

    def named(self, marks: Sequence[Mark]) -> tuple[tuple[Frame, str], ...]:
        """The open blocks among those that select a Variable, and its path there.

        Raises:
            BlockError: if another asyncio task has opened one of them.
        """
        by_key = {frame.key: frame for frame in self.frames}
        found = tuple((by_key[key], path) for key, path in marks if key in by_key)
        for frame, _ in found:
            frame.place.check_task(frame.block)
        return found


running = Running()


# The marks of Variables on which blocks are open, by ``id``. Their own metadata cannot
# be written in another trace. Threads share it: two may open a block on one model.
_marks: dict[int, Marks] = {}
lock = threading.RLock()


class Selected(nnx.Variable[Any]):
    """A Variable that is read through the open blocks which select it.

    Attributes:
        base: the type that it has otherwise.
    """

    base: ClassVar[type[nnx.Variable[Any]]]

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda one: (((_VALUE, _taken(one)),), _static(one)),
            lambda static, raw: cls.from_metadata(next(iter(raw)), dict(static)),
            lambda one: ((_taken(one),), _static(one)),
        )

    @classmethod
    def from_metadata(cls, value: Any, attributes: Mapping[str, Any]) -> Any:
        """Makes one of what Flax or JAX took apart."""
        metadata = dict(attributes)
        through = running.named(metadata.pop(NAME, ()))
        if not through:
            return cls.base.from_metadata(value, metadata)
        metadata[NAME] = Marks((frame.key, path) for frame, path in through)
        variable = super().from_metadata(value, metadata)
        level = tracing.current_trace()
        for frame, _ in through:
            if frame.level == level:  # What another trace makes ends with it.
                frame.take(variable)
        return variable

    def get_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The metadata, and which of the open blocks select it."""
        metadata = super().get_metadata(*args, **kwargs)
        if not (args or 'name' in kwargs):
            metadata.pop(NAME, None)
            for frame, path in running.named(marks_of(self)):
                frame.key.used = True
                metadata[NAME] = Marks((*metadata.get(NAME, ()), (frame.key, path)))
        return metadata

    @property
    def var_type(self) -> type[Any]:
        """The type by which Flax makes another one."""
        return type(self) if running.named(marks_of(self)) else self.base

    def get_value(self, **how: Any) -> Any:
        """What a reader sees."""
        marks = marks_of(self)
        through = running.named(marks)
        if not through:
            return super().get_value(**how)
        value, stored = super().get_value(), jax.tree.leaves(self.get_raw_value())
        # What a get_value of the user's own computes may be of another trace.
        seen = marks.seen if _same(stored, jax.tree.leaves(value)) else {}
        for depth, (frame, path) in enumerate(through, 1):
            leaves = jax.tree.leaves(value)
            known = seen.get(through[:depth])
            if known is None or not _same(known[0], leaves):
                known = seen[through[:depth]] = leaves, frame.see(path, value)
            value = known[1]
        index = how.get('index', ...)
        is_whole = index is ... and isinstance(value, jax.Array)
        return value if is_whole or 'index' not in how else value[index]

    def set_value(self, value: Any, **how: Any) -> None:
        """Stores a value; raises in a block of ``nnx.read_only``."""
        for frame, path in running.named(marks_of(self)):
            if frame.rewrite.rule.acts_on == 'writes':
                raise errors.BlockError(
                    f'The Variable {path!r} is written, which is read only under '
                    f'{frame.rewrite!r}.\n'
                    'Fix: leave the block for the write, or leave the Variable out.'
                )
        super().set_value(value, **how)

    def update_from_state(self, variable_state: Any) -> None:
        """Takes the value of another one, and keeps the blocks that select this one."""
        before = super().get_metadata(NAME, ())
        super().update_from_state(variable_state)
        _write(self, before)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_') or self.has_metadata(name):
            return super().__getattr__(name)
        return getattr(self.get_value(), name)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        metadata = self.get_metadata()
        metadata.pop(NAME, None)
        return self.base.from_metadata, (self.get_raw_value(), metadata)


_VALUE = jax.tree_util.GetAttrKey('value')


def _taken(variable: Selected) -> Any:
    """What JAX gets of a Variable that it takes apart: what is stored.

    A function with a derivative of its own says itself what flows to its arguments, so
    there JAX has to get what a reader sees. So has a program that reads the leaves of a
    state. What is made of the leaves is seen again, so this is for stops alone.
    """
    through = running.named(marks_of(variable)) if running.frames else ()
    in_derivative = through and frames.in_derivative_of_its_own()
    if not (in_derivative or (through and frames.in_reader_of_leaves())):
        return variable.get_raw_value()
    for open_block, path in through:
        rule = open_block.rewrite.rule
        if not rule.idempotent:
            if not in_derivative:
                return variable.get_raw_value()
            raise errors.BlockError(
                f'{open_block.rewrite!r} selects the Variable {path!r}, and a function '
                'with a derivative of its own (jax.custom_vjp) takes its model apart.\n'
                'Give the function what it reads: fn(model.kernel[...]).'
            )
    return variable.get_value()


def _static(variable: Selected) -> tuple[Any, ...]:
    return tuple(sorted(variable.get_metadata().items()))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def marks_of(variable: Any) -> Marks:
    """The blocks, open or not, that select a Variable."""
    return _marks.get(id(variable)) or variable.get_metadata(NAME, Marks())


def _write(variable: Any, marks: Sequence[Mark]) -> None:
    """Writes into the metadata of a Variable which blocks select it."""
    if marks:
        variable.set_metadata(NAME, marks)
    elif variable.has_metadata(NAME):
        variable.del_metadata(NAME)


@functools.cache  # JAX keeps each type that is registered.
def _selected(cls: type[Any]) -> type[Any]:
    """The type that a Variable of this type has while a block selects it."""
    if issubclass(cls, Selected):
        return cls
    name = f'{cls.__name__}_of_an_open_block'
    return type(name, (Selected, cls), {'base': cls, '__module__': 'flax_sg.nnx'})


def select(frame: Frame, variable: Any, path: str) -> None:
    """Lets a block select a Variable."""
    with lock:
        marks = marks_of(variable)
        _marks[id(variable)] = Marks((*marks, (frame.key, path)), marks.seen)
        object.__setattr__(variable, '__class__', _selected(type(variable)))
        frame.take(variable)


def give_back(frame: Frame, variable: Any) -> None:
    """Gives a Variable the type and the metadata that it had without a block."""
    with lock:
        marks = marks_of(variable)
        last = next(mark for mark in reversed(marks) if mark[0] is frame.key)
        number = marks.index(last)
        # A block around this one may be open for long: it forgets what was seen here.
        seen = {
            through: what
            for through, what in list(marks.seen.items())
            if all(other is not frame for other, _ in through)
        }
        rest = Marks(marks[:number] + marks[number + 1 :], seen)
        is_ours = id(variable) in _marks
        if is_ours and rest and variable.get_metadata(NAME, ()) != rest:
            _marks[id(variable)] = rest
        else:
            _marks.pop(id(variable), None)
            _write(variable, rest)
        if not rest:
            object.__setattr__(variable, '__class__', variable.base)
