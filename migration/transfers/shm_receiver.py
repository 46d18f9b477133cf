"""The target's side of an shm transfer: take bytes out of the peer's memory, into blocks whose handle still holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from midstream.migration.transfers import rpc_format
from midstream.migration.transfers import shm_format as wire
from midstream.migration.transfers.rpc_receiver import Refusal, Reservation, place
from midstream.migration.transfers.rpc_socket import PeerClosed, Stream
from midstream.migration.transfers.shm_copy import Addresses, checksum, copy_pieces
from midstream.migration.transfers.shm_memory import Mapping, Mappings, address_of
from midstream.migration.transfers.threads import settled


class Receiver:
    """One connection. Frames are copied one after the other in a thread, while the next ones are looked up."""

    def __init__(self, stream: Stream, reservation: Reservation, mappings: Mappings, executor: Executor) -> None:
        self._stream = stream
        self._reservation = reservation
        self._mappings = mappings
        self._executor = executor
        self._regions: list[Mapping] = []
        self._jobs: set[asyncio.Future[int]] = set()
        self._is_over = False
        self._refused = rpc_format.STORED

    async def serve(self) -> None:
        """Until the peer closes. Raises `Refusal` after telling it, `PeerGone` when it stalls or leaves in the middle.

        When this ends nothing of ours is written, and nothing of the peer's is read, any more.
        """
        try:
            await self._take_frames()
        except PeerClosed:
            if self._jobs:
                raise
        except rpc_format.BadFrame:
            self._answer(rpc_format.BAD_FRAME, 0)
            raise Refusal(rpc_format.BAD_FRAME) from None
        except Refusal as refusal:
            self._answer(refusal.code, 0)
            raise
        except asyncio.CancelledError:
            self._answer(rpc_format.UNKNOWN_HANDLE, 0)
            raise
        finally:
            self._is_over = True
            await settled(set(self._jobs))
            for mapping in self._regions:
                self._mappings.give_back(mapping)

    async def _take_frames(self) -> None:
        while True:
            header = wire.unpack_header(await self._stream.read(wire.HEADER.size, is_idle=True))
            if self._refused != rpc_format.STORED:
                raise Refusal(self._refused)
            if header.op == wire.OP_REGION:
                await self._take_region()
            else:
                await self._take_blocks(header)

    async def _take_region(self) -> None:
        number = await self._stream.read_descriptor()
        try:
            if len(self._regions) >= wire.REGIONS_MAX:
                raise Refusal(rpc_format.BAD_FRAME)
            self._regions.append(self._mappings.take(number))
        finally:
            os.close(number)

    async def _take_blocks(self, header: wire.Header) -> None:
        table = await self._stream.read(header.pieces * 12)
        indexes = np.frombuffer(table, "<u4", header.pieces)
        theirs = None
        if header.flags & wire.FLAG_CHECKSUM:
            (theirs,) = wire.CHECKSUM.unpack(await self._stream.read(wire.CHECKSUM.size))
        sources = self._sources(header, np.frombuffer(table, "<u8", header.pieces, 4 * header.pieces))
        end = header.skip + header.length
        views = [place(self._reservation, index, header.whole)[header.skip : end] for index in indexes.tolist()]
        targets = np.array([address_of(view) for view in views], np.int64)
        known = table[: 4 * header.pieces]

        def store() -> int:
            try:
                if not copy_pieces(targets, sources, header.length, self._may_go_on):
                    return rpc_format.UNKNOWN_HANDLE
                if theirs is not None and checksum(views, known) != theirs:
                    return rpc_format.BAD_CHECKSUM
                return rpc_format.STORED
            finally:
                views.clear()  # whoever keeps the job must not hold on to the engine's memory

        self._start(store, header.pieces)

    def _sources(self, header: wire.Header, offsets: npt.NDArray[np.uint64]) -> Addresses:
        if header.region >= len(self._regions):
            raise Refusal(rpc_format.BAD_FRAME)
        region = self._regions[header.region]
        if region.size < header.length or int(offsets.max()) > region.size - header.length:
            raise Refusal(rpc_format.BAD_FRAME)
        return offsets.astype(np.int64) + region.address

    def _start(self, store: Callable[[], int], count: int) -> None:
        job = asyncio.get_running_loop().run_in_executor(self._executor, store)
        self._jobs.add(job)
        job.add_done_callback(lambda done: self._stored(done, count))

    def _stored(self, job: asyncio.Future[int], count: int) -> None:
        self._jobs.discard(job)
        code = job.result()
        if code == rpc_format.STORED:
            self._answer(code, count)
        elif self._refused == rpc_format.STORED:
            self._refused = code
            self._answer(code, 0)

    def _may_go_on(self) -> bool:
        return self._reservation.is_open and not self._is_over

    def _answer(self, code: int, count: int) -> None:
        if not self._stream.is_closed:
            self._stream.write_now(wire.REPLY.pack(code, count))
