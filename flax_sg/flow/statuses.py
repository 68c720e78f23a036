"""What an output can be to a parameter, and how reports write it."""

from __future__ import annotations

from collections.abc import Iterable

from flax_sg.rendering.matrix import Word

FLOWS, PARTLY, STOPPED, UNUSED = 'flows', 'partly', 'stopped', 'unused'

# Told apart by colour-blind people and in grey: from the palette of Okabe and Ito, and
# their lightness goes one way from what is trained to what is not used.
WORDS = {
    FLOWS: Word(
        'trains',
        'the output depends differentiably on every parameter there',
        'bold green',
        ('#0072b2', '#ffffff'),
        ('#7cc4f4', '#000000'),
    ),
    PARTLY: Word(
        'partly',
        'on some of the parameters there, or of their elements',
        'yellow',
        ('#56b4e9', '#000000'),
        ('#0072b2', '#ffffff'),
    ),
    STOPPED: Word(
        'stopped',
        'it uses them, and their gradient is exactly zero',
        '',
        ('#e8e8e8', '#333333'),
        ('#30363d', '#e6edf3'),
    ),
    UNUSED: Word(
        '-',
        'it does not use them',
        'dim',
        None,
        None,
    ),
}


def together(statuses: Iterable[str]) -> str:
    """The status of several parameters together."""
    found = set(statuses)
    if found & {FLOWS, PARTLY}:
        return FLOWS if found == {FLOWS} else PARTLY
    return STOPPED if STOPPED in found else UNUSED
