"""`sg.tabulate`: sizes and flops of programs as they are, stops and all."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from flax.core import DenyList
from flax.linen import summary as flax_summary

import flax_sg as sg
from benchmarks import models
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.internals import tables
from flax_sg.summary import programs, rows

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
WIDE = {'width': 200, 'force_terminal': False}


def summary_of(module: linen.Module, *args: Any, rngs: Any = KEY, **kwargs: Any):
    options = {'show_repeated': False, 'flops': True}
    given = {name: kwargs.pop(name, value) for name, value in options.items()}
    table = tables.module_rows(module, given['show_repeated'], rngs, *args, **kwargs)
    program = programs.program_of(module, rngs, DenyList('intermediates'), args, kwargs)
    return rows.collect(table, program, given['flops'], given['flops'])


def by_path(found: rows.Summary) -> dict[str, rows.Row]:
    return {'/'.join(row.path): row for row in reversed(found.rows)}


class Net(linen.Module):
    """A body of two layers and a head."""

    stop: models.Stop = models.no_stop
    frozen: Any = ()

    @linen.compact
    def __call__(self, x):
        with self.stop(self.frozen):
            for name in ('body_0', 'body_1'):
                x = jnp.tanh(linen.Dense(5, name=name)(x))
        return linen.Dense(2, name='head')(x)


def xla_flops(fun: Any, *args: Any) -> int:
    return int(jax.jit(fun).lower(*args).cost_analysis()['flops'])


def total_by_hand(module: linen.Module, live: Any) -> int:
    """What XLA counts in the program written by hand: gradients of `live` alone."""
    params = jax.eval_shape(module.init, KEY, X)['params']
    trained = {name: params[name] for name in params if name.startswith(live)}
    others = {name: params[name] for name in params if not name.startswith(live)}

    def step(trained, others, x, seed):
        def forward(trained):
            return module.apply({'params': {**trained, **others}}, x)

        out, pull_back = jax.vjp(forward, trained)
        return out, pull_back(seed)

    out = jax.eval_shape(module.apply, {'params': params}, X)
    return xla_flops(step, trained, others, X, out)


# Flops.


@pytest.mark.parametrize(
    ('frozen', 'live'), [('body_*/**', 'head'), ('head/**', 'body'), ('body_0/**', '')]
)
def test_flops_of_the_whole_are_those_of_the_program_by_hand(frozen, live):
    live = live or ('body_1', 'head')
    model = (
        nn.stop_gradient(Net, 'head/**')()
        if live == 'body'
        else Net(nn.stop_gradient, frozen)
    )
    found = by_path(summary_of(model, X))
    total = found[''].flops + found[''].backward_flops
    assert total == total_by_hand(Net(), live)
    assert total < total_by_hand(Net(), '')


class Repeats(linen.Module):
    prints: bool

    @linen.compact
    def __call__(self, x):
        w = self.param('w', linen.initializers.ones, (8, 8))
        if self.prints:
            jax.debug.print('{}', x)
        w = jax.lax.stop_gradient(w)  # Such a loop has no way back.
        step = lambda carry: (carry[0] + 1, jnp.sin(carry[1] @ w))  # noqa: E731
        return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]


def test_a_loop_without_an_end_counts_once_and_printing_nothing():
    x = jnp.ones((2, 8))
    params = {'params': {'w': jnp.ones((8, 8))}}
    expected = xla_flops(Repeats(prints=False).apply, params, x)
    assert by_path(summary_of(Repeats(prints=True), x))[''].flops == expected


def test_forward_flops_are_those_of_flax():
    layer = models.Layer(8)
    x = jnp.ones((2, 3, 8))
    with jax.numpy_rank_promotion('allow'):
        table = flax_summary._get_module_table(layer, None, False, True, False)(KEY, x)
        found = summary_of(layer, x)
    expected = {row.path: row.flops for row in table}
    assert {row.path: row.flops for row in found.rows} == expected


def test_a_frozen_backbone_has_no_backward_pass():
    free = by_path(summary_of(Net(), X))
    found = by_path(summary_of(Net(nn.stop_gradient, 'body_*/**'), X))
    assert [row.flops for row in found.values()] == [row.flops for row in free.values()]
    assert found['body_0'].backward_flops == found['body_1'].backward_flops == 0
    assert found['head'].backward_flops > 0
    # Of what the whole program does backwards, all is done in the head.
    assert found[''].backward_flops == found['head'].backward_flops
    # nn.tabulate counts each module alone, every one with a backward pass.
    table = flax_summary._get_module_table(
        Net(nn.stop_gradient, 'body_*/**'), None, False, True, True
    )(KEY, X)
    assert all(row.vjp_flops > row.flops for row in table if row.path)


def test_a_gradient_that_passes_a_frozen_module_costs_its_half():
    free = by_path(summary_of(Net(), X))['head']
    found = by_path(summary_of(nn.stop_gradient(Net, 'head/**')(), X))['head']
    assert found.state == 'frozen'
    # Dense: 2 * 3 * 5 * 2 for the input; as much again, and the bias, for its weights.
    assert found.backward_flops == 60
    assert free.backward_flops > 2 * found.backward_flops


class Scanned(linen.Module):
    length: int
    stop: models.Stop = models.no_stop
    remat: bool = False

    @linen.compact
    def __call__(self, x):
        cell = linen.remat(Cell) if self.remat else Cell
        layers = linen.scan(
            cell,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=self.length,
        )
        with self.stop('layers/**'):
            x, _ = layers(name='layers')(x, None)
        return linen.Dense(2, name='head')(x)


class Cell(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return jnp.tanh(linen.Dense(4, name='dense')(x)), None


def test_a_scan_counts_as_often_as_it_runs():
    once, five = (by_path(summary_of(Scanned(n), X)) for n in (1, 5))
    for path in ('layers', 'layers/dense'):
        assert five[path].flops == 5 * once[path].flops > 0
        assert five[path].backward_flops == 5 * once[path].backward_flops > 0
    stopped = by_path(summary_of(Scanned(5, nn.stop_gradient), X))
    assert stopped['layers'].flops == five['layers'].flops
    assert stopped['layers/dense'].backward_flops == 0
    again = by_path(summary_of(Scanned(5, remat=True), X))['layers/dense']
    # What is computed a second time belongs to the backward pass.
    first = five['layers/dense']
    assert again.backward_flops == first.backward_flops + first.flops


class Branches(linen.Module):
    @linen.compact
    def __call__(self, x):
        small, large = linen.Dense(2, name='small'), linen.Dense(2, name='large')
        if self.is_initializing():
            small(x), large(x)
        return linen.cond(
            x[0, 0] > 0,
            lambda module, x: large(jnp.concatenate([x] * 1)) + large(x),
            lambda module, x: small(x),
            self,
            x,
        )


def test_of_branches_the_dearest_counts():
    found = by_path(summary_of(Branches(), X))
    assert found['large'].flops > 0
    assert found['small'].flops == 0


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
    found = summary_of(Kinds(), X, flops=False)
    assert found.trainable == rows.Size(4, 8)
    assert found.frozen == rows.Size(4 + 3 + 4, 16 + 12 + 16)
    assert found.rows[0].state == 'partly'


def test_states_of_modules_with_all_that_is_in_them():
    found = by_path(summary_of(Nested(), X, flops=False))
    assert {path: row.state for path, row in found.items()} == {
        '': 'partly',
        'net': 'partly',
        'net/body_0': 'frozen',
        'net/body_1': 'frozen',
        'net/head': 'trainable',
        'relu': '',
    }
    assert found[''].trainable == found['net/head'].trainable == rows.Size(12, 48)
    assert found['net'].frozen.values == 25 + 30


class Relu(linen.Module):
    def __call__(self, x):
        return linen.relu(x)


class Nested(linen.Module):
    def setup(self):
        self.net = Net(nn.stop_gradient, 'body_*/**')
        self.relu = Relu()

    def __call__(self, x):
        return self.relu(self.net(x))

    def body(self, x):
        return self.net(x), linen.Dense(2, parent=None)

    def doubled(self, x, train: bool):
        assert train is True  # Not traced.
        return self.net(self.net(x)[:, :1] * x) if train else x


def test_another_method_and_arguments_that_are_no_arrays():
    found = summary_of(Nested(), X, train=True, method='doubled', show_repeated=True)
    assert [row.path for row in found.rows].count(('net', 'head')) == 2
    once = by_path(summary_of(Nested(), X))
    twice = by_path(found)
    # Flops of all calls are in the row of each.
    assert twice['net/head'].flops == 2 * once['net/head'].flops
    # Between the calls the gradient passes the frozen body.
    assert twice['net/body_0'].backward_flops > 0
    assert twice['net/body_0'].state == 'frozen'


def test_a_function_as_the_method():
    def loss(module, x):
        with nn.stop_gradient('net/head/**'):
            return jnp.sum(module(x))

    found = by_path(summary_of(Nested(), X, method=loss, flops=False))
    assert found['net/head'].state == 'frozen'


def test_a_block_around_the_table_counts():
    with nn.stop_gradient('head/**'):
        found = by_path(summary_of(Net(), X))
    assert found['head'].state == 'frozen'
    assert found['body_0'].state == 'trainable'


class Stateful(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, name='before')(x)
        x = linen.BatchNorm(use_running_average=False, name='norm')(x)
        x = jax.lax.stop_gradient(x)
        return linen.Dropout(0.5, deterministic=False)(linen.Dense(2, name='after')(x))


def test_state_is_written_and_trains_nothing():
    rngs = {'params': KEY, 'dropout': KEY}
    found = by_path(summary_of(Stateful(), X, rngs=rngs))
    # What is stopped flows into running averages, which no loss differentiates.
    assert found['before'].state == found['norm'].state == 'frozen'
    assert found['after'].state == 'trainable'
    assert summary_of(Stateful(), X, rngs=KEY, flops=False).trainable.values == 10


class AsInTraining(linen.Module):
    """Two modules, the name of one the beginning of the other's; stopped in init."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(2, name='a')(x) + linen.Dense(2, name='ab')(x)
        return jax.lax.stop_gradient(x) if self.is_mutable_collection('params') else x


def test_the_program_is_the_one_that_is_trained():
    found = by_path(summary_of(AsInTraining(), X, flops=False))
    assert found['a'].trainable == found['ab'].trainable == rows.Size(10, 40)
    assert found[''].trainable.values == 20


def test_outputs_without_a_gradient_train_nothing():
    class Best(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.argmax(linen.Dense(2)(x), axis=-1)

    found = summary_of(Best(), X)
    assert found.rows[0].state == 'frozen'
    assert found.rows[0].backward_flops == 0
    assert found.rows[0].flops > 0


def test_a_module_without_parameters():
    found = summary_of(Relu(), X)
    assert (found.trainable, found.frozen) == (rows.Size(), rows.Size())
    assert found.rows[0].state == ''


def test_shapes_stay_shapes_under_jit_twice():
    """A trace that an earlier program left in a cache has no marks."""

    class Jitted(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.jit(linen.Dense)(2, name='a')(x)

    variables = Jitted().init(KEY, X)
    jax.jit(Jitted().apply).lower(variables, X)
    for _ in range(2):
        found = by_path(summary_of(Jitted(), X))
        assert found['a'].flops == found[''].flops > 0
        assert found['a'].backward_flops == found[''].backward_flops > 0


# The table.


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line[:1] in ('┃', '│')]
    return [
        [cell.strip() for cell in line[1:-1].replace('┃', '│').split('│')]
        for line in lines
    ]


def test_the_table_is_that_of_flax_and_more():
    model = Nested()
    ours = cells(sg.tabulate(model, KEY, console_kwargs=WIDE)(X))
    theirs = cells(nn.tabulate(model, KEY, console_kwargs=WIDE)(X))
    assert ours[0] == [
        *('path', 'module', 'inputs', 'outputs', 'gradient'),
        *('flops', 'backward_flops', 'params'),
    ]
    added = {4, 5, 6}

    def without_blank_lines(rows):
        return [row for row in rows if any(row)]

    same = [[c for n, c in enumerate(row) if n not in added] for row in ours]
    same, theirs = without_blank_lines(same), without_blank_lines(theirs)
    # The word Total stands in the last column before the variables.
    assert same[:-1] == theirs[:-1]
    gradient = {row[0]: row[4:7] for row in ours if row[0]}
    assert gradient['net/body_0'] == ['frozen: 25 (100 B)', '135', '0']
    assert gradient['net/head'][0] == 'trainable: 12 (48 B)'
    assert gradient['net'][0] == 'partly:'
    assert gradient['relu'][0] == ''


def test_the_total_and_the_options():
    show = sg.tabulate(
        Net(nn.stop_gradient, 'body_*/**'),
        KEY,
        depth=0,
        console_kwargs=WIDE,
        compute_flops=False,
        compute_vjp_flops=False,
    )
    text = show(X)
    assert text.endswith('\nTrainable: 12 (48 B)   Frozen: 55 (220 B)\n')
    assert 'Total Parameters: 67 (268 B)' in text
    assert 'flops' not in text
    assert 'body_0' not in {row[0] for row in cells(text)}
    narrow = {**WIDE, 'width': 60}
    forward = sg.tabulate(Net(), KEY, compute_vjp_flops=False, console_kwargs=narrow)(X)
    assert '…' not in forward  # Lines are broken, and nothing is cut off.
    assert 'flops' in cells(forward)[0]
    assert 'backward_flops' not in forward


class Stack(linen.Module):
    """Blocks in blocks, each with parameters of its own."""

    depth: int
    width: int = 2

    @linen.compact
    def __call__(self, x):
        x = x * self.param('scale', linen.initializers.ones, (1, 1))
        for n in range(self.width if self.depth else 0):
            x = Stack(self.depth - 1, self.width, name=f'block_{n}')(x)
        return linen.Dense(4, name='dense')(x)


PLAIN = {'compute_flops': False, 'compute_vjp_flops': False}


def shown(text: str) -> list[str]:
    """The paths of the rows; their parts where they are broken are joined."""
    return [row[0] for row in cells(text)[1:] if len(row) > 2 and row[2]]


def test_a_large_model_is_shown_as_deep_as_can_be_read():
    model = Stack(5)

    def lines(**options):
        show = sg.tabulate(model, KEY, console_kwargs=WIDE, **PLAIN, **options)
        return show(X).splitlines()

    whole, fitting = lines(depth=None), lines()
    assert len(whole) > 500
    assert 50 < len(fitting) <= 150
    said = re.fullmatch(
        'Modules deeper than ([0-9]+) are counted in those that they belong to; '
        'depth=None shows all.',
        fitting[-2],
    )
    assert said is not None
    deepest = int(said[1])
    assert lines(depth=deepest) == fitting
    assert len(lines(depth=deepest + 1)) > 150
    # All that is left out is counted.
    for depth in (0, 1, deepest, 4, 50, None):
        assert lines(depth=depth)[-1] == whole[-1]
        assert 'Total Parameters: 1,323 (5.3 KB)' in '\n'.join(lines(depth=depth))
    for depth in (6, 50, None):
        assert 'Modules deeper' not in ''.join(lines(depth=depth))


def test_sizes_of_modules_that_are_left_out_are_those_of_the_module_around():
    found = summary_of(Stack(2), X, flops=False)
    for depth in range(3):
        part = rows.collapsed(found, depth)
        sizes = {'/'.join(r.path): r.size_and_bytes(['params']) for r in part.rows}
        deeper = [path for path in sizes if path.count('/') == depth - 1 and path]
        assert all(len(row.path) <= depth for row in part.rows)
        of_block = {0: None, 1: 1 + 20 + 2 * 21, 2: 21}[depth]
        for path in deeper:
            assert sizes[path]['params'][0] == (20 if 'dense' in path else of_block)
        assert sum(size['params'][0] for size in sizes.values()) == 7 * 21
    assert rows.collapsed(found, None) is found


def test_a_model_with_many_modules_at_its_top_is_shown_one_deep():
    show = sg.tabulate(Stack(2, 30), KEY, console_kwargs=WIDE, **PLAIN)
    text = show(X)
    assert len(shown(text)) == 32
    assert 'Modules deeper than 1 are' in text


def test_modules_below_one_that_is_not_called_are_counted():
    class Uncalled(linen.Module):
        def setup(self):
            self.net = Net()

        def __call__(self, x):
            return self.net.body(x)

    class Net(linen.Module):
        def setup(self):
            self.dense = linen.Dense(4)

        @linen.nowrap
        def body(self, x):
            return self.dense(x)

    def total(depth):
        show = sg.tabulate(Uncalled(), KEY, depth=depth, console_kwargs=WIDE, **PLAIN)
        # How far the line is padded depends on the table around.
        return re.findall(r'Total Parameters: .*\S', show(X))

    # nn.tabulate counts them in the module around as well.
    assert total(0) == total(1) == total(None)


def test_numbers_in_names_of_parameters_are_in_order():
    class Many(linen.Module):
        @linen.compact
        def __call__(self, x):
            for n in range(12):
                x = x * self.param(f'w_{n}', linen.initializers.ones, (1, 4))
            return x

    text = sg.tabulate(Many(), KEY, console_kwargs=WIDE, **PLAIN)(X)
    assert re.findall('w_[0-9]+', text) == [f'w_{n}' for n in range(12)]


@pytest.mark.parametrize('lift', [linen.jit, lambda cls: linen.jit(linen.remat(cls))])
def test_the_table_is_whole_after_a_trace_of_the_same_shapes(lift):
    cls = lift(Net)
    plain = shown(sg.tabulate(Net(), KEY, console_kwargs=WIDE, **PLAIN)(X))
    for _ in range(2):
        cls().init(KEY, X)
        jax.eval_shape(cls().init, KEY, X)
        text = sg.tabulate(cls(), KEY, console_kwargs=WIDE, **PLAIN)(X)
        assert shown(text) == plain
        assert text.endswith('\nTrainable: 67 (268 B)   Frozen: 0\n')


@pytest.mark.every_case
@pytest.mark.parametrize(
    ('target', 'what'),
    [(linen.Dense, 'the class Dense'), (3, '3 of type int')],
)
def test_what_is_no_module_is_refused(target, what):
    with pytest.raises(errors.ArgumentTypeError) as info:
        sg.tabulate(target, KEY)
    assert str(info.value).splitlines() == [
        f'tabulate() takes a Module instance, and was given {what}.',
        'Make the module: sg.tabulate(Model(...), rngs)(x).',
    ]


def test_colours_unless_told_otherwise(monkeypatch):
    monkeypatch.setenv('TERM', 'xterm-256color')
    options = {'compute_flops': False, 'compute_vjp_flops': False}
    monkeypatch.delenv('NO_COLOR', raising=False)
    assert '\x1b[32mtrainable' in sg.tabulate(Net(), KEY, **options)(X)
    monkeypatch.setenv('NO_COLOR', '1')
    assert '\x1b[32m' not in sg.tabulate(Net(), KEY, **options)(X)
