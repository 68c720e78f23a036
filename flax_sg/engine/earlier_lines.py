"""Finds the line before a block that reads what the block names.

``h = self.torso(x)``, then ``with nn.stop_gradient('torso/**'): y = self.head(h)``: the
block stops no read of the torso. The warning names the line, and ``h``. What ran is
guessed from the source, so a line is named only if it surely reads such a variable.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import types
from collections.abc import Collection, Iterator
from typing import Any

import jax

from flax_sg.internals import modules
from flax_sg.internals.places import Place

Names = tuple[str, ...]


def line_before(
    place: Place, owner: Names, variables: Collection[Names]
) -> tuple[int, str] | None:
    """Returns the last line before a block that reads one of some variables.

    Args:
        place: where the block was opened, by the function that runs now.
        owner: the path of the module that opened the block.
        variables: their paths from the root of the tree.

    Returns:
        The line, and the name of the value that it makes: ``h`` if it has none.
    """
    frame = place.running_frame()
    if frame is None:
        return None
    uses = _Uses(frame.f_locals, owner, variables)
    with contextlib.suppress(Exception):  # The source may be missing, or changed.
        for statement in _before(_parsed(frame.f_code).body, place.line):
            if lines := [node.lineno for node in uses.in_(statement)]:
                return max(lines), _value_of(statement)
    return None


@functools.lru_cache(64)
def _parsed(code: types.CodeType) -> ast.Module:
    lines, first = inspect.getsourcelines(code)
    text = ''.join(lines)
    # Python parses the lines of a method, which are indented, in an ``if`` alone.
    tree = ast.parse(f'if True:\n{text}' if text[:1].isspace() else f'\n{text}')
    ast.increment_lineno(tree, max(first, 1) - 2)
    return tree


def _before(body: list[Any], line: int) -> Iterator[ast.stmt]:
    """Yields the statements that ran before a line of a branch, the last one first."""
    for index, statement in enumerate(body):
        if statement.lineno <= line <= statement.end_lineno:
            for part in ('body', 'orelse', 'finalbody'):
                yield from _before(getattr(statement, part, []), line)
            yield from reversed(body[:index])


def _value_of(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return 'h'


class _Uses:
    """Tells what in the source of a function reads some variables.

    Args:
        names: the names in the function, and what they stand for.
        owner: the path of the module that opened the block.
        variables: the paths of the variables.
    """

    def __init__(
        self, names: dict[str, Any], owner: Names, variables: Collection[Names]
    ) -> None:
        self._names, self._owner = names, owner
        self._variables = [path for path in variables if path[: len(owner)] == owner]
        self._children = {path[len(owner)] for path in self._variables}

    def in_(self, statement: ast.stmt) -> Iterator[ast.expr]:
        """Yields the expressions of a statement that read one of the variables."""
        # ``torso = self.torso`` gives it another name, and reads nothing.
        value = getattr(statement, 'value', None)
        is_alias = isinstance(value, ast.Name | ast.Attribute)
        nodes = (node for node in ast.walk(statement) if isinstance(node, ast.expr))
        for node in nodes:
            if not (is_alias and node is value) and self._is_read(node):
                yield node

    def _is_read(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(name, ast.Load()):
                return self._holds(self._names.get(name))
            case ast.Attribute(ast.Name(name), attribute):
                module = self._names.get(name)
                if _path_of(module) != self._owner:
                    return False
                value = vars(module).get(attribute)
                return self._holds(value) or (
                    # A parameter that ``setup`` has made.
                    attribute in self._children and isinstance(value, jax.Array)
                )
            case ast.Call(ast.Call(keywords=words)):  # nn.Dense(4, name='torso')(x)
                given = [word.value for word in words if word.arg == 'name']
            case ast.Call(ast.Attribute(attr='param'), [given_name, *_]):
                given = [given_name]
            case _:
                return False
        names = [node.value for node in given if isinstance(node, ast.Constant)]
        return any(name in self._children for name in names)

    def _holds(self, value: Any) -> bool:
        """Whether a value is a module below the owner that has one of the variables."""
        paths = map(_path_of, jax.tree.leaves(value))
        return any(
            path is not None and path != self._owner and variable[: len(path)] == path
            for path in paths
            for variable in self._variables
        )


def _path_of(value: Any) -> Names | None:
    scope = value.scope if isinstance(value, modules.Module) else None
    return None if scope is None else scope.path
