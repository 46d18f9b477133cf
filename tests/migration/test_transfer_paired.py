"""What transfers over a communicator of two ranks can get wrong: bytes on their way when nobody wants them any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator

import pytest

from tests.migration.transfer_storm import BLOCK_BYTES, BLOCKS, NEED_TORCH, make_kind

pytest.importorskip("torch")

SOURCE = textwrap.dedent(
    """
    import asyncio, sys
    from tests.migration.transfer_storm import BLOCK_BYTES, BLOCKS, make_kind

    async def main(backend, address):
        blocks = [(index, memoryview(bytearray(b"x" * BLOCK_BYTES))) for index in range(BLOCKS)]
        transfer = make_kind(backend)
        channel = await transfer.open(address, "h")
        while True:
            await channel.send(blocks)

    asyncio.run(main(sys.argv[1], sys.argv[2]))
    """
)


@contextlib.asynccontextmanager
async def source(backend: str, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that sends without end."""
    errors = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SOURCE, backend, address, stderr=errors)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ended when it was refused
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.parametrize("backend", NEED_TORCH)
async def test_P05_P13_a_source_that_was_stopped_writes_nothing_when_it_goes_on(backend: str) -> None:
    arrived = bytearray(BLOCKS * BLOCK_BYTES)
    target = make_kind(backend)
    target.expect("h", lambda i: memoryview(arrived)[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
    async with asyncio.timeout(60), source(backend, await target.start()) as process:
        while not all(arrived[::BLOCK_BYTES]):
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGSTOP)
        async with asyncio.timeout(10):
            await target.forget("h")
        arrived[:] = bytes(len(arrived))
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert not any(arrived)
        arrived.append(0)  # raises BufferError while anybody still holds the memory
    await target.stop()
