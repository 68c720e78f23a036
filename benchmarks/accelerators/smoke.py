"""At a small size, into a folder that goes away; fails if a program is not by hand."""

from collections.abc import Mapping, Sequence

from benchmarks.accelerators.rows import Row

# These are stops by hand; or, where whole arrays are frozen, the partition by hand.
STOPS = ('nn.map_variables', 'hk.custom_getter', 'flax_sg block', 'flax_sg Frozen')
PARTITIONS = (
    *('equinox partition', 'nnx DiffState', 'flax_sg grad, wrt='),
    *('flax_sg live', 'flax_sg live, one jit', 'flax_sg Frozen, live'),
)


def check(found: Mapping[str, Sequence[Row]]) -> None:
    """Fails if a way to freeze compiles to another program than on a CPU."""
    assert found
    for study, rows in found.items():
        ways = {(row.topology, row.case, row.way): row for row in rows}
        for (topology, case, way), row in ways.items():
            where = (study, topology, case, way)
            if row.note:
                continue
            assert row.flops and row.peak, where
            is_split = study == 'scale' and way == 'flax_sg frozen_layers'
            if way in STOPS or is_split:
                assert row.program == 'stops', where
            if way in PARTITIONS and 'half' not in case:
                assert row.program in ('stops', 'partition'), where
            if 'mask' in way and 'clip' not in way and 'one jit' not in way:
                assert row.program == 'other', where
