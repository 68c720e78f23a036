"""Several filters as arguments of their own: the error shows the list to write."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx as flax_nnx

import flax_sg as sg
from flax_sg import core, errors
from flax_sg import linen as nn

A, B, C = 'a', 'b', 'c'
tx, tree = optax.sgd(0.1), {'a': 1.0, 'b': 2.0, 'c': 3.0}
target, factor, value = nn.Dense(2), 0.5, jnp.zeros(())


def fn(scope: Any) -> Any:
    return scope


# The line of the error, and the call that it is for.
CALLS: dict[str, Any] = {
    "nn.stop_gradient(['a', 'b'])": lambda: nn.stop_gradient(A, B),
    "nn.stop_gradient(target, ['a', 'b'])": lambda: nn.stop_gradient(target, A, B),
    "nn.train_only(['a', 'b', 'c'])": lambda: nn.train_only(A, B, C),
    "nn.train_only(target, ['a', 'b'])": lambda: nn.train_only(nn.Dense, A, B),
    "nn.read_only(['a', 'b'])": lambda: nn.read_only(A, B),
    "nn.scale_gradient(['a', 'b'], factor)": lambda: nn.scale_gradient(A, B, factor),
    "nn.reverse_gradient(['a', 'b', 'c'])": lambda: nn.reverse_gradient(A, B, C),
    "nn.print_cotangent(['a', 'b'])": lambda: nn.print_cotangent(A, B),
    "nn.replace_cotangent(['a', 'b'], value)": lambda: nn.replace_cotangent(
        A, B, value
    ),
    "sg.stop_gradient(tree, ['a', 'b'])": lambda: sg.stop_gradient(tree, A, B),
    "sg.freeze(tx, ['a', 'b'])": lambda: sg.freeze(tx, A, B),
    "sg.partition(tree, ['a', 'b'])": lambda: sg.partition(tree, A, B),
    "core.stop_gradient(fn, ['a', 'b', 'c'])": lambda: core.stop_gradient(fn, A, B, C),
}
if hasattr(flax_nnx.Variable, 'get_value'):
    from flax_sg import nnx

    model = nnx.Dict(a=nnx.Param(1.0), b=nnx.Param(2.0))
    argnum = 0
    CALLS |= {
        "nnx.stop_gradient(model, ['a', 'b'])": lambda: nnx.stop_gradient(model, A, B),
        "nnx.train_only(model, ['a', 'b'])": lambda: nnx.train_only(model, A, B),
        "nnx.where(model, ['a', 'b'])": lambda: nnx.where(model, A, B),
        "nnx.DiffState(argnum, ['a', 'b'])": lambda: nnx.DiffState(argnum, A, B),
        "nnx.scale_gradient(model, ['a', 'b'], factor)": lambda: nnx.scale_gradient(
            model, A, B, factor
        ),
        "nnx.clip_gradient(model, ['a', 'b'], norm=1.0)": lambda: nnx.clip_gradient(
            model, A, B, norm=1.0
        ),
        "nnx.print_cotangent(model, ['a', 'b'])": lambda: nnx.print_cotangent(
            model, A, B
        ),
        "nnx.replace_cotangent(model, ['a', 'b'], value)": lambda: (
            nnx.replace_cotangent(model, A, B, value)
        ),
    }


@pytest.mark.parametrize('line', CALLS)
def test_the_line_to_write(line):
    with pytest.raises(errors.ArgumentTypeError) as raised:
        CALLS[line]()
    assert str(raised.value).endswith(f'\nWrite them as a list: {line}.')
    assert str(raised.value).startswith(f'{line.partition("(")[0]} was given ')
    assert eval(line) is not None


def test_filters_of_several_kinds():
    with pytest.raises(errors.ArgumentTypeError, match='3 filters') as raised:
        sg.stop_gradient(tree, A, sg.where(B), C)
    assert "sg.stop_gradient(tree, ['a', where, 'c'])" in str(raised.value)


def test_other_arguments_that_are_too_many():
    for call in (
        lambda: sg.freeze(tx, A, 1),
        lambda: nn.scale_gradient(A, factor, B),
        lambda: nn.stop_gradient(target, A, 1),
    ):
        with pytest.raises(TypeError, match='positional argument'):
            call()


def test_a_filter_beside_other_texts():
    """Names of collections and functions are no second filter."""
    assert callable(nn.stop_gradient(jax.nn.relu, A))
    assert nn.Frozen(target, A, 'params').collections == 'params'
    assert callable(core.stop_gradient(fn, A, 'params'))
