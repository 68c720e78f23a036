"""Names are checked in each block, whatever else has run in the process.

A block around a compiled program meets no variable. What the program had read is known
from the cache keys of JAX; see ``flax_sg/engine/programs.py``.
"""

import contextlib
import functools
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import flax_sg as sg
import oracle
from flax_sg import errors
from flax_sg import linen as nn

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)


class Net(fnn.Module):
    """Layers by name. All models share shapes, and small programs such as ``relu``."""

    names: tuple[str, ...]

    @fnn.compact
    def __call__(self, x):
        x = jax.nn.relu(x)
        for name in self.names:
            x = jax.nn.silu(fnn.Dense(2, name=name)(x))
        return x


# Eight models with overlapping names.
MODELS = {
    'encoder': Net(('encoder', 'head')),
    'backbone': Net(('backbone', 'head')),
    'both': Net(('encoder', 'backbone', 'head')),
    'dense': Net(('Dense_0', 'Dense_1')),
    'short': Net(('Dense_0',)),
    'head': Net(('head',)),
    'extra': Net(('encoder', 'extra')),
    'enc': Net(('enc', 'head')),
}
NAMES = sorted({name for model in MODELS.values() for name in model.names})
PARAMS = {
    name: model.init(jax.random.key(0), X)['params'] for name, model in MODELS.items()
}


def loss(name: str, params: Any) -> Any:
    return jnp.mean(jax.nn.silu(MODELS[name].apply({'params': params}, X)))


# Five kinds of filters of the layers with a name.
FILTERS: dict[str, Callable[[str], Any]] = {
    'glob': lambda name: f'{name}/**',
    'other glob': lambda name: f'{name}/*',
    'regex': lambda name: re.compile(f'{name}/.+'),
    'function': lambda name: lambda path: path.startswith(f'{name}/'),
    'list': lambda name: [f'{name}/kernel', f'{name}/bias'],
}
# How a gradient is computed; each function lives as long as the process.
RUNS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    'jitted gradient': lambda fn: jax.jit(jax.grad(fn)),
    'gradient of jitted': lambda fn: jax.grad(jax.jit(fn)),
    'checkpoint': lambda fn: jax.grad(jax.checkpoint(fn)),
    'eager': jax.grad,
}
STEPS = {
    (run, name): make(functools.partial(loss, name))
    for run, make in RUNS.items()
    for name in MODELS
}


# What is written, around a function.
FORMS_OF_BLOCKS: dict[str, Callable[[Any, Any], Any]] = {
    'block': lambda where, step: _in(nn.stop_gradient(where), step),
    'train_only': lambda where, step: _in(nn.train_only(where), step),
    'scale_gradient': lambda where, step: _in(nn.scale_gradient(where, 0.0), step),
    'decorator': lambda where, step: nn.stop_gradient(where)(step)(),
}


def _in(block: Any, step: Callable[[], Any]) -> Any:
    with block:
        return step()


@functools.cache
def by_hand(run: str, model: str, name: str, kept: bool) -> Any:
    """The gradients with the layers of a name stopped, or all others."""

    def selects(path: str) -> bool:
        return (path.split('/')[0] == name) != kept

    return RUNS[run](lambda p: loss(model, oracle.stopped(p, selects)))(PARAMS[model])


def heard(block: Any, run: Callable[[], Any]) -> tuple[str, Any]:
    """What a block says: 'raised', 'warned' or ''; and what was computed in it."""
    found = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try:
            with block:
                found = run()
        except errors.UnusedFilterError:
            return 'raised', found
    return 'warned' if caught else '', found


@pytest.mark.every_case
@pytest.mark.parametrize('seed', range(3))
def test_names_in_any_order_of_models_filters_and_programs(seed):
    draw = random.Random(seed)
    for _ in range(60):
        model, name = draw.choice(sorted(MODELS)), draw.choice(NAMES)
        kind, run = draw.choice(sorted(FILTERS)), draw.choice(sorted(RUNS))
        form = draw.choice(sorted(FORMS_OF_BLOCKS))
        step = functools.partial(STEPS[run, model], PARAMS[model])
        whole = functools.partial(FORMS_OF_BLOCKS[form], FILTERS[kind](name), step)
        said, found = heard(contextlib.nullcontext(), whole)
        case = f'{form} {kind} {name!r} in {model!r}, {run}: {said!r}'
        assert said == ('' if name in MODELS[model].names else 'raised'), case
        if not said:
            expected = by_hand(run, model, name, form == 'train_only')
            if form == 'scale_gradient':  # Negative zeros.
                expected, found = jax.tree.map(lambda g: g + 0.0, (expected, found))
            oracle.assert_same(found, expected)


def text_of(block: Any, run: Callable[[], Any]) -> str:
    with pytest.raises(errors.UnusedFilterError) as caught, block:
        run()
    return str(caught.value)


def jitted(model: str) -> Callable[[], Any]:
    step = jax.jit(functools.partial(loss, model))
    return lambda: step(PARAMS[model])


def test_the_error_is_of_this_block_each_time():
    steps = [jitted('encoder'), jitted('backbone')]
    with nn.stop_gradient('encoder/**'):
        steps[0]()
    texts = [text_of(nn.stop_gradient('encoder/**'), steps[1]) for _ in range(3)]
    assert 'backbone/kernel' in texts[0]
    assert 'none of the 4 variables' in texts[0]  # Each of them once.
    assert texts[1:] == texts[:1] * 2


def test_a_second_function_of_the_same_code_is_checked():
    step = jitted('both')
    for name in ['encoder', 'encodr', 'backbone'] * 2:
        where = FILTERS['function'](name)
        said, _ = heard(nn.stop_gradient(where), step)
        assert said == ('raised' if name == 'encodr' else '')


def test_programs_that_ran_in_one_block_are_told_apart():
    one, other = jitted('encoder'), jitted('backbone')
    with nn.stop_gradient('encoder/**'):
        one()
        other()
    for _ in range(2):
        with nn.stop_gradient('encoder/**'):
            one()
        text_of(nn.stop_gradient('encoder/**'), other)


def test_the_warning_does_not_depend_on_other_programs():
    model = MODELS['encoder']
    whole = jax.jit(lambda p: model.apply({'params': p}, X))
    with nn.stop_gradient('encoder/**'):
        whole(PARAMS['encoder'])
    bound = model.bind({'params': PARAMS['encoder']})
    reads = jax.jit(lambda x: x + bound.get_variable('params', 'head')['kernel'])
    for _ in range(3):
        assert heard(nn.stop_gradient('encoder/**'), lambda: reads(X))[0] == 'warned'


def test_a_cached_program_beside_what_was_read_beside_it_before():
    step, model, params = jitted('encoder'), MODELS['dense'], PARAMS['dense']
    for _ in range(3):
        with nn.stop_gradient('encoder/**'):
            step()
            model.apply({'params': params}, X)


def test_a_cached_program_beside_a_new_model():
    step = jitted('extra')
    with nn.stop_gradient('extra/**'):
        step()

    new = Net(('of_this_test',))
    variables = new.init(jax.random.key(0), X)

    def run() -> None:
        step()
        new.apply(variables, X)

    text = text_of(nn.stop_gradient('extra/**'), run)
    assert 'of_this_test/kernel' in text
    assert text.endswith('open a block for each of the two models.')
    for _ in range(2):  # Neither of the two has it.
        assert 'nowhere' in text_of(nn.stop_gradient(['nowhere/**', 'extra/**']), run)
    with nn.stop_gradient('extra/**', unused='ignore'):
        run()


def test_a_cached_program_beside_a_known_model_warns():
    one, other = jitted('extra'), jitted('head')
    with nn.stop_gradient(['extra/**', 'head/**']):
        one()
        other()

    def run() -> None:
        one()
        MODELS['head'].apply({'params': PARAMS['head']}, X)

    with nn.stop_gradient('extra/**'):
        one()
        other()
    said, _ = heard(nn.stop_gradient('extra/**'), run)
    assert said == 'warned'


def test_a_block_of_a_module_around_a_cached_function_of_another_tree():
    dense = fnn.Dense(2)
    params = dense.init(jax.random.key(1), X)['params']
    step = jax.jit(lambda p, x: dense.apply({'params': p}, x))

    class Around(fnn.Module):
        where: str

        @fnn.compact
        def __call__(self, x, other):
            x = fnn.Dense(2, name='own')(x)
            with nn.stop_gradient(self.where):
                return step(other, x)

    variables = {'params': {'own': params}}
    for _ in range(3):
        Around('kernel').apply(variables, X, params)
        with pytest.raises(errors.UnusedFilterError):
            Around('kernle').apply(variables, X, params)


# What runs no program of Flax at all, under a filter that is known.


def test_an_empty_block_raises():
    with nn.stop_gradient('encoder/kernel'):
        jitted('encoder')()
    assert 'did nothing' in text_of(nn.stop_gradient('encoder/kernel'), lambda: None)


def test_programs_from_before_the_block_raise():
    step, params = jax.jit(functools.partial(loss, 'encoder')), PARAMS['encoder']
    _, pullback = jax.vjp(step, params)
    compiled = step.lower(params).compile()
    with nn.stop_gradient('encoder/bias'):
        step(params)
    for run in (lambda: pullback(jnp.ones(())), lambda: compiled(params)):
        assert 'did nothing' in text_of(nn.stop_gradient('encoder/bias'), run)


# Forms that know all variables of their module.


FORMS: dict[str, Callable[[Any, str], Any]] = {
    'Frozen': lambda model, where: nn.Frozen(model, where).apply(SHORT, X),
    'init': lambda model, where: nn.Frozen(model, where).init(jax.random.key(0), X),
    'class': lambda model, where: nn.stop_gradient(Net, where)(model.names).apply(
        SHORT, X
    ),
    'jitted': lambda model, where: jax.jit(nn.Frozen(model, where).apply)(SHORT, X),
}
SHORT = {'params': PARAMS['short']}


@pytest.mark.parametrize('form', FORMS)
def test_forms_after_a_right_filter_for_another_model(form):
    with nn.stop_gradient('extra/**'):
        jitted('extra')()
    frozen = nn.Frozen(MODELS['extra'], 'extra/**')
    jax.jit(frozen.apply)({'params': PARAMS['extra']}, X)
    for where in ('extra/**', 'ext*/**', re.compile('extra/.*'), 'Dense_1/**'):
        for _ in range(2):
            with pytest.raises(errors.UnusedFilterError):
                FORMS[form](MODELS['short'], where)


def test_live_and_reports_in_a_block():
    step = jax.jit(functools.partial(loss, 'encoder'))
    other = jax.jit(functools.partial(loss, 'backbone'))
    for _ in range(2):
        with nn.stop_gradient('encoder/**'):
            live = sg.live(step, PARAMS['encoder'])
        assert repr(live) == "<live: 'head/bias', 'head/kernel'>"
        for tell in (sg.live, sg.gradient_flow):
            unheard = functools.partial(tell, other, PARAMS['backbone'])
            text_of(nn.stop_gradient('encoder/**'), unheard)
