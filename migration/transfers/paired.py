"""Transfers over a communicator of two ranks, made for one channel: blocks are gathered, passed on, and scattered.

The target is rank 0, the source rank 1. A connection of our own says what comes, frame by frame, and carries the
answers; handles are checked there. The communicator's own connections are not authenticated: it belongs on a closed
network. No group exists that other instances are part of, so none has to be rebuilt when one comes or goes.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers import rpc_format
from midstream.migration.transfers.base import Channel, Where
from midstream.migration.transfers.endpoint import CONNECTIONS_MAX, TcpEndpoint
from midstream.migration.transfers.frame_receiver import FrameReceiver
from midstream.migration.transfers.frames import FrameChannel, Piece
from midstream.migration.transfers.pair_store import PairStore, meet
from midstream.migration.transfers.rpc_receiver import Reservation
from midstream.migration.transfers.rpc_socket import PeerGone, Stream
from midstream.migration.transfers.shm_memory import Region
from midstream.migration.transfers.slots import Slot, Slots
from midstream.migration.transfers.threads import in_thread

TARGET, SOURCE = 0, 1
THREADS = 4 * CONNECTIONS_MAX
"""At most; they wait for bytes, or for the other rank. Were there fewer than frames and meetings, two processes could
wait for each other's threads."""
CONNECT_S = 3.0
"""A group takes milliseconds to make, but of a core, and some threads: thirty at once take their time."""


class Work(Protocol):
    """Bytes on their way."""

    def wait(self) -> object:
        """Return when they have arrived, or were sent. Raises `RuntimeError`, also after the group's deadline."""
        ...


class Group(Protocol):
    """A communicator of two ranks. Raises `RuntimeError` when the other is gone."""

    def send(self, memory: Any, start: int, length: int, tag: int) -> Work: ...

    def receive(self, memory: Any, start: int, length: int, tag: int) -> Work: ...

    def close(self) -> None:
        """May take a while."""
        ...


class PairedTransfer(TcpEndpoint):
    """One process's endpoint. A backend says how groups and memory for slots are made, and how bytes get in and out."""

    connect_s = CONNECT_S

    def __init__(self, where: Where, regions: Sequence[Region] = ()) -> None:
        super().__init__(where)
        self.outgoing: Slots[Any] = Slots(self._memory)
        self.incoming: Slots[Any] = Slots(self._memory)
        self.executor = _threads()

    @abstractmethod
    def _memory(self, size: int) -> Any:
        """Memory for slots."""

    @abstractmethod
    def _group(self, store: PairStore, rank: int) -> Group:
        """Meet the other rank. Runs in a thread. Raises `RuntimeError`."""

    @abstractmethod
    def gather(self, slot: Slot[Any], views: Sequence[Any]) -> None:
        """Put pieces of equal length into a slot, one behind the other. Runs in a thread."""

    @abstractmethod
    def scatter(self, slot: Slot[Any], views: Sequence[Any], may_go_on: Callable[[], bool]) -> bool:
        """Put a slot's bytes into pieces; False if told to stop. Runs in a thread; done when it returns."""

    @abstractmethod
    def checksum(self, views: Sequence[Any], indexes: bytes) -> int:
        """CRC-32 of indexes and pieces."""

    async def stop(self) -> None:
        """Close everything; threads end as soon as they have let go."""
        await super().stop()
        self.executor.shutdown(wait=False)
        self.executor = _threads()

    async def _channel(self, stream: Stream, handle: bytes, left: Callable[[Channel], None]) -> Channel:
        return PairedChannel(self, stream, await self._meet(stream, SOURCE), left)

    async def _receive(self, stream: Stream, handle: bytes, reservation: Reservation) -> None:
        group = await self._meet(stream, TARGET)
        try:
            await PairedReceiver(self, stream, reservation, group).serve()
        finally:
            self.executor.submit(group.close)

    async def _meet(self, stream: Stream, rank: int) -> Group:
        return await meet(stream, self.executor, CONNECT_S, lambda store: self._group(store, rank))


class PairedChannel(FrameChannel):
    """The source's end of one channel."""

    def __init__(self, transfer: PairedTransfer, stream: Stream, group: Group, left: Callable[[Channel], None]) -> None:
        super().__init__(stream, transfer.budget, left)
        self._transfer = transfer
        self._group = group
        self._tags = itertools.count()

    def _home(self, view: Any) -> tuple[object, int]:
        return None, 0

    async def _send_frame(self, frame: list[Piece], is_checked: bool) -> Callable[[], None]:
        slots = self._transfer.outgoing
        slot = await self._slot(slots)
        try:
            work = await self._pass(slot, frame, is_checked)
        except RuntimeError as error:
            slots.give_back(slot)
            raise PeerGone(str(error)) from error
        except BaseException:
            slots.give_back(slot)
            raise

        def let_go() -> None:
            nonlocal work
            work = None  # it must live until the bytes are there
            slots.give_back(slot)

        return let_go

    async def _pass(self, slot: Slot[Any], frame: list[Piece], is_checked: bool) -> Work | None:
        transfer, first = self._transfer, frame[0]
        indexes = np.array([piece.block for piece in frame], "<u4").tobytes()

        def gather() -> bytes:
            views = [piece.view for piece in frame]
            transfer.gather(slot, views)
            return wire.CHECKSUM.pack(transfer.checksum(views, indexes)) if is_checked else b""

        crc = await in_thread(transfer.executor, gather)
        length = len(first.view)
        work = self._group.send(slot.memory, slot.start, length * len(frame), next(self._tags))
        header = wire.Header(
            op=wire.OP_BLOCKS,
            flags=wire.FLAG_CHECKSUM if is_checked else 0,
            region=0,
            pieces=len(frame),
            length=length,
            whole=first.whole,
            skip=first.skip,
        )
        await self._stream.write([memoryview(wire.pack_header(header) + indexes + crc)])
        return work

    def _ended(self) -> None:
        self._transfer.executor.submit(self._group.close)


class PairedReceiver(FrameReceiver):
    """The target's end of one channel."""

    def __init__(self, transfer: PairedTransfer, stream: Stream, reservation: Reservation, group: Group) -> None:
        executor: Executor = transfer.executor
        super().__init__(stream, reservation, executor)
        self._transfer = transfer
        self._group = group
        self._tags = itertools.count()

    async def _take_blocks(self, header: wire.Header) -> None:
        indexes = await self._indexes(header)
        theirs = await self._checksum(header)
        transfer, slots = self._transfer, self._transfer.incoming
        slot = await slots.take()
        try:
            views = self._views(header, indexes)
            work = self._group.receive(slot.memory, slot.start, header.pieces * header.length, next(self._tags))
        except RuntimeError as error:
            slots.give_back(slot)
            raise PeerGone(str(error)) from error
        except BaseException:
            slots.give_back(slot)
            raise

        def store() -> int:
            try:
                work.wait()
                if not transfer.scatter(slot, views, self._may_go_on):
                    return rpc_format.UNKNOWN_HANDLE
                is_right = theirs is None or transfer.checksum(views, indexes) == theirs
                return rpc_format.STORED if is_right else rpc_format.BAD_CHECKSUM
            except RuntimeError:
                return rpc_format.BAD_FRAME  # the group broke: whoever hears this is told, the other is gone
            finally:
                views.clear()  # whoever keeps the job must not hold on to the engine's memory

        self._start(store, header.pieces, lambda: slots.give_back(slot))


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="midstream copies")
