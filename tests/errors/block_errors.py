"""Blocks, lifts and wrappers that are not used as they can be; see test_errors."""

from __future__ import annotations

import importlib
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.internals import optional
from tests.helpers import oracle

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)
ONES = fnn.initializers.ones


class Model(fnn.Module):
    """A dense layer by hand."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param('kernel', ONES, (2, 2))
        return x @ kernel + self.param('bias', ONES, (1, 2))

    def encode(self, x: Any) -> Any:
        return self(x)


MODEL = Model()
PARAMS = {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones((1, 2))}
VARIABLES = {'params': PARAMS}


def traced(model: Any, variables: Any, **options: Any) -> Any:
    """Traces a model: what is no tracer needs no stop."""
    return jax.eval_shape(lambda v: model.apply(v, X, **options), variables)


def run(block: Any, model: Any = MODEL, variables: Any = VARIABLES) -> Any:
    with block:
        return model.apply(variables, X)


def in_steps(module: Any) -> Any:
    """A generator function."""
    yield module.name


class Named(Model):
    label = 'a model'


class Steps(fnn.Dense):
    def steps(self, x: Any) -> Any:
        yield self(x)

    def listed(self, x: Any) -> Any:
        return [*self.steps(x)]


OF_STEPS = Steps(2).init(jax.random.key(0), X)


def later(module: Any) -> Any:
    """Returns before its body has run."""
    return in_steps(module)


def mirrored(**options: Any) -> Any:
    class Shows(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            return nn.mirror(Model(name='m'), **options)(x)

    return Shows().apply({'params': {'m': PARAMS}}, X)


class StartsItself(Model):
    """A model with an ``apply`` of its own, as MaxText's."""

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return fnn.Module.apply(self, *args, **kwargs)


class Calls(fnn.Module):
    """Calls a module that it is given, in a wrapper of its own."""

    @fnn.compact
    def __call__(self, x: Any, module: Any) -> Any:
        return nn.Frozen(module)(x)


def nested(wrap: Any) -> None:
    class Lifts(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            return fnn.remat(Calls)()(x, wrap(Model(name='m')))

    Lifts().init(jax.random.key(0), X)


class Layer(fnn.Module):
    """A layer of a stack, which may write its parameter."""

    writes: bool = False

    @fnn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        w = self.param('w', ONES, (2, 2))
        if self.writes:
            self.put_variable('params', 'w', 2.0 * w)
        return x * w, None


def run_at(where: Any) -> None:
    with nn.stop_gradient(where):
        stacked(None)


class Applies(fnn.Module):
    """Applies a model to weights of its own."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        own = Model(name='own')
        own(x)
        return Model(parent=None).apply(own.variables, x)


class Counts(fnn.Module):
    """Writes state in each call."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        count = self.variable('state', 'count', jnp.zeros, ())
        count.value = count.value + 1.0
        return x * self.param('scale', ONES, (1, 2))


def write_in_remat(collections: Any = True) -> None:
    state = {'count': jnp.zeros(())}
    variables = {'params': {'scale': jnp.ones((1, 2))}, 'state': state}
    with nn.stop_gradient(True, collections=collections):
        fnn.remat(Counts)().apply(variables, X, mutable='state')


class Lonely(fnn.Module):
    """A name that no other test has: what is known is warned of."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param('lonely', ONES, (1, 2))


def cached_beside(**options: Any) -> Any:
    """A program that has what is named, beside a model that has not."""
    first = fnn.Sequential([fnn.Dense(2)])
    variables = first.init(jax.random.key(0), X)
    step = jax.jit(lambda v: first.apply(v, X))
    with nn.stop_gradient('layers_0/kernel'):
        step(variables)
    with nn.stop_gradient('layers_0/kernel', **options):
        step(variables)
        return Lonely().apply({'params': {'lonely': X[:1]}}, X)


def shared_by_layers(**options: Any) -> Any:
    return nn.scan(Layer, frozen_layers=slice(0, 2), length=4, **options)


def stacked(frozen_layers: Any, writes: bool = False, mutable: Any = ()) -> Any:
    stack = nn.scan(Layer, length=4, frozen_layers=frozen_layers, **oracle.STACKED)
    params = {'params': {'w': jnp.ones((4, 2, 2))}}
    return stack(writes).apply(params, X, None, mutable=list(mutable))


class Draws(fnn.Module):
    """Keeps what it draws, and draws once more."""

    def setup(self) -> None:
        self.w = self.param('w', ONES, (2, 2))
        self.kept = self.w + jax.random.normal(self.make_rng('noise'), (2, 2))

    def __call__(self, x: Any) -> Any:
        x = x + jax.random.normal(self.make_rng('noise'), (2, 2))
        with nn.stop_gradient('w'):
            return self.kept * x


def kept() -> Any:
    return traced(Draws(), {'params': {'w': X}}, rngs={'noise': jax.random.key(0)})


class Hides(fnn.Module):
    """Keeps a function that holds the module, where nothing can take its place."""

    def setup(self) -> None:
        self.w = self.param('w', ONES, (2, 2))
        self.kept = Holder(self.w, self)

    def __call__(self, x: Any) -> Any:
        with nn.stop_gradient('w'):
            return self.kept.w * x


class Holder:
    """Has slots, and so no attributes that could be copied."""

    __slots__ = ('__weakref__', 'module', 'w')

    def __init__(self, w: Any, module: Any) -> None:
        self.w, self.module = w, module


calls: list[int] = []


class Forgets(fnn.Module):
    """Makes another attribute on its second run, or none."""

    again: str

    def setup(self) -> None:
        self.w = self.param('w', ONES, (2, 2))
        self.twice = 2.0 * self.w
        if self.again == 'always' or not calls:
            self.kept = (self.twice, None)
        elif self.again == 'other':
            self.kept = {'module': Hides(), 'w': self.twice}
        calls.append(1)

    def __call__(self, x: Any) -> Any:
        with nn.stop_gradient('w'):
            return self.kept[0] * x


def forgets(again: str) -> Any:
    calls.clear()
    return traced(Forgets(again), {'params': {'w': X}})


class ReadsAtOnce(fnn.Module):
    """Reads what ``setup`` makes where it is made."""

    sizes: Any

    def setup(self) -> None:
        self.kept = 2.0 * self.param('w', ONES, (2, 2))
        self.layers = [fnn.Dense(n, name=name) for name, n in self.sizes.items()]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope is not None:
            self.kept  # noqa: B018

    def __call__(self, x: Any) -> Any:
        return self.kept * x


def at_once(**sizes: int) -> Any:
    with nn.stop_gradient('w'):
        return traced(ReadsAtOnce(sizes), {'params': {'w': X}})


class OpensAfter(fnn.Module):
    """Opens a block in ``setup``, and reads in it what was computed before."""

    def setup(self) -> None:
        self.w = self.param('w', ONES, (2, 2))
        self.kept = 2.0 * self.w
        with nn.stop_gradient('w'):
            self.used = self.kept + 1.0

    def __call__(self, x: Any) -> Any:
        return self.used * x


class Body(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        other = Model(name='other')
        return nn.Frozen(fnn.Sequential([Model(), lambda x: other(x)]))(x), None


def in_scan() -> None:
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), PARAMS)
    params = {'other': stack, 'Model_0': stack}
    model = fnn.scan(Body, length=2, **oracle.STACKED)()
    jax.eval_shape(lambda: model.apply({'params': params}, X, None))


class Doubled(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return x + self.param('in_bits', jnp.zeros, (2,), jnp.int8).sum(), None


def around_scan() -> None:
    model = fnn.scan(Doubled, length=2, **oracle.STACKED)()
    variables = {'params': {'in_bits': jnp.zeros((2, 2), jnp.int8)}}
    with nn.substitute(lambda _, w: w.astype(jnp.float32), where='in_bits'):
        jax.eval_shape(lambda: model.apply(variables, jnp.float32(0), None))


class ReadsBefore(fnn.Module):
    """Opens a block behind what it names, or around it."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        before, head = Model(name='before'), Model(name='head')
        h = before(x)
        with nn.stop_gradient('before/**'):
            return head(h)


def read_before() -> None:
    ReadsBefore().apply({'params': {'before': PARAMS, 'head': PARAMS}}, X)


def reload(name: str) -> None:
    importlib.reload(importlib.import_module(name))


class ReadsLater(fnn.Module):
    """Keeps what reads its parameters later."""

    def setup(self):
        self.box = self.variable('params', 'b', lambda: jnp.ones(()))
        self.fn = lambda x: self.box.value * x

    def use(self, x):
        return self.fn(x) * self.box.value


OUT = {'kernel': X[:, :1], 'bias': X[0, :1]}


def shared(values: Any) -> Any:
    """A view, with other values, of a module that uses a module of its parent."""

    class Uses(fnn.Module):
        embed: Any

        @fnn.compact
        def __call__(self, x: Any) -> Any:
            return fnn.Dense(1, name='out')(self.embed.attend(x))

    class Parent(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            uses = Uses(fnn.Embed(2, 2, name='embed'), name='uses')
            return nn.mirror(uses, variables=values)(x)

    params = {'embed': {'embedding': X}, 'uses': {'out': OUT}}
    return Parent().apply({'params': params}, X)


def reads_later() -> Any:
    return nn.Frozen(ReadsLater()).bind({'params': {'b': jnp.ones(())}})


CASES: dict[str, tuple[Any, ...]] = {
    'the twin of several collections': (
        lambda: nn.substitute('ema', collections=['params', 'batch_stats']),
        "ArgumentTypeError: 'ema' | 'kernel' | 'params' | nn.mirror",
    ),
    'an empty tree of values': (
        lambda: nn.substitute({}),
        "ArgumentTypeError: 'kernel' | 'params' | nn.mirror",
    ),
    'an array for a collection': (
        lambda: nn.substitute({'params': X}, collections=['params']),
        "ArgumentTypeError: 'params' | 'kernel' | nn.mirror",
    ),
    'values of a collection that is left out': (
        lambda: nn.substitute({'ema': {'bias': X}}, collections=['params', 'stats']),
        "ArgumentTypeError: 'ema' | 'params' | 'stats' | nn.mirror",
    ),
    'values of a module that is not bound': (
        lambda: nn.substitute(MODEL),
        "ArgumentTypeError: 'kernel' | 'params' | nn.mirror",
    ),
    'a value for a variable outside of the module': (
        lambda: shared({'embed': {'embedding': X}, 'out': OUT}),
        "UnusedFilterError: 'embed/embedding' | nn.substitute(tree)",
        lambda: shared(lambda path, value: 2.0 * value),
    ),
    'a selected variable without a value': (
        lambda: run(nn.substitute({'bias': 2.0 * PARAMS['bias']}, where='*')),
        "StructureError: 'kernel' | 'params' | sg.ABSENT",
    ),
    'values by name for a tree': (
        lambda: sg.rewrite(PARAMS, nn.substitute({'bias': 2.0 * PARAMS['bias']})),
        'ArgumentTypeError: sg.substitute(tree, values)',
    ),
    'a decorated function that returns a generator': (
        lambda: nn.stop_gradient(later, 'kernel')(MODEL.bind(VARIABLES)),
        'ArgumentTypeError: nn.stop_gradient(where)',
    ),
    'a method of a wrapped module that returns a generator': (
        lambda: nn.Frozen(Steps(2)).bind(OF_STEPS).steps(X),
        'BlockError: Steps.steps | return list(...)',
        lambda: nn.Frozen(Steps(2)).bind(OF_STEPS).listed(X),
    ),
    'a name in methods= that is no method': (
        lambda: nn.stop_gradient(Named, 'kernel', methods=['label']),
        "ArgumentTypeError: methods=['label'] | Named.label is 'a model' | "
        'nn.stop_gradient(Named, where, methods=[...])',
    ),
    'a name in methods= that there is not': (
        lambda: nn.stop_gradient(Named, 'kernel', methods=['encod']),
        "AttributeError: Named has no method 'encod' | methods=['encode', ...]",
        lambda: nn.stop_gradient(Named, 'kernel', methods=['encode']),
    ),
    'a wrapper in place of a block': (
        lambda: run(nn.Frozen(MODEL)),
        'ArgumentTypeError: nn.Frozen(Model(...)) | with nn.stop_gradient(where):',
        lambda: run(nn.stop_gradient(True)),
    ),
    'several filters that are no list': (
        lambda: nn.Frozen(MODEL, 'kernel', 'b/**'),
        "FilterTypeError: collections='b/**' | ['encoder/**', 'b/**']",
        lambda: nn.Frozen(MODEL, ['kernel', 'b/**']),
    ),
    'methods of a function': (
        lambda: nn.stop_gradient('kernel')(reload, methods=['encode']),
        "ArgumentTypeError: 'encode' | nn.stop_gradient(Model, where, methods=[...])",
    ),
    'levels': (
        lambda: nn.stop_gradient('kernel', levels=2),
        'ArgumentValueError: levels=2',
    ),
    'rngs': (lambda: mirrored(rngs='other'), "ArgumentValueError: 'other'"),
    'an update of other variables': (
        lambda: mirrored(variables=VARIABLES, state='update'),
        "ArgumentValueError: 'update' | 'hold' | 'eval'",
    ),
    'a wrapper as an argument of a lifted class': (
        lambda: nested(nn.Frozen),
        'ArgumentTypeError: nn.Frozen(module, where)(x)',
        lambda: nested(lambda module: module),
    ),
    'what Python asks of a wrapper': (
        lambda: nn.Frozen(MODEL).__wrapped__,
        "AttributeError: 'Frozen' | '__wrapped__'",
    ),
    'a layer that there is not': (
        lambda: stacked([7]),
        'PartError: frozen_layers=[7] | frozen_layers=slice',
    ),
    'a number of layers': (
        lambda: stacked(2),
        'PartError: frozen_layers=2 | slice(2) | [2]',
        lambda: [stacked(slice(2)), stacked([2])],
    ),
    'a frozen stack that is written': (
        lambda: stacked(slice(0, 2), True, ['params']),
        "PartError: 'w' | 'params' | nn.stop_gradient(sg.at(...))",
        lambda: [stacked(slice(0, 2)), run_at(sg.at('w', np.s_[:2]))],
    ),
    'no name of flax.linen': (lambda: nn.Densse, "AttributeError: 'Densse'"),
    'a name that flax_sg has not': (
        lambda: sg.gradinet_flow,
        "AttributeError: 'flax_sg' | 'gradinet_flow'",
    ),
    'a package that is not installed': (
        lambda: optional.optional('no_such_package.part', 'Drawing', 'no-such-package'),
        'ModuleNotFoundError: Drawing | no-such-package',
    ),
    'a reload of what holds state': (
        lambda: reload('flax_sg.engine.blocks'),
        'UnsupportedVersionError: flax_sg.engine.blocks',
        lambda: [reload('flax_sg.linen'), reload('flax_sg')],
    ),
    'a block behind what it names': (
        read_before,
        "NothingStoppedWarning: block_errors.py:LINE | 'before/**' | "
        'jax.lax.stop_gradient(h)',
    ),
    'a cached program of another model': (
        cached_beside,
        "NothingStoppedWarning: 'layers_0/kernel' | 'lonely' | 'encoder/**'",
        lambda: cached_beside(unused='ignore'),
    ),
    'an apply inside of another one': (
        lambda: run(nn.stop_gradient('ker*'), Applies(), {'params': {'own': PARAMS}}),
        "UnusedFilterError: 'ker*' | sg.stop_gradient(tree, where)",
        lambda: run(nn.stop_gradient('own/**'), Applies(), {'params': {'own': PARAMS}}),
    ),
    'a write in a transform in a block': (
        write_in_remat,
        'BlockError: collections=True',
        lambda: write_in_remat('params'),
    ),
    'layers that share their parameters': (
        lambda: shared_by_layers(variable_broadcast='params'),
        "PartError: 'params' | nn.Frozen(module)",
        lambda: shared_by_layers(variable_axes={'params': 0}),
    ),
    'a draw that is kept': (kept, 'BlockError: self.kept | it draws random numbers'),
    'a module beside an array': (
        lambda: traced(Hides(), {'params': {'w': X}}),
        "BlockError: self.kept | Hides (at '') | it holds a module",
    ),
    'a value that is not made again': (
        lambda: forgets('never'),
        "BlockError: self.kept | Forgets (at '') | setup did not make it again",
    ),
    'a value of another type': (
        lambda: forgets('other'),
        "BlockError: self.kept | Forgets (at '') | another type of value",
    ),
    'a value that is read in a constructor': (
        lambda: at_once(second=2, first=2),
        'BlockError: ReadsAtOnce.__post_init__ | ReadsAtOnce.sizes | Sort sizes',
        lambda: at_once(first=2, second=2),
    ),
    'a value that is read in setup': (
        lambda: traced(OpensAfter(), {'params': {'w': X}}),
        'BlockError: self.kept | setup has not ended',
    ),
    'a wrapper of a module with an apply of its own': (
        lambda: nn.mirror(StartsItself()).apply(VARIABLES, X),
        'ArgumentTypeError: nn.stop_gradient(where)',
    ),
    'a stop that scans keep': (
        in_scan,
        'ScanMemoryWarning: nn.Frozen(Sequential(...)) | '
        "nn.stop_gradient('layers/...')",
    ),
    'a function of a wrapped module': (
        lambda: reads_later().fn,
        'BlockError: nn.Frozen(ReadsLater(...))',
        lambda: reads_later().use(1.0),
    ),
    'a function around a scan': (
        around_scan,
        "ScanMemoryWarning: 'in_bits' | nn.substitute(Layer, function, where=...)",
    ),
}

module, x = nn.Dense(2), X
