"""Makes the notebooks from their sources and checks them: ``dev.py notebooks``.

The source of a notebook is a Python file in jupytext's percent format, such as
``notebooks/01_name.py``, so that diffs are readable. Beside the source is the notebook
with outputs, ``01_name.ipynb``. Without an option this program makes the notebooks.
With ``--check`` it runs each source as a notebook, from the top, at the small size. The
check fails if a source raises, or if its cells differ from those of the notebook.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from nbclient import exceptions

from tests.helpers import quick_compile

FOLDER = Path(__file__).resolve().parents[1] / 'notebooks'
SIZE = 'FLAX_SG_NOTEBOOKS'  # notebooks read from it how much to compute
BYTES = 400_000  # of a notebook with outputs, which is kept in the repository
SECONDS = 900  # of a single cell


def main(argv: Sequence[str]) -> int:
    """Makes or checks all notebooks, or those that are named.

    Args:
        argv: ``[--check] [NAME ...]``, each the beginning of a file's name.

    Returns:
        The exit status: 0 if there is no fault.
    """
    parser = argparse.ArgumentParser('dev.py notebooks', description=main.__doc__)
    parser.add_argument('names', nargs='*', metavar='NAME', help='such as 01')
    parser.add_argument('--check', action='store_true', help='write nothing, run small')
    parser.add_argument('--folder', type=Path, default=FOLDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    names = tuple(options.names) or ('',)
    sources = sorted(options.folder.glob('[0-9]*.py'))
    sources = [source for source in sources if source.name.startswith(names)]
    if not sources:
        sys.exit(f'No notebook in {options.folder} begins with {" or ".join(names)}.')
    faults = asyncio.run(_run_all(sources, options.check))
    if options.check:
        faults += orphans(options.folder)
    print(*faults, sep='\n', end='\n' if faults else '')
    return int(bool(faults))


async def _run_all(sources: Sequence[Path], check: bool) -> list[str]:
    """Runs notebooks, as many at a time as there are cores; returns the faults."""
    cores = asyncio.Semaphore(min(os.cpu_count() or 1, 4))

    async def one(source: Path) -> list[str]:
        async with cores:
            start = time.perf_counter()
            notebook = cells_of(source)
            faults = await _executed(notebook, source, env)
            if check:
                faults += list(differences(source))
            elif not faults:
                nbformat.write(notebook, source.with_suffix('.ipynb'))
                faults += list(differences(source))
            seconds = time.perf_counter() - start
            print(f'{source.stem}: {seconds:.0f} s', flush=True)
            return faults

    with tempfile.TemporaryDirectory() as profile:
        env = {
            **os.environ,
            'IPYTHONDIR': profile,  # Ignores the settings of the user.
            'PYTHONPATH': str(FOLDER.parent),  # Imports this checkout.
            # Puts figures into the notebook, whatever backend the user has set.
            'MPLBACKEND': 'module://matplotlib_inline.backend_inline',
            SIZE: 'ci' if check else 'full',
        }
        if check:  # Each program runs once.
            env.setdefault('XLA_FLAGS', quick_compile.FLAGS)
        faults = await asyncio.gather(*map(one, sources))
    return [fault for found in faults for fault in found]


def cells_of(source: Path) -> nbformat.NotebookNode:
    """The notebook that a source means, without outputs; the same at every call."""
    notebook = jupytext.reads(source.read_text(), fmt='py:percent')
    for number, cell in enumerate(notebook.cells):
        cell.id = f'cell-{number}'  # Otherwise nbformat draws a random id.
        cell.metadata = {}
    notebook.metadata = {
        'kernelspec': {'name': 'python3', 'display_name': 'Python 3'},
        'language_info': {'name': 'python'},
    }
    return notebook


async def _executed(notebook: Any, source: Path, env: dict[str, str]) -> list[str]:
    """Runs a notebook from the top, in a process of its own and its own folder."""
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        startup_timeout=SECONDS,
        record_timing=False,
        resources={'metadata': {'path': str(source.parent)}},
    )
    metadata = dict(notebook.metadata)
    client.km = client.create_kernel_manager()
    if os.name != 'nt':  # Opens no port to other users of this machine.
        client.km.transport = 'ipc'
        client.km.ip = str(Path(env['IPYTHONDIR']) / source.stem)
    try:
        await client.async_execute(env=env)
    except exceptions.CellExecutionError as error:
        return [f'{source.name} raises:\n{error}']
    except exceptions.CellTimeoutError as error:
        return [f'{source.name} hangs:\n{error}']
    except exceptions.DeadKernelError as error:
        return [f'{source.name} ends its process:\n{error}']
    finally:
        # The Python version is no part of the notebook.
        notebook.metadata = metadata
    return []


def differences(source: Path) -> Iterator[str]:
    """What is wrong with the notebook beside a source."""
    file = source.with_suffix('.ipynb')
    fix = f'run python3 dev.py notebooks {source.stem}'
    if not file.exists():
        yield f'{file.name} is missing: {fix}'
        return
    made = nbformat.read(file, as_version=4)
    wanted = cells_of(source)
    if _texts(made) != _texts(wanted):
        yield f'{file.name} is not that of {source.name} any more: {fix}'
    code = [cell for cell in made.cells if cell.cell_type == 'code']
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield f'{file.name} was not run from the top: {fix}'
    outputs = [output for cell in code for output in cell.outputs]
    if any(o.output_type == 'error' or o.get('name') == 'stderr' for o in outputs):
        yield f'{file.name} shows errors or warnings: mend {source.name}'
    if file.stat().st_size > BYTES:
        yield f'{file.name} has more than {BYTES:,} bytes: draw fewer or smaller plots'


def orphans(folder: Path) -> Iterator[str]:
    """Notebooks without a source."""
    for file in sorted(folder.glob('*.ipynb')):
        if not file.with_suffix('.py').exists():
            yield f'{file.name} has no source'


def _texts(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
