"""Two interpreters of the descriptions in ``specs.py``: with flax_sg, and by hand.

The interpreter by hand is a function of a tree of parameters. A block is a copy of the
tree with other values, and a loop of Flax is a loop of Python. It shares nothing with
the other interpreter but the modules without blocks, which run on their part of the
tree as plain Flax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

import specs
from flax_sg import linen as nn

VALUES = ('params', 'ema')


class StopError(Exception):
    """Raised to leave a block early."""


def rewrite_of(where: specs.Where, rule: str) -> Any:
    """The value of flax_sg that serves every extent."""
    options: dict[str, Any] = {'unused': 'ignore'}
    selected = where.filter()
    if rule == 'stop':
        return nn.stop_gradient(selected, **options)
    if rule == 'scale':
        return nn.scale_gradient(selected, -0.5, **options)
    if rule == 'read_only':
        return nn.read_only(selected, collections='params', **options)
    values = 'ema' if rule == 'collection' else warped
    return nn.substitute(values, where=selected, **options)


def warped(path: str, value: jax.Array) -> jax.Array:
    """Other values."""
    del path
    return jnp.sin(value) + 0.25


# Modules without blocks.


def number(module: linen.Module, name: str) -> jax.Array:
    return module.param(name, linen.initializers.normal(), (4,))


class Affine(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x * number(self, 'w') + number(self, 'b')


class Kept(linen.Module):
    """Keeps raw and derived values in ``setup``."""

    def setup(self):
        self.w, self.b = number(self, 'w'), number(self, 'b')
        self.w2 = jnp.tanh(self.w) * self.b
        self.scaled = lambda x: x * self.w2

    def __call__(self, x):
        return self.scaled(x) + self.w2 + self.w + self.variables['params']['b']


class Recurrent(linen.Module):
    """A cell that belongs to this module, in an RNN."""

    @linen.compact
    def __call__(self, x):
        cell = linen.SimpleCell(4, name='cell')
        return linen.RNN(cell, name='rnn')(x[None])[0]


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, x):
        normal = linen.initializers.lecun_normal()
        boxed = linen.with_partitioning(normal, ('a', None))
        return linen.Dense(4, kernel_init=boxed, name='base')(x)


class Lora(linen.Module):
    """``nn.share_scope``: both have one path."""

    def setup(self):
        self.base = linen.Dense(4)
        nn.share_scope(self, self.base)
        self.a = self.param('A', linen.initializers.normal(), (4, 4))
        self.a2 = self.a * 2.0

    def __call__(self, x):
        return self.base(x) + x @ self.a2


MODULES: dict[str, Callable[..., linen.Module]] = {
    'affine': Affine,
    'kept': Kept,
    'dense': functools.partial(linen.Dense, 4),
    'rnn': Recurrent,
    'boxed': Boxed,
    'lora': Lora,
}


# Transforms of classes.


def _mapped_class(lift: Any, cls: Any) -> Any:
    options: dict[str, Any] = {
        'variable_axes': dict.fromkeys(VALUES, 0),
        'split_rngs': {'params': True},
        'metadata_params': {nn.PARTITION_NAME: None},
    }
    if lift is nn.vmap:
        lifted = nn.vmap(cls, in_axes=None, axis_size=2, **options)

        def mean(self, x):
            return lifted.__call__(self, x).mean(0)

        return type(cls.__name__, (lifted,), {'__call__': nn.nowrap(mean)})

    def step(self, x, _):
        return cls.__call__(self, x), None

    def call(self, x):
        return getattr(self, name)(x, None)[0]

    name = f'step_of_{len(cls.__mro__)}'  # A scanned class may be scanned again.
    stepped = type(cls.__name__, (cls,), {name: step})
    scanned = nn.scan(stepped, length=2, methods=[name], **options)
    return type(cls.__name__, (scanned,), {'__call__': nn.nowrap(call)})


def make(kid: specs.Kid, plain: bool, **fields: Any) -> linen.Module:
    """A submodule, not bound yet; ``plain`` leaves out all that flax_sg does."""
    if isinstance(kid.spec, specs.Composite):
        cls: Any = COMPOSITES[kid.spec.style]
        fields.update(spec=kid.spec, plain=plain)
    else:
        cls = MODULES[kid.spec.kind]
    if isinstance(cls, functools.partial):
        cls, fields = cls.func, {'features': cls.args[0], **fields}
    for wrap in kid.wraps:
        if wrap == 'stop':
            cls = cls if plain else rewrite_of(kid.where, kid.rule)(cls)
        elif wrap in ('scan', 'vmap'):
            cls = _mapped_class(getattr(nn, wrap), cls)
        else:
            cls = getattr(nn, wrap)(cls)
    module = cls(**fields)
    return (
        rewrite_of(kid.where, kid.rule)(module) if kid.frozen and not plain else module
    )


# Transforms of functions of a module.


def _cond(fn: Any, module: Any, x: Any) -> Any:
    def negative(module: Any, x: Any) -> Any:
        return fn(module, x) * 2.0

    return nn.cond(x.sum() > 0, fn, negative, module, x)


def _while_loop(fn: Any, module: Any, x: Any) -> Any:
    def go_on(_: Any, carry: Any) -> Any:
        return carry[0] < 2

    def step(module: Any, carry: Any) -> Any:
        return carry[0] + 1, fn(module, carry[1])

    return nn.while_loop(go_on, step, module, (0, x), broadcast_variables=VALUES)[1]


def _scan(fn: Any, module: Any, x: Any) -> Any:
    scanned = nn.scan(
        lambda module, x, _: (fn(module, x), None),
        variable_broadcast=VALUES,
        split_rngs={'params': False},
        length=2,
    )
    return scanned(module, x, None)[0]


def _vmap(fn: Any, module: Any, x: Any) -> Any:
    mapped = nn.vmap(
        fn,
        variable_axes=dict.fromkeys(VALUES),
        split_rngs={'params': False},
        in_axes=None,
        axis_size=2,
    )
    return mapped(module, x).mean(0)


def _map_variables(fn: Any, module: Any, x: Any) -> Any:
    def doubled(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2.0, tree)

    return nn.map_variables(fn, 'params', trans_in_fn=doubled)(module, x)


def _custom_vjp(fn: Any, module: Any, x: Any) -> Any:
    def forward(module: Any, x: Any) -> Any:
        return nn.vjp(fn, module, x)

    def backward(pull_back: Any, y_t: Any) -> Any:
        params_t, x_t = pull_back(y_t * 3.0)
        return params_t, x_t

    return nn.custom_vjp(fn, forward, backward)(module, x)


def _vjp(fn: Any, module: Any, x: Any) -> Any:
    y, pull_back = nn.vjp(fn, module, x)
    return y + pull_back(y)[1]


LIFTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    '': lambda fn, module, x: fn(module, x),
    'remat': lambda fn, module, x: nn.remat(fn)(module, x),
    'jit': lambda fn, module, x: nn.jit(fn)(module, x),
    'scan': _scan,
    'vmap': _vmap,
    'cond': _cond,
    'while_loop': _while_loop,
    'map_variables': _map_variables,
    'custom_vjp': _custom_vjp,
    'vjp': _vjp,
}
# No variables can be created in these.
NOT_AT_INIT = ('scan', 'vmap', 'cond', 'while_loop', 'map_variables')


# Composite modules.


class Composite(linen.Module):
    """Runs the statements of a description."""

    spec: specs.Composite
    plain: bool
    shared: Any = None

    def make_kids(self, **named: Any) -> tuple[list[linen.Module], Any]:
        """The submodules, and the module that some of them share."""
        shared = self.shared
        if shared is None and any(kid.shares for kid in self.spec.kids):
            shared = Affine(**{name: 'shared' for name in named})
        kids = [
            make(
                kid,
                self.plain,
                **{name: f'k{i}' for name in named},
                **({'shared': shared} if kid.shares else {}),
            )
            for i, kid in enumerate(self.spec.kids)
        ]
        return kids, shared

    def own(self, name: str) -> jax.Array:
        raise NotImplementedError

    def run(self, body: Any, kids: list[linen.Module], x: jax.Array) -> jax.Array:
        for item in body:
            x = self._step(item, kids, x)
        return x

    def _step(self, item: Any, kids: list[linen.Module], x: jax.Array) -> jax.Array:
        match item:
            case specs.Use():
                return self._use(item, kids[item.kid], x)
            case specs.Own():
                return x * self.own(item.name)
            case specs.Residual():
                return x + self.run(item.body, kids, x)
            case specs.Shared():
                return x if self.shared is None else jnp.tanh(self.shared(x))
            case specs.Block() if self.plain:
                return self.run(item.body, kids, x)
            case specs.Block():
                results = []
                held = rewrite_of(item.where, item.rule)
                with contextlib.suppress(StopError), held:
                    results.append(self.run(item.body, kids, x))
                    if item.raises:
                        raise StopError
                return results[0]
        raise TypeError(item)

    def _use(self, use: specs.Use, module: linen.Module, x: jax.Array) -> jax.Array:
        def call(module: Any, x: Any) -> Any:
            if use.mirror is not None and not self.plain:
                # A view that draws random numbers and writes as the module does.
                options = {'rngs': 'fresh', 'state': 'update', 'unused': 'ignore'}
                module = nn.mirror(module, use.mirror.filter(), **options)
            return jnp.tanh(module(x))  # Or values grow with the number of calls.

        if self.is_initializing() and use.lift in NOT_AT_INIT:
            return call(module, x)
        return LIFTS[use.lift](call, module, x)


class CompactComposite(Composite):
    @linen.compact
    def __call__(self, x):
        kids, _ = self.make_kids(name=True)
        return self.run(self.spec.body, kids, x)

    def own(self, name):
        made = self.has_variable('params', name)
        return self.get_variable('params', name) if made else number(self, name)


class SetupComposite(Composite):
    def setup(self):
        kids, shared = self.make_kids()
        if shared is not self.shared:
            self.shared_by_kids = shared  # Before a kid that holds it gives it a name.
        for i, module in enumerate(kids):
            setattr(self, f'k{i}', module)
        self.p0, self.p1 = number(self, 'p0'), number(self, 'p1')

    def __call__(self, x):
        kids = [getattr(self, f'k{i}') for i in range(len(self.spec.kids))]
        return self.run(self.spec.body, kids, x)

    def own(self, name):
        return getattr(self, name)


COMPOSITES = {'setup': SetupComposite, 'compact': CompactComposite}


def model(spec: specs.Composite, plain: bool = False) -> linen.Module:
    """The model of a description; ``plain``: without all that flax_sg does."""
    return COMPOSITES[spec.style](spec, plain)


# By hand.

Path = tuple[str, ...]


@jax.custom_jvp
def _scaled(x: jax.Array) -> jax.Array:
    return x


_scaled.defjvp(lambda x, t: (*x, -0.5 * t[0]))

_RULES: dict[str, Callable[[Any, Any], Any]] = {
    'stop': lambda value, _: jax.lax.stop_gradient(value),
    'scale': lambda value, _: jax.tree.map(_scaled, value),
    'function': lambda value, _: jax.tree.map(lambda leaf: warped('', leaf), value),
    'collection': lambda _, twin: twin,
    'read_only': lambda value, _: value,
}


def at(tree: Any, path: Path) -> Any:
    """A part of a tree of dicts."""
    return functools.reduce(lambda tree, name: tree[name], path, tree)


def changed(tree: Any, path: Path, fn: Callable[[Any], Any]) -> Any:
    """A copy of a tree, with another part at a path."""
    if not path:
        return fn(tree)
    if path[0] not in tree:  # A module without parameters.
        return tree
    return {**tree, path[0]: changed(tree[path[0]], path[1:], fn)}


@dataclasses.dataclass(frozen=True)
class Values:
    """What readers see: the parameters, and the collection that may replace them."""

    params: Any
    ema: Any

    def rewritten(self, owner: Path, where: specs.Where, rule: str) -> Values:
        """In a block of the module at a path."""

        def walk(path: Path, value: Any, twin: Any) -> Any:
            if isinstance(value, Mapping):
                return {n: walk((*path, n), value[n], twin[n]) for n in value}
            inside = path[: len(owner)] == owner
            taken = where.takes(path[len(owner) :] if inside else path)
            return _RULES[rule](value, twin) if taken else value

        return dataclasses.replace(self, params=walk((), self.params, self.ema))

    def sliced(self, path: Path, index: int) -> Values:
        """Without the first axis of the variables below a path."""

        def part(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[index], tree)

        return Values(*(changed(t, path, part) for t in (self.params, self.ema)))


@dataclasses.dataclass(frozen=True)
class ByHand:
    """A module of a description: where it is, and which module it was handed."""

    spec: Any
    path: Path = ()
    shared: Path | None = None

    def run(self, values: Values, x: jax.Array) -> jax.Array:
        if isinstance(self.spec, specs.Leaf):
            params = {'params': at(values.params, self.path)}
            return MODULES[self.spec.kind]().apply(params, x)
        return self._run(self.spec.body, values, x)

    def _run(self, body: Any, values: Values, x: jax.Array) -> jax.Array:
        for item in body:
            x = self._step(item, values, x)
        return x

    def _step(self, item: Any, values: Values, x: jax.Array) -> jax.Array:
        match item:
            case specs.Use():
                return self._use(item, values, x)
            case specs.Own():
                return x * at(values.params, (*self.path, item.name))
            case specs.Residual():
                return x + self._run(item.body, values, x)
            case specs.Shared():
                if self.shared is None:
                    return x
                return jnp.tanh(
                    ByHand(specs.Leaf('affine'), self.shared).run(values, x)
                )
            case specs.Block():
                inside = values.rewritten(self.path, item.where, item.rule)
                return self._run(item.body, inside, x)
        raise TypeError(item)

    def _use(self, use: specs.Use, values: Values, x: jax.Array) -> jax.Array:
        kid, path = self.spec.kids[use.kid], (*self.path, f'k{use.kid}')
        name = 'shared' if self.spec.style == 'compact' else 'shared_by_kids'
        shared = self.shared or (*self.path, name)
        module = ByHand(kid.spec, path, shared if kid.shares else None)

        def call(values: Values, x: Any) -> Any:
            if use.mirror is not None:
                values = values.rewritten(path, use.mirror, 'stop')
            wraps = (*kid.wraps, 'stop') if kid.frozen else kid.wraps
            return jnp.tanh(_wrapped(wraps, kid, module, values, x))

        return _lifted(use.lift, call, values, path, x)


def _wrapped(
    wraps: tuple[str, ...], kid: specs.Kid, module: ByHand, values: Values, x: Any
) -> Any:
    """What a class in transforms computes, the last one outermost."""
    if not wraps:
        return module.run(values, x)
    *inner, wrap = wraps

    def run(values: Values, x: Any) -> Any:
        return _wrapped(tuple(inner), kid, module, values, x)

    if wrap == 'stop':
        return run(values.rewritten(module.path, kid.where, kid.rule), x)
    if wrap == 'scan':
        for index in range(2):
            x = run(values.sliced(module.path, index), x)
        return x
    if wrap == 'vmap':
        each = [run(values.sliced(module.path, index), x) for index in range(2)]
        return sum(each) / 2.0
    return run(values, x)


def _lifted(lift: str, call: Any, values: Values, path: Path, x: Any) -> Any:
    """What a function of a module computes in a transform."""
    if lift in ('scan', 'while_loop'):
        return call(values, call(values, x))
    if lift == 'cond':
        return call(values, x) * jnp.where(jnp.sum(x) > 0, 1.0, 2.0)
    if lift == 'map_variables':
        double = functools.partial(jax.tree.map, lambda leaf: leaf * 2.0)
        doubled = changed(values.params, path, double)
        return call(dataclasses.replace(values, params=doubled), x)
    if lift == 'custom_vjp':
        y = call(values, x)
        return y + 2.0 * (y - jax.lax.stop_gradient(y))
    if lift == 'vjp':
        run = lambda p, x: call(dataclasses.replace(values, params=p), x)  # noqa: E731
        y, pull_back = jax.vjp(run, values.params, x)
        return y + pull_back(y)[1]
    return call(values, x)
