"""State that is held and dropout that is off, by path: `state=` with `where=`."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import errors as flax_errors
from flax import linen

import flax_sg as sg
from flax_sg import errors, filters
from flax_sg import linen as nn
from tests.helpers import oracle, stepwise
from tests.helpers.described.modules import Do
from tests.helpers.turns import in_turn

KEY = jax.random.key(7)
X = jnp.array([[0.5, -1.0, 2.0, 1.0], [1.5, 0.25, -0.75, -2.0]])


def bare(module: Any) -> Any:
    return module


RNGS = {'params': jax.random.key(1), 'dropout': jax.random.key(2)}
TOKENS = jnp.linspace(-1.0, 1.0, 12).reshape(1, 3, 4)
EVERY = (0, 1, 2)  # The stages.
ALL = (*EVERY, 3)  # With the dropout behind them.


class Stage(linen.Module):
    """A stage that is told by arguments, and two layers of it by a field."""

    @linen.compact
    def __call__(self, x, deterministic, average):
        x = linen.Dropout(0.5)(jnp.tanh(linen.Dense(4)(x)), deterministic)
        x = linen.Dropout(0.5, deterministic=deterministic)(x)
        if not deterministic:  # As in a model that one may not edit.
            x += jax.random.normal(self.make_rng('dropout'), x.shape)
        return linen.BatchNorm(use_running_average=average, name='norm')(x)


class Stages(linen.Module):
    """By hand: some stages are without dropout, and some norms use what is stored."""

    lift: Any = bare
    off: tuple[int, ...] = ()
    averages: tuple[int, ...] = ()

    @linen.compact
    def __call__(self, x):
        for n in EVERY:
            stage = self.lift(Stage)(name=f'stage_{n}')
            x = stage(x, n in self.off, n in self.averages)
        return linen.Dropout(0.5, deterministic=3 in self.off)(x)


@functools.cache
def variables_of_stages() -> Any:
    return oracle.init(Stages(), RNGS, TOKENS)


@functools.cache
def told(*fields: Any) -> Any:
    """What ``Stages`` that are told give, and write."""
    return run_stages(Stages(*fields))


def run_stages(model: Any) -> Any:
    apply = functools.partial(model.apply, rngs=RNGS, mutable='batch_stats')
    return stepwise.evaluate(apply, variables_of_stages(), TOKENS)


def static(lift: Any) -> Any:
    return lambda cls: lift(cls, static_argnums=(2, 3))


LIFTS = {'bare': bare, 'jit': static(linen.jit), 'remat': static(linen.remat)}
# A filter, the stages in which dropout is off, and those whose statistics are held.
WHERE: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    'a glob': ('stage_1/**', (1,), (1,)),
    'a list': (['stage_0/**', 'stage_1/**'], (0, 1), (0, 1)),
    'the rest': (~filters.as_filter('stage_[02]/**') & 'stage_*/**', (1,), (1,)),
    'a function': (lambda path: path.startswith('stage_2'), (2,), (2,)),
    'a tree': ({'stage_0': False, 'stage_1': True, 'stage_2': False}, (1,), (1,)),
    'some of each': ('**/kernel', (), ()),
    'all but some': (~filters.as_filter('**/bias'), (), EVERY),
    'one layer': ('stage_1/Dense_0/**', (), ()),
    'all': (True, ALL, EVERY),
}
HOW = [*itertools.product(('hold', 'eval', 'update'), LIFTS, (nn.Frozen, nn.mirror))]


@pytest.mark.parametrize(('name', 'how'), in_turn(WHERE, HOW, times=2))
def test_state_is_held_and_dropout_off_where_the_filter_says(name, how) -> None:
    """Stages of one class share a trace of ``nn.jit``, unless it is told apart."""
    (where, off, held), (state, lift, wrap) = WHERE[name], how
    check(wrap(Stages(LIFTS[lift]), where, state=state), off, held, state, lift)


@pytest.mark.parametrize('state', ['hold', 'eval'])
def test_state_is_held_by_the_class_of_a_module(state: str) -> None:
    for cls, off, held in (
        (linen.BatchNorm, (), EVERY),
        (Stage, EVERY, EVERY),
        (linen.Dense, (), ()),
    ):
        where = filters.of_type(cls, Stages(), TOKENS)
        check(nn.Frozen(Stages(), where, state=state), off, held, state)


def check(model: Any, off: Any, held: Any, state: str, lift: str = 'bare') -> None:
    """Compares with a model that is told, and with the state before and after."""
    variables = variables_of_stages()
    made = jax.eval_shape(model.init, RNGS, TOKENS)
    assert jax.tree.structure(made) == jax.tree.structure(variables)
    evaluates = (off, held) if state == 'eval' else ((), ())
    (found, written), (expected, updated) = (
        run_stages(model),
        told(LIFTS[lift], *evaluates),
    )
    oracle.assert_same(found, expected)
    before, now, after = (w['batch_stats'] for w in (variables, written, updated))
    for number in EVERY:
        name = f'stage_{number}'
        if number in held and state != 'update':
            oracle.assert_same(now[name], before[name])
        else:
            assert not jnp.allclose(*(s[name]['norm']['mean'] for s in (after, before)))
            oracle.assert_same(now[name], after[name])


def test_everything_is_off_and_no_random_numbers_are_needed():
    frozen, variables = nn.Frozen(Stages(), state='eval'), variables_of_stages()
    by_hand = Stages(off=ALL, averages=EVERY).apply(variables, TOKENS)
    for rngs in (None, RNGS):
        oracle.assert_same(frozen.apply(variables, TOKENS, rngs=rngs), by_hand)
    oracle.assert_same(frozen.init(RNGS, TOKENS), Stages().init(RNGS, TOKENS))


@pytest.mark.parametrize('state', ['hold', 'eval'])
def test_state_is_held_and_parameters_are_trained(state: str) -> None:
    held = nn.Frozen(Stages(), collections='batch_stats', state=state)
    check(held, ALL, EVERY, state)
    by_hand = Stages(bare, ALL, EVERY) if state == 'eval' else Stages()
    variables = variables_of_stages()

    def grads(model: Any) -> Any:
        def loss(params: Any) -> Any:
            given = {**variables, 'params': params}
            out, _ = model.apply(given, TOKENS, mutable='batch_stats', rngs=RNGS)
            return jnp.sum(out**2)

        return jax.grad(loss)(variables['params'])

    oracle.assert_same(grads(held), grads(by_hand))


class Told(linen.Module):
    """It has no state."""

    @linen.compact
    def __call__(self, x, use_running_average=False):
        return linen.Dense(2)(x) * (10.0 if use_running_average else 1.0)


def test_a_layer_without_state_is_not_told() -> None:
    variables = oracle.init(Told(), KEY, X)
    frozen = nn.Frozen(Told(), state='eval')
    for more in {}, {'ema_params': variables['params']}:
        found = frozen.apply({**variables, **more}, X)
        oracle.assert_same(found, Told().apply(variables, X))


@pytest.mark.parametrize('where', ['stage_1/norm/scale', '**/bias', '**/kernel'])
def test_an_average_of_the_parameters_is_no_state(where: str) -> None:
    variables, how = variables_of_stages(), {'mutable': 'batch_stats', 'rngs': RNGS}
    given = {**variables, 'ema_params': variables['params']}
    frozen = nn.Frozen(Stages(), where, state='eval')
    expected = Stages().apply(variables, TOKENS, **how)
    oracle.assert_same(frozen.apply(given, TOKENS, **how), expected)


class Both(linen.Module):
    """Tells two norms what to use, and has a constant and a result of its own."""

    @linen.compact
    def __call__(self, x, use_running_average=False):
        x = x * self.variable('constants', 'k', jnp.ones, ()).value
        self.sow('losses', 'sum', x.sum())
        x = linen.BatchNorm(name='a')(x, use_running_average)
        return linen.BatchNorm(name='b')(x, use_running_average)


@pytest.mark.parametrize('where', [~filters.as_filter('b/**'), ['a/**', '*']])
def test_a_layer_that_is_told_by_a_module_around_it(where: Any) -> None:
    def twice(self, x):
        view = nn.Frozen(Both(name='net'), where, state='eval', unused='ignore')
        return view(x), view(x)

    variables = Do(twice).init(KEY, X)
    del variables['losses']
    found, written = Do(twice).apply(variables, X, mutable=['batch_stats', 'losses'])
    stats = written['batch_stats']['net']
    oracle.assert_same(stats['a'], variables['batch_stats']['net']['a'])
    assert stats['b']['mean'].any()
    assert all(jnp.allclose(y.mean(0), 0.0, atol=1e-6) for y in found)


def test_state_is_held_by_path_in_a_scan() -> None:
    class Body(linen.Module):
        wrap: Any

        @linen.compact
        def __call__(self, x, _):
            return self.wrap(Stages(name='stages'))(x), None

    axes = {'params': 0, 'batch_stats': 0}
    rngs = {'params': True, 'dropout': True}
    scan = linen.scan(Body, variable_axes=axes, split_rngs=rngs, length=2)
    held = functools.partial(nn.Frozen, where='stage_1/**', state='hold')
    variables = oracle.init(scan(bare), RNGS, TOKENS, None)

    def written(wrap: Any) -> Any:
        how: Any = {'mutable': 'batch_stats', 'rngs': RNGS}
        return scan(wrap).apply(variables, TOKENS, None, **how)[1]

    states = variables, written(bare), written(held)
    before, after, found = (state['batch_stats']['stages'] for state in states)
    oracle.assert_same(found, {**after, 'stage_1': before['stage_1']})
    was, now = (stages['stage_1']['norm']['var'] for stages in (before, after))
    assert not jnp.array_equal(was, now)


class Language(linen.Module):
    """A language model with a cache, and a layer that sows and draws in training."""

    decode: bool = False

    @linen.compact
    def __call__(self, tokens, train=True):
        embed = linen.Embed(7, 8, name='embed')
        mask = None if self.decode else linen.make_causal_mask(tokens)
        x = embed(tokens)
        x += linen.MultiHeadDotProductAttention(
            2, decode=self.decode, dropout_rate=0.5, deterministic=not train, name='att'
        )(x, mask=mask)
        self.sow('intermediates', 'x', x)
        return embed.attend(x)


@pytest.mark.parametrize('state', ['hold', 'update', 'eval'])
@pytest.mark.parametrize('where', [True, 'att/**'])
def test_a_frozen_language_model_generates(state: str, where: Any) -> None:
    """A cache is no statistic: it is written as without the wrapper."""
    tokens = jax.random.randint(jax.random.key(0), (1, 5), 0, 7)
    params = oracle.init(Language(), KEY, tokens, train=False)['params']
    cache = oracle.init(Language(decode=True), KEY, tokens, train=False)['cache']
    whole = Language().apply({'params': params}, tokens, train=False)
    # In evaluation dropout is off, whatever the model is told.
    train = state == 'eval'
    frozen = nn.Frozen(Language(decode=True), where, state=state)

    def steps(model: Any, train: bool) -> tuple[list[Any], Any]:
        variables, made = {'params': params, 'cache': cache}, []
        for n in range(5):
            token = tokens[:, n : n + 1]
            out, new = model.apply(variables, token, train, mutable=['cache'])
            variables, made = {**variables, **new}, [*made, out]
        return made, variables['cache']

    made, written = steps(frozen, train)
    expected, of_model = steps(Language(decode=True), False)
    oracle.assert_same(made, expected)
    oracle.assert_same(written, of_model)
    assert jnp.allclose(jnp.concatenate(made, 1), whole, atol=1e-5)


@pytest.mark.parametrize('order', [(True, False), (False, True)])
def test_a_mirror_leaves_the_cache_to_its_module(order: tuple[bool, bool]) -> None:
    def pair(self, tokens):
        model = Language(decode=True, name='model')
        view = nn.mirror(model)
        for is_view in order:
            (view if is_view else model)(tokens, train=False)
        return 0.0

    alone = oracle.init(Language(decode=True), KEY, jnp.ones((1, 5), int), train=False)
    variables = {name: {'model': alone[name]} for name in ('params', 'cache')}
    _, new = Do(pair).apply(variables, jnp.ones((1, 1), int), mutable=['cache'])
    assert new['cache']['model']['att']['cache_index'] == 1


class Bare(linen.Module):
    """A norm that has state and no parameters, and a head."""

    @linen.compact
    def __call__(self, x):
        norm = linen.BatchNorm(False, use_scale=False, use_bias=False, name='norm')
        return linen.Dense(2, name='head')(norm(x))


NAMES = ['norm/**', 'norm/mean', ['norm/**', 'head/*'], ~filters.as_filter('norm/**')]
IN_STATE = [*NAMES, lambda path: path.startswith('norm')]


@pytest.mark.parametrize('state', ['hold', 'eval'])
@pytest.mark.parametrize('where', IN_STATE)
def test_a_name_may_be_that_of_state_alone(where: Any, state: str) -> None:
    variables = Bare().init(KEY, X)
    frozen = nn.Frozen(Bare(), where, state=state)
    oracle.assert_same(frozen.init(KEY, X), variables)
    _, written = frozen.apply(variables, X, mutable='batch_stats')
    names = filters.as_filter(where)
    before, now = (tree['batch_stats']['norm'] for tree in (variables, written))
    for name in 'mean', 'var':
        held = bool(names.atoms) and where != NAMES[3]
        held = held and (where != 'norm/mean' or name == 'mean')
        assert bool((now[name] == before[name]).all()) == held


@pytest.mark.parametrize('where', ['nrom/**', ['norm/**', 'hed/*']])
def test_a_name_of_neither_raises(where: Any) -> None:
    variables, frozen = Bare().init(KEY, X), nn.Frozen(Bare(), where, state='hold')
    for start in (
        lambda: frozen.apply(variables, X, mutable='batch_stats'),
        lambda: frozen.init(KEY, X),
    ):
        with pytest.raises(errors.UnusedFilterError, match='of the 4 variables'):
            start()


def reshapes(self, x):
    """Its state is a dict in every second call, and an array in the others."""
    memory = self.variable('memory', 'of', lambda: {'last': x})
    last = memory.value
    memory.value = last['last'] if isinstance(last, dict) else {'last': last}
    return x + memory.value['last'] if isinstance(memory.value, dict) else x


@pytest.mark.parametrize('before', [X, {'last': X}], ids=['array', 'dict'])
def test_state_of_another_structure_is_held(before: Any) -> None:
    variables = {'memory': {'of': before}}
    held = nn.Frozen(Do(reshapes), state='hold')
    found, written = held.apply(variables, X, mutable='memory')
    expected, moved = Do(reshapes).apply(variables, X, mutable='memory')
    oracle.assert_same((found, written), (expected, variables))
    assert jax.tree.structure(moved) != jax.tree.structure(variables)


class Counts(linen.Module):
    """What it computes depends on state that it has written in the same call."""

    @linen.compact
    def __call__(self, x):
        calls = self.variable('calls', 'n', lambda: jnp.zeros(()))
        calls.value = calls.value + 1.0
        return linen.BatchNorm(False, name='norm')(x) * calls.value


class Twice(linen.Module):
    """Its layers write state, one of them twice, and it reads what they wrote."""

    lift: Any = bare

    def setup(self):
        self.one = self.lift(Counts)()
        self.two = self.lift(Counts)()

    def __call__(self, x):
        y = self.two(self.one(x)) + self.one(x)
        return y * self.variables['calls']['one']['n']


class Beside(linen.Module):
    """Reads the state of a module before, between and after the calls of a view."""

    wrap: Any = bare
    lift: Any = bare

    def setup(self):
        self.net = Twice(self.lift)

    def __call__(self, x):
        view, seen = self.wrap(self.net), [self.net.one.variables['calls']['n']]
        for _ in range(2):
            seen += [view(x), self.net.variables['calls']['one']['n']]
        return seen


def held(module: Any) -> Any:
    return nn.Frozen(module, state='hold')


STATES = ['batch_stats', 'calls']


@pytest.mark.parametrize('wrap', [held, nn.mirror])
def test_held_state_has_to_be_mutable(wrap: Any) -> None:
    """What a call computes with it is dropped when the call ends."""
    of_net = oracle.init(Twice(), KEY, X)
    variables = {name: {'net': tree} for name, tree in of_net.items()}
    model = Beside(wrap)
    expected, written = model.apply(variables, X, mutable=STATES)
    oracle.assert_same(written, {name: variables[name] for name in STATES})
    with pytest.raises(flax_errors.ModifyScopeVariableError, match='immutable'):
        model.apply(variables, X)
    bound = model.bind(variables, mutable=STATES)
    oracle.assert_same([bound(X), bound(X)], [expected, expected])


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        x = linen.Dense(4)(x)
        return jnp.tanh(linen.BatchNorm(use_running_average=False)(x)), None


class Stack(linen.Module):
    lift: Any = bare

    @linen.compact
    def __call__(self, x):
        axes = {'params': 0, 'batch_stats': 0}
        layers = linen.scan(
            self.lift(Layer), axes, split_rngs={'params': True}, length=3
        )
        return layers(name='layers')(x, None)[0]


def four_steps(
    model: Any,
    read: Any = lambda n, params: params,
    kept: Any = lambda n, old, new: new,
) -> list[Any]:
    """The variables after each of four jitted steps; statistics feed the gradients.

    Args:
        model: the model of a step, by its number.
        read: the parameters that it reads.
        kept: what becomes of old and new statistics.
    """

    @jax.jit
    def step(variables: Any, n: Any) -> Any:
        def loss(params: Any) -> Any:
            given = {**variables, 'params': read(n, params)}
            y, new = model(n).apply(given, X, mutable=['batch_stats'])
            return jnp.sum(y**2), new['batch_stats']

        grads, new = jax.grad(loss, has_aux=True)(variables['params'])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables['params'], grads)
        return {'params': params, 'batch_stats': kept(n, variables['batch_stats'], new)}

    seen = [oracle.init(Stack(), KEY, X)]
    for n in range(4):
        seen.append(step(seen[-1], n))
    return seen


def rows(n: Any, x: Any) -> Any:
    return (jnp.arange(3) < 2).reshape(3, *[1] * (x.ndim - 1))


HELD: dict[str, tuple[Any, Any]] = {
    'for two steps': (lambda n: sg.where(True) & (n < 2), lambda n, x: n < 2),
    'from the third step on': (
        lambda n: sg.where('layers/**') & (n >= 2),
        lambda n, x: n >= 2,
    ),
    'some layers': (lambda n: sg.at(True, slice(2)), rows),
    'some layers, for two steps': (
        lambda n: sg.at(True, slice(2)) & (n < 2),
        lambda n, x: rows(n, x) & (n < 2),
    ),
}


HOW_IN_PART = [*itertools.product((nn.Frozen, nn.mirror), (bare, nn.remat, nn.jit))]


@pytest.mark.parametrize(('name', 'how'), in_turn(HELD, HOW_IN_PART, times=3))
def test_state_is_held_for_a_while_and_in_part(name, how):
    (wheres, held), (wrap, lift) = HELD[name], how

    def chosen(n: Any, old: Any, new: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(held(n, a), a, b), old, new)

    def stopped(n: Any, params: Any) -> Any:
        return chosen(n, jax.lax.stop_gradient(params), params)

    found = four_steps(lambda n: wrap(Stack(lift), wheres(n), state='hold'))
    oracle.assert_same(found, four_steps(lambda n: Stack(lift), stopped, chosen))


@pytest.mark.parametrize('wrap', [nn.Frozen, nn.mirror])
def test_a_layer_evaluates_as_a_whole(wrap):
    variables = oracle.init(Stack(), KEY, X)
    in_part = wrap(Stack(), sg.at(True, slice(2)), state='eval')
    with pytest.raises(errors.PartError, match="Write state='hold', which holds the"):
        in_part.apply(variables, X)
    with pytest.raises(errors.PartError, match=r'bool\(step < k\)'):
        jax.jit(lambda n: wrap(Stack(), n < 2, state='eval').apply(variables, X))(0)
    # A part of parameters is no part of a layer's state.
    head = wrap(Stack(), sg.at('**/kernel', slice(2)), state='eval')
    oracle.assert_same(
        head.apply(variables, X, mutable=['batch_stats']),
        Stack().apply(variables, X, mutable=['batch_stats']),
    )


# Dropout.


@pytest.mark.parametrize('where', [True, 'stage/**'])
def test_dropout_is_off_in_a_scan(where):
    class Body(linen.Module):
        off: bool

        @linen.compact
        def __call__(self, x, _):
            return Stage(name='stage')(x, self.off, self.off), None

    axes = {'params': 0, 'batch_stats': 0}
    rngs = {'params': True, 'dropout': True}
    for lift in (bare, linen.remat):
        scan = linen.scan(lift(Body), variable_axes=axes, split_rngs=rngs, length=2)
        variables = oracle.init(scan(True), RNGS, TOKENS, None)
        frozen = nn.Frozen(scan(False), where, state='eval')
        found = frozen.apply(variables, TOKENS, None, rngs=RNGS)
        oracle.assert_same(found, scan(True).apply(variables, TOKENS, None))


class Drops(linen.Module):
    off: bool = False

    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=self.off)(linen.Dense(4)(x))


JITTED = linen.jit(Drops)


class Tower(linen.Module):
    off: tuple[int, ...] = ()

    @linen.compact
    def __call__(self, x):
        for n in EVERY:
            x = JITTED(n in self.off, name=f'stage_{n}')(x)
        return x


class Anything(dict[str, bool]):
    """A table with an answer for layers that have no variables."""

    def __missing__(self, path: str) -> bool:
        return path.startswith('stage_1')


def of_table(table: Any) -> Any:
    return lambda path: table[path]


def test_a_trace_of_jit_belongs_to_one_choice():
    """In any order, with one jitted class, and filters of one code."""
    variables = oracle.init(Tower(), RNGS, X)
    paths = oracle.by_path(variables['params'])
    known = {path: path.startswith('stage_1') for path in paths}

    def run(model: Any) -> Any:
        return jax.jit(functools.partial(model.apply, rngs=RNGS))(variables, X)

    def evaluating(where: Any) -> Any:
        return run(nn.Frozen(Tower(), where, state='eval'))

    for _ in range(2):
        # The first table raises for a layer without variables: its dropout stays on.
        oracle.assert_same(evaluating(of_table(known)), run(Tower()))
        found = evaluating(of_table(Anything(known)))
        oracle.assert_same(found, run(Tower((1,))))
    for n in (0, 2, 1):
        oracle.assert_same(evaluating(f'stage_{n}/**'), run(Tower((n,))))


def test_a_layer_that_is_a_model():
    drop = nn.Frozen(linen.Dropout(0.5, deterministic=False), state='eval')
    oracle.assert_same(drop.apply({}, X, rngs=RNGS), X)
    bound = linen.Dropout(0.5, deterministic=False).bind({}, rngs=RNGS)
    oracle.assert_same(nn.mirror(bound, state='eval')(X), X)
    assert bound.deterministic is False
    assert bool((bound(X) != X).any())
