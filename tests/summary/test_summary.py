"""`sg.tabulate` and `sg.paths`: what a model consists of, and what is trained of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.rendering.text import amount
from tests.helpers import oracle

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Normed(linen.Module):
    """Wants random numbers and a flag, and has running statistics."""

    @linen.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = linen.BatchNorm(use_running_average=not train)(x)
            x = linen.Dropout(0.5, deterministic=not train)(linen.Dense(3)(x))
        return x


def test_a_model_that_wants_a_flag_random_numbers_and_collections() -> None:
    rngs = {'params': KEY, 'dropout': KEY}
    kwargs: dict[str, Any] = {'train': True, 'mutable': ['batch_stats']}
    table = sg.tabulate(Normed(), X, rngs=rngs, **kwargs)
    assert table == sg.tabulate(Normed(), X, train=False)
    # Running statistics are no parameters.
    assert table.endswith('Trainable: 41 (164 B)   Frozen: 0')
    found = sg.paths(Normed(), X, rngs=rngs, **kwargs)
    assert found == sg.paths(Normed(), X, train=False)


def rows_of(module: linen.Module, *args: Any, rngs: Any = KEY, **kwargs: Any) -> Any:
    rows = sg.tabulate(module, *args, rngs=rngs, **kwargs).rows()
    return {row['module']: row for row in rows}


def sizes_of(row: dict[str, Any]) -> tuple[int, int]:
    """The numbers of values that are trained, and that are not."""
    return row['trainable'], row['parameters'] - row['trainable']


class Net(linen.Module):
    frozen: Any = False

    @linen.compact
    def __call__(self, x):
        with nn.stop_gradient(self.frozen):
            for name in ('body_0', 'body_1'):
                x = jnp.tanh(linen.Dense(5, name=name)(x))
        return linen.Dense(2, name='head')(x)


# Sizes.


class Kinds(linen.Module):
    """Parameters of all kinds, of which the output trains the scale alone."""

    @linen.compact
    def __call__(self, x):
        self.param('unused', linen.initializers.ones, (2, 2))
        self.param('count', lambda key: jnp.arange(3))
        scale = self.param('scale', linen.initializers.ones, (4,), jnp.bfloat16)
        stopped = self.param('stopped', linen.initializers.ones, (4,))
        frozen = jax.lax.stop_gradient(stopped)
        return x * scale.astype(jnp.float32)[None] + frozen[None]


def test_sizes_are_told_apart_and_add_up():
    row = rows_of(Kinds(), X)['']
    assert (sizes_of(row), row['gradient']) == ((4, 4 + 3 + 4), 'partly')
    assert sg.tabulate(Kinds(), X).endswith('Trainable: 4 (8 B)   Frozen: 11 (44 B)')
    for sizes, text in (
        ((), '0'),
        ((1,), '1 (4 B)'),
        ((249,), '249 (996 B)'),
        ((100, 200), '300 (1.2 KB)'),
        ((2500 * 10**12,), '2,500,000,000,000,000 (10000.0 TB)'),
    ):
        counts = [(size, jnp.dtype(jnp.float32)) for size in sizes]
        assert amount(counts) == text


def test_states_of_modules_with_all_that_is_in_them():
    found = rows_of(Nested(), X)
    # A module without parameters has no row.
    bodies = {'net/body_0': 'frozen', 'net/body_1': 'frozen', 'net/head': 'trainable'}
    states = {path: row['gradient'] for path, row in found.items()}
    assert states == {'': 'partly', 'net': 'partly', **bodies}
    assert found['']['trainable'] == found['net/head']['trainable'] == 12
    assert sizes_of(found['net'])[1] == 25 + 30
    assert [row['class'] for row in found.values()] == ['Nested', 'Net', *['Dense'] * 3]


class Relu(linen.Module):
    def __call__(self, x):
        return linen.relu(x)


class Nested(linen.Module):
    def setup(self):
        self.net = Net('body_*/**')
        self.relu = Relu()

    def __call__(self, x):
        return self.relu(self.net(x))

    def doubled(self, x, train: bool):
        assert train is True  # Not traced.
        return self.net(self.net(x)[:, :1] * x) if train else x


def test_the_call_that_is_shown():
    def loss(module, x):
        with nn.stop_gradient('net/head/**'):
            return jnp.sum(module(x))

    # Another method, and arguments that are not arrays.
    once = rows_of(Nested(), X)
    assert rows_of(Nested(), X, train=True, method='doubled') == once
    assert rows_of(Nested(), X, method=loss)['net/head']['gradient'] == 'frozen'
    with nn.stop_gradient('head/**'):
        found = rows_of(Net(), X)
    assert found['head']['gradient'] == 'frozen'
    assert found['body_0']['gradient'] == 'trainable'


class Stateful(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, name='before')(x)
        x = linen.BatchNorm(use_running_average=False, name='norm')(x)
        x = jax.lax.stop_gradient(x)
        return linen.Dropout(0.5, deterministic=False)(linen.Dense(2, name='after')(x))


class AsInTraining(linen.Module):
    """Two modules, the name of one the beginning of the other's; stopped in init."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(2, name='a')(x) + linen.Dense(2, name='ab')(x)
        return jax.lax.stop_gradient(x) if self.is_mutable_collection('params') else x


class Best(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.argmax(linen.Dense(2)(x), axis=-1)


class Uncalled(linen.Module):
    """The scope of a module that is not called has a module that is."""

    def setup(self):
        self.net = Holder()

    def __call__(self, x):
        return self.net.body(x)


class Holder(linen.Module):
    def setup(self):
        self.dense = linen.Dense(4)

    @linen.nowrap
    def body(self, x):
        return self.dense(x)


# What is stopped flows into running averages, which no loss differentiates.
STATEFUL = {'': (10, 28), 'before': (0, 20), 'norm': (0, 8), 'after': (10, 0)}
TRAINED = [
    (Stateful(), {'params': KEY, 'dropout': KEY}, STATEFUL),
    (Stateful(), KEY, STATEFUL),
    (AsInTraining(), KEY, {'': (20, 0), 'a': (10, 0), 'ab': (10, 0)}),
    (Best(), KEY, {'': (0, 10), 'Dense_0': (0, 10)}),
    (Relu(), KEY, {'': (0, 0)}),
    (Uncalled(), KEY, {'': (20, 0), 'net': (20, 0), 'net/dense': (20, 0)}),
]


@pytest.mark.parametrize(('model', 'rngs', 'expected'), TRAINED)
def test_what_is_trained_and_what_is_frozen(model, rngs, expected):
    rows = rows_of(model, X, rngs=rngs)
    found = {path: sizes_of(row) for path, row in rows.items()}
    assert found == expected


class Cell(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.Dense(4, name='dense')(x), None


class Lifted(linen.Module):
    """Every way in which a class is wrapped."""

    @linen.compact
    def __call__(self, x):
        x = nn.Frozen(Net(name='frozen'))(x)
        x = nn.stop_gradient(linen.Dense, True)(4, name='stopped')(x)
        x = linen.remat(linen.Dense)(4, name='remat')(x)
        x = linen.jit(linen.Dense)(4, name='jit')(x)
        x, _ = linen.scan(Cell, length=3, **oracle.STACKED)(name='scan')(x, None)
        return linen.WeightNorm(linen.Dense(2, name='dense'), name='norm')(x)


def test_a_second_table_has_the_classes_of_the_first():
    """JAX keeps the trace of a compiled module, in which nobody is called."""
    jitted = linen.jit(linen.Dense)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jitted(4)(x)

    tables = [str(sg.tabulate(Model(), X)) for _ in range(2)]
    assert tables[0] == tables[1]
    assert 'Dense ' in tables[0]


@pytest.mark.parametrize('wrap', [lambda cls: cls, linen.jit])
def test_classes_are_those_that_were_written(wrap):
    model = wrap(Lifted)()
    jax.eval_shape(model.init, KEY, X)  # A trace of the same shapes hides no module.
    found = rows_of(model, X)
    classes = {'frozen': 'Net', 'scan': 'Cell', 'norm': 'WeightNorm'}
    dense = 'frozen/body_0 frozen/body_1 frozen/head stopped remat jit scan/dense dense'
    classes |= dict.fromkeys(dense.split(), 'Dense')
    assert {path: row['class'] for path, row in found.items() if path} == classes
    assert found['scan']['trainable'] == 3 * 20


# The table.


def shown(model: linen.Module, **options: Any) -> list[str]:
    return sg.tabulate(model, X, **options).splitlines()


class Deep(linen.Module):
    @linen.compact
    def __call__(self, x):
        runs.append(None)
        with nn.stop_gradient('layer_[0-4]/**'):
            for n in range(12):
                x = linen.Dense(4, name=f'layer_{n}')(x)
        return x


runs: list[None] = []


def test_long_names_of_classes_are_left_out():
    model = type('Long' * 20, (linen.Dense,), {})(4)
    assert shown(model)[0].split() == ['module', 'parameters', 'trainable', 'gradient']


def test_what_a_condition_stops_for_a_while_is_named_below_the_table():
    class Begins(linen.Module):
        @linen.compact
        def __call__(self, x: Any, step: Any) -> Any:
            last = linen.Dense(2, name='last')
            return nn.Frozen(last, sg.where('kernel') & (step < 3))(x)

    *_, total, note = sg.tabulate(Begins(), X, jnp.array(0)).splitlines()
    assert total == 'Trainable: 10 (40 B)   Frozen: 0'
    assert note.startswith('While a condition holds, test_summary.py:')
    assert note.endswith(' stops last/kernel.')


def test_layers_that_are_trained_and_not_are_two_rows():
    runs.clear()
    assert shown(Deep()) == [
        'module            class   parameters   trainable   gradient',
        '─' * 60,
        '(model)           Deep           240         140   partly',
        '  layer_[0-4]     Dense          100           0   frozen',
        '  layer_{5..11}   Dense          140         140   trainable',
        '',
        'Trainable: 140 (560 B)   Frozen: 100 (400 B)',
    ]
    assert len(runs) == 2  # Traced, which is all that takes time.


# Paths.


def test_paths_of_a_model_are_plain_data():
    found = sg.paths(Stateful(), X, where='before/**')
    assert [one.module for one in found] == ['Dense'] * 4 + ['BatchNorm'] * 4
    assert (found[1].path, found[1].shape) == ('after/kernel', 'float32[4, 2]')
    assert (found[6].path, found[6].path.collection) == ('norm/mean', 'batch_stats')
    assert [one.selected for one in found] == [False] * 2 + [True] * 2 + [False] * 4
    assert {one.selected for one in sg.paths(Stateful(), X)} == {None}


def test_paths_as_a_table():
    where = ['**/mean', sg.at('after/kernel', np.s_[:2]), 'before/**']
    assert str(sg.paths(Stateful(), X, where=where)).splitlines() == [
        'selected   path            module      shape           collection',
        '─' * 66,
        '-          after/bias      Dense       float32[2]      params',
        'partly     after/kernel    Dense       float32[4, 2]   params',
        'yes        before/bias     Dense       float32[4]      params',
        'yes        before/kernel   Dense       float32[4, 4]   params',
        '-          norm/bias       BatchNorm   float32[4]      params',
        '-          norm/scale      BatchNorm   float32[4]      params',
        'yes        norm/mean       BatchNorm   float32[4]      batch_stats',
        '-          norm/var        BatchNorm   float32[4]      batch_stats',
        '',
        'The filter selects 4 of 8 variables.',
    ]


def test_paths_of_a_tree_and_of_other_arguments():
    tree = {'a': [np.ones(3), 2], 'b': KEY}
    assert [(one.path, one.module) for one in sg.paths(tree)] == [
        *(('a/0', ''), ('a/1', '')),
        ('b', ''),
    ]
    rngs = {'params': KEY, 'dropout': KEY}
    found = sg.paths(Nested(), X, rngs=rngs, train=True, method='doubled')
    assert len(found) == 6
    with pytest.raises(errors.UnusedFilterError, match='nett'):
        sg.paths(Nested(), X, where='nett/**')


class Stages(linen.Module):
    """Stages of blocks, as in a ResNet; more than ten of some."""

    @linen.compact
    def __call__(self, x):
        for stage, count in (('s_1', 2), ('s_2', 2), ('s_3', 12), ('tail', 11)):
            for n in range(count):
                x = linen.Dense(4, name=f'{stage}_{n}')(x)
        return linen.Dense(4, name='tail_last')(x)


def test_each_row_of_paths_is_a_filter_of_what_stands_in_it():
    found = sg.paths(Stages(), X)
    rows = [line.split()[0] for line in repr(found).splitlines()[2:]]
    assert len(rows) < len(found)
    filters = map(sg.filters.as_filter, rows)
    taken = [one.path for where in filters for one in found if where(one.path)]
    assert sorted(taken) == sorted(one.path for one in found)


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.MultiHeadDotProductAttention(2, name='attention')(x)
        return linen.Dense(4, name='output')(x)


class Transformer(linen.Module):
    """Layers that differ from one to the next, as in a model under fine-tuning."""

    @linen.compact
    def __call__(self, x):
        for n in range(12):
            with nn.stop_gradient('*/attention/query/**' if n % 2 else False):
                x = Attention(name=f'encoder_layer_{n}')(x)
        return linen.Dense(2, name='classifier')(x)


def test_a_usual_model_is_read_on_a_screen_of_80_columns():
    whole, fitting = shown(Transformer(), depth=None), shown(Transformer())
    assert (len(whole), len(fitting)) == (4 + 86, 5 + 38)
    assert max(map(len, whole)) <= 80
    # No word is cut: classes with long names are left out.
    names = ['parameters', 'trainable', 'gradient']
    assert whole[0].split() == ['module', *names]
    assert shown(Transformer(), depth=1)[0].split() == ['module', 'class', *names]


class OfBatches(linen.Module):
    @linen.compact
    def __call__(self, batch, where=None):
        h = linen.Dense(2)(batch['embedding'])
        rows = where if where is not None else batch['mask']
        if rows.shape != h.shape[:1]:
            raise ValueError('mask and embedding differ in length')
        return linen.LayerNorm()(h, mask=rows[:, None])


@pytest.mark.parametrize('how', ['tabulate', 'paths', 'of_type', 'where'])
def test_an_error_in_a_model_that_takes_a_dict_or_a_mask_is_its_own(how):
    """A batch may have names of parameters, and ``where=`` may be a model's own."""
    call = {
        'paths': sg.paths,
        'of_type': functools.partial(sg.filters.of_type, linen.LayerNorm),
    }.get(how, sg.tabulate)
    mask = jnp.ones(3, bool)
    options = {'where': mask} if how == 'where' else {}
    batch = {'embedding': jnp.ones((2, 3)), 'mask': mask, 'kernel': {'bias': mask}}
    with pytest.raises(ValueError, match='mask and embedding differ'):
        call(OfBatches(), batch, **options)


class Kept(nnx.Variable):
    """A kind of the user."""


class OfKinds(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.kept, self.raw = Kept(jnp.ones(3)), jnp.ones(3)
        self.lora = nnx.LoRAParam(jnp.ones(3))


@pytest.mark.parametrize('where', [True, '**', ['norm/*', '*', 'drop/**']])
def test_paths_of_an_nnx_model_have_kinds_and_select_what_a_view_takes(where):
    model = OfKinds(nnx.Rngs(0))
    found = {str(one.path): one for one in sg.paths(model, where=where)}
    assert {path: one.kind for path, one in found.items()} == {
        **dict.fromkeys(('norm/scale', 'norm/bias'), 'Param'),
        **dict.fromkeys(('norm/mean', 'norm/var'), 'BatchStat'),
        **{'drop/rngs/count': 'RngCount', 'drop/rngs/key': 'RngKey'},
        **{'kept': 'Kept', 'raw': 'array', 'lora': 'LoRAParam'},
    }
    taken = [path for path, one in found.items() if one.selected]
    assert sorted(taken) == ['lora', 'norm/bias', 'norm/scale', 'raw']
    assert taken == [path for path, one in found.items() if one.is_parameter]

    head, *_, last = str(sg.paths(model, where=where)).splitlines()
    assert head.split() == ['selected', 'path', 'module', 'shape', 'kind']
    kinds = 'RngCount, RngKey, Kept, BatchStat'
    assert last == f'Views take parameters, and by kind=: {kinds}.'

    unsupported = errors.UnsupportedVersionError
    sg_nnx = pytest.importorskip('flax_sg.nnx', exc_type=unsupported)

    def sums(model):
        view = sg_nnx.stop_gradient(model, where, unused='ignore')
        leaves = view.norm.scale, view.norm.bias, view.raw, view.lora
        return sum(jnp.sum(jnp.asarray(leaf[...])) for leaf in leaves)

    assert oracle.is_zero(nnx.grad(sums)(model))


def test_paths_of_a_state_have_no_kinds():
    """A tree is filtered whole."""
    state = nnx.state(OfKinds(nnx.Rngs(0)), nnx.BatchStat)
    assert [one.selected for one in sg.paths(state, where=True)] == [True, True]


def test_a_table_of_an_nnx_model_has_its_classes():
    """With every Flax, the oldest too; a function is no module."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    rows = sg.tabulate(model, X[:, :2]).rows()
    assert [(row['module'], row['class']) for row in rows] == [
        ('', 'Sequential'),
        ('layers', 'List'),
        ('layers/0', 'Linear'),
    ]
