"""Two interpreters of the descriptions in ``specs.py``: with flax_sg, and by hand.

The interpreter by hand opens no blocks and records which stops are active. It calls
each module on a copy of its weights. The copy went through ``jax.lax.stop_gradient``,
or through an identity with another derivative. All uses in a block share one copy.
During the call the copy is in the module's scope, outside of every transform in the
block, where a person would write the stop. Both interpreters share one class, so names,
initial values and random numbers are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.core import FrozenDict

import specs
from flax_sg import linen as nn
from flax_sg.internals import core_scopes, modules, tracing


class StopError(Exception):
    """Raised to leave a block early."""


# By hand.


@dataclasses.dataclass(frozen=True, eq=False)
class _Stop:
    """A block: the path of its owner, what it stops, or what else it does."""

    owner: tuple[str, ...]
    where: specs.Where
    rule: str = 'stop'

    def takes(self, path: tuple[str, ...]) -> bool:
        inside = path[: len(self.owner)] == self.owner
        return self.where.takes(path[len(self.owner) :] if inside else path)

    def apply(self, value: Any, twin: Any) -> Any:
        """What stands for a variable, given that of its name in ``'ema'``."""
        if self.rule == 'collection':
            return twin
        if self.rule == 'function':
            return jax.tree.map(lambda leaf: warped('', leaf), value)
        return jax.tree.map(_BY_HAND[self.rule], value)


@jax.custom_jvp
def _scaled(x: jax.Array) -> jax.Array:
    return x


_scaled.defjvp(lambda x, t: (*x, -0.5 * t[0]))


@jax.custom_vjp
def _mapped(x: jax.Array) -> jax.Array:
    return x


_mapped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.tanh(ct),))

_BY_HAND = {'stop': jax.lax.stop_gradient, 'scale': _scaled, 'map': _mapped}


class _Hand:
    """The stops that hold, outermost first, and the copies that were made.

    Attributes:
        stops: those that hold for the running code.
        around: those that held where the copies in use were made.
    """

    def __init__(self) -> None:
        self.stops: tuple[_Stop, ...] = ()
        self.around: tuple[_Stop, ...] = ()
        self._copies: dict[Any, tuple[Any, Any]] = {}
        self._derived: dict[Any, list[tuple[Any, Any, Any]]] = {}

    def begin(self) -> None:
        """Forgets the copies of another program."""
        self._copies, self._derived = {}, {}

    @contextlib.contextmanager
    def block(
        self, module: linen.Module, where: specs.Where, rule: str
    ) -> Generator[None]:
        """Holds a stop for the body."""
        with self._only((*self.stops, _Stop(module.path, where, rule))):
            yield

    @contextlib.contextmanager
    def _only(self, stops: Any, around: Any = ()) -> Generator[None]:
        before, self.stops, self.around = (self.stops, self.around), stops, around
        try:
            yield
        finally:
            self.stops, self.around = before

    def stop(self, path: tuple[str, ...], value: Any, twins: Any) -> Any:
        """A variable, or a tree of them, with what holds now."""
        if isinstance(value, Mapping):
            return {
                name: self.stop((*path, name), v, twins[name])
                for name, v in value.items()
            }
        for stop in self.stops:
            if stop.rule != 'read_only' and stop.takes(path):
                value = self._copy(stop, path, value, twins)
        return value

    def _copy(self, stop: _Stop, path: tuple[str, ...], value: Any, twin: Any) -> Any:
        key = (stop, path, *map(id, jax.tree.leaves(value)))
        if key not in self._copies:
            self._copies[key] = (value, stop.apply(value, twin))
        return self._copies[key][1]

    def derived(self, module: Any, fn: Callable[..., Any], *values: Any) -> Any:
        """What ``setup`` derives: once of stored values, once of those in a block."""
        copies = {id(copy) for _, copy in self._copies.values()}
        where = self.around if copies & {id(value) for value in values} else ()
        key = (fn, where, id(module), *map(id, values))
        known = self._derived.setdefault(key, [])
        # Each branch of ``nn.cond`` and ``nn.switch`` closes over the variables.
        now = tracing.current_trace()
        for trace, _, result in known:
            if trace == now:
                return result
        known.append((now, (module, values), fn(*values)))
        return known[-1][2]

    @contextlib.contextmanager
    def copied(self, module: linen.Module) -> Generator[None]:
        """Gives a module copies of its weights, with what holds now."""
        if not self.stops or module.is_initializing():
            with self._only((), around=self.stops):
                yield
            return
        replaced = []
        known = {id(s._variables): s for s in modules.scopes_of(module)}
        _forget(module, known)
        for scope in known.values():
            stored = core_scopes.stored(scope)
            if 'params' in stored:
                replaced.append((stored, stored['params']))
                copy = self.stop(scope.path, stored['params'], stored['ema'])
                frozen = isinstance(stored['params'], FrozenDict)
                stored['params'] = FrozenDict(copy) if frozen else copy
        try:
            with self._only((), around=self.stops):
                yield
        finally:
            for stored, params in reversed(replaced):
                stored['params'] = params
            if replaced:
                _forget(module, known)


def _forget(module: linen.Module, scopes: Mapping[int, Any]) -> None:
    """Lets submodules that are bound already look for their weights once more."""
    for child in modules.children_of(module).values():
        if isinstance(child, linen.Module) and child.scope is not None:
            if id(child.scope._variables) not in scopes:
                child.scope._variables.pop('params', None)
            _forget(child, scopes)


hand = _Hand()


def block(module: linen.Module, by_hand: bool, item: specs.Block) -> Any:
    """A block of one of the interpreters."""
    if by_hand:
        return hand.block(module, item.where, item.rule)
    return rewrite_of(item.where, item.rule)


def rewrite_of(where: specs.Where, rule: str) -> Any:
    """The value of flax_sg that serves every extent."""
    if rule == 'stop':
        return nn.stop_gradient(where.filter(), unused='ignore')
    if rule == 'scale':
        return nn.scale_gradient(where.filter(), -0.5, unused='ignore')
    if rule == 'map':
        return nn.map_cotangent(where.filter(), squashed, unused='ignore')
    if rule == 'read_only':  # What models write is in other collections.
        return nn.read_only(where.filter(), collections='params', unused='ignore')
    values = 'ema' if rule == 'collection' else warped
    return nn.substitute(values, where=where.filter(), unused='ignore')


def squashed(path: str, ct: jax.Array) -> jax.Array:
    """Changes a cotangent. One function, since JAX compares functions by identity."""
    del path
    return jnp.tanh(ct)


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
    """Keeps raw and derived values in ``setup``; by hand it reads them anew."""

    by_hand: bool = False

    def setup(self):
        self.w, self.b = number(self, 'w'), number(self, 'b')
        self.w2 = derived(self.w, self.b)
        self.scaled = lambda x: x * self.w2

    def _by_hand(self):
        w, b = self.get_variable('params', 'w'), self.get_variable('params', 'b')
        return w, hand.derived(self, derived, w, b)

    def __call__(self, x):
        if self.by_hand:
            w, w2 = self._by_hand()
            return x * w2 + w
        return self.scaled(x) + self.w

    def other(self, x):
        w2 = self._by_hand()[1] if self.by_hand else self.w2
        return x + w2 + self.variables['params']['b']


def derived(w: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(w) * b


def doubled(a: jax.Array) -> jax.Array:
    return a * 2.0


class BatchNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        norm = linen.BatchNorm(False, momentum=0.5, epsilon=0.1)
        return norm(x) + jnp.tanh(norm.variables['params']['scale'])


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


class Sower(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = x * number(self, 'w')
        self.sow('intermediates', 'y', y)
        return y


class Lora(linen.Module):
    """``nn.share_scope``: both have one path."""

    by_hand: bool = False

    def setup(self):
        self.base = linen.Dense(4)
        nn.share_scope(self, self.base)
        self.a = self.param('A', linen.initializers.normal(), (4, 4))
        self.a2 = doubled(self.a)

    def __call__(self, x):
        if self.by_hand:
            a2 = hand.derived(self, doubled, self.get_variable('params', 'A'))
        else:
            a2 = self.a2
        return self.base(x) + x @ a2


class Listed(linen.Module):
    """Submodules in a list, shared, and one that sows."""

    def setup(self):
        one = Affine()
        self.parts = [one, linen.Dense(4), one, Sower()]

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Dropout(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=False)(x) * number(self, 'w')


class Record(linen.Module):
    """A state that is computed from weights, written and read."""

    @linen.compact
    def __call__(self, x):
        state = self.variable('state', 'mean', jnp.zeros, (4,))
        w = number(self, 'w')
        state.value = 0.5 * state.value + (x * w).mean(0)
        return x * w + state.value


MODULES: dict[str, Callable[..., linen.Module]] = {
    'affine': Affine,
    'kept': Kept,
    'dense': functools.partial(linen.Dense, 4),
    'batch_norm': BatchNorm,
    'dropout': Dropout,
    'rnn': Recurrent,
    'boxed': Boxed,
    'lora': Lora,
    'list': Listed,
    'record': Record,
}


# Transforms of classes.


def _mapped_class(lift: Any, cls: Any) -> Any:
    collections = ('params', 'ema', 'batch_stats', 'state', 'intermediates')
    axes = dict.fromkeys(collections, 0)
    options: dict[str, Any] = {
        'variable_axes': axes,
        'split_rngs': {'params': True, 'dropout': True},
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


def _stopping(cls: Any, by_hand: bool, kid: specs.Kid, closed: bool) -> Any:
    if not by_hand:
        return rewrite_of(kid.where, kid.rule)(cls)

    def stopping(name: str) -> Callable[..., Any]:
        def call(self, x):
            with contextlib.ExitStack() as stack:
                stack.enter_context(hand.block(self, kid.where, kid.rule))
                if closed:
                    stack.enter_context(hand.copied(self))
                return getattr(cls, name)(self, x)

        return nn.nowrap(call)

    names = [name for name in specs.METHODS if hasattr(cls, name)]
    return type(cls.__name__, (cls,), {name: stopping(name) for name in names})


def is_closed(kid: specs.Kid) -> bool:
    """Whether its stops are made where it is called, and not further inside."""
    last = 'stop' if kid.frozen else kid.wraps[-1] if kid.wraps else ''
    return last != 'stop' and (bool(last) or isinstance(kid.spec, specs.Leaf))


def make(kid: specs.Kid, by_hand: bool, **fields: Any) -> linen.Module:
    """A submodule, not bound yet."""
    if isinstance(kid.spec, specs.Composite):
        cls: Any = COMPOSITES[kid.spec.style]
        fields.update(spec=kid.spec, by_hand=by_hand)
    else:
        cls = MODULES[kid.spec.kind]
        if kid.spec.kind in ('kept', 'lora'):
            fields.update(by_hand=by_hand)
    if isinstance(cls, functools.partial):
        cls, fields = cls.func, {'features': cls.args[0], **fields}
    closed = isinstance(kid.spec, specs.Leaf)
    for wrap in kid.wraps:
        if wrap == 'stop':
            cls = _stopping(cls, by_hand, kid, closed)
        elif wrap in ('scan', 'vmap'):
            cls = _mapped_class(getattr(nn, wrap), cls)
        else:
            cls = getattr(nn, wrap)(cls)
        closed = wrap != 'stop'
    if kid.frozen and by_hand:
        return _stopping(cls, by_hand, kid, closed)(**fields)
    module = cls(**fields)
    if not kid.frozen:
        return module
    return rewrite_of(kid.where, kid.rule)(module)


# Transforms of functions of a module.

VALUES = ('params', 'ema')


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
    by_hand: bool
    shared: Any = None

    def make_kids(self, compact: bool) -> list[linen.Module]:
        kids, shared = [], self.shared
        for i, kid in enumerate(self.spec.kids):
            fields: dict[str, Any] = {'name': f'k{i}'} if compact else {}
            if kid.shares:
                if shared is None:
                    shared = Affine(name='shared') if compact else Affine()
                fields['shared'] = shared
            kids.append(make(kid, self.by_hand, **fields))
        if shared is not self.shared and not compact:
            self.shared_by_kids = shared
        return kids

    def own(self, name: str) -> jax.Array:
        raise NotImplementedError

    def by_hand_stopped(self, name: str, value: jax.Array) -> jax.Array:
        if self.is_initializing():
            return value
        return hand.stop((*self.path, name), value, self.get_variable('ema', name))

    def run(self, kids: list[linen.Module], x: jax.Array) -> jax.Array:
        return self._run(self.spec.body, kids, x)

    def _run(self, body: Any, kids: list[linen.Module], x: jax.Array) -> jax.Array:
        for item in body:
            x = self._step(item, kids, x)
        return x

    def _step(self, item: Any, kids: list[linen.Module], x: jax.Array) -> jax.Array:
        match item:
            case specs.Use():
                return self._use(item, kids, x)
            case specs.Own():
                return x * self.own(item.name)
            case specs.Residual():
                return x + self._run(item.body, kids, x)
            case specs.Shared():
                if self.shared is None:
                    return x
                return self._call(True, '__call__', self.shared, x)
            case specs.Block():
                results = []
                held = block(self, self.by_hand, item)
                with contextlib.suppress(StopError), held:
                    results.append(self._run(item.body, kids, x))
                    if item.raises:
                        raise StopError
                return results[0]
        raise TypeError(item)

    def _use(self, use: specs.Use, kids: list[linen.Module], x: jax.Array) -> jax.Array:
        kid = self.spec.kids[use.kid]
        call = functools.partial(self._call, is_closed(kid), use.method)
        if use.mirror is not None:
            call = functools.partial(self._call_mirror, call, use.mirror)
        module = kids[use.kid]
        if not use.lift or (self.is_initializing() and use.lift in NOT_AT_INIT):
            return call(module, x)
        copied = hand.copied(module) if self.by_hand else contextlib.nullcontext()
        with copied:
            return LIFTS[use.lift](call, module, x)

    def _call_mirror(
        self, call: Any, where: specs.Where, module: Any, x: jax.Array
    ) -> jax.Array:
        if self.by_hand:
            with hand.block(module, where, 'stop'):
                return call(module, x)
        # A view that draws random numbers and writes as the module does.
        options = {'rngs': 'fresh', 'state': 'update', 'unused': 'ignore'}
        return call(nn.mirror(module, where.filter(), **options), x)

    def _call(self, closed: bool, method: str, module: Any, x: Any) -> Any:
        fn = getattr(module, method)
        copied = self.by_hand and closed
        with hand.copied(module) if copied else contextlib.nullcontext():
            # Keeps values from growing with the number of calls.
            return jnp.tanh(fn(x))


class CompactComposite(Composite):
    @linen.compact
    def __call__(self, x):
        return self.run(self.make_kids(compact=True), x)

    def own(self, name):
        made = self.has_variable('params', name)
        value = self.get_variable('params', name) if made else number(self, name)
        return self.by_hand_stopped(name, value) if self.by_hand else value


class SetupComposite(Composite):
    def setup(self):
        kids = self.make_kids(compact=False)
        for i, module in enumerate(kids):
            setattr(self, f'k{i}', module)
        self.p0, self.p1 = number(self, 'p0'), number(self, 'p1')

    def __call__(self, x):
        return self.run([getattr(self, f'k{i}') for i in range(len(self.spec.kids))], x)

    def own(self, name):
        if not self.by_hand:
            return getattr(self, name)
        return self.by_hand_stopped(name, self.get_variable('params', name))


COMPOSITES = {'setup': SetupComposite, 'compact': CompactComposite}


class Model(linen.Module):
    """A description with a random number at the end, which tells of all draws."""

    spec: specs.Composite
    by_hand: bool

    @linen.compact
    def __call__(self, x):
        hand.begin()
        cls = COMPOSITES[self.spec.style]
        y = cls(self.spec, self.by_hand, name='model')(x)
        noise = jax.random.normal(self.make_rng('dropout'), x.shape)
        return y, noise
