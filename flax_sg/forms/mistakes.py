"""What wrappers and decorators are not for: the errors, and what to write instead."""

from __future__ import annotations

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.internals import modules
from flax_sg.internals.optional import is_of_nnx
from flax_sg.internals.types import BoundModule


def check_module(wrapper: str, module: object) -> None:
    """Raises unless a wrapper is given a module."""
    if isinstance(module, modules.Module):
        return
    if type(module).__name__ == 'InstancePlaceholder':
        raise errors.ArgumentTypeError(
            f'nn.{wrapper}(...) is an argument of a lifted class, such as '
            'nn.remat(Layer), and Flax takes arguments apart.\n'
            'Give it the bare module, and wrap this where it is called, in '
            'Layer.__call__:\n'
            'nn.Frozen(module, where)(x).'
        )
    raise refused(f'nn.{wrapper} wraps a Module instance', module)


def refused(expected: str, target: object) -> errors.ArgumentTypeError:
    """The error for what is no module, class or function."""
    write = (
        'For a class or a function write nn.stop_gradient(target, where), for an array '
        'jax.lax.stop_gradient(x), for a tree sg.stop_gradient(tree, where).'
    )
    if is_of_nnx(target if isinstance(target, type) else type(target), 'Module'):
        write = (
            'For a model of NNX write nnx.stop_gradient(model, where), from flax_sg '
            'import nnx, and call what it returns.'
        )
    return errors.ArgumentTypeError(
        f'{expected}, and was given {brief(target)}.\n{write}'
    )


def read_later(wrapper: str, cls: str, name: str, kind: str) -> errors.BlockError:
    """A wrapper was asked for a value that reads variables when it is used."""
    write = (
        f'Iterate in the method, and return a list: return list(...) in {cls}.{name}.'
        if 'iterator' in kind
        else f'Call a method of the module: def use(self, ...) in {cls}, which uses '
        f'self.{name}.'
    )
    return errors.BlockError(
        f'nn.{wrapper}({cls}(...)).{name} is or holds a {kind} that '
        'reads variables when it is used.\n'
        "Such a read is outside of the wrapper's calls, so the rule would miss it.\n"
        f'{write}'
    )


def no_block(wrapper: str, cls: type) -> errors.ArgumentTypeError:
    """A wrapper stands in a ``with`` statement."""
    return errors.ArgumentTypeError(
        f'with nn.{wrapper}({cls.__name__}(...)): a module is no block.\n'
        f'What goes through it is rewritten: nn.{wrapper}({cls.__name__}(...))(x).\n'
        'For a block around some lines write with nn.stop_gradient(where):'
    )


def named(wrapper: str, name: str, module: BoundModule) -> errors.ArgumentValueError:
    """A wrapper was given another name than the module that it stands for."""
    cls = type(module).__name__
    return errors.ArgumentValueError(
        f'nn.{wrapper}({cls}(...), name={name!r}): the module is at '
        f'{"/".join(module.scope.path)!r} already, and the wrapper has no place of '
        'its own.\n'
        f'Name the module: nn.{wrapper}({cls}(..., name={name!r})).'
    )
