"""What cannot be wrapped or decorated, and what to write in place of it."""

from __future__ import annotations

import difflib
from typing import Any

import jax

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.internals import modules

_VALUE = 'To stop the gradient of a value write jax.lax.stop_gradient(x).'
_TREE_FORMS = {
    'stop_gradient': 'sg.stop_gradient(tree, where)',
    'substitute': 'sg.substitute(tree, values)',
}


def not_liftable(
    name: str, target: object, argument: object = None
) -> errors.ArgumentTypeError:
    """Something was decorated that has no calls.

    Args:
        name: the name of the rule.
        target: what was given.
        argument: what was given with it, as in ``nn.stop_gradient(target, argument)``.
    """
    fix = _VALUE if hasattr(target, 'shape') else ''
    if name == 'substitute' and isinstance(argument, str):
        fix = f'To say which variables write where={argument!r}.'
    elif _arrays_in(target):
        tree_form = _TREE_FORMS.get(name, f'sg.rewrite(tree, nn.{name}(...))')
        fix = f'For a tree of parameters write {tree_form}.'
    elif argument is not None:
        fix = f'For several filters write [{target!r}, {argument!r}].'
    lines = [
        f'nn.{name} cannot decorate {_brief(target)}: expected a function, a method, a '
        'Module class or a module.',
        fix,
    ]
    return errors.ArgumentTypeError('\n'.join(filter(None, lines)))


def not_wrappable(wrapper: str, target: Any) -> errors.ArgumentTypeError:
    """Something was given to ``nn.Frozen`` or ``nn.mirror`` that is no module."""
    what, fix = _brief(target), ''
    if target is None:
        fix = 'Has the module been made? setup assigns attributes.'
    elif isinstance(target, type) and issubclass(target, modules.Module):
        name = target.__name__
        fix = (
            f'Make the module, nn.{wrapper}({name}(...)), or lift the class, '
            f'nn.stop_gradient({name}, where).'
        )
    elif callable(target):
        name = getattr(target, '__qualname__', type(target).__name__)
        what = f'the function {name}'
        fix = 'For a function write nn.stop_gradient(fn, where).'
    elif hasattr(target, 'shape'):
        fix = _VALUE
    elif _arrays_in(target):
        fix = f'For a tree of parameters write {_TREE_FORMS["stop_gradient"]}.'
    lines = [f'nn.{wrapper} wraps a Module instance, and was given {what}.', fix]
    return errors.ArgumentTypeError('\n'.join(filter(None, lines)))


def _arrays_in(target: object) -> int:
    """How many arrays a tree holds; 0 for what is no tree."""
    leaves = jax.tree_util.tree_leaves(target)
    return sum(hasattr(x, 'shape') and x is not target for x in leaves)


def _brief(target: object) -> str:
    """A thing in a few words, without a number of any array."""
    if arrays := _arrays_in(target):
        kind = type(target).__name__
        return f'a {kind} of {arrays} array{"s" * (arrays > 1)}'
    return brief(target)


def unknown_method(name: str, cls: type) -> errors.UnknownNameError:
    """``methods=`` names a method that the class does not have."""
    known = [
        name
        for name in dir(cls)
        if callable(getattr(cls, name))
        and (not name.startswith('__') or name == '__call__')
    ]
    close = difflib.get_close_matches(name, known, 3)
    meant = f' Did you mean {" or ".join(map(repr, close))}?' if close else ''
    return errors.UnknownNameError(f'{cls.__name__} has no method {name!r}.{meant}')


def methods_without_class(methods: object) -> errors.UnknownNameError:
    """The error for ``methods=`` where no class is lifted."""
    return errors.UnknownNameError(
        f'methods={methods!r} was given, but no Module class to lift.\n'
        'Write nn.stop_gradient(Model, where, methods=[...]).',
    )


def methods_without_names(methods: object) -> errors.UnknownNameError:
    """The error for ``methods=`` that is no sequence of names."""
    return errors.UnknownNameError(
        f'methods={methods!r} names no methods: expected their names, such as '
        "methods=['encode'].",
    )


def runs_later(fn: object) -> errors.ArgumentTypeError:
    """A generator or a coroutine was decorated: a block around the call is no help."""
    name = getattr(fn, '__qualname__', type(fn).__name__)
    return errors.ArgumentTypeError(
        f'{name} returns a generator or a coroutine, whose body runs when the call is '
        'over and its block is closed.\n'
        'Open the block in the body: with nn.stop_gradient(where):'
    )
