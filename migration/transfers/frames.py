"""Transfers that announce blocks on a connection while the bytes take another way: the source's side.

Blocks are cut into frames; the target answers each, in order; a few may be unanswered at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

from midstream.control.errors import TransferFailed
from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers import rpc_format
from midstream.migration.transfers.base import Channel, CopyReport
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.pieces import Addresses
from midstream.migration.transfers.rpc_socket import Stream
from midstream.migration.transfers.slots import Slot, Slots

M = TypeVar("M")


class Home(NamedTuple):
    """Where the first `blocks` of some blocks lie."""

    blocks: int
    memory: object = None
    """What the target can reach by itself, if it is that."""
    offsets: Addresses | None = None
    """Where in it each begins."""


class Frame(NamedTuple):
    """Equally long pieces of blocks that have `whole` bytes each, from `skip` on, all with one home."""

    blocks: list[int]
    views: list[Any]
    whole: int
    skip: int
    home: Home


FindHome = Callable[[list[Any]], Home]
"""Of equally long blocks, of which there is one at least."""


class FrameChannel(ABC):
    """An authenticated connection for the blocks of one reservation. One `send` at a time; others wait their turn."""

    frame_bytes_max = wire.FRAME_BYTES_MAX

    def __init__(self, stream: Stream, budget: Budget, left: Callable[[Channel], None]) -> None:
        self._stream = stream
        self._budget = budget
        self._left = left
        self._lock = asyncio.Lock()
        self._unanswered: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_closed = False

    @abstractmethod
    def _home(self, views: list[Any]) -> Home:
        """Where blocks lie."""

    @abstractmethod
    async def _send_frame(self, frame: Frame, is_checked: bool) -> Callable[[], None]:
        """Announce a frame and see that its bytes come; the answer lets go of what that takes."""

    async def send(self, blocks: Sequence[tuple[int, Any]], *, checksum: bool = False) -> CopyReport:
        """Have blocks copied and return when the target has stored all of them. See `Channel.send`.

        However it ends, nobody reads the blocks any more, unless the target hung for the whole stall time.
        """
        async with self._lock:
            if self._is_closed:
                raise TransferFailed("the channel is closed")
            started_s = asyncio.get_running_loop().time()
            try:
                copied_bytes = await self._copy(blocks, checksum)
            except BaseException as error:
                early = self._stream.read_now(wire.REPLY.size)
                await self._part()
                if isinstance(error, OSError):
                    raise TransferFailed(rpc_format.refusal(early) or str(error)) from error
                raise
            duration_ms = (asyncio.get_running_loop().time() - started_s) * 1000
            return CopyReport(blocks=len(blocks), copied_bytes=copied_bytes, duration_ms=duration_ms)

    async def _copy(self, blocks: Sequence[tuple[int, Any]], is_checked: bool) -> int:
        copied_bytes = 0
        for frame in cut(blocks, self._home, self._budget.frame_bytes_max(self.frame_bytes_max)):
            if len(self._unanswered) >= wire.FRAMES_AHEAD_MAX:
                await self._answer()
            pieces = len(frame.views)
            copied_bytes += pieces * len(frame.views[0])
            await self._budget.take(pieces * len(frame.views[0]))
            self._unanswered.append((pieces, await self._send_frame(frame, is_checked)))
            frame.views.clear()
        while self._unanswered:
            await self._answer()
        return copied_bytes

    async def _answer(self) -> None:
        code, stored = wire.REPLY.unpack(await self._stream.read(wire.REPLY.size))
        pieces, let_go = self._unanswered[0]
        if (code, stored) != (rpc_format.STORED, pieces):
            raise TransferFailed(f"refused: {rpc_format.reason(code)}")
        self._unanswered.popleft()
        let_go()

    async def _slot(self, slots: Slots[M]) -> Slot[M]:
        """A slot for the next frame. Frames of ours hold theirs until their answers are read: that comes first."""
        while (slot := slots.take_now()) is None and self._unanswered:
            await self._answer()
        return slot or await slots.take()

    async def _part(self) -> None:
        """Close, and wait until the target has let go of our memory."""
        self._stream.say_goodbye()
        try:
            await self._stream.drain()
        except OSError:
            pass  # it is gone, or hangs
        finally:
            self._end()

    async def close(self) -> None:
        """Give up the connection; idempotent. A send in progress fails first."""
        if self._lock.locked():
            self._stream.say_goodbye()
            async with self._lock:
                pass
        self._end()

    def _end(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._stream.close()
            for _, let_go in self._unanswered:
                let_go()
            self._unanswered.clear()
            self._ended()
            self._left(self)

    def _ended(self) -> None:  # noqa: B027 - most have nothing to do
        """The connection is closed."""


def cut(blocks: Sequence[tuple[int, Any]], home: FindHome, frame_bytes_max: int) -> Iterator[Frame]:
    """Cut blocks, in order, into frames within the bounds of a frame."""
    at = 0
    while at < len(blocks):
        views = _alike(blocks, at, frame_bytes_max)
        found = home(views)
        whole = len(views[0])
        fitting = frame_bytes_max if found.memory is not None else wire.FRAME_BYTES_MAX
        count = min(found.blocks, max(1, fitting // max(1, whole)))
        frame = Frame([index for index, _ in blocks[at : at + count]], views[:count], whole, 0, found)
        at += count
        yield from _parts(frame, fitting) if whole > fitting else (frame,)


def _alike(blocks: Sequence[tuple[int, Any]], at: int, bytes_max: int) -> list[Any]:
    """Bytes of the first blocks from `at` on that are equally long, as many as fit; one at least."""
    whole = len(blocks[at][1].cast("B"))
    count = min(max(1, bytes_max // max(1, whole)), wire.FRAME_PIECES_MAX)
    views = [view.cast("B") for _, view in blocks[at : at + count]]
    lengths = list(map(len, views))
    return views if lengths.count(whole) == len(lengths) else list(takewhile(lambda view: len(view) == whole, views))


def _parts(frame: Frame, length_max: int) -> Iterator[Frame]:
    """A block that is too long for a frame, in pieces."""
    (view,), offsets = frame.views, frame.home.offsets
    for skip in range(0, frame.whole, length_max):
        home = frame.home._replace(offsets=None if offsets is None else offsets[:1] + skip)
        yield Frame(frame.blocks, [view[skip : skip + length_max]], frame.whole, skip, home)
