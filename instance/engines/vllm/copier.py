"""Moves KV bytes between workers, in a thread with an event loop of its own, never in step with the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from midstream.control.errors import CannotConnect, MidstreamError, TransferFailed
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.frames import frame, read_frame
from midstream.instance.engines.vllm.kv_memory import KvMemory, Window
from midstream.migration.transfers.base import Bytes, Channel, Where
from midstream.migration.transfers.endpoint import Endpoint
from midstream.migration.transfers.registry import make_transfers
from midstream.migration.transfers.shm_memory import Region

PART_BYTES = 4 << 20
"""Bytes that move between two pauses; larger blocks move one by one."""
PAUSES_MS_MAX = 1_000.0
"""All pauses of one copy: a long one must not become so slow that its move is given up."""


def start_copier(socket: str, rank: int, memory: KvMemory, regions: Sequence[Region] = ()) -> threading.Thread:
    """Start the thread; it ends when the llumlet closes the connection. `regions`: where peers may read the memory."""
    thread = threading.Thread(
        target=lambda: asyncio.run(Copier(rank, memory, regions).serve(socket)), name="midstream copier", daemon=True
    )
    thread.start()
    return thread


class Copier:
    """One worker's end of all transfers, told what to do by the llumlet."""

    def __init__(self, rank: int, memory: KvMemory, regions: Sequence[Region]) -> None:
        self._rank = rank
        self._memory = memory
        self._regions = regions
        self._transfers: Mapping[str, Endpoint] = {}
        self._channels: dict[str, tuple[str, Channel]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._arriving: dict[str, Window] = {}

    async def serve(self, socket: str) -> None:
        """Take calls until the other side closes."""
        reader, self._writer = await asyncio.open_unix_connection(socket)
        self._answer(0, calls.Hello(rank=self._rank, block_bytes=self._memory.block_bytes))
        try:
            while True:
                call = msgspec.msgpack.decode(await read_frame(reader), type=calls.CopierCall)
                task = asyncio.get_running_loop().create_task(self._do(call))
                self._tasks[call.number] = task
                task.add_done_callback(partial(self._forget_task, call.number))
        except asyncio.IncompleteReadError:
            pass  # the llumlet is gone, or has no more use for us
        finally:
            await self._end()

    def _forget_task(self, number: int, _: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)

    async def _end(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        for transfer in self._transfers.values():
            await transfer.stop()
        self._writer.close()

    async def _do(self, call: calls.CopierCall) -> None:
        try:
            self._answer(call.number, await self._perform(call.what))
        except asyncio.CancelledError:
            self._answer(call.number, calls.Failed(reason="cancelled"))
        except (MidstreamError, OSError, IndexError) as error:
            is_unreachable = isinstance(error, CannotConnect)
            self._answer(call.number, calls.Failed(reason=str(error), is_unreachable=is_unreachable))

    def _answer(self, number: int, what: calls.FromCopier) -> None:
        self._writer.write(frame(msgspec.msgpack.encode(calls.CopierAnswer(number, what))))

    async def _perform(self, what: calls.ToCopier) -> calls.Done:
        match what:
            case calls.Open():
                return await self._open(what)
            case calls.Expect():
                await self._expect(what)
            case calls.Forget():
                await self._forget(what)
            case calls.SendBlocks():
                return await self._send(what)
            case calls.CancelCall():
                await self._cancel(what.call)
            case calls.HangUp():
                await self._hang_up(what.channel)
        return calls.Done()

    async def _open(self, order: calls.Open) -> calls.Done:
        where = Where(
            bind_host=order.host,
            port=order.port + self._rank if order.port else 0,
            secret=order.secret,
            advertise_host=order.advertise_host or None,
            bytes_per_s=order.bytes_per_s,
            stall_s=order.stall_s,
            kv_device=self._memory.device,
        )
        self._transfers = make_transfers(order.transfers, where, self._regions)
        endpoints = [(transfer.offer, await transfer.start()) for transfer in self._transfers.values()]
        return calls.Done(endpoints=tuple(endpoints))

    async def _open_window(
        self, transfer: Endpoint, how: Callable[[Sequence[int]], Window], block_ids: Sequence[int]
    ) -> Window:
        if transfer.is_on_device:
            return self._memory.in_place(block_ids)
        return await asyncio.to_thread(how, block_ids) if self._memory.is_staged else how(block_ids)

    async def _expect(self, order: calls.Expect) -> None:
        transfer = self._transfer(order.transfer)
        window = await self._open_window(transfer, self._memory.writing, order.block_ids)
        self._arriving[order.handle] = window
        transfer.expect(order.handle, Incoming(window, order.first, len(order.block_ids), len(self._memory.planes)))

    async def _forget(self, order: calls.Forget) -> None:
        await self._transfer(order.transfer).forget(order.handle)
        window = self._arriving.pop(order.handle, None)
        if window is None or not order.is_kept:
            return
        if self._memory.is_staged:
            await asyncio.to_thread(window.land)
        else:
            window.land()

    def _transfer(self, name: str) -> Endpoint:
        transfer = self._transfers.get(name)
        if transfer is None:
            raise TransferFailed(f"no transfer {name!r} here")
        return transfer

    async def _send(self, order: calls.SendBlocks) -> calls.Done:
        try:
            channel = await self._channel(order)
            transfer = self._transfer(order.transfer)
            window = await self._open_window(transfer, self._memory.reading, order.block_ids)
            return await self._send_in_parts(order, window, channel)
        except BaseException:
            await self._hang_up(order.channel)
            raise

    async def _send_in_parts(self, order: calls.SendBlocks, window: Window, channel: Channel) -> calls.Done:
        """A few blocks at a time, so that a model that computes meanwhile is left in peace in between."""
        copied_bytes, moved_ms, paused_ms = 0, 0.0, 0.0
        for places in parts(len(order.block_ids), self._memory.block_bytes, order.share):
            pause_ms = moved_ms * (1 / order.share - 1) - paused_ms
            if pause_ms > 0 and paused_ms < PAUSES_MS_MAX:
                paused_ms += pause_ms
                await asyncio.sleep(pause_ms / 1e3)
            report = await channel.send(list(self._outgoing(order, window, places)), checksum=order.checksum)
            copied_bytes += report.copied_bytes
            moved_ms += report.duration_ms
        return calls.Done(copied_bytes=copied_bytes, duration_ms=moved_ms)

    def _outgoing(self, order: calls.SendBlocks, window: Window, places: range) -> Iterator[tuple[int, Bytes]]:
        """Pieces of equal length together, so that they fill a frame; a block's planes lie at even distances."""
        count = len(self._memory.planes)
        alike: dict[int, list[int]] = {}
        for plane, (_, _, length) in enumerate(self._memory.planes):
            alike.setdefault(length, []).append(plane)
        for planes in alike.values():
            for place in places:
                for plane in planes:
                    yield (order.first + place) * count + plane, window.view(place, plane)

    async def _channel(self, order: calls.SendBlocks) -> Channel:
        route = f"{order.transfer} {order.address} {order.handle}"
        known = self._channels.get(order.channel)
        if known is not None and known[0] == route:
            return known[1]
        await self._hang_up(order.channel)
        channel = await self._transfer(order.transfer).open(order.address, order.handle)
        self._channels[order.channel] = (route, channel)
        return channel

    async def _cancel(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _hang_up(self, name: str) -> None:
        known = self._channels.pop(name, None)
        if known is not None:
            await known[1].close()


def parts(blocks: int, block_bytes: int, share: float) -> Iterator[range]:
    """The places of `blocks` blocks, cut into what moves between two pauses; uncut when there are none."""
    step = blocks if share >= 1 else max(1, PART_BYTES // block_bytes)
    for first in range(0, blocks, max(1, step)):
        yield range(first, min(blocks, first + step))


class Incoming:
    """Where the blocks of one reservation are written: its `first`-th block is place 0 of the window."""

    def __init__(self, window: Window, first: int, blocks: int, planes: int) -> None:
        self._window = window
        self._first = first
        self._blocks = blocks
        self._planes = planes

    def __call__(self, index: int) -> Bytes:
        """The memory of one plane of one block. Raises `IndexError` outside the reservation."""
        block, plane = divmod(index, self._planes)
        if not 0 <= block - self._first < self._blocks:
            raise IndexError(f"block {block} is not to be written")
        return self._window.view(block - self._first, plane)
