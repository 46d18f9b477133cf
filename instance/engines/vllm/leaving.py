"""Copies of a run's blocks to its next engine: pinned, read by the workers, stopped when the run loses them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from midstream.control.errors import Refused, TransferFailed
from midstream.instance.engines.base import RoundReport, Route
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.copier_link import CopierLink
from midstream.instance.engines.vllm.core_link import CoreLink

NOTHING = (calls.Done(),)
LIVE_SHARE = 0.25
"""Part of the time in which bytes move beside a model that decodes. Nobody waits for them, and on a CPU they take
cores, memory bandwidth and Python's lock from the decoding; of a frozen run they move as fast as they can."""


class Copy:
    """One copy in progress."""

    def __init__(self, slot: str, first: int, route: Route, *, checksum: bool, frozen: calls.Frozen | None) -> None:
        self.slot = slot
        self.first = first
        self.route = route
        self.checksum = checksum
        self.frozen = frozen
        self.fate: str | None = None
        self.sending: asyncio.Task[list[calls.Done]] | None = None

    def stop(self, fate: str) -> None:
        """Let go of the memory as soon as possible; whoever waits hears of `fate`."""
        self.fate = self.fate or fate
        if self.sending is not None:
            self.sending.cancel()


class Leaving:
    """All copies out of one engine."""

    def __init__(self, core: CoreLink, copiers: CopierLink, block_tokens: Callable[[], int]) -> None:
        self._core = core
        self._copiers = copiers
        self._block_tokens = block_tokens
        self._copies: dict[asyncio.Task[RoundReport], Copy] = {}
        self._hang_ups: set[asyncio.Task[None]] = set()

    async def copy(
        self, slot: str, first: int, route: Route, *, checksum: bool, frozen: calls.Frozen | None
    ) -> RoundReport:
        """Raises `TransferFailed`, `Refused`. Cancelled: ends once nothing is read or pinned any more.

        A frozen run's blocks stay as they are until it is thawed or aborted, both of which wait for `settle`; so
        its last copy, the one that clients wait for, makes no call to the core.
        """
        copy = Copy(slot, first, route, checksum=checksum, frozen=frozen)
        work = self._copy_pinned(copy) if frozen is None else self._copy_frozen(copy, frozen)
        task = asyncio.get_running_loop().create_task(work)
        self._copies[task] = copy
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            copy.stop("cancelled")
            await asyncio.wait({task})
            raise
        return task.result()

    def _ended(self, task: asyncio.Task[RoundReport]) -> None:
        del self._copies[task]
        if not task.cancelled():
            task.exception()  # marks it as seen: the caller may be gone, and if not, asks the task itself

    async def _copy_pinned(self, copy: Copy) -> RoundReport:
        pinned = await self._core.call("mig_pin", calls.Pin(slot=copy.slot, first=copy.first), calls.Pinned)
        try:
            done = await self._send(copy, pinned.block_ids)
        finally:
            unpinned = await self._core.call("mig_unpin", calls.Unpin(pinned.pin), calls.Unpinned)
            _check(copy, unpinned.fate)
        assert unpinned.progress is not None
        left = -(-unpinned.progress.computed // self._block_tokens()) - copy.first - len(pinned.block_ids)
        return _report(copy, len(pinned.block_ids), done, max(0, left), unpinned.progress.tokens)

    async def _copy_frozen(self, copy: Copy, frozen: calls.Frozen) -> RoundReport:
        block_ids = frozen.block_ids[copy.first : frozen.blocks]
        try:
            done = await self._send(copy, block_ids)
        finally:
            _check(copy, None)
        return _report(copy, len(block_ids), done, 0, frozen.tokens)

    async def _send(self, copy: Copy, block_ids: tuple[int, ...]) -> list[calls.Done]:
        if copy.fate is not None or not block_ids:
            return list(NOTHING)
        if copy.route.transfer not in self._copiers.addresses:
            raise TransferFailed(f"no transfer {copy.route.transfer!r} here")
        orders: list[calls.ToCopier] = [
            calls.SendBlocks(
                channel=copy.slot,
                transfer=copy.route.transfer,
                address=address,
                handle=copy.route.handle,
                first=copy.first,
                block_ids=block_ids,
                checksum=copy.checksum,
                share=LIVE_SHARE if copy.frozen is None else 1.0,
            )
            for address in copy.route.address.split(",")
        ]
        copy.sending = asyncio.get_running_loop().create_task(self._copiers.each(orders))
        await asyncio.wait({copy.sending})
        if copy.sending.cancelled():
            return list(NOTHING)
        return copy.sending.result()

    def disturb(self, slot: str, fate: str) -> None:
        """Stop the run's copies; their callers get `Refused(fate)`. Its connections are closed."""
        for copy in self._of(slot).values():
            copy.stop(fate)
        task = asyncio.get_running_loop().create_task(self._hang_up(slot))
        self._hang_ups.add(task)
        task.add_done_callback(self._hang_ups.discard)

    async def settle(self, slot: str) -> None:
        """Return when no copy reads or pins the run's blocks any more."""
        while copies := self._of(slot):
            await asyncio.wait(copies)

    async def stop(self) -> None:
        """Stop everything and wait for it."""
        for copy in self._copies.values():
            copy.stop("gone")
        while pending := [*self._copies, *self._hang_ups]:
            await asyncio.wait(pending)

    def _of(self, slot: str) -> dict[asyncio.Task[RoundReport], Copy]:
        return {task: copy for task, copy in self._copies.items() if copy.slot == slot}

    async def _hang_up(self, slot: str) -> None:
        with contextlib.suppress(TransferFailed):  # the worker is gone, its connections with it
            await self._copiers.all(calls.HangUp(channel=slot))


def _check(copy: Copy, fate: str | None) -> None:
    fate = copy.fate or fate
    if fate is not None:
        raise Refused(fate, f"{copy.slot} lost its blocks under the copy")


def _report(copy: Copy, blocks: int, done: list[calls.Done], left: int, tokens: int) -> RoundReport:
    return RoundReport(
        blocks=blocks,
        copied_bytes=sum(answer.copied_bytes for answer in done),
        duration_ms=max(answer.duration_ms for answer in done),
        next_block=copy.first + blocks,
        blocks_left=left,
        tokens=tokens,
    )
