"""Copies of a run's blocks to its next engine: pinned while they are read, stopped as soon as the run loses them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from midstream.control.errors import MidstreamError, Refused, TransferFailed
from midstream.instance.engines.base import Route
from midstream.instance.engines.sim.core import EngineCore, Pinned
from midstream.instance.engines.sim.run import Run
from midstream.migration.transfers.base import Channel, CopyReport, Transfer

logger = structlog.get_logger(__name__)

Send = asyncio.Task[CopyReport]

NOTHING = CopyReport(blocks=0, copied_bytes=0, duration_ms=0.0)


class Copies:
    """All copies out of one engine. A run keeps one open channel, to the target of its current move."""

    def __init__(self, core: EngineCore, transfers: Mapping[str, Transfer]) -> None:
        self._core = core
        self._transfers = transfers
        self._sends: dict[Send, Pinned] = {}
        self._channels: dict[Run, tuple[Route, Channel]] = {}
        self._closing: dict[asyncio.Task[None], None] = {}
        self._fates: dict[Send, str] = {}

    async def copy(self, pinned: Pinned, route: Route, *, checksum: bool) -> CopyReport:
        """Send the pinned blocks and unpin them, whatever happens. Raises `TransferFailed`, `Refused`."""
        if not pinned.blocks:
            self._core.unpin(pinned)
            return NOTHING
        send = asyncio.get_running_loop().create_task(self._send(pinned, route, checksum))
        self._sends[send] = pinned
        send.add_done_callback(self._end)
        try:
            await asyncio.wait({send})
        except asyncio.CancelledError:
            send.cancel()
            await asyncio.wait({send})
            raise
        finally:
            fate = self._fates.pop(send, None)
            if send.done():
                self._end(send)
        fate = fate or self._core.fate(pinned)
        if fate is not None:
            raise Refused(fate, f"{pinned.run.slot} lost its blocks under the copy")
        return send.result()

    def disturb(self, run: Run, fate: str) -> None:
        """Stop the run's copies; their callers get `Refused(fate)`. Its channel is closed."""
        for send in self._sends_of(run):
            if not send.done():
                self._fates[send] = fate
                send.cancel()
        self._hang_up(run)

    async def settle(self, run: Run) -> None:
        """Return when no copy reads the run's blocks any more."""
        while sends := self._sends_of(run):
            await asyncio.wait(sends)
            for send in sends:
                self._end(send)

    async def stop(self) -> None:
        """Stop everything and wait for it."""
        for pinned in list(self._sends.values()):
            self.disturb(pinned.run, "gone")
        for run in list(self._channels):
            self._hang_up(run)
        while pending := [*self._sends, *self._closing]:
            await asyncio.wait(pending)

    def _sends_of(self, run: Run) -> list[Send]:
        return [send for send, pinned in self._sends.items() if pinned.run is run]

    def _end(self, send: Send) -> None:
        """Unpin once the send is over; whoever gets there first does it."""
        pinned = self._sends.pop(send, None)
        if pinned is not None:
            self._core.unpin(pinned)
            if not send.cancelled():
                send.exception()  # marks it as seen: the caller may be gone, and if not, asks the task itself

    async def _send(self, pinned: Pinned, route: Route, checksum: bool) -> CopyReport:
        try:
            channel = await self._channel(pinned.run, route)
            blocks = [(i, self._core.bytes_of(block)) for i, block in enumerate(pinned.blocks, pinned.first)]
            return await channel.send(blocks, checksum=checksum)
        except BaseException:
            self._hang_up(pinned.run)
            raise

    async def _channel(self, run: Run, route: Route) -> Channel:
        known = self._channels.get(run)
        if known is not None and known[0] == route:
            return known[1]
        self._hang_up(run)
        transfer = self._transfers.get(route.transfer)
        if transfer is None:
            raise TransferFailed(f"no transfer {route.transfer!r} here")
        channel = await transfer.open(route.address, route.handle)
        self._channels[run] = (route, channel)
        return channel

    def _hang_up(self, run: Run) -> None:
        known = self._channels.pop(run, None)
        if known is not None:
            task = asyncio.get_running_loop().create_task(_close(known[1]))
            self._closing[task] = None
            task.add_done_callback(lambda done: self._closing.pop(done, None))


async def _close(channel: Channel) -> None:
    try:
        await channel.close()
    except MidstreamError as error:
        logger.warning("closing a transfer channel failed", error=str(error))
