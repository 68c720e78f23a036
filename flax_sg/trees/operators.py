"""Python's operators, for classes whose instances stand for a value."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

_REFLECTED = (
    *('add', 'sub', 'mul', 'matmul', 'truediv', 'floordiv', 'mod', 'divmod', 'pow'),
    *('and', 'or', 'xor', 'lshift', 'rshift'),
)
_OTHERS = (
    *('neg', 'pos', 'abs', 'invert', 'round', 'lt', 'le', 'gt', 'ge', 'eq', 'ne'),
    *('bool', 'int', 'float', 'complex', 'index', 'len', 'iter', 'contains', 'getitem'),
    *('hash', 'str', 'format'),
)


def operators(value_of: Callable[[Any], Any]) -> Any:
    """A base class whose operators and conversions are those of ``value_of(self)``.

    >>> class Three(operators(lambda x: 3 if isinstance(x, Three) else x)):
    ...     pass
    >>> Three() * 2, 10 - Three(), float(Three()), Three() == 3
    (6, 7, 3.0, True)

    Args:
        value_of: called with each operand. It returns operands of other classes as
            they are.
    """

    def method(name: str) -> Callable[..., Any]:
        # Builtins first: ``operator.__hash__`` is that of the module ``operator``.
        fn = getattr(builtins, name, None) or getattr(operator, f'__{name}__')
        return lambda self, *others: fn(value_of(self), *map(value_of, others))

    def reflected(name: str) -> Callable[..., Any]:
        fn = method(name)
        return lambda self, other: fn(other, self)

    methods = {f'__{name}__': method(name) for name in _REFLECTED + _OTHERS}
    methods |= {f'__r{name}__': reflected(name) for name in _REFLECTED}
    return type('Operators', (), {'__slots__': (), **methods})
