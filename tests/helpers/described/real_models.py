"""Makes the modules of a description, and calls them, with flax_sg."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.traverse_util import flatten_dict, path_aware_map

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers.described import language
from tests.helpers.described.modules import LEAVES, Affine, param
from tests.helpers.described.real import Real, filter_of, rewrite_of
from tests.helpers.lifts import DERIVATIVES, LIFTS

# Transforms of classes.


def _mapped_class(lift: Any, cls: Any) -> Any:
    options: dict[str, Any] = {
        'variable_axes': dict.fromkeys(('params', 'ema'), 0),
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


def make(kid: language.Part, **fields: Any) -> linen.Module:
    """A submodule, not bound yet."""
    if isinstance(kid.spec, language.Leaf):
        cls: Any = LEAVES[kid.spec.kind]
    else:
        cls, fields = COMPOSITES[kid.spec.style], {'spec': kid.spec, **fields}
    rewrite = rewrite_of(kid.where, kid.rule)
    for wrap in kid.wraps:
        if wrap == 'stop':
            cls = rewrite(cls)
        elif wrap in ('scan', 'vmap'):
            cls = _mapped_class(getattr(nn, wrap), cls)
        else:
            cls = getattr(nn, wrap)(cls)
    return rewrite(cls(**fields)) if kid.frozen else cls(**fields)


# Those of JAX, around a function of ``x`` that reads a bound module.
RAW: dict[str, Any] = {'jax.jit': jax.jit, 'jax.checkpoint': jax.checkpoint}
# No variables can be created in these.
NOT_AT_INIT = ('scan', 'vmap', 'cond', 'while_loop', 'map_variables', *RAW)

_INNER = Affine()
_apply_inner = jax.jit(lambda params, x: _INNER.apply({'params': params}, x))


# Composite modules.


class Composite(linen.Module):
    """Runs the statements of a description."""

    spec: language.Composite
    handed_in: Any = None

    def make_kids(self, **named: Any) -> tuple[list[linen.Module], Any]:
        """The submodules, and the module that some of them share."""
        shared = self.handed_in
        if shared is None and any(kid.shares for kid in self.spec.kids):
            shared = Affine(**{name: 'shared' for name in named})
        kids = [
            make(
                kid,
                **{name: f'k{i}' for name in named},
                **({'handed_in': shared} if kid.shares else {}),
            )
            for i, kid in enumerate(self.spec.kids)
        ]
        return kids, shared


class CompactComposite(Composite):
    @linen.compact
    def __call__(self, x):
        kids, _ = self.make_kids(name=True)
        return _Running(self, kids).result(self.spec.body, x)

    def own(self, name):
        made = self.has_variable('params', name)
        return self.get_variable('params', name) if made else param(self, name, 4)


class SetupComposite(Composite):
    def setup(self):
        kids, shared = self.make_kids()
        if shared is not self.handed_in:
            self.shared = shared  # Before a kid that holds it gives it a name.
        for i, module in enumerate(kids):
            setattr(self, f'k{i}', module)
        self.p0, self.p1 = param(self, 'p0', 4), param(self, 'p1', 4)

    def __call__(self, x):
        kids = [getattr(self, f'k{i}') for i in range(len(self.spec.kids))]
        return _Running(self, kids).result(self.spec.body, x)

    def own(self, name):
        return getattr(self, name)


COMPOSITES = {'setup': SetupComposite, 'compact': CompactComposite}


class _Running(language.OnValue, Real):
    """The statements of a composite module that is called."""

    def __init__(self, module: Any, kids: list[linen.Module]) -> None:
        self.module, self.kids = module, kids
        self._raw: dict[language.Use, Callable[[Any], Any]] = {}

    def own(self, item: language.Own, place: Any) -> None:
        self.x = self.x * self.module.own(item.name)

    def inner(self, item: language.Inner, place: Any) -> None:
        own = {'w': self.module.own('p0'), 'b': self.module.own('p1')}
        self.x = jnp.tanh(_apply_inner(own, self.x))

    def shared(self, item: language.Shared, place: Any) -> None:
        if self.module.handed_in is not None:
            self.x = jnp.tanh(self.module.handed_in(self.x))

    def use(self, item: language.Use, place: Any) -> None:
        def call(module: Any, x: Any) -> Any:
            if item.mirror is not None:
                # A view that writes as the module does.
                options = {'state': 'update', 'unused': 'ignore'}
                module = nn.mirror(module, filter_of(item.mirror, x), **options)
            return jnp.tanh(module(x))  # Or values grow with the number of calls.

        kid = self.kids[item.kid]
        creates = self.module.is_initializing() and item.lift in NOT_AT_INIT
        if item.lift in RAW and not creates:
            # Or the trace would make, and leave behind, what ``setup`` keeps.
            getattr(kid, 'is_set_up', None)
            compiled = RAW[item.lift](lambda x: call(kid, x))
            self.x = self._raw.setdefault(item, compiled)(self.x)
        else:
            lift = 'none' if creates or not item.lift else item.lift
            self.x = (LIFTS | DERIVATIVES)[lift](call, kid, self.x)


# Calls.


def in_two(fn: Any, ahead: language.Ahead | None) -> Any:
    """A function of parameters and ``x``, as the two that ``sg.precompute`` makes."""

    def run(params: Any, x: Any) -> Any:
        trained = path_aware_map(lambda path, _: ahead.trained.takes(path), params)
        each = 1 if ahead.each else ()
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', '.* is computed once')
            split = sg.precompute(fn, params, x, wrt=trained, each=each)
        data, last = ((), (x,)) if ahead.each else ((x,), ())
        kept = split.early(*jax.lax.stop_gradient((params, *data)))
        return split.late(params, kept, *last)

    return fn if ahead is None else run


class RealCalls(language.Calls, Real):
    """Calls models in real blocks.

    Attributes:
        modules: the models.
        traces: how often Python ran, by what was called.
    """

    def __init__(
        self, models: tuple[language.Part, ...], params: Any, x: jax.Array
    ) -> None:
        super().__init__(models, params, x)
        self.traces = Counter[language.Call]()
        self.modules = [make(part) for part in models]
        self._paths = [list(flatten_dict(one)) for one in params]
        self._functions: dict[language.Call, Any] = {}
        self._found = set[Any]()
        self._threads = 0

    def function(self, item: language.Call, place: tuple[language.Open, ...]) -> Any:
        made = self._functions.get(item)
        made = made or language.HOWS[item.how](in_two(self._counted(item), item.ahead))
        self._functions[item] = made

        # Equal blocks share a trace, if no other one is open that equals one of them. A
        # condition may be another tracer.
        blocks = [dataclasses.replace(one.block, body=()) for one in place]
        shares = not self._threads and len({*blocks}) == len(blocks)
        shares &= not any(block.where.when for block in blocks)
        found = item, *(blocks if shares else place)

        def fn(params: Any, x: Any) -> Any:
            before = self.traces[item]
            out = made(params, x)
            again = self.traces[item] - before
            if item.how not in UNCACHED:
                assert again <= (found not in self._found), f'traced: {item}'
            self._found.add(found)
            for one in place:  # What is written within a negation has to match.
                takes = dataclasses.replace(one.block.where, negated=False).takes
                one.called |= any(map(takes, self._paths[item.model]))
            return out

        return fn

    def _counted(self, item: language.Call) -> Any:
        def fn(params: Any, x: Any) -> Any:
            self.traces[item] += 1
            variables = {'params': params, 'ema': jax.tree.map(jnp.sin, params)}
            module = self.modules[item.model]
            if not item.mutable:
                return module.apply(variables, x)
            y, written = module.apply(variables, x, mutable=['params'])
            return y, written['params']

        return fn

    def derivative(self, fn: Any, params: Any) -> Callable[[], Any]:
        """Compiled here and now: JAX finds such a program in another cache."""
        out = fn(params, self.x)
        return lambda: out

    def thread(self, item: Any, place: Any) -> None:
        self._threads += 1
        super().thread(item, place)
        self._threads -= 1

    def block(self, item: language.Block, place: tuple[language.Open, ...]) -> None:
        opened = language.Open(item, self.x)
        try:
            with (
                language.left(),
                rewrite_of(item.where, item.rule, item.judged, self.x),
            ):
                self.run(item.body, (*place, opened))
        except (errors.UnusedFilterError, UserWarning):
            # Something may have read a variable all the same.
            assert item.judged and not opened.called


# Their rules run in the backward pass, or they are not compiled.
UNCACHED = 'plain', 'forward', 'jit of custom_vjp'
