"""Names are checked where Python reads variables, and right programs never raise.

A block around a compiled program meets no variable, and repeats the verdict of the
block that compiled it; see ``flax_sg/engine/judgement.py``.
"""

import asyncio
import contextlib
import functools
import gc
import random
import re
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_sg import errors, filters
from flax_sg import linen as nn
from flax_sg.engine import numbers, roots
from flax_sg.rules import rules
from tests.helpers import oracle
from tests.helpers.left_over import forget_contexts

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


# Models with overlapping names.
MODELS = {
    'encoder': Net(('encoder', 'head')),
    'backbone': Net(('backbone', 'head')),
    'both': Net(('encoder', 'backbone', 'head')),
    'dense': Net(('Dense_0', 'Dense_1')),
    'short': Net(('Dense_0',)),
    'extra': Net(('encoder', 'extra')),
}
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


def heard(block: Any, run: Callable[[], Any]) -> str:
    """What a block says: 'raised', 'warned' or ''."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try:
            with block:
                run()
        except errors.UnusedFilterError:
            return 'raised'
    return 'warned' if caught else ''


def text_of(block: Any, run: Callable[[], Any]) -> str:
    with pytest.raises(errors.UnusedFilterError) as caught, block:
        run()
    return str(caught.value)


def jitted(model: str) -> Callable[[], Any]:
    step = jax.jit(functools.partial(loss, model))
    return lambda: step(PARAMS[model])


# Everyday programs: something runs a jitted loss first, and others follow.


def _traced(loss: Any, params: Any) -> Any:
    return jax.jit(lambda p: loss(p) * 2.0)(params)


def _with_rule(loss: Any, params: Any) -> Any:
    fn = jax.custom_vjp(loss)
    fn.defvjp(lambda p: (loss(p), p), lambda p, ct: jax.vjp(loss, p)[1](ct))
    return jax.jit(jax.grad(fn))(params)


async def _awaited(loss: Any, params: Any) -> Any:
    return loss(params)


OPENERS: dict[str, Callable[[Any, Any], Any]] = {
    'value': lambda loss, p: loss(p),
    'grad': lambda loss, p: jax.grad(loss)(p),
    'grad, then value': lambda loss, p: (jax.grad(loss)(p), loss(p)),
    'jitted grad': lambda loss, p: jax.jit(jax.grad(loss))(p),
    'lower': lambda loss, p: loss.lower(p),
    'compile': lambda loss, p: loss.lower(p).compile(),
    'eval_shape': lambda loss, p: jax.eval_shape(loss, p),
    'export': lambda loss, p: jax.export.export(loss)(p),
    'vjp': lambda loss, p: jax.vjp(loss, p)[1](jnp.ones(())),
    'jvp': lambda loss, p: jax.jvp(loss, (p,), (p,)),
    'vmap': lambda loss, p: jax.vmap(loss)(jax.tree.map(lambda w: w[None], p)),
    'jit of jit': _traced,
    'jit of checkpoint': lambda loss, p: jax.jit(jax.checkpoint(loss))(p),
    'a partial': lambda loss, p: functools.partial(loss, p)(),
    'made again': lambda loss, p: jax.jit(loss.__wrapped__)(p),
    'donated': lambda loss, p: jax.jit(jax.grad(loss.__wrapped__), donate_argnums=0)(
        jax.tree.map(jnp.copy, p)
    ),
    'NumPy': lambda loss, p: loss(jax.tree.map(np.asarray, p)),
    'another device': lambda loss, p: loss(jax.device_put(p, jax.devices()[1])),
    'a rule of its own': _with_rule,
    'a thread': lambda loss, p: loss(p),  # Its whole block runs in one.
    'a task': lambda loss, p: asyncio.run(_awaited(loss, p)),
    'inside of a jit': lambda loss, p: loss(p),  # Its block is opened in the trace.
}
FOLLOWERS: dict[str, Callable[[Any, Any], Any]] = {
    'value': lambda loss, p: loss(p),
    'grad': lambda loss, p: jax.grad(loss)(p),
    'made again': lambda loss, p: jax.jit(loss.__wrapped__)(p),
    'of NumPy': lambda loss, p: jax.grad(loss)(jax.tree.map(np.asarray, p)),
}


def opened(opener: str, block: Callable[[], Any], loss: Any) -> None:
    params = PARAMS['extra']

    def run(params: Any) -> None:
        with block():
            OPENERS[opener](loss, params)

    if opener == 'inside of a jit':
        jax.jit(run)(params)
    elif opener == 'a thread':
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run, params).result()
    else:
        run(params)


BLOCKS: dict[str, Callable[[Any], Any]] = {
    'stop_gradient': nn.stop_gradient,
    'train_only': nn.train_only,
    'scale_gradient': lambda where: nn.scale_gradient(where, 0.5),
}


def fresh_loss() -> Any:
    """A jitted loss that no block has seen."""
    return jax.jit(lambda params: loss('extra', params))


def stopped_by_hand(model: str, name: str, kept: bool) -> Callable[[Any], Any]:
    """The loss with the layers of a name stopped, or all others."""

    def selects(path: str) -> bool:
        return (path.split('/')[0] == name) != kept

    return lambda params: loss(model, oracle.stopped(params, selects))


@functools.cache
def by_hand(run: str, *how: Any) -> Any:
    return RUNS[run](stopped_by_hand(*how))(PARAMS[how[0]])


@functools.cache
def expected_of(follower: str, block: str) -> Any:
    if block != 'scale_gradient':
        by_hand = jax.jit(stopped_by_hand('extra', 'extra', block == 'train_only'))
        return FOLLOWERS[follower](by_hand, PARAMS['extra'])
    found = FOLLOWERS[follower](fresh_loss(), PARAMS['extra'])
    if isinstance(found, dict):  # Half of a float is exact.
        found['extra'] = jax.tree.map(lambda g: g * 0.5, found['extra'])
    return found


# Each opener; the kinds of filters and the rules take turns. Above they meet at random.
EVERYDAY = [
    (opener, [*FILTERS][n % len(FILTERS)], [*BLOCKS][n % len(BLOCKS)])
    for n, opener in enumerate(OPENERS)
]


@pytest.mark.parametrize(('opener', 'kind', 'block'), EVERYDAY)
def test_what_follows_a_right_block_is_right(opener, kind, block):
    step, make = fresh_loss(), BLOCKS[block]
    opened(opener, lambda: make(FILTERS[kind]('extra')), step)
    for follower in [*FOLLOWERS] * 2 + ['value'] * 3:
        with make(FILTERS[kind]('extra')):
            found = FOLLOWERS[follower](step, PARAMS['extra'])
        oracle.assert_same(found, expected_of(follower, block))


@pytest.mark.parametrize(('opener', 'kind', 'block'), EVERYDAY)
def test_a_typo_raises_each_time(opener, kind, block):
    step, make = fresh_loss(), BLOCKS[block]
    follower = FOLLOWERS[[*FOLLOWERS][[*OPENERS].index(opener) % len(FOLLOWERS)]]
    for _ in range(2):
        with pytest.raises(errors.UnusedFilterError):
            opened(opener, lambda: make(FILTERS[kind]('extr')), step)
    for _ in range(2):
        with pytest.raises(errors.UnusedFilterError), make(FILTERS[kind]('extr')):
            follower(step, PARAMS['extra'])


# Where the library is in doubt, it warns.


def test_a_second_function_of_the_same_code_is_checked():
    step = jitted('both')
    for name in ['encoder', 'encodr', 'backbone'] * 2:
        where = FILTERS['function'](name)
        said = heard(nn.stop_gradient(where), step)
        assert said == ('raised' if name == 'encodr' else '')


def test_a_compiled_program_beside_what_was_read_beside_it_before():
    # It warns at no time: a warning is an error in all tests.
    step, model, params = jitted('encoder'), MODELS['dense'], PARAMS['dense']
    for _ in range(3):
        with nn.stop_gradient('encoder/**'):
            step()
            model.apply({'params': params}, X)


def test_a_compiled_program_beside_another_model_warns():
    step = jitted('extra')
    with nn.stop_gradient('extra/**'):
        step()

    new = Net(('of_this_test',))
    variables = oracle.init(new, jax.random.key(0), X)

    def run() -> None:
        step()
        new.apply(variables, X)

    assert heard(nn.stop_gradient('extra/**'), run) == 'warned'
    for _ in range(2):  # Neither of the two has it.
        assert 'nowhere' in text_of(nn.stop_gradient(['nowhere/**', 'extra/**']), run)
    with nn.stop_gradient('extra/**', unused='ignore'):
        run()


def test_a_body_that_raises_leaves_no_verdict():
    """The block is not judged, so the next one traces again, and is judged."""
    for name in ('extra', 'extr'):
        step = fresh_loss()

        def run(step: Any = step) -> None:
            step(PARAMS['extra'])
            raise KeyError

        with pytest.raises(KeyError), nn.stop_gradient(f'{name}/*'):
            run()
        said = heard(nn.stop_gradient(f'{name}/*'), lambda s=step: s(PARAMS['extra']))
        assert said == ('' if name == 'extra' else 'raised')


def test_a_filter_that_may_be_empty_says_nothing_of_one_that_may_not():
    step = fresh_loss()
    with nn.stop_gradient('extr/**', unused='ignore'):
        step(PARAMS['extra'])
    assert 'extr/' in text_of(
        nn.stop_gradient('extr/**'), lambda: step(PARAMS['extra'])
    )


def test_more_filters_than_a_table_would_hold_take_turns():
    traces = list[None]()

    @jax.jit
    def step(params: Any) -> Any:
        traces.append(None)
        return loss('extra', params)

    filters: list[Any] = [re.compile(f'extra/.{{1,{n}}}') for n in range(10, 150)]
    filters += [
        lambda path, n=n: path.startswith('extra') or len(path) > 100 + n
        for n in range(20)
    ]
    for _ in range(2):
        for where in filters:
            with nn.stop_gradient(where):
                jax.eval_shape(step, PARAMS['extra'])
    assert len(traces) == len(filters) - 19  # Functions that answer alike share one.


def test_what_runs_nothing_of_flax_raises():
    params = PARAMS['encoder']
    step = jax.jit(functools.partial(loss, 'encoder'))
    _, pullback = jax.vjp(step, params)
    compiled = step.lower(params).compile()
    runs = [lambda: None, lambda: pullback(jnp.ones(())), lambda: compiled(params)]
    for run in runs:
        assert 'did nothing' in text_of(nn.stop_gradient('encoder/k*'), run)


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


def test_a_question_of_a_tree_that_is_no_more_has_no_answer():
    """Two blocks hold one number, and the tree that the first asked about is gone."""
    rewrite = rules.Rewrite(filters.as_filter('w'), rules.StopGradient())
    around, tree = numbers.TraceNumber(), roots.Tree(0)

    def opened():
        lease = numbers.Lease(around, numbers.Asker(rewrite, (), None), numbers.NONE)
        lease.find(contextlib.nullcontext)
        return lease

    first, second = opened(), opened()
    assert first.number is second.number
    first.note([weakref.ref(tree)])
    del tree
    gc.collect()
    second.note([numbers.VALUES])
    third = opened()
    assert third.is_new and third.number not in (first.number, second.number)


def _in(block: Any, step: Callable[[], Any]) -> Any:
    with block:
        return step()


def _keep(results: list[Any], run: Callable[[], Any]) -> None:
    results.append(run())


# What is written, around a function.
FORMS_OF_BLOCKS: dict[str, Callable[[Any, Any], Any]] = {
    'block': lambda where, step: _in(nn.stop_gradient(where), step),
    'train_only': lambda where, step: _in(nn.train_only(where), step),
    'scale_gradient': lambda where, step: _in(nn.scale_gradient(where, 0.0), step),
    'decorator': lambda where, step: nn.stop_gradient(where)(step)(),
}


# JAX stores a program once more for each kind of arguments.
GIVEN: dict[str, Callable[[Any], Any]] = {
    'as they are': lambda params: params,
    'NumPy': lambda params: jax.tree.map(np.asarray, params),
    'put on a device': lambda params: jax.device_put(params, jax.devices()[0]),
    'on another device': lambda params: jax.device_put(params, jax.devices()[1]),
}


NAMES = sorted({name for model in MODELS.values() for name in model.names})


# How a gradient is computed; each function lives as long as the process.
def after(step: Any, first: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def run(params: Any) -> Any:
        first(step, params)
        return step(params)

    return run


def made_anew(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda params: jax.jit(fn)(params)


RUNS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    'jitted gradient': lambda fn: jax.jit(jax.grad(fn)),
    'gradient of jitted': lambda fn: jax.grad(jax.jit(fn)),
    'checkpoint': lambda fn: jax.grad(jax.checkpoint(fn)),
    'eager': jax.grad,
    'jit made anew': lambda fn: made_anew(jax.grad(fn)),
    'shapes first': lambda fn: after(jax.jit(jax.grad(fn)), jax.eval_shape),
    'lowered first': lambda fn: after(
        jax.jit(jax.grad(fn)), lambda step, params: step.lower(params)
    ),
}


STEPS = {
    (run, name): make(functools.partial(loss, name))
    for run, make in RUNS.items()
    for name in MODELS
}


@pytest.mark.parametrize('seed', [0, pytest.param(1, marks=pytest.mark.long)])
def test_names_in_any_order_of_models_filters_and_programs(seed):
    """A wrong name is told at the latest when its program is traced."""
    forget_contexts()
    draw, told = random.Random(seed), set[Any]()
    for _ in range(30):
        model, name = draw.choice(sorted(MODELS)), draw.choice(NAMES)
        kind, run = draw.choice(sorted(FILTERS)), draw.choice(sorted(RUNS))
        form, given = draw.choice(sorted(FORMS_OF_BLOCKS)), draw.choice(sorted(GIVEN))
        step = functools.partial(STEPS[run, model], GIVEN[given](PARAMS[model]))
        whole = functools.partial(FORMS_OF_BLOCKS[form], FILTERS[kind](name), step)
        results: list[Any] = []
        run_once = functools.partial(_keep, results, whole)
        said = heard(contextlib.nullcontext(), run_once)
        case = f'{form} {kind} {name!r} in {model!r}, {run} of {given}: {said!r}'
        form = 'block' if form == 'decorator' else form
        if name in MODELS[model].names:
            assert not said, case
        elif said:
            told.add((form, kind, name, model))
        else:
            assert (form, kind, name, model) in told, case
        for found in results:
            expected = by_hand(run, model, name, form == 'train_only')
            if form == 'scale_gradient':  # Negative zeros.
                expected, found = jax.tree.map(lambda g: g + 0.0, (expected, found))
            oracle.assert_same(found, expected)
