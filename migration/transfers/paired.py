"""Transfers over a communicator of two ranks, made for one channel: blocks are gathered, passed on, and scattered, or
passed on as they lie.

The target is rank 0, the source rank 1. A connection of our own says what comes, frame by frame, and carries the
answers; handles are checked there. The communicator's own connections are not authenticated: it belongs on a closed
network. No group exists that other instances are part of, so none has to be rebuilt when one comes or goes.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np

from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers import rpc_format
from midstream.migration.transfers.base import Channel, Where
from midstream.migration.transfers.endpoint import CONNECTIONS_MAX, TcpEndpoint
from midstream.migration.transfers.frame_receiver import FrameReceiver
from midstream.migration.transfers.frames import Frame, FrameChannel, Home
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
    """Bytes that are expected."""

    def wait(self, may_go_on: Callable[[], bool]) -> None:
        """Return when they have arrived; may give up once `may_go_on` says no. Raises `RuntimeError`, also after the
        group's deadline: then nothing is written into the slot any more."""
        ...


class Group(Protocol):
    """A communicator of two ranks. Raises `RuntimeError` when the other is gone. Its calls never overlap, but for
    `Work.wait` and `store`, which wait in threads.

    Frames whose pieces are short go through slots. A slot of None says that they do not.
    """

    def is_direct(self, length: int) -> bool:
        """Whether pieces so long need no slot. Both ranks say the same."""
        ...

    def send(self, slot: Slot[Any] | None, views: Sequence[Any]) -> object:
        """Put pieces of equal length on their way. Runs in a thread. What it returns must live until they are there.
        If they went through a slot, they are not read any more when it returns."""
        ...

    def receive(self, slot: Slot[Any] | None, views: Sequence[Any]) -> Work:
        """Expect a frame, in a slot or in the pieces themselves. Runs on the event loop; the order of calls is that of
        the other's sends."""
        ...

    def store(self, slot: Slot[Any] | None, views: Sequence[Any], may_go_on: Callable[[], bool]) -> bool:
        """Put a frame that has arrived into its pieces; False if told to stop. Runs in a thread; done when it
        returns."""
        ...

    def checksum(self, views: Sequence[Any], indexes: bytes) -> int:
        """CRC-32 of indexes and pieces. Runs in a thread."""
        ...

    def close(self) -> None:
        """May take a while; afterwards no slot is read or written."""
        ...


class PairedTransfer(TcpEndpoint):
    """One process's endpoint. A backend says how groups and memory for slots are made."""

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
        made: list[Group] = []

        def make(store: PairStore) -> Group:
            made.append(self._group(store, rank))
            return made[0]

        try:
            return await meet(stream, self.executor, self.connect_s, make)
        except BaseException:  # cancelled, or the other left, when this one had met it
            for group in made:
                self.executor.submit(group.close)
            raise


class PairedChannel(FrameChannel):
    """The source's end of one channel."""

    def __init__(self, transfer: PairedTransfer, stream: Stream, group: Group, left: Callable[[Channel], None]) -> None:
        super().__init__(stream, transfer.budget, left)
        self._transfer = transfer
        self._group = group
        self._stuck: list[tuple[Slot[Any] | None, object]] = []

    def _home(self, views: list[Any]) -> Home:
        return Home(len(views))

    async def _send_frame(self, frame: Frame, is_checked: bool) -> Callable[[], None]:
        slots = self._transfer.outgoing
        slot = None if self._group.is_direct(len(frame.views[0])) else await self._slot(slots)
        try:
            work = await self._pass(slot, frame, is_checked)
        except RuntimeError as error:
            self._keep_back(slot, None)
            raise PeerGone(str(error)) from error
        except BaseException:
            self._keep_back(slot, None)
            raise
        return partial(self._let_go, slot, work)

    def _let_go(self, slot: Slot[Any] | None, work: object) -> None:
        if self._is_closed:
            self._keep_back(slot, work)
        elif slot is not None:
            self._transfer.outgoing.give_back(slot)

    def _keep_back(self, slot: Slot[Any] | None, work: object) -> None:
        """The group may still be reading: until it has ended."""
        self._stuck.append((slot, work))

    async def _pass(self, slot: Slot[Any] | None, frame: Frame, is_checked: bool) -> object:
        transfer = self._transfer
        indexes = np.array(frame.blocks, "<u4").tobytes()

        def send() -> tuple[object, bytes]:
            views = list(frame.views)
            crc = wire.CHECKSUM.pack(self._group.checksum(views, indexes)) if is_checked else b""
            return self._group.send(slot, views), crc

        work, crc = await in_thread(transfer.executor, send)
        header = wire.Header(
            op=wire.OP_BLOCKS,
            flags=wire.FLAG_CHECKSUM if is_checked else 0,
            region=0,
            pieces=len(frame.views),
            length=len(frame.views[0]),
            whole=frame.whole,
            skip=frame.skip,
        )
        await self._stream.write([memoryview(wire.pack_header(header) + indexes + crc)])
        return work

    def _ended(self) -> None:
        closing = asyncio.get_running_loop().run_in_executor(self._transfer.executor, self._group.close)
        closing.add_done_callback(lambda _: self._give_back_stuck())

    def _give_back_stuck(self) -> None:
        for slot, _ in self._stuck:
            if slot is not None:
                self._transfer.outgoing.give_back(slot)
        self._stuck.clear()


class PairedReceiver(FrameReceiver):
    """The target's end of one channel."""

    def __init__(self, transfer: PairedTransfer, stream: Stream, reservation: Reservation, group: Group) -> None:
        executor: Executor = transfer.executor
        super().__init__(stream, reservation, executor)
        self._transfer = transfer
        self._group = group

    async def _take_blocks(self, header: wire.Header) -> None:
        indexes = await self._indexes(header)
        theirs = await self._checksum(header)
        group, slots = self._group, self._transfer.incoming
        slot = None if group.is_direct(header.length) else await slots.take()
        try:
            views = self._views(header, indexes)
            work = group.receive(slot, views)
        except RuntimeError as error:
            _give_back(slots, slot)
            raise PeerGone(str(error)) from error
        except BaseException:
            _give_back(slots, slot)
            raise

        def store() -> int:
            try:
                work.wait(self._may_go_on)
                if not group.store(slot, views, self._may_go_on):
                    return rpc_format.UNKNOWN_HANDLE
                is_right = theirs is None or group.checksum(views, indexes) == theirs
                return rpc_format.STORED if is_right else rpc_format.BAD_CHECKSUM
            except RuntimeError:
                return rpc_format.BAD_FRAME  # the group broke: whoever hears this is told, the other is gone
            finally:
                views.clear()  # whoever keeps the job must not hold on to the engine's memory

        self._start(store, header.pieces, lambda: _give_back(slots, slot))


def _give_back(slots: Slots[Any], slot: Slot[Any] | None) -> None:
    if slot is not None:
        slots.give_back(slot)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="midstream copies")
