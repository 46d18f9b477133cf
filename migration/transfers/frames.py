"""Transfers that announce blocks on a connection while the bytes take another way: the source's side.

Blocks are cut into frames; the target answers each, in order; a few may be unanswered at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from midstream.control.errors import TransferFailed
from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers import rpc_format
from midstream.migration.transfers.base import Channel, CopyReport
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.rpc_socket import Stream
from midstream.migration.transfers.slots import Slot, Slots

M = TypeVar("M")


class Piece(NamedTuple):
    """`view` holds the bytes from `skip` on of a block that has `whole` bytes."""

    block: int
    view: Any
    whole: int
    skip: int
    home: object
    """Pieces of different homes never share a frame."""
    offset: int
    """Where in its home it lies, if it has one."""


Home = Callable[[Any], tuple[object, int]]
"""(home, offset) of a whole block's bytes."""


class FrameChannel(ABC):
    """An authenticated connection for the blocks of one reservation. One `send` at a time; others wait their turn."""

    def __init__(self, stream: Stream, budget: Budget, left: Callable[[Channel], None]) -> None:
        self._stream = stream
        self._budget = budget
        self._left = left
        self._lock = asyncio.Lock()
        self._unanswered: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_closed = False

    @abstractmethod
    def _home(self, view: Any) -> tuple[object, int]:
        """Where a block's bytes lie."""

    @abstractmethod
    async def _send_frame(self, frame: list[Piece], is_checked: bool) -> Callable[[], None]:
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
        for frame in cut(blocks, self._home):
            if len(self._unanswered) >= wire.FRAMES_AHEAD_MAX:
                await self._answer()
            pieces = len(frame)
            copied_bytes += pieces * len(frame[0].view)
            await self._budget.take(pieces * len(frame[0].view))
            self._unanswered.append((pieces, await self._send_frame(frame, is_checked)))
            frame.clear()
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


def cut(blocks: Sequence[tuple[int, Any]], home: Home) -> Iterator[list[Piece]]:
    """Cut blocks, in order, into frames of equally long pieces of one home, within the bounds of a frame."""
    frame: list[Piece] = []
    for piece in _pieces(blocks, home):
        if frame and not _fits(frame, piece):
            yield frame
            frame = []
        frame.append(piece)
    if frame:
        yield frame


def _pieces(blocks: Sequence[tuple[int, Any]], home: Home) -> Iterator[Piece]:
    for index, block in blocks:
        view = block.cast("B") if isinstance(block, memoryview) and block.format != "B" else block
        whole = len(view)
        where, offset = home(view)
        bytes_max = _bytes_max(where)
        if whole <= bytes_max:
            yield Piece(index, view, whole, 0, where, offset)
            continue
        for skip in range(0, whole, bytes_max):
            yield Piece(index, view[skip : skip + bytes_max], whole, skip, where, offset + skip)


def _fits(frame: list[Piece], piece: Piece) -> bool:
    first, count = frame[0], len(frame)
    return (
        piece.whole == first.whole == len(first.view)
        and piece.home is first.home
        and count < wire.FRAME_PIECES_MAX
        and (count + 1) * first.whole <= _bytes_max(first.home)
    )


def _bytes_max(home: object) -> int:
    return wire.FRAME_BYTES_MAX if home is None else wire.LENT_BYTES_MAX
