"""Exceptions of assertions: what a user's test states does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flax_sg.errors.base import FlaxSGError

SHOWN = 12  # Rows of a table in a message: enough to see what is wrong.


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines in columns, indented; of many rows the first ones and how many more.

    >>> print(table(['', 'first', 'second'], [['dot', '6', '4'], ['add', '1', '2']]))
           first  second
      dot  6      4
      add  1      2

    Args:
        head: the heading of each column.
        rows: the cells of each row.
    """
    rows = list(rows)
    shown = [head, *rows[:SHOWN]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ['  ' + '  '.join(map(str.ljust, row, widths)) for row in shown]
    if len(rows) > SHOWN:
        lines.append(f'  and {len(rows) - SHOWN} more')
    return '\n'.join(line.rstrip() for line in lines)


class DifferentProgramError(FlaxSGError, AssertionError):
    """Two functions are compiled to different programs.

    ::

        def hand(params, x):
            return loss(jax.lax.stop_gradient(params), x)

        assert_same_program(jax.grad(loss), jax.grad(hand), params, x)  # raises

    The message counts what differs, and shows the first line that does.
    """

    def __init__(
        self, rows: Sequence[tuple[str, str, str]], lines: tuple[str, str]
    ) -> None:
        counts = table(['', 'first', 'second'], rows) if rows else ''
        parts = [
            'the two functions are compiled to different programs.',
            counts or '  As many of each operation.',
            'The first line that differs:',
            *(
                f'  {name}  {" ".join(line.split())[:120]}'
                for name, line in zip(('first ', 'second'), lines, strict=True)
            ),
        ]
        super().__init__('\n'.join(parts))


class TracedAgainError(FlaxSGError, AssertionError):
    """A function that should be traced once was traced again.

    ::

        step = jax.jit(assert_traces_once(train_step))
        step(params, x)
        step(params, x[:-1])  # raises: another shape
    """

    def __init__(self, name: str, rows: Sequence[tuple[str, str, str]]) -> None:
        if rows:
            text = table(['', 'first trace', 'this trace'], rows)
        else:
            text = (
                '  Its arguments and the open blocks are what they were. JAX keeps '
                'traces by the\n  function, the devices and its settings: is the '
                'function made, or jitted, anew for each call?'
            )
        super().__init__(f'{name} is traced a second time.\n{text}')


class NeverTracedError(FlaxSGError, TypeError):
    """A function whose traces are to be counted runs without being traced.

    ::

        step = assert_traces_once(jax.jit(train_step))  # raises
        step = jax.jit(assert_traces_once(train_step))
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f'assert_traces_once({name}) counts no traces: the function is called '
            'outside of any.\n'
            f'Write jax.jit(assert_traces_once({name})), not the other way round.'
        )


class FlowExpectationError(FlaxSGError, AssertionError):
    """A function trains something else than it is expected to.

    ::

        def loss(params, x):
            with nn.stop_gradient('encoder/**'):
                return jnp.mean(model.apply({'params': params}, x) ** 2)

        assert_flows(loss, 'encoder/**', params, x)  # raises
        assert_stopped(loss, 'encoder/**', params, x)
    """

    def __init__(self, expected: str, broken: str) -> None:
        super().__init__(f'{expected}: this does not hold.\n{broken}')


class ReportArgumentsError(FlaxSGError, TypeError):
    """Arguments are given together with a report, which is of a program with its own.

    ::

        flow = sg.gradient_flow(loss, params, x)
        assert_flows(flow, 'head/**', params, x)  # raises
        assert_flows(flow, 'head/**')
    """

    def __init__(self, count: int) -> None:
        several = '1 argument' if count == 1 else f'{count} arguments'
        super().__init__(
            f'a report was given with {several}; it says what it says of the arguments '
            'that it was made with.\n'
            'Leave them out, or give the function in place of the report.'
        )
