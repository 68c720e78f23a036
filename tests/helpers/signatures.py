"""Signatures of public names as a page shows them: one line, with the defaults."""

import inspect
from types import ModuleType
from typing import Any

import flax_sg as sg

# Arguments that the library passes itself.
NOT_FOR_USERS = {'self', 'rule', 'within', 'parent'}


def signatures(module: ModuleType, short: str, names: list[str]) -> str:
    """A line for each name that is called, such as ``sg.at(where, index)``."""
    lines = [signature(getattr(module, name), f'{short}.{name}') for name in names]
    return ''.join(f'{line}\n' for line in lines if line)


def signature(thing: Any, name: str) -> str | None:
    """The signature of a function or a class; None of what nobody calls."""
    if thing in (sg.ABSENT, sg.DECLARED, sg.filters.Filter, sg.filters.Where):
        return None
    if isinstance(thing, type) and issubclass(thing, Exception):
        return None
    # Classes of NNX have a metaclass whose call takes anything.
    makes = isinstance(thing, type) and '__init__' in vars(thing)
    found = inspect.signature(thing.__init__ if makes else thing).parameters
    shown = [
        p.replace(annotation=p.empty, default=_Default.of(p.default))
        for p in found.values()
        if p.name not in NOT_FOR_USERS and 'Never' not in str(p.annotation)
    ]
    return name + str(inspect.Signature(shown))


class _Default:
    """A default that is shown as a user would write it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, value: Any) -> Any:
        """What is shown for a default."""
        if value is inspect.Parameter.empty:
            return value
        if value is sg.ABSENT:
            return cls('...')
        if value is sg.DECLARED:
            return cls('sg.DECLARED')
        if isinstance(value, type):
            return cls(f'nnx.{value.__name__}')
        return cls('...') if inspect.isfunction(value) else value
