"""What a step costs on devices that are not there: rows, and how they are made."""

import concurrent.futures
import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from benchmarks.accelerators import times
from benchmarks.compiled import Compiler, Step, hands, peak
from benchmarks.trainers import Trainer, UnableError
from flax_sg.internals import jaxprs

_COLLECTIVE = re.compile(
    r'= (?P<shapes>.+?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|'
    r'ragged-all-to-all|collective-permute|collective-broadcast)(?P<start>-start)?\('
)
_SHAPE = re.compile(r'(?P<type>[a-z]+)(?P<bits>\d*)[a-z\d]*\[(?P<dims>[\d,]*)\]')
# What is raised where a way to freeze, Flax or JAX cannot do it; the last by JAX, which
# does not export it.
_UNABLE = UnableError.__name__, TypeError.__name__, 'ShardingTypeError'
_TOO_MUCH = (
    re.compile(r'Used (?P<used>[\d.]+\w) of (?P<there>[\d.]+\w) hbm'),
    re.compile(r'temporaries \((?P<used>[\d.]+\w)\) exceeds .*\((?P<there>[\d.]+\w)\)'),
    # When a program runs.
    re.compile(r'[Oo]ut of memory.* allocate (?P<used>[\d.]+ ?\w+)(?P<there>)'),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to freeze, in one case, on some devices.

    Attributes:
        topology: the devices, as the compiler calls them.
        case: what is trained, and where its arrays are.
        way: the way to freeze.
        program: the program by hand that this one is: ``'stops'``, ``'partition'``, or
            ``'other'``.
        flops: of one device, as XLA counts them; one turn of a loop.
        accessed: bytes that are read and written, counted like the flops.
        arguments: bytes of the arguments, on each device.
        temporary: bytes of temporary memory, on each device.
        peak: bytes of arguments, results and temporary memory.
        host: bytes of these in the memory of the host.
        estimate: seconds, as the compiler of a TPU estimates them. None where it does
            not, and for programs with loops, of which it counts one turn.
        collectives: how many there are in the text, and their bytes, by kind.
        trace: seconds to trace and lower, while nothing compiles.
        step: seconds of a step, on a device that is there.
        note: why there are no figures.
        commit: the commit of flax_sg that was measured.
    """

    topology: str
    case: str
    way: str
    program: str = ''
    flops: float = 0.0
    accessed: float = 0.0
    arguments: int = 0
    temporary: int = 0
    peak: int = 0
    host: int = 0
    estimate: float | None = None
    collectives: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    trace: float | None = None
    step: float | None = None
    note: str = ''
    commit: str = ''


def measured(
    topology: str,
    case: str,
    makers: Mapping[str, Callable[[], Trainer]],
    inputs: Any,
    place: Callable[[Any], Any],
    rounds: int = 1,
    timed: bool = False,
) -> Iterator[Row]:
    """Makes the rows of a case, one for each way to freeze.

    Args:
        topology: the name of the devices.
        case: the name of the case.
        makers: what makes the step of each way; those by hand come first.
        inputs: the inputs of the loss.
        place: makes shapes of a tree of arrays, on the devices.
        rounds: how often each step is traced, in turns; the shortest time counts.
        timed: whether the devices are there, so that steps run.
    """
    steps: dict[str, Step] = {}
    traces: dict[str, float] = {}
    notes: dict[str, str] = {}
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count()) if timed else None
    compiler = Compiler(pool)
    for way, make in [*makers.items()] * rounds:
        start = time.process_time()
        try:
            steps[way] = Step(make(), inputs, [0], compiler, place)
        except Exception as reason:
            if type(reason).__name__ not in _UNABLE:
                raise
            notes[way] = str(reason).partition('\n')[0]
        seconds = time.process_time() - start
        traces[way] = min(traces.get(way, seconds), seconds)
    if pool:
        pool.shutdown()  # Compiling would disturb what is timed.
    by_hand: dict[str, str] = {}
    for way in makers:
        seconds = None
        if way in steps:
            try:
                programs = steps[way].programs
                if timed:
                    seconds = times.of_step(steps[way], place, inputs)
            except jax.errors.JaxRuntimeError as error:
                notes[way] = _too_much(str(error))
        if way in notes:
            yield Row(topology, case, way, note=notes[way])
            continue
        by_hand = {**hands({way: steps[way]}), **by_hand}
        row = row_of(topology, case, way, [program.run for program in programs])
        kind = by_hand.get(programs[0].text, 'other')
        if timed:
            yield dataclasses.replace(row, program=kind, step=seconds)
        else:
            yield dataclasses.replace(row, program=kind, trace=traces[way])


def row_of(topology: str, case: str, way: str, programs: list[Any]) -> Row:
    """The row of compiled programs that run one after the other."""
    costs = [jaxprs.counts(program) for program in programs]
    sizes = [program.memory_analysis() for program in programs]
    texts = [program.as_text() for program in programs]
    loops = any(' while(' in text for text in texts)
    estimates = [cost.get('optimal_seconds') for cost in costs]
    # The compiler of a GPU returns a negative number.
    known = not loops and all(seconds and seconds > 0 for seconds in estimates)
    moved: dict[str, tuple[int, int]] = {}
    for text in texts:
        for kind, (count, size) in collectives(text).items():
            before = moved.get(kind, (0, 0))
            moved[kind] = before[0] + count, before[1] + size
    return Row(
        topology,
        case,
        way,
        flops=sum(cost.get('flops', 0.0) for cost in costs),
        accessed=sum(cost.get('bytes accessed', 0.0) for cost in costs),
        arguments=max(size.argument_size_in_bytes for size in sizes),
        temporary=max(size.temp_size_in_bytes for size in sizes),
        peak=max(map(peak, sizes)),
        host=max(
            size.host_argument_size_in_bytes
            + size.host_output_size_in_bytes
            - size.host_alias_size_in_bytes
            + size.host_temp_size_in_bytes
            for size in sizes
        ),
        estimate=sum(filter(None, estimates)) if known else None,
        collectives=moved,
    )


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """How many collectives of each kind are in a program, and the bytes they return.

    A collective that is started and awaited is one; it returns its operands, too, which
    are not counted.
    """
    out: dict[str, tuple[int, int]] = {}
    for found in _COLLECTIVE.finditer(text):
        shapes = found['shapes']
        sizes = []
        for shape in _SHAPE.finditer(shapes):
            size = math.prod(map(int, filter(None, shape['dims'].split(','))))
            sizes.append(size * int(shape['bits'] or 8) // 8)
        if found['start'] and found['kind'] != 'all-reduce' and shapes.startswith('('):
            half = len(sizes) // 2
            sizes = sizes[half : 2 * half]
        count, size = out.get(found['kind'], (0, 0))
        out[found['kind']] = count + 1, size + sum(sizes)
    return out


def _too_much(message: str) -> str:
    for pattern in _TOO_MUCH:
        if found := pattern.search(message):
            there = found['there'] or 'what is left'
            return f'needs {found["used"]} of {there}'
    raise RuntimeError(message)
