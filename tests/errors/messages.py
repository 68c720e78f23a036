"""What each program raises, as text: `messages.txt` holds it, and is read here."""

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

import flax_sg

FILE = Path(__file__).with_suffix('.txt')
LIBRARY = str(Path(flax_sg.__file__).parent) + os.sep
# What differs between two runs or two machines: `...` stands in its place.
VARIES = re.compile(
    r'(?<=\.py:)\d+|(?<=\bline )\d+|\d+(\.\d+){2,}|(?<=0x)[0-9a-f]+'
    r'|/[^\s:]*/tmp[^\s:/]*'  # A temporary folder.
)


class Raised(NamedTuple):
    """An error, its text, and the places in the library that raised it."""

    error: Exception
    text: str
    sites: frozenset[str]


@functools.cache
def raised(program: Callable[[], Any]) -> Raised:
    filtering = jax.config.jax_traceback_filtering
    jax.config.update('jax_traceback_filtering', 'off')  # It leaves our files out.
    try:
        program()
    except Exception as error:
        said = str(error).split('------------------')[0].rstrip()
        text = f'{type(error).__name__}: {said}'
        sites = frozenset(_sites_of(error))
        return Raised(error.with_traceback(None), text, sites)
    finally:
        jax.config.update('jax_traceback_filtering', filtering)
    raise AssertionError('It raises nothing.')


def _sites_of(error: BaseException) -> Iterator[str]:
    """Where an exception, and those that it was raised from, come from."""
    frame = error.__traceback__
    site = ''
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if file.startswith(LIBRARY):
            site = f'{file.removeprefix(LIBRARY)}:{frame.tb_lineno}'
        frame = frame.tb_next
    yield site
    for other in (error.__cause__, error.__context__):
        if other is not None:
            yield from _sites_of(other)


def settled(text: str, written: str) -> str:
    """What is written of a program, if its error says that; else what it says."""
    pattern = re.escape(written).replace(re.escape('...'), '.*')
    return written if re.fullmatch(pattern, text) else VARIES.sub('...', text)


def read() -> dict[str, str]:
    """The text of each program, by its name."""
    parts = FILE.read_text().split('\n\n[')[1:]
    pairs = [part.split(']\n', maxsplit=1) for part in parts]
    return {name: text.rstrip('\n') for name, text in pairs}


def rewrite(texts: dict[str, str]) -> None:
    """Writes the text of each program, where it is not what is written."""
    head, written = FILE.read_text().split('\n\n[')[0], read()
    rows = {name: settled(text, written.get(name, '')) for name, text in texts.items()}
    parts = [head.rstrip('\n'), *(f'[{name}]\n{text}' for name, text in rows.items())]
    FILE.write_text('\n\n'.join(parts) + '\n')
