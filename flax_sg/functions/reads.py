"""What a code object reads: closure cells, globals, arguments and their attributes.

An attribute is *anchored* when it is read directly off something known: ``a.b.c`` on
a global ``a``. All other attribute names are *loose*: which object they are read from
cannot be told. Nothing is run; each code object is analysed once.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import re
import types
from collections.abc import Hashable, Iterable
from typing import Any


class Reads:
    """What is read of one value: attributes of it, and whether it is used itself."""

    __slots__ = ('attrs', 'whole')

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self.attrs: dict[str, Reads] = {}

    def of(self, name: str) -> Reads:
        """What is read of an attribute."""
        return self.attrs.setdefault(name, Reads())

    def names(self) -> set[str]:
        """The names of all attributes, at every depth."""
        return set(self.attrs).union(*(node.names() for node in self.attrs.values()))


WHOLE = Reads(whole=True)


class Fingerprint:
    """What a code object does, wherever it stands; hashed once."""

    __slots__ = ('_content', '_hash')

    def __init__(self, content: Hashable) -> None:
        self._content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Fingerprint) and self._content == other._content
        )


@dataclasses.dataclass(frozen=True)
class Code:
    """What a code object does and reads, the code nested in it included.

    Attributes:
        fingerprint: what it does.
        globals: what is read of each global.
        cells: what is read of each variable of its closure.
        params: what is read of each argument that is not bound again.
        loose: the names of attributes that are read of something else.
        imports: the modules that it imports.
        refusals: why it cannot be told what the code reads.
    """

    fingerprint: Fingerprint
    globals: dict[str, Reads]
    cells: dict[str, Reads]
    params: dict[str, Reads]
    loose: set[str]
    imports: set[str]
    refusals: list[str]


# Attributes through which anything can be reached without being named.
_BACK_DOORS = frozenset(
    (
        *('__dict__', '__getattribute__', '__getattr__', '__globals__', '__code__'),
        *('__builtins__', '__closure__', '__defaults__', '__kwdefaults__'),
        *('__subclasses__', 'cell_contents', 'f_back', 'f_globals', 'f_locals'),
        *('f_builtins', 'gi_frame', 'tb_frame'),
        *('__dir__', '__getstate__', '__reduce__', '__reduce_ex__'),
    )
)


@functools.lru_cache(maxsize=4096)
def analyse(code: types.CodeType) -> Code:
    """Returns what a code object does and reads.

    >>> code = (lambda path: path.name in config.model.frozen).__code__
    >>> found = analyse(code)
    >>> sorted(found.globals['config'].names()), found.params['path'].names()
    (['frozen', 'model'], {'name'})
    """
    params = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    out = Code(
        _fingerprint(code),
        globals={},
        cells={name: Reads() for name in code.co_freevars},
        params={name: Reads() for name in params},
        loose=set(),
        imports=set(),
        refusals=[],
    )
    stored = set(_stored(code))
    for name in stored & set(out.cells):
        out.cells[name].whole = True
    anchors = {**out.params, **out.cells}
    _scan(code, {n: r for n, r in anchors.items() if n not in stored}, out)
    for name in stored & set(out.params):
        del out.params[name]
    return out


def _scan(code: types.CodeType, anchors: dict[str, Reads], out: Code) -> None:
    """Adds what the instructions read; anchors are the variables that are known."""
    top: Reads | None = None  # what the value on top of the stack was read from
    constants: list[Any] = []
    cells = {*code.co_cellvars, *code.co_freevars}
    current: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        previous, current = current, instruction
        op, name = instruction.opname, instruction.argval
        if top is not None and instruction.is_jump_target:
            # Something else may be on top of the stack here.
            top.whole = True
            top = None
        if op == 'EXTENDED_ARG':
            continue
        if op in ('LOAD_ATTR', 'LOAD_METHOD', 'STORE_ATTR', 'DELETE_ATTR'):
            if name in _BACK_DOORS or _names_in_template(name, previous):
                out.refusals.append(f'it reads attributes through {name}')
            if top is None:
                out.loose.add(name)
            else:
                top = top.of(name) if op.startswith('LOAD') else None
            continue
        if top is not None:
            top.whole = True
            top = None
        if op in ('LOAD_GLOBAL', 'LOAD_NAME', 'LOAD_FROM_DICT_OR_GLOBALS'):
            top = out.globals.setdefault(name, Reads())
        elif op in ('LOAD_DEREF', 'LOAD_CLASSDEREF', 'LOAD_FROM_DICT_OR_DEREF'):
            top = anchors.get(name)
        elif 'LOAD_FAST' in op:
            # Some instructions load two; Python 3.13 loads cells to build closures.
            *below, name = name if isinstance(name, tuple) else (name,)
            for other in below:  # pragma: no cover (before Python 3.13 there is one)
                if not op.startswith('STORE') and other in anchors.keys() - cells:
                    anchors[other].whole = True
            top = None if name in cells else anchors.get(name)
        elif op in ('LOAD_CONST', 'LOAD_SMALL_INT'):
            constants.append(name)
        elif op == 'IMPORT_NAME':
            out.imports.add(name)
            if constants[-2:-1] != [0]:
                out.refusals.append('it has a relative import')
        elif op == 'IMPORT_FROM':
            out.loose.add(name)
        elif op == 'STORE_GLOBAL':
            out.refusals.append(f'it assigns the global {name!r}')
        elif op == 'MATCH_CLASS':
            out.refusals.append('it matches attributes by a class pattern')
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            free = {n: anchors[n] for n in constant.co_freevars if n in anchors}
            _scan(constant, free, out)


def _names_in_template(name: str, previous: dis.Instruction | None) -> bool:
    """Whether a method of str may read attributes: '{0.frozen}'.format(config)."""
    if name not in ('format', 'format_map') or previous is None:
        return False
    template = previous.argval
    known = previous.opname == 'LOAD_CONST' and isinstance(template, str)
    return not known or re.search(r'\{[^}]*[.\[]', template) is not None


def _stored(code: types.CodeType) -> Iterable[str]:
    """Local variables that are bound again, in the code or in code nested in it."""
    for instruction in dis.get_instructions(code):
        op, name = instruction.opname, instruction.argval
        if 'STORE_FAST' in op or op in (
            'DELETE_FAST',
            'LOAD_FAST_AND_CLEAR',
            'STORE_DEREF',
            'DELETE_DEREF',
        ):
            yield from name if isinstance(name, tuple) else (name,)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from set(_stored(constant)) & set(constant.co_freevars)


def _fingerprint(code: types.CodeType) -> Fingerprint:
    """All of a code object but its name, file and lines."""
    return Fingerprint(
        (
            code.co_code,
            tuple(map(_constant, code.co_consts)),
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
            code.co_flags,
            code.co_exceptiontable,
        )
    )


def _constant(value: Any) -> Hashable:
    if isinstance(value, types.CodeType):
        return _fingerprint(value)
    if isinstance(value, (tuple, frozenset)):
        return type(value), type(value)(map(_constant, value))
    return atom(value)


def atom(value: Any) -> Hashable:
    """The key of a value that is compared as it is, with its type."""
    # 1, True and 1.0 are equal, so are 0.0 and -0.0, and nan is not equal to nan.
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    return type(value), value
