"""Blocks on NNX models: what opens and closes them."""

from __future__ import annotations

import itertools
import types
import warnings
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Self

from flax_sg import errors
from flax_sg.graphs import choosing
from flax_sg.graphs.types import (
    Frame,
    Key,
    give_back,
    lock,
    running,
    select,
    shapes_of,
)
from flax_sg.internals import tracing
from flax_sg.internals.places import Place
from flax_sg.rules import rules


class Block:
    """A block on an NNX model, for ``with``; what ``nnx.stop_gradient`` returns.

    It may be opened any number of times. The filter is asked each time.

    Args:
        model: the model.
        rewrite: the filter and the rule.
        kind: an NNX filter of the Variables that the filter is asked for.
    """

    def __init__(self, model: Any, rewrite: rules.Rewrite, kind: Any) -> None:
        if rewrite.rule.jointly:
            raise errors.ArgumentTypeError(
                f'nnx.{rewrite.rule.name}: a block on an NNX model sees each Variable '
                'for itself, and this rule takes them together.\n'
                'Apply it to the state: sg.rewrite(nnx.state(model, nnx.Param), '
                'nn.clip_gradient(where, global_norm=1.0)).'
            )
        self._model, self._rewrite, self._kind = model, rewrite, kind

    def __repr__(self) -> str:
        return f'{type(self._model).__name__}: {self._rewrite!r}'

    def __enter__(self) -> Self:
        model, rewrite, rule = self._model, self._rewrite, self._rewrite.rule
        call, unused = f'nnx.{rule.name}(model, where)', rewrite.unused
        found = choosing.choose(call, model, rewrite.where, self._kind, unused)
        # Of tied weights the first path that the filter takes.
        chosen = {id(one[0]): one for one in reversed(found) if one[2]}.values()
        answers = {
            str(path): (said, shapes_of(variable.get_raw_value()))
            for variable, path, said in chosen
        }
        says = frozenset((path, said) for path, (said, _) in answers.items())
        content = says, rule.key(), rule.token()
        key = _key_of(content, choosing.modules_of(model))
        level = tracing.current_trace()
        outer, place = running.frames, Place.here()
        frame = Frame(self, rewrite, key, answers, outer, place, level)
        for variable, path, said in chosen:
            # Without its path, the state of a layer fits that of another.
            plain = rule.acts_on == 'values' and not rule.asks_path and said is True
            select(frame, variable, '' if plain else str(path))
        frame.entered = running.only((*running.frames, frame))
        frame.entered.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: types.TracebackType | None,
    ) -> None:
        frames = running.frames
        mine = [number for number, frame in enumerate(frames) if frame.block is self]
        closed = frames[mine[-1] :] if mine else ()
        for frame in reversed(closed):
            frame.entered.__exit__(None, None, None)
            while frame.own:
                give_back(frame, frame.own.pop())
        if exc_type is not None:
            return
        if len(closed) != 1:
            inner = (
                f'{closed[-1].block!r} is still open' if closed else 'it is not open'
            )
            raise errors.BlockError(
                f'the block {self!r} cannot be closed: {inner} in this thread.\n'
                'Blocks close in the thread that opened them, the last one first: use '
                'a with statement around the code that it is for.'
            )
        [frame] = closed
        if frame.answers and not frame.key.used and self._rewrite.unused != 'ignore':
            warnings.warn(
                f'{self!r} has no effect: none of its {len(frame.answers)} Variables '
                'was read in the block.\n'
                'Open it around the code that reads the model itself: '
                'nnx.cached_partial and nnx.split before it have made a copy.',
                errors.NothingStoppedWarning,
                stacklevel=2,
            )


# JAX's caches keep the keys of their programs alive.
_keys: weakref.WeakValueDictionary[Hashable, Key] = weakref.WeakValueDictionary()


def _key_of(content: Hashable, modules: Sequence[Any]) -> Key:
    """The key of a block: that of an equal one of the model, or of one that is gone.

    Args:
        content: the Variables that it selects, and the rule.
        modules: the modules of the model.
    """
    with lock:
        keys = (_keys.setdefault((content, n), Key()) for n in itertools.count())
        return next(key for key in keys if key.given_to(modules))
