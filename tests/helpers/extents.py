"""The extents of a rewrite, each as one call of a model: how people write it there.

Each function takes the rewrite, a model that is not bound, and what ``apply`` takes.
"""

import dataclasses
from typing import Any

from flax import core

from flax_sg import linen as nn
from flax_sg.core import lift


def block(rewrite: Any, model: Any, *args: Any, **options: Any) -> Any:
    """In a block around ``apply``."""
    with rewrite:
        return model.apply(*args, **options)


def inside(rewrite: Any, model: Any, *args: Any, **options: Any) -> Any:
    """In a block in a method of the model."""

    class Opens(type(model)):
        def __call__(self, *args):
            with rewrite:
                return super().__call__(*args)

    return _of_class(Opens, model).apply(*args, **options)


def method(rewrite: Any, model: Any, *args: Any, **options: Any) -> Any:
    """By a decorator of a method."""

    class Decorated(type(model)):
        @rewrite
        def __call__(self, *args):
            return super().__call__(*args)

    return _of_class(Decorated, model).apply(*args, **options)


def lifted(rewrite: Any, model: Any, *args: Any, **options: Any) -> Any:
    """By a lifted class."""
    return _of_class(rewrite(type(model)), model).apply(*args, **options)


def function(rewrite: Any, model: Any, *args: Any, **options: Any) -> Any:
    """By a function of the module."""
    call = rewrite(lambda module, *args: module(*args))
    return model.apply(*args, method=call, **options)


def wrapper(rewrite: Any, model: Any, *args: Any, **options: Any) -> Any:
    """By a wrapper."""
    return rewrite(model).apply(*args, **options)


def scopes(
    rewrite: Any, model: Any, *args: Any, mutable: Any = False, **options: Any
) -> Any:
    """By a function of a scope."""
    call = lift(lambda scope, *args: model.clone(parent=scope)(*args), rewrite)
    return core.apply(call, mutable=mutable)(*args, **options)


def mirror(rewrite: Any, model: Any, *args: Any, **options: Any) -> Any:
    """By a view, for what a rewrite stops."""
    call = lambda module, *args: nn.mirror(module, rewrite.where)(*args)  # noqa: E731
    return model.apply(*args, method=call, **options)


def _of_class(cls: Any, model: Any) -> Any:
    """A model of another class with the same fields."""
    names = {field.name for field in dataclasses.fields(model)} - {'name', 'parent'}
    return cls(**{name: getattr(model, name) for name in names})


# Those of all rewrites, and those of stops.
EXTENTS = {
    fn.__name__: fn for fn in (block, inside, method, lifted, function, wrapper, scopes)
}
OF_STOPS = {**EXTENTS, 'mirror': mirror}
