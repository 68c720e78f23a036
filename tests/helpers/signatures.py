"""Signatures of public names as a page shows them: one line, with the defaults."""

import inspect
import re
from types import ModuleType
from typing import Any

import flax_sg as sg
from flax_sg.ahead import Precomputed
from flax_sg.flow import GradientFlow, Why
from flax_sg.summary import ModuleTable
from flax_sg.testing.steps import Moves

# What functions return, and what users ask of it.
RETURNED: list[tuple[str, Any, str]] = [
    (
        'flow = sg.gradient_flow(...)',
        GradientFlow,
        'status_of why live outputs rows by_module plot',
    ),
    ('why = flow.why(...)', Why, 'status by lines uses condition'),
    ('ahead = sg.precompute(...)', Precomputed, 'early late kept reads axes'),
    ('moved = testing.moves(...)', Moves, 'status_of rows plot'),
    ('table = sg.tabulate(...)', ModuleTable, 'rows'),
    ('rows = sg.store(...)', sg.Rows, '__len__ __getitem__ folder'),
]


def returned() -> str:
    """A table of what functions return: each attribute with the line that tells it."""
    lines: list[str] = []
    for call, cls, members in RETURNED:
        lines.append(f'| **`{call}`** | |')
        told = dict(attributes(inspect.getdoc(cls) or ''))
        for member in members.split():
            found = inspect.getattr_static(cls, member, None)
            write = f'{call.split()[0]}.{member}'
            if callable(found):
                told[member] = inspect.getdoc(found) or ''
                write = signature(found, write) or write
                write = re.sub(r'(\w+)\.__len__\(\)', r'len(\1)', write)
                write = re.sub(r'\.__getitem__\((.*)\)', r'[\1]', write)
            elif isinstance(found, property):
                told[member] = inspect.getdoc(found) or ''
            text = told[member].partition('\n\n')[0].replace('\n', ' ')
            text = text.replace('``', '`').rstrip('.').replace('|', '\\|')
            lines.append(f'| `{write}` | {text[0].lower() + text[1:]} |')
    return ''.join(f'{line}\n' for line in lines)


def attributes(doc: str) -> list[tuple[str, str]]:
    """The attributes that the docstring of a class lists, each with its first part."""
    _, _, section = doc.partition('Attributes:\n')
    section = re.split(r'\n\n', section)[0]
    entries = re.findall(r'^    (\w[\w, ]*): ((?:.*\n?)(?:     .*\n?)*)', section, re.M)
    return [
        (name, re.sub(r'\s+', ' ', text).partition('. ')[0])
        for names, text in entries
        for name in names.split(', ')
    ]


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
        if p.name != 'self' and 'Never' not in str(p.annotation)
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
