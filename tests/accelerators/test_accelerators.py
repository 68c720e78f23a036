"""Programs for TPUs and GPUs that are not there are those by hand.

The compilers of these run on any CPU. `dev.py accelerators --smoke` installs one and
runs these tests. Elsewhere they are skipped.
"""

import functools
import os
import re
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_sg as sg
from benchmarks import trainers
from benchmarks.accelerators import (
    compilers,
    kernels,
    picture,
    results,
    rows,
    scale,
    sharded,
    tables,
)
from benchmarks.accelerators.models import BACKBONE, Decoder
from benchmarks.accelerators.sharded import data_of
from benchmarks.compiled import Compiler, Step
from benchmarks.workloads import Workload
from flax_sg import errors, testing
from flax_sg import linen as nn

# Other packages are measured, too.
BENCH = "needs the extra 'bench'"
# LayerNorm promotes bfloat16.
pytestmark = pytest.mark.usefixtures('standard_promotion')

NET = Decoder(2, 64)
FOUR = {'tpu': 'v5e:2x2', 'cuda': '1x1x4'}


@pytest.fixture(params=FOUR)
def platform(request: pytest.FixtureRequest) -> str:
    """A platform whose compiler is here; where it has to be, it is not skipped."""
    name: str = request.param
    try:
        compilers.compiler(name)
    except compilers.NoCompilerError as reason:
        if os.environ.get('FLAX_SG_COMPILER') == name:
            raise
        pytest.skip(str(reason))
    return name


def loss_of(spelling, net, params, tokens):
    if spelling == 'by hand':
        params = BACKBONE.map(jax.lax.stop_gradient, params)
    if spelling == 'Frozen':
        net = nn.Frozen(net, BACKBONE.pattern)
    if spelling == 'block':
        with nn.stop_gradient(BACKBONE.pattern):
            return net.apply({'params': params}, tokens)
    return net.apply({'params': params}, tokens)


def gradient(spelling, net=NET):
    loss = functools.partial(loss_of, spelling, net)
    if spelling == 'wrt':
        return sg.grad(loss, wrt='head/**', absent='zeros')
    return jax.grad(loss)


def shapes(mesh, tree, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    return jax.tree.map(lambda x: shape(x.shape, x.dtype), tree)


@pytest.mark.parametrize('count', [1, 4])
def test_programs_are_those_by_hand(platform, count):
    devices = compilers.devices(platform, FOUR[platform])[:count]
    mesh = Mesh(np.array(devices), ('data',))
    data = data_of(NET, 4, 16)
    args = shapes(mesh, data.params), shapes(mesh, data.inputs[0], 'data')
    hand = jax.jit(gradient('by hand')).lower(*args).compile()
    for spelling in ('block', 'Frozen', 'wrt'):
        testing.assert_same_program(gradient(spelling), hand, *args)
    with pytest.raises(errors.ExpectationError, match='different programs'):
        testing.assert_same_program(gradient('none'), hand, *args)
    row = rows.row_of('', '', '', [hand])
    assert row.flops and row.peak and not row.host
    assert bool(row.collectives) == (count > 1)


@pytest.mark.parametrize('platform', ['tpu'], indirect=True)
def test_the_lines_of_the_page(platform):
    page = Path(__file__).parents[2] / 'docs' / 'reference' / 'testing.md'
    [lines] = re.findall(r'on 16 chips is.*?```text\n(.*?)```', page.read_text(), re.S)
    first, *others = lines.splitlines()
    compilers.devices(platform, 'v5e:4x4')  # It says where there is no TPU.
    data = data_of(NET, 16, 16)
    steps = {'step': gradient('block'), 'step_by_hand': gradient('by hand')}
    names = {'jax': jax, 'testing': testing, **steps}
    exec(first, names)
    mesh = Mesh(np.array(names['devices']), ('data',))
    whole, split = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((), ('data',)))
    names['args'] = data.params, data.inputs[0]
    names['shardings'] = jax.tree.map(lambda _: whole, data.params), split
    exec('\n'.join(others), names)
    names['step'] = gradient('none')
    with pytest.raises(errors.ExpectationError, match='different programs'):
        exec('\n'.join(others), names)


def test_a_kernel_of_pallas_under_a_block(platform):
    net = Decoder(2, 256, 2, attention=kernels.flash(platform))
    [device, *_] = compilers.devices(platform, FOUR[platform])
    mesh = Mesh(np.array([device]), ('data',))
    data = data_of(net, 2, 256)
    args = shapes(mesh, data.params), shapes(mesh, data.inputs[0])
    for spelling in ('block', 'Frozen'):
        ours, hand = gradient(spelling, net), gradient('by hand', net)
        testing.assert_same_program(ours, hand, *args)
    loss = functools.partial(loss_of, 'block', net)
    testing.assert_trains_only(loss, 'head/**', *args)


def test_what_the_compiler_does_not_know_is_said_in_one_line(platform):
    with pytest.raises(compilers.NoCompilerError) as info:
        compilers.devices(platform, 'v99:2x2')
    [line] = str(info.value).splitlines()
    assert compilers.compiler(platform) in line
    assert "makes no topology 'v99:2x2'" in line


def test_a_missing_compiler_is_said_in_one_line(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, 'version', missing)
    with pytest.raises(compilers.NoCompilerError) as info:
        compilers.devices('tpu', 'v5e:2x2')
    wanted = 'libtpu is not installed: python3 dev.py accelerators tpu'
    assert str(info.value) == wanted


@pytest.mark.parametrize('one_jit', [True, False])
def test_what_a_step_returns_is_where_it_was(one_jit):
    # Else XLA may keep the gradients of sharded parameters whole on each device.
    placement = sharded.Placement(sharded=True)
    mesh = placement.mesh(jax.devices()[:2])
    data = data_of(NET, 2, 16)
    specs = placement.specs(mesh, data.params)
    place = functools.partial(sharded.placed, mesh, specs)
    work = Workload('', NET, [], BACKBONE)
    trainer = trainers.masks(work, data, one_jit=one_jit, clip=True)
    step = Step(trainer, data.inputs, [0], Compiler(), place)
    kept = place((data.params, step.optimizer))
    (_, *first), *second = (p.run.output_shardings for p in step.programs)
    pairs = [(first, kept)] if one_jit else [(first, kept[:1]), (second[0], kept)]
    for after, before in pairs:
        leaves = jax.tree.leaves(before), jax.tree.leaves(after)
        for leaf, sharding in zip(*leaves, strict=True):
            assert sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_on_a_device_that_is_there_steps_run(tmp_path, monkeypatch):
    names = 'stops by hand', 'flax_sg block', 'optax mask'
    ways = {name: sharded.WAYS[name] for name in names}
    monkeypatch.setattr(scale, 'WAYS', ways)
    device = compilers.compiler(compilers.HERE)
    model = {'8 billion': Decoder(2, 8, 2, 16)}
    only = 'backbone frozen'
    found = [*scale.rows(compilers.HERE, [device], only, model, tokens=4)]
    assert all(row.step and not row.trace for row in found)
    programs = {row.way: row.program for row in found}
    assert programs['flax_sg block'] == programs['stops by hand'] == 'stops'
    assert programs['optax mask'] == 'other'
    results.keep(tmp_path / 'scale.json', found)
    tables.write(tmp_path, device, {})
    page = (tmp_path / 'README.md').read_text()
    assert '| MB peak | ms a step |' in page and 'The steps ran' in page
    picture.save(tmp_path / 'scale.svg', found)
    assert f'ms on one {device}' in (tmp_path / 'scale.svg').read_text()


def test_collectives_are_counted_by_kind_and_bytes():
    text = """
      %a = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1}}
      %b = (bf16[2]{0:T(256)}, f32[3]{0}) all-reduce(%y, %z), to_apply=%add
      %c = (bf16[2]{0}, bf16[8]{0}) all-gather-start(%x), dimensions={0}
      %d = bf16[8]{0} all-gather-done(%c)
      %e = f32[5]{0} all-reduce-start(%x), to_apply=%add
      %f = f8e4m3fn[16]{0} reduce-scatter(%x), dimensions={0}
      %g = f32[16]{0} fusion(%all-reduce), kind=kLoop
    """
    assert rows.collectives(text) == {
        'all-reduce': (3, 4 * 32 + 2 * 2 + 4 * 3 + 4 * 5),
        'all-gather': (1, 16),
        'reduce-scatter': (1, 16),
    }


def test_nothing_to_compile_is_no_error(tmp_path, monkeypatch):
    """Where no row has such a name, the folder is made all the same."""
    main = pytest.importorskip('benchmarks.accelerators.__main__', reason=BENCH)
    command = f'accelerators {compilers.HERE} --only nothing --out {tmp_path / "new"}'
    monkeypatch.setattr('sys.argv', command.split())
    main.main()
    [folder] = (tmp_path / 'new').iterdir()
    assert [file.name for file in folder.iterdir()] == ['README.md']
