"""Exceptions of extents: a block, a lift or a kept value is not used as it can be."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from typing import Any

from flax_sg.errors.base import FlaxSGError
from flax_sg.errors.selection import UnusedFilterError
from flax_sg.errors.trees import shown


class OverwriteWithGradientError(FlaxSGError, ValueError):
    """A rule was asked for on the collection ``_overwrite_with_gradient``.

    fp8 layers receive the new value of these variables *as* their gradient, so
    stopping it does not freeze them, it wrecks training::

        nn.stop_gradient(True, collections='_overwrite_with_gradient')  # wrong
        nn.stop_gradient(True, collections=True)  # leaves that collection out
    """

    def __init__(self, collections: Sequence[str]) -> None:
        super().__init__(
            f'collections={tuple(collections)!r} selects "_overwrite_with_gradient": '
            'its variables receive their new value as a gradient, and no rule may '
            'touch them.\n'
            'Leave it out; collections=True leaves it out by itself.'
        )

    @classmethod
    def for_optimizer(cls) -> OverwriteWithGradientError:
        """The error for variables that are given to an optimizer."""
        error = cls.__new__(cls)
        ValueError.__init__(
            error,
            'the variables hold "_overwrite_with_gradient": they receive their new '
            'value as a gradient, and no optimizer may see them.\n'
            "Give it variables['params']; sg.TrainState takes both and does so.",
        )
        return error


class UnknownCollectionError(UnusedFilterError):
    """A collection was named that does not exist under the extent.

    ::

        with nn.stop_gradient(True, collections='batch_stat'): ...  # wrong
        with nn.stop_gradient(True, collections='batch_stats'): ...
    """

    def __init__(self, name: str, known: Sequence[str]) -> None:
        Exception.__init__(
            self,
            f'no collection {name!r} exists under this extent; there are '
            f'{", ".join(map(repr, known)) or "none"}.\n'
            "Name one of these, or pass unused='ignore' if it may be absent.",
        )


class NothingReadError(UnusedFilterError):
    """No variable was read in a block at top level.

    The block has to be around the code that reads the variables. What was read, traced
    or compiled before is out of its reach::

        grads = vjp_fn(ct)                      # made by jax.vjp before the block
        with nn.stop_gradient('encoder/**'):    # wrong: nothing is read in here
            grads = vjp_fn(ct)

        with nn.stop_gradient('encoder/**'):    # right
            y, vjp_fn = jax.vjp(loss, params)
    """

    def __init__(self, rewrite: object) -> None:
        Exception.__init__(
            self,
            f'{rewrite!r} held for a block in which no variable of a Flax module was '
            'read, so it did nothing.\n'
            'Open the block around the code that calls the model (jax.grad or '
            'model.apply): results of jax.vjp and compiled programs made before it are '
            "out of its reach. If nothing may be read here, pass unused='ignore'.",
        )


class UnknownMethodError(FlaxSGError, AttributeError):
    """``methods=`` names a method that the class does not have.

    ::

        nn.stop_gradient(Model, 'encoder/**', methods=['encodee'])  # wrong
        nn.stop_gradient(Model, 'encoder/**', methods=['encode'])
    """

    def __init__(self, name: str, cls: type) -> None:
        known = [
            name
            for name in dir(cls)
            if callable(getattr(cls, name))
            and (not name.startswith('__') or name == '__call__')
        ]
        close = difflib.get_close_matches(name, known, 3)
        meant = f' Did you mean {" or ".join(map(repr, close))}?' if close else ''
        super().__init__(f'{cls.__name__} has no method {name!r}.{meant}')

    @classmethod
    def without_class(cls, methods: object) -> UnknownMethodError:
        """The error for ``methods=`` where no class is lifted."""
        error = cls.__new__(cls)
        AttributeError.__init__(
            error,
            f'methods={methods!r} was given, but no Module class to lift.\n'
            'Write nn.stop_gradient(Model, where, methods=[...]).',
        )
        return error

    @classmethod
    def without_names(cls, methods: object) -> UnknownMethodError:
        """The error for ``methods=`` that is no sequence of names."""
        error = cls.__new__(cls)
        AttributeError.__init__(
            error,
            f'methods={methods!r} names no methods: expected their names, such as '
            "methods=['encode'].",
        )
        return error


class LiftTargetError(FlaxSGError, TypeError):
    """Something was lifted that is no Module class, method or function of a module.

    ::

        nn.stop_gradient('kernel')(3)                    # wrong
        nn.stop_gradient(lambda x: x, 'kernel')(x)       # wrong: no module to read
        nn.stop_gradient(lambda module, x: module(x), 'kernel')(module, x)
    """

    def __init__(self, target: object, fix: str = '') -> None:
        hint = f'\n{fix}' if fix else ''
        cls = type(target).__name__
        what = shown(target)
        what = f'a {cls}' if what == f'{cls} object' else f'{what} of type {cls}'
        super().__init__(
            f'cannot lift {what}: expected a Module class, a method, a function whose '
            f'first argument is a bound module, or a module.{hint}'
        )

    @classmethod
    def called_with(cls, fn: object, first: object) -> LiftTargetError:
        """The error for a lifted function called without a module."""
        error = cls.__new__(cls)
        name = getattr(fn, '__qualname__', repr(fn))
        TypeError.__init__(
            error,
            f'the lifted function {name} was called with '
            f'{type(first).__name__} as its first argument, which has to be a bound '
            f'module: write {name}(module, ...).',
        )
        return error


class SummaryTargetError(FlaxSGError, TypeError):
    """Something that is no module is to be shown as a table.

    ::

        sg.tabulate(nn.Dense, rngs)(x)     # wrong: a class
        sg.tabulate(nn.Dense(4), rngs)(x)
    """

    def __init__(self, target: object) -> None:
        what = f'{target!r} of type {type(target).__name__}'
        if isinstance(target, type):
            what = f'the class {target.__name__}'
        super().__init__(
            f'tabulate() takes a Module instance, and was given {what}.\n'
            'Make the module: sg.tabulate(Model(...), rngs)(x).'
        )


class BlockOrderError(FlaxSGError, RuntimeError):
    """A block was closed in another order, thread or task than it was opened in.

    ::

        a.__enter__(); b.__enter__(); a.__exit__(None, None, None)  # wrong
        with a, b: ...
    """

    def __init__(self, rewrite: object, place: object, reason: str) -> None:
        opened = '' if place is None else f', opened at {place},'
        super().__init__(
            f'the block of {rewrite!r}{opened} cannot be closed: {reason}.\n'
            'Blocks close in the thread and task that opened them, the last one '
            'first: use a with statement around the code that it is for.'
        )


class BlockLeakError(FlaxSGError, RuntimeError):
    """A variable is read in another asyncio task than the one that opened a block.

    A task was suspended inside a block, and other tasks of the thread go on::

        async def evaluate():
            with nn.stop_gradient('encoder/**'):
                await queue.get()              # wrong: the block stays open meanwhile
                y = model.apply(variables, x)

        async def evaluate():
            await queue.get()
            with nn.stop_gradient('encoder/**'):
                y = model.apply(variables, x)
    """

    def __init__(self, rewrite: object, place: object) -> None:
        super().__init__(
            f'the block of {rewrite!r}, opened at {place}, belongs to another asyncio '
            'task, which was suspended inside it.\n'
            'Leave the block before await.'
        )


class LateReadError(FlaxSGError, RuntimeError):
    """A rule of ``jax.custom_vjp`` reads a variable that two blocks see differently.

    Such a rule runs after its block has closed. By then another block may have found
    the function that JAX had compiled in the first one, and the rule belongs to both::

        @jax.jit
        def loss(x):
            return with_rule(x)                # only its backward rule reads 'w'

        with nn.stop_gradient('w'):
            y, back = jax.vjp(loss, x)
        with nn.stop_gradient('v'):
            z, other_back = jax.vjp(loss, x)   # the same compiled function
        back(ct)                               # raises

    Read the variable in the function too, or open the block inside of ``jax.jit``.
    """

    def __init__(self, rewrite: object) -> None:
        super().__init__(
            f'a rule of a function that was compiled in the block of {rewrite!r} reads '
            'a variable after the block has closed, and another block that has used '
            'the same compiled function answers differently.\n'
            'Read the variable in the function as well, or open the block inside of '
            'the function that jax.jit compiles.'
        )


class NothingStoppedWarning(UserWarning):
    """A block had no effect: nothing that was read in it is selected.

    ::

        h = self.encoder(x)
        with nn.stop_gradient('encoder/**'):  # warns: the encoder was read before
            y = self.head(h)
    """


def warn_without_effect(text: str, place: Any) -> None:
    """Warns of a block without an effect, once for each line where one is opened."""
    warnings.warn_explicit(
        text, NothingStoppedWarning, place.file, place.line, registry=_warned
    )


_warned: dict[Any, Any] = {}  # Where Python notes what it has said already.


class ReloadError(FlaxSGError, ImportError):
    """A module was loaded anew that holds what cannot be made a second time.

    Open blocks and the caches of JAX rest on it: what is compiled under one filter
    would be found under another one::

        importlib.reload(flax_sg.engine.blocks)  # raises
        importlib.reload(flax_sg.linen)     # holds nothing
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f'{name} cannot be reloaded: open blocks, and what JAX keeps of compiled '
            'programs, rest on what it holds.\n'
            'Start Python anew; flax_sg and flax_sg.linen can be reloaded.'
        )


class KeptValueError(FlaxSGError, RuntimeError):
    """A value that ``setup`` keeps cannot be derived again under a block.

    ``self.w2 = f(self.w)`` in ``setup`` is no read of a variable when a method uses
    it, so ``setup`` is run again to find it under the block. Where that need not give
    the same thing, it raises::

        def setup(self):
            self.noisy = self.w + jax.random.normal(self.make_rng('noise'))

        def __call__(self, x):
            x = x + jax.random.normal(self.make_rng('noise'))
            with nn.stop_gradient('w'):
                return self.noisy * x  # raises: which draw was it?

    Compute the value in the method that uses it instead.
    """

    def __init__(self, module: object, name: str | None, reason: str) -> None:
        what = 'the values' if name is None else f'the value self.{name}'
        path = '/'.join(getattr(getattr(module, 'scope', None), 'path', ()))
        super().__init__(
            f'{what} that setup of {type(module).__name__} (at {path!r}) keeps cannot '
            f'be seen under the open block: {reason}.\n'
            'Compute it in the method that uses it, or open the block before the '
            'module is first used.'
        )
