"""Two asyncio tasks, of which one waits in a block."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def read_while_another_waits(
    block: AbstractContextManager[Any], read: Callable[[], Any]
) -> None:
    """Reads in one task, while another task is suspended in a block."""

    async def holds() -> None:
        with block:
            await asyncio.sleep(0)

    async def reads() -> None:
        read()

    async def main() -> None:
        task = asyncio.create_task(holds())
        try:
            await asyncio.create_task(reads())
        finally:
            task.cancel()

    asyncio.run(main())
