"""Exceptions of modules that stand for another one: Frozen and mirror."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flax import linen

from flax_sg.errors.base import FlaxSGError


class WrappedModuleError(FlaxSGError, TypeError):
    """Something that is no module was wrapped, or one that cannot be wrapped so.

    ::

        nn.Frozen(nn.Dense)     # wrong: a class
        nn.Frozen(nn.relu)      # wrong: a function, without parameters
        nn.Frozen(nn.Dense(4))
    """

    def __init__(self, wrapper: str, target: Any) -> None:
        what, fix = f'{target!r}, of type {type(target).__name__}', ''
        if target is None:
            what, fix = 'None', 'Has the module been made? setup assigns attributes.'
        elif isinstance(target, type) and issubclass(target, linen.Module):
            name = target.__name__
            what = f'the class {name}'
            fix = (
                f'Make the module, nn.{wrapper}({name}(...)), or lift the class, '
                f'nn.stop_gradient({name}, where).'
            )
        elif callable(target):
            name = getattr(target, '__qualname__', type(target).__name__)
            what = f'the function {name}'
            fix = (
                'A function has no parameters of its own: write '
                'nn.stop_gradient(fn, where) for a function of a module, and open a '
                'block, with nn.stop_gradient(where):, around other code.'
            )
        elif hasattr(target, 'shape'):
            fix = 'To stop the gradient of a value write jax.lax.stop_gradient(x).'
        lines = [f'nn.{wrapper} wraps a Module instance, and was given {what}.', fix]
        super().__init__('\n'.join(filter(None, lines)))

    @classmethod
    def for_method(cls, wrapper: Any, method: str) -> WrappedModuleError:
        """The error for a module that overrides ``apply`` or ``init``."""
        call = {'Mirror': 'mirror'}.get(type(wrapper).__name__, 'Frozen')
        name = type(wrapper.module).__name__
        error = cls.__new__(cls)
        TypeError.__init__(
            error,
            f'nn.{call}({name}(...), state={wrapper.state!r}): {name} defines its own '
            f'{method}, which the wrapper calls in a block.\n'
            'A block stops gradients; it does not hold state or show other variables.\n'
            f'Open the block yourself: with nn.stop_gradient(where): '
            f'{name}(...).{method}(...).',
        )
        return error


class WrapperNameError(FlaxSGError, ValueError):
    """A wrapper was given another name than the module that it stands for.

    In a compact method a module has its place, and its name, as soon as it is made::

        nn.Frozen(nn.Dense(4), name='base')(x)  # wrong: it is 'Dense_0' already
        nn.Frozen(nn.Dense(4, name='base'))(x)
    """

    def __init__(self, wrapper: str, name: str, module: Any) -> None:
        cls = type(module).__name__
        super().__init__(
            f'nn.{wrapper}({cls}(...), name={name!r}): the module is at '
            f'{"/".join(module.scope.path)!r} already, and the wrapper has no place of '
            'its own.\n'
            f'Name the module: nn.{wrapper}({cls}(..., name={name!r})).'
        )


class ChoiceError(FlaxSGError, ValueError):
    """An option was given a value that it does not have.

    ::

        nn.Frozen(nn.BatchNorm(), state='eval')  # wrong
        nn.Frozen(nn.BatchNorm(), state='use_running_average')
    """

    def __init__(self, option: str, value: Any, choices: Mapping[Any, str]) -> None:
        lines = [f'  {name!r}: {what}' for name, what in choices.items()]
        super().__init__(
            f'{option}={value!r} is none of the choices:\n' + '\n'.join(lines)
        )


class MirrorVariablesError(FlaxSGError, ValueError):
    """What a mirror should read does not fit the module that it shows.

    The tree is that of the module, with collections on top::

        nn.mirror(self.encoder, variables=params)                # wrong
        nn.mirror(self.encoder, variables={'params': params['encoder']})
    """

    def __init__(self, module: Any, problem: str, names: Iterable[str] = ()) -> None:
        path = '/'.join(module.scope.path)
        place = repr(path) if path else 'the root'
        lines = [
            f'nn.mirror({type(module).__name__}(...), variables=...): {problem}',
            *(f'  {name}' for name in names),
            f'The tree is that of the module at {place}, with collections on top, '
            "such as {'params': ...}.",
        ]
        super().__init__('\n'.join(lines))


class ScanMemoryWarning(UserWarning):
    """In the body of a scan, what is stopped is kept for the way back at each step.

    Without this warning it is not, as where the stop is outside of the scan. But a call
    that uses other modules of the body has to stay in the trace of the body::

        nn.Frozen(nn.Sequential([nn.Dense(4), lambda x: self.head(x)]))(x)  # more
        self.head(nn.Frozen(nn.Dense(4))(x))
    """

    def __init__(self, wrapper: str, module: Any, size: int) -> None:
        name, path = type(module).__name__, '/'.join(module.scope.path)
        super().__init__(
            f'nn.{wrapper}({name}(...)) at {path!r} is called in the body of a scan '
            'with a function that uses other modules of the body.\n'
            'Gradients are right, but the stopped parameters are kept for the way back '
            f'at each step: at least {size:,} bytes times the length of the scan.\n'
            'Call the other modules outside of the wrapper, or open a block around the '
            "scan: with nn.stop_gradient('layers/...'): layers(x)."
        )
