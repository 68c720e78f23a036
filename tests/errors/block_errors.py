"""Blocks, lifts and wrappers that are not used as they can be; see test_errors."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.internals import optional

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
    stack = nn.scan(
        Layer,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=4,
        frozen_layers=frozen_layers,
    )
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
    scan = fnn.scan(
        Body, variable_axes={'params': 0}, split_rngs={'params': True}, length=2
    )
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), PARAMS)
    params = {'other': stack, 'Model_0': stack}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model = scan()
        jax.eval_shape(lambda: model.apply({'params': params}, X, None))


class Doubled(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return x + self.param('in_bits', jnp.zeros, (2,), jnp.int8).sum(), None


def around_scan() -> None:
    model = fnn.scan(
        Doubled, variable_axes={'params': 0}, split_rngs={'params': True}, length=2
    )()
    variables = {'params': {'in_bits': jnp.zeros((2, 2), jnp.int8)}}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
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
    variables = {'params': {'before': PARAMS, 'head': PARAMS}}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        ReadsBefore().apply(variables, X)


def reload(name: str) -> None:
    importlib.reload(importlib.import_module(name))


def made_by_setup(name: str, who: str, reason: str) -> str:
    return (
        f'BlockError: self.{name}, which setup of {who} makes, cannot be '
        f'computed again for the open block: {reason}.\n'
        'Keep parameters and modules in setup (self.w = self.param(...)), and compute '
        f'self.{name} in the method that uses it.'
    )


VALUES = (
    ' cannot be read in place of variables.\n'
    "Expected: a tree of values, nested as the variables are, {'kernel': value}, with "
    "collections on top for nn.mirror, {'params': {'kernel': value}}; the name of "
    'another collection, for variables of one collection; a bound module; or a '
    'function (path, value) -> value.'
)


class ReadsLater(fnn.Module):
    """Keeps what reads its parameters later."""

    def setup(self):
        self.box = self.variable('params', 'b', lambda: jnp.ones(()))
        self.fn = lambda x: self.box.value * x

    def use(self, x):
        return self.fn(x) * self.box.value


def reads_later() -> Any:
    return nn.Frozen(ReadsLater()).bind({'params': {'b': jnp.ones(())}})


CASES: dict[str, tuple[Any, ...]] = {
    'the twin of several collections': (
        lambda: nn.substitute('ema', collections=['params', 'batch_stats']),
        f"ArgumentTypeError: 'ema' (str){VALUES}",
    ),
    'an empty tree of values': (
        lambda: nn.substitute({}),
        f'ArgumentTypeError: a tree without a value{VALUES}',
    ),
    'an array of values': (
        lambda: nn.substitute(X),
        f'ArgumentTypeError: an array (float32[2, 2]){VALUES}',
    ),
    'an array for a collection': (
        lambda: nn.substitute({'params': X}, collections=['params']),
        f"ArgumentTypeError: float32[2, 2] for the collection 'params'{VALUES}",
    ),
    'values of a collection that is left out': (
        lambda: nn.substitute({'ema': {'bias': X}}, collections=['params', 'stats']),
        "ArgumentTypeError: values for the collection 'ema', which "
        f"collections=['params', 'stats'] leaves out,{VALUES}",
    ),
    'values of a module that is not bound': (
        lambda: nn.substitute(MODEL),
        f'ArgumentTypeError: a Model that is not bound{VALUES}',
    ),
    'a selected variable without a value': (
        lambda: run(nn.substitute({'bias': 2.0 * PARAMS['bias']}, where='*')),
        "StructureError: There is no value for 'kernel' of the collection 'params' in "
        'the tree.\n'
        'Give one, or leave the variable out: by where= of substitute, by sg.ABSENT in '
        'its place for nn.mirror.',
    ),
    'values by name for a tree': (
        lambda: sg.rewrite(PARAMS, nn.substitute({'bias': 2.0 * PARAMS['bias']})),
        'ArgumentTypeError: sg.rewrite was given nn.substitute with values by name: '
        'only variables of a model have these names.\n'
        'For a tree write sg.substitute(tree, values).',
    ),
    'a decorated function that returns a generator': (
        lambda: nn.stop_gradient(later, 'kernel')(MODEL.bind(VARIABLES)),
        'ArgumentTypeError: later returns a generator or a coroutine, whose body runs '
        'when the call is over and its block is closed.\n'
        'Open the block in the body: with nn.stop_gradient(where):',
    ),
    'methods of a function': (
        lambda: nn.stop_gradient('kernel')(reload, methods=['encode']),
        "ArgumentTypeError: methods=['encode'] was given, but no Module class to "
        'lift.\n'
        'Write nn.stop_gradient(Model, where, methods=[...]).',
    ),
    'levels': (
        lambda: nn.stop_gradient('kernel', levels=2),
        'ArgumentValueError: levels=2: expected None or 1.',
    ),
    'rngs': (
        lambda: mirrored(rngs='other'),
        "ArgumentValueError: rngs='other': expected 'same' or 'fresh'.",
    ),
    'an update of other variables': (
        lambda: mirrored(variables=VARIABLES, state='update'),
        "ArgumentValueError: with variables=, state='update': expected 'hold' or "
        "'eval'.",
    ),
    'what Python asks of a wrapper': (
        lambda: nn.Frozen(MODEL).__wrapped__,
        "AttributeError: 'Frozen' object has no attribute '__wrapped__'",
    ),
    'a layer that there is not': (
        lambda: stacked(7),
        'PartError: frozen_layers=7 does not fit a scan of 4 layers: index 7 is out '
        'of bounds for axis 0 with size 4.\n'
        'Write indices from 0 to 3, such as frozen_layers=slice(0, 2), or a bool for '
        'each layer.',
    ),
    'a frozen stack that is written': (
        lambda: stacked(slice(0, 2), True, ['params']),
        "PartError: the parameter 'w' of layers of which some are frozen is written, "
        'or handed to a lifted transform that may write it.\n'
        "Take 'params' out of mutable=, or use nn.stop_gradient(sg.at(...)) around a "
        'scan without frozen_layers=.',
        lambda: [
            stacked(slice(0, 2)),
            run_at(sg.at('w', np.s_[:2])),
        ],
    ),
    'no name of flax.linen': (
        lambda: nn.Densse,
        "AttributeError: module 'flax_sg.linen' has no attribute 'Densse'",
    ),
    'a name that flax_sg has not': (
        lambda: sg.gradinet_flow,
        "AttributeError: module 'flax_sg' has no attribute 'gradinet_flow'",
    ),
    'a package that is not installed': (
        lambda: optional.optional('no_such_package.part', 'Drawing', 'no-such-package'),
        'ModuleNotFoundError: Drawing needs no-such-package, which is not installed. '
        'Install it with: pip install no-such-package',
    ),
    'a reload of what holds state': (
        lambda: reload('flax_sg.engine.blocks'),
        'UnsupportedVersionError: flax_sg.engine.blocks cannot be reloaded: open '
        'blocks, and what JAX keeps of compiled programs, rest on what it holds.\n'
        'Start Python anew; flax_sg and flax_sg.linen can be reloaded.',
        lambda: [
            reload('flax_sg.linen'),
            reload('flax_sg'),
        ],
    ),
    'a block behind what it names': (
        read_before,
        "NothingStoppedWarning: The block of stop_gradient(Glob('before/**')), opened "
        'at block_errors.py:LINE, had no effect: it selects nothing that was read in '
        'it.\n'
        'Open the block around the code that reads these variables, or pass '
        "unused='ignore'.",
    ),
    'a cached program of another model': (
        cached_beside,
        "NothingStoppedWarning: Glob('layers_0/kernel') matches none of the 1 "
        'variable.\n'
        "Nearest: 'lonely'.\n"
        "A pattern matches whole paths, from below the collection: 'encoder/**' takes "
        'all variables in encoder.\n'
        "If nothing has to match, pass unused='ignore'.\n"
        'A compiled program may have it: the same filter was right before. If a second '
        'model runs in this block, open a block of its own for it.',
        lambda: cached_beside(unused='ignore'),
    ),
    'an apply inside of another one': (
        lambda: run(nn.stop_gradient('ker*'), Applies(), {'params': {'own': PARAMS}}),
        "UnusedFilterError: stop_gradient(Glob('ker*')) names variables of an apply "
        'inside of another one.\n'
        'A block covers one tree: such an apply sees what the module around it gives '
        'it, computed or read.\n'
        'Stop what is given: apply(sg.stop_gradient(tree, where), x). Or open a block '
        'around that apply at top level.',
        lambda: run(nn.stop_gradient('own/**'), Applies(), {'params': {'own': PARAMS}}),
    ),
    'a write in a transform in a block': (
        write_in_remat,
        "BlockError: Counts.__call__ (at '') writes the variable 'count' of the "
        "collection 'state' in a transform, and stop_gradient(Constant(True), "
        'collections=True), which selects it, is open around the transform.\n'
        'Leave the collection out with collections=, or open the block inside of the '
        'transform.',
        lambda: write_in_remat('params'),
    ),
    'layers that share their parameters': (
        lambda: shared_by_layers(variable_broadcast='params'),
        'PartError: frozen_layers=slice(0, 2, None) was given, but all layers share '
        "their parameters: variable_axes has no 'params'.\n"
        "Write variable_axes={'params': 0}, or freeze the parameters as a whole: "
        'nn.Frozen(module).',
        lambda: shared_by_layers(variable_axes={'params': 0}),
    ),
    'a draw that is kept': (
        kept,
        made_by_setup(
            'kept',
            "Draws (at '')",
            'setup would have to run again, and it draws random numbers',
        ),
    ),
    'a module beside an array': (
        lambda: traced(Hides(), {'params': {'w': X}}),
        made_by_setup('kept', "Hides (at '')", 'it holds a module as well as an array'),
    ),
    'a value that is not made again': (
        lambda: forgets('never'),
        made_by_setup('kept', "Forgets (at '')", 'setup did not make it again'),
    ),
    'a value of another type': (
        lambda: forgets('other'),
        made_by_setup(
            'kept',
            "Forgets (at '')",
            'setup made another type of value when it ran again',
        ),
    ),
    'a value that is read in setup': (
        lambda: traced(OpensAfter(), {'params': {'w': X}}),
        made_by_setup(
            'kept',
            "OpensAfter (at '')",
            'the block is in setup, after the line that makes the value',
        ),
    ),
    'a wrapper of a module with an apply of its own': (
        lambda: nn.mirror(StartsItself()).apply(VARIABLES, X),
        'ArgumentTypeError: StartsItself defines its own apply, which a wrapper '
        'cannot call.\n'
        'Open a block: with nn.stop_gradient(where): StartsItself(...).apply(...).',
    ),
    'a stop that scans keep': (
        in_scan,
        "ScanMemoryWarning: nn.Frozen(Sequential(...)) at 'Sequential_0' is called in "
        'the body of a scan with a function that uses other modules of the body.\n'
        'Gradients are right, but each step saves the stopped parameters for the '
        'backward pass: at least 24 bytes times the length of the scan.\n'
        'Call the other modules outside of the wrapper, or open a block around the '
        "scan: with nn.stop_gradient('layers/...'): layers(x).",
    ),
    'a function of a wrapped module': (
        lambda: reads_later().fn,
        'BlockError: nn.Frozen(ReadsLater(...)).fn is or holds a function that reads '
        'variables when it is used.\n'
        "Such a read is outside of the wrapper's calls, so the rule would miss it.\n"
        'Call a method of the module: def use(self, ...) in ReadsLater, which uses '
        'self.fn.',
        lambda: reads_later().use(1.0),
    ),
    'a Variable of a wrapped module': (
        lambda: reads_later().box,
        'BlockError: nn.Frozen(ReadsLater(...)).box is or holds a Variable that reads '
        'variables when it is used.\n'
        "Such a read is outside of the wrapper's calls, so the rule would miss it.\n"
        'Call a method of the module: def use(self, ...) in ReadsLater, which uses '
        'self.box.',
        lambda: reads_later().use(1.0),
    ),
    'a function around a scan': (
        around_scan,
        "ScanMemoryWarning: substitute(Glob('in_bits')) is open around a scan, and "
        'makes 16 bytes of 4 bytes of stacked variables.\n'
        'Values are right, but those of all layers are there at a time, and are kept '
        'for the backward pass.\n'
        'Let each layer make its own, in the body of the scan: '
        'nn.substitute(Layer, function, where=...).',
    ),
}

module, x = nn.Dense(2), X
