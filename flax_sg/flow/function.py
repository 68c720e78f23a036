"""What is traced: a function, or a module of linen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import errors as flax_errors
from flax import linen

from flax_sg import errors
from flax_sg.errors.texts import brief, shown, wrong_argument
from flax_sg.filters import predicates
from flax_sg.filters.paths import natural_key
from flax_sg.internals.types import Kwargs, PyTree
from flax_sg.rendering.rows import unique
from flax_sg.trees.leaves import path_of

# The name of an output that is not in a tree.
ALONE = 'output'

# What Flax raises for a part of the variables, and for an array.
_WITHOUT_VARIABLES = (
    flax_errors.ApplyScopeInvalidVariablesTypeError,
    flax_errors.ScopeCollectionNotFound,
    flax_errors.ScopeParamNotFoundError,
    TypeError,
    AttributeError,  # of flax 0.12.0, for an array
)


class Function:
    """What is called: a function, or a module of linen.

    Attributes:
        call: the call of the user, as it is to be written: ``'sg.live(loss, params)'``.
        run: the function.
        name: what the user calls it.
        may_have_aux: whether it has returned a tuple that begins with one number, and
            nobody has said ``has_aux=True``. What is behind it may be no loss.
    """

    def __init__(
        self,
        call: str,
        fun: Callable[..., Any],
        has_aux: bool,
        kwargs: Kwargs,
    ) -> None:
        self.call = call
        is_module = isinstance(fun, linen.Module)
        if not callable(fun) and not is_module:
            of_losses = isinstance(fun, Mapping) and any(map(callable, fun.values()))
            several = 'one function that returns a dict of losses: '
            raise wrong_argument(fun, 'function', (several if of_losses else '') + call)
        self.run: Callable[..., PyTree] = fun.apply if is_module else fun
        self.name = type(fun).__name__ if is_module else predicates.describe(fun)
        name = getattr(fun, '__name__', 'fun').replace('<lambda>', 'fun')
        owner = fun if is_module else getattr(fun, '__self__', None)
        is_apply = isinstance(owner, linen.Module) and (is_module or name == 'apply')
        self.called = 'model.apply' if is_apply else name
        self.may_have_aux = False
        self._is_module, self._module = is_module, owner if is_apply else None
        self._has_aux = has_aux
        # What a module writes comes back beside its output.
        self._writes = is_module and kwargs.get('mutable', False) is not False

    def returned(self, args: Sequence[Any], kwargs: Kwargs) -> PyTree:
        """Calls it; what it returns, without ``aux`` and what a module writes."""
        try:
            out = self.run(*args, **kwargs)
        except _WITHOUT_VARIABLES as error:
            has_all = isinstance(args[0], Mapping) and (
                'params' in args[0] or isinstance(error, (TypeError, AttributeError))
            )
            if self._module is None or has_all:
                raise
            raise errors.ArgumentTypeError(
                f'{type(self._module).__name__} was given {brief(args[0])} as its '
                "variables, without 'params'.\n"
                'A module of linen has no variables in itself: give all of them before '
                'its inputs.\n'
                f'Write {self.call.partition("(")[0]}(model, variables, x), with '
                "variables = model.init(key, x), or {'params': params}."
            ) from error
        out = out[0] if self._writes else out
        if self._has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    'With has_aux=True the function has to return a pair (outputs, '
                    f'aux), but {self.name} returned {shown(out)}.'
                )
            out = out[0]
        elif type(out) is tuple and len(out) > 1 and not self._is_module:
            self.may_have_aux = [np.ndim(x) for x in jax.tree.leaves(out[0])] == [0]
        return out


def outputs_of(out: PyTree) -> tuple[list[str], list[Any]]:
    """The names and the arrays of what a function returns."""
    pairs = jax.tree_util.tree_leaves_with_path(out)
    # JAX sorts the keys of dicts as text. People count: loss_2, loss_10.
    keys_of = itertools.chain(*(keys for keys, _ in pairs))
    if all(isinstance(key, jax.tree_util.DictKey) for key in keys_of):
        pairs.sort(key=lambda pair: natural_key(path_of(pair[0])))
    names = unique([path_of(keys) for keys, _ in pairs])
    return [name or ALONE for name in names], [leaf for _, leaf in pairs]
