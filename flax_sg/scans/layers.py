"""Frozen layers of a scanned stack, at the price of two scans.

All layers of ``nn.scan`` share a path and lie in one array. So a program with one scan
can only mask this array, and it computes the backward pass of every layer. By hand
people write two scans instead. Here the loop alone is split: variables, names, initial
values and random numbers are those of one scan.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core.meta import AxisMetadata
from flax.core.scope import in_filter
from jax.extend import core
from numpy.typing import NDArray

from flax_sg import errors, filters
from flax_sg.filters.expressions import of_a_part
from flax_sg.internals import lifting
from flax_sg.internals.types import Array, Leaf, PyTree, TreeDef
from flax_sg.scans import residuals
from flax_sg.trees.leaves import path_of, selected

T = TypeVar('T')
# An int, a slice, a sequence or array of ints, or of as many bools as there are layers;
# or a dict of these by filters.
Layers = Any
# More runs than these are compiled as one loop with a mask.
MOST_RUNS = 4


def scan(target: T, *args: Any, frozen_layers: Layers = None, **kwargs: Any) -> T:
    """``flax.linen.scan`` in which the parameters of some layers are not trained.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> class Layer(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, _):
    ...         return nn.tanh(nn.Dense(3)(x)), None
    >>> Stack = nn.scan(
    ...     Layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=4,
    ...     frozen_layers=slice(0, 3),
    ... )
    >>> x = jnp.ones(3)
    >>> v = Stack().init(jax.random.key(0), x, None)
    >>> grads = jax.grad(lambda v: jnp.sum(Stack().apply(v, x, None)[0]))(v)
    >>> [bool(layer.any()) for layer in grads['params']['Dense_0']['kernel']]
    [False, False, False, True]

    The loop runs in parts. Frozen layers read their parameters one by one from the
    whole stack. If nothing below them is trained, they have no backward pass and save
    no residuals. Everything else is as in ``flax.linen.scan``, which is called if
    ``frozen_layers`` is not given.

    Args:
        target: what is scanned: a Module class, or a function of a module.
        *args: as for ``flax.linen.scan``.
        frozen_layers: which layers, by their index along the scan: 0, -1, a slice, a
            sequence of ints, or a bool for each layer. Negative ones count from the
            end. A few runs of neighbours are fast; layers here and there are masked. Or
            a dict, from paths in a layer to such layers: with ``{'**/kernel':
            slice(0, 8)}`` the biases of these layers are trained. Other parameters are
            trained in all layers.
        **kwargs: as for ``flax.linen.scan``.

    Returns:
        What ``flax.linen.scan`` returns.

    Raises:
        UnusedFilterError: when the result is called, if a path does not exist.
        PartError: when the result is called, if a layer does not exist; or if
            parameters are mutable and a layer writes them, or passes them to another
            lifted transform, which may write them.

    Note:
        ``nn.stop_gradient(sg.at('layers/**', np.s_[:12]))`` around a plain scan stops
        the same gradients, and computes them first.
    """
    if frozen_layers is None:
        return linen.scan(target, *args, **kwargs)  # pyright: ignore
    arguments = inspect.signature(linen.scan).bind(target, *args, **kwargs).arguments
    axes: Any = arguments.get('variable_axes', {})
    if not any(in_filter(collections, 'params') for collections in axes):
        raise errors.PartError(
            f'frozen_layers={frozen_layers!r} was given, but all layers share their '
            "parameters: variable_axes has no 'params'.\n"
            "Write variable_axes={'params': 0}, or freeze the parameters as a whole: "
            'nn.Frozen(module).'
        )

    def loop(body: lifting.Body, init: PyTree, xs: PyTree, **options: Any) -> Any:
        return split_scan(frozen_layers, body, init, xs, **options)

    return lifting.scan_with(loop)(target, *args, **kwargs)


def split_scan(
    frozen: Layers,
    body: lifting.Body,
    init: PyTree,
    xs: PyTree,
    *,
    length: int | None,
    reverse: bool,
    **options: Any,
) -> tuple[Any, Any]:
    """``jax.lax.scan`` over the variables of layers, of which some are frozen.

    Args:
        frozen: which layers.
        body: the body of the loop.
        init: the first carry.
        xs: the scanned tree, which begins with the groups of variables.
        length: how many layers there are, or None to take it from ``xs``.
        reverse: whether the last layer is the first to run.
        **options: other arguments of ``jax.lax.scan``.
    """
    # A box around an array adds nothing to its path.
    is_box = lambda node: isinstance(node, AxisMetadata)  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(xs, is_leaf=is_box)
    pairs = [(keys, leaf) for keys, node in nodes for leaf in jax.tree.leaves(node)]
    stack = [leaf for _, leaf in pairs]
    names = [lifting.param_path(keys, 'in') for keys, _ in pairs]
    params = [name is not None for name in names]
    sizes: set[Any] = {leaf.shape[0] for leaf in stack} | ({length} - {None})
    count: int = max(sizes, default=0)
    # JAX raises if sizes differ. ``init`` makes the parameters, and scans none.
    has_layers = len(sizes) == 1 and any(params)
    none = np.zeros((1, 1), bool)
    masks = _masks(frozen, names, stack, count) if has_layers else none
    if not masks.any():
        return jax.lax.scan(body, init, xs, length=length, reverse=reverse, **options)
    layer, init = _Layer.of(body, init, xs, params)
    # Runs of neighbours.
    changes = np.diff(masks, axis=1).any(axis=0)
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), count]
    runs = list(itertools.pairwise(cuts))
    seen = stack
    if len(runs) > MOST_RUNS:
        runs = [(0, count)]
        seen = list(map(_masked, stack, masks))
        masks = np.zeros_like(masks)
    carry, parts = init, []
    for start, end in reversed(runs) if reverse else runs:
        whole = masks[:, start].tolist()
        step, scanned = layer.steps(seen, whole, start, end)
        carry, ys = jax.lax.scan(step, carry, scanned, reverse=reverse, **options)
        parts.append(ys)
    stacked = map(_joined, zip(*(parts[::-1] if reverse else parts), strict=True))
    return carry, layer.out.unflatten(
        next(stacked) if index is None else stack[index] for index in layer.handed_on
    )


def _masks(
    frozen: Layers,
    names: Sequence[tuple[Any, ...] | None],
    stack: Sequence[Any],
    length: int,
) -> NDArray[np.bool_]:
    """A mask of the frozen layers for each scanned leaf; of no layer for others."""
    masks = np.zeros((len(names), length), bool)
    indices = [index for index, name in enumerate(names) if name is not None]
    paths = [path_of(names[index] or (), stack[index]) for index in indices]
    by_path = frozen if isinstance(frozen, Mapping) else {True: frozen}
    for where, layers in by_path.items():
        mask = chosen(layers, length)
        [decisions] = selected([paths], filters.as_filter(where))
        for path, decision in zip(paths, decisions, strict=True):
            if isinstance(decision, filters.Part):
                write = "The slice tells the layers: {'base/**': slice(0, 6)}."
                raise of_a_part(path, 'a scan has whole variables', decision, write)
        masks[list(itertools.compress(indices, decisions))] |= mask
    return masks


def chosen(layers: Layers, length: int) -> NDArray[np.bool_]:
    """A mask of the layers that an index selects; an empty one may select none.

    >>> chosen(slice(-2, None), 4).tolist(), chosen(slice(0, 0), 2).tolist()
    ([False, False, True, True], [False, False])
    >>> chosen(range(0), 2).tolist()
    [False, False]
    """
    mask = np.zeros(length, bool)
    if isinstance(layers, int) and layers not in (0, -1):
        write = f'write slice({layers}) for a number of layers, [{layers}] for one'
        raise _wrong_layers(
            layers, length, f'{layers} may be a number or an index: {write}'
        )
    index = layers if isinstance(layers, (slice, int)) else np.asarray(layers)
    # numpy makes floats of [], which are no indices.
    is_empty = isinstance(index, np.ndarray) and not index.size
    if isinstance(index, np.ndarray) and index.dtype.kind in 'UO':
        where = layers if isinstance(layers, str) else '**/kernel'
        raise errors.PartError(
            f'frozen_layers={layers!r} names parameters, and no layers.\n'
            f'A filter of parameters tells for which the {length} layers are frozen.\n'
            f'Write frozen_layers={{{where!r}: slice(0, {max(1, length // 2)})}}.'
        )
    try:
        mask[slice(0) if is_empty else index] = True
    except IndexError as error:
        raise _wrong_layers(layers, length, str(error)) from None
    if not mask.any() and isinstance(index, slice) and index.stop != (index.start or 0):
        raise _wrong_layers(layers, length, 'it selects no layer')
    return mask


class _Layer(NamedTuple):
    """The body of a loop, traced.

    It is traced once for all parts of the loop: another trace would draw other random
    numbers.

    Attributes:
        program: the body, as a function of leaves.
        carry: the structure of its carry.
        out: the structure of its scanned outputs.
        handed_on: for each parameter in ``out`` the index of the scanned leaf that it
            is; None for other leaves. A body that may write parameters returns them.
    """

    program: core.ClosedJaxpr
    carry: TreeDef
    out: TreeDef
    handed_on: list[int | None]

    @classmethod
    def of(
        cls, body: lifting.Body, carry: PyTree, xs: PyTree, params: list[bool]
    ) -> tuple[_Layer, Any]:
        """Traces the body on the first layer; returns what to carry, too."""
        first = jax.eval_shape(lambda xs: jax.tree.map(lambda x: x[0], xs), xs)
        trace = jax.make_jaxpr(body, return_shape=True)
        program, (new_carry, out) = trace(carry, first)
        if jax.tree.structure(carry) != jax.tree.structure(new_carry):
            jax.lax.scan(body, carry, xs)  # It raises, and says where they differ.
        strong = _strong(carry, new_carry)
        leaves = zip(*map(jax.tree.leaves, (carry, strong)), strict=True)
        # ``jax.lax.scan``, too, traces the body again with the wider dtypes.
        if any(old is not new for old, new in leaves):
            carry = strong
            program, (new_carry, out) = trace(carry, first)
        start = len(jax.tree.leaves(new_carry))
        variables = program.jaxpr.invars[start:]
        indices = {v: index for index, v in enumerate(variables) if params[index]}
        handed_on: list[int | None] = []
        pairs = jax.tree_util.tree_leaves_with_path(out)
        for (keys, _), v in zip(pairs, program.jaxpr.outvars[start:], strict=True):
            path = lifting.param_path(keys, 'out')
            # A parameter that a layer returns or sows is a result: it stays as the
            # layer has seen it. Only the variables come from the stack.
            is_param = path is not None and not isinstance(v, core.Literal)
            handed_on.append(indices.get(v) if is_param else None)
            if path is not None and handed_on[-1] is None:
                raise errors.PartError(
                    f'the parameter {path_of(path)!r} of layers of which some are '
                    'frozen is written, or handed to a lifted transform that may '
                    "write it.\nTake 'params' out of mutable=, or use "
                    'nn.stop_gradient(sg.at(...)) around a scan without frozen_layers=.'
                )
        treedef = jax.tree.structure
        return cls(program, treedef(new_carry), treedef(out), handed_on), carry

    def steps(
        self, seen: list[Any], whole: list[bool], start: int, end: int
    ) -> tuple[Callable[[Any, Any], Any], Any]:
        """The body of a loop over some neighbours, and the arrays that it scans.

        Args:
            seen: the stacked leaves that the layers read.
            whole: which of these a layer reads from the whole stack: a slice of the
                stack would be a copy of it. They are stopped.
            start: the index of the first layer.
            end: the index after that of the last one.
        """
        # Stopped before the loop. If JAX differentiated an input of the loop, it would
        # save the loop's constants, too, such as an attention mask.
        stopped = jax.lax.stop_gradient
        pairs = [
            (stopped(stack) if is_whole else stack, is_whole)
            for stack, is_whole in zip(seen, whole, strict=True)
        ]

        def step(carry: PyTree, xs: PyTree) -> tuple[Any, Any]:
            index, slices = xs[0], iter(xs[1])
            carry = jax.tree.leaves(carry)
            leaves = [
                residuals.Remade(_slice, (stack, index)) if is_whole else next(slices)
                for stack, is_whole in pairs
            ]
            results = residuals.evaluate(self.program, [*carry, *leaves])
            out = zip(self.handed_on, results[len(carry) :], strict=True)
            # Parameters that a layer returns unchanged come from the stack itself.
            ys = [result for index, result in out if index is None]
            return self.carry.unflatten(results[: len(carry)]), ys

        sliced = [stack[start:end] for stack, is_whole in pairs if not is_whole]
        return step, (jnp.arange(start, end, dtype=jnp.uint32), sliced)


def _strong(carry: PyTree, new_carry: PyTree) -> PyTree:
    """The carry, with Python's numbers in the dtype that the body returns."""

    def strong(old: Array, new: Array) -> Array:
        if not jax.typeof(old).weak_type:
            return old
        is_wider = jnp.result_type(old, new) != jnp.result_type(old)
        return jnp.asarray(old, new.dtype) if is_wider else old

    return jax.tree.map(strong, carry, new_carry)


def _masked(leaf: Leaf, mask: NDArray[np.bool_]) -> Array:
    """A stack of which some layers are stopped; as it is if none is."""
    if not mask.any():
        return leaf
    over = mask.reshape(-1, *(1 for _ in leaf.shape[1:]))
    return jnp.where(over, jax.lax.stop_gradient(leaf), leaf)


def _slice(stack: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _joined(parts: Sequence[Any]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _wrong_layers(layers: Layers, length: int, problem: str) -> errors.PartError:
    """``frozen_layers=`` names layers that a scan does not have."""
    return errors.PartError(
        f'frozen_layers={layers!r} does not fit a scan of {length} layers: '
        f'{problem}.\n'
        f'Write indices from 0 to {length - 1}, such as '
        f'frozen_layers=slice(0, {max(1, length // 2)}), or a bool for each layer.'
    )
