"""What the demo prints: the table of who trains whom, and what holds."""

import dataclasses
import textwrap

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flax_sg.demo import checks, train
from flax_sg.demo import model as models
from flax_sg.flow import GradientFlow
from flax_sg.rendering import text

ACCURACY = 0.9


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence, and whether it is true; None if that was not to be decided."""

    text: str
    holds: bool | None


def claims(
    measured: checks.Measured, runs: dict[str | None, train.Run], whole: bool
) -> list[Claim]:
    """What the demo claims of its measurements.

    Args:
        measured: measurements of the model.
        runs: the trained models, by frozen part; None for the one with none frozen.
        whole: whether training had all its steps, so that accuracy can be asked for.
    """
    own = np.eye(len(measured.trains), dtype=bool)
    accuracy = runs[None].accuracy[-1]
    best_frozen = max(run.accuracy[-1] for part, run in runs.items() if part)
    return [
        Claim(
            'Each loss trains its own part, and nothing else at all.',
            bool(np.all(np.where(own, measured.trains > 0, measured.trains == 0))),
        ),
        Claim(
            'What sg.gradient_flow proves of the program on shapes is what its '
            f'{len(measured.flow.outputs) * len(measured.flow.parameters)} real '
            'gradients are, zero or not.' + _some('Disproved', measured.disproved),
            not measured.disproved,
        ),
        Claim(
            'Without the blocks each of them would train all three parts.',
            bool(np.all(measured.trains_unstopped > 0)),
        ),
        Claim(
            f'All {measured.leaves} arrays of values and gradients are, to the last '
            'bit, those of the program written by hand with four weight copies.'
            + _some('Different', measured.different),
            not measured.different,
        ),
        Claim(
            'The cotangent of the stopped inference pass reaches the observation '
            f'({measured.code_to_observation:.2g}) and no parameter '
            f'({measured.code_to_params:.2g}).',
            measured.code_to_observation > 0 and measured.code_to_params == 0,
        ),
        Claim(
            'The sampler runs once: length of each scan in the training step: '
            f'{", ".join(map(str, measured.scans)) or "none"}.',
            len(measured.scans) == 1,
        ),
        Claim(
            f'Held-out digits recognised: {accuracy:.3f} ({ACCURACY} asked).',
            accuracy >= ACCURACY if whole else None,
        ),
        Claim(
            f'At most {best_frozen:.3f} if a part keeps its initial weights.',
            best_frozen < ACCURACY if whole else None,
        ),
    ]


def _some(what: str, found: list[str]) -> str:
    more = f' and {len(found) - 2} more' if len(found) > 2 else ''
    return f' {what}: {", ".join(found[:2])}{more}' if found else ''


def show_flow(console: Console, flow: GradientFlow) -> None:
    """Prints which loss trains which module, as proven from the program."""
    console.print(
        '[bold]Which loss trains which module[/]: sg.gradient_flow, on shapes'
    )
    console.print(text.MatrixText(flow.matrix(depth=1)))
    console.print()


def show_table(console: Console, measured: checks.Measured) -> None:
    """Prints which loss trains which part."""
    console.print('[bold]Which loss trains which part[/]: largest absolute gradient')
    console.print('(in brackets: the same program without the blocks)')
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column()
    for where in models.PARTS.values():
        table.add_column(where, justify='right')
    for part, stopped, unstopped in zip(
        models.PARTS, measured.trains, measured.trains_unstopped, strict=True
    ):
        cells = [_cell(*pair) for pair in zip(stopped, unstopped, strict=True)]
        table.add_row(f'{part} loss', *cells)
    console.print(table)


def _cell(stopped: float, unstopped: float) -> Text:
    # Exactly zero is printed as a bare 0, what is only small never is.
    value = (f'{stopped:.1e}', 'bold green') if stopped else '0'
    return Text.assemble(value, (f' ({unstopped:.1e})', 'dim'))


def show_claims(console: Console, stated: list[Claim]) -> None:
    """Prints each claim with its verdict."""
    verdicts = {True: ('ok', 'green'), False: ('FAILED', 'bold red'), None: ('-', '')}
    indent = 2 + max(len(verdicts[claim.holds][0]) for claim in stated)
    for claim in stated:
        verdict, style = verdicts[claim.holds]
        lines = textwrap.wrap(claim.text, console.width - indent)
        console.print(Text.assemble((verdict.ljust(indent), style), lines[0]))
        for line in lines[1:]:
            console.print(Text(' ' * indent + line))
