"""Transfers that announce blocks on a connection while the bytes take another way: the target's side."""

from __future__ import annotations

import asyncio
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor

from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers import rpc_format
from midstream.migration.transfers.rpc_receiver import Refusal, Reservation, places
from midstream.migration.transfers.rpc_socket import PeerClosed, Stream
from midstream.migration.transfers.threads import settled


class FrameReceiver(ABC):
    """One connection. Frames are stored by threads while the next ones are looked up, and answered in order."""

    frame_bytes_max = wire.FRAME_BYTES_MAX

    def __init__(self, stream: Stream, reservation: Reservation, executor: Executor) -> None:
        self._stream = stream
        self._reservation = reservation
        self._executor = executor
        self._jobs: dict[asyncio.Future[int], int] = {}
        """Frames without an answer, oldest first, and how many pieces they have."""
        self._is_over = False
        self._refused = rpc_format.STORED

    @abstractmethod
    async def _take_blocks(self, header: wire.Header) -> None:
        """Read the rest of a frame of blocks and `_start` a job that stores it. Raises `Refusal`, `OSError`."""

    async def _take_region(self) -> None:
        """Read the rest of a frame that brings memory. Raises `Refusal`, `OSError`."""
        raise Refusal(rpc_format.BAD_FRAME)

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

    async def _take_frames(self) -> None:
        while True:
            header = wire.unpack_header(await self._stream.read(wire.HEADER.size, is_idle=True))
            if self._refused != rpc_format.STORED:
                raise Refusal(self._refused)
            if len(self._jobs) > wire.FRAMES_AHEAD_MAX or header.pieces * header.length > self.frame_bytes_max:
                raise Refusal(rpc_format.BAD_FRAME)
            await (self._take_region() if header.op == wire.OP_REGION else self._take_blocks(header))

    async def _indexes(self, header: wire.Header) -> bytes:
        return await self._stream.read(4 * header.pieces)

    async def _checksum(self, header: wire.Header) -> int | None:
        if not header.flags & wire.FLAG_CHECKSUM:
            return None
        (crc,) = wire.CHECKSUM.unpack(await self._stream.read(wire.CHECKSUM.size))
        return int(crc)

    def _views(self, header: wire.Header, indexes: bytes) -> list[memoryview]:
        """The reserved memory of a frame's pieces. Raises `Refusal`."""
        views = places(self._reservation, struct.unpack(f"<{header.pieces}I", indexes), header.whole)
        if header.length == header.whole:
            return views
        end = header.skip + header.length
        return [view[header.skip : end] for view in views]

    def _start(self, store: Callable[[], int], pieces: int, let_go: Callable[[], None] | None = None) -> None:
        """Have `store` run in a thread. See `_follow`."""
        self._follow(asyncio.get_running_loop().run_in_executor(self._executor, store), pieces, let_go)

    def _follow(self, job: asyncio.Future[int], pieces: int, let_go: Callable[[], None] | None = None) -> None:
        """Have the code that `job` ends with told to the peer; then `let_go` of what it needed."""
        self._jobs[job] = pieces
        if let_go is not None:
            job.add_done_callback(lambda _: let_go())
        job.add_done_callback(lambda _: self._answer_done())

    def _answer_done(self) -> None:
        for job, pieces in list(self._jobs.items()):
            if not job.done():
                return
            del self._jobs[job]
            self._stored(job, pieces)

    def _stored(self, job: asyncio.Future[int], pieces: int) -> None:
        is_well = not job.cancelled() and job.exception() is None
        code = job.result() if is_well else rpc_format.BAD_FRAME
        if code == rpc_format.STORED:
            self._answer(code, pieces)
        elif self._refused == rpc_format.STORED:
            self._refused = code
            self._answer(code, 0)

    def _may_go_on(self) -> bool:
        return self._reservation.is_open and not self._is_over

    def _answer(self, code: int, pieces: int) -> None:
        if not self._stream.is_closed:
            self._stream.write_now(wire.REPLY.pack(code, pieces))
