"""Two asyncio tasks, of which one waits in a block."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def read_while_another_waits(
    block: AbstractContextManager[Any],
    read: Callable[[], Any],
    held: Callable[[], Any] = lambda: None,
) -> Any:
    """Reads in one task, while another task is suspended in a block.

    Returns:
        What ``held`` gives in the block afterwards.
    """

    async def holds() -> Any:
        with block:
            await asyncio.sleep(0)
            return held()

    async def reads() -> None:
        read()

    async def main() -> Any:
        task = asyncio.create_task(holds())
        try:
            await asyncio.create_task(reads())
            return await task
        finally:
            task.cancel()

    return asyncio.run(main())
