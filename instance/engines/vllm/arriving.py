"""Reservations as peers see them: handles authorise writes, and writes end before blocks change hands."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

from midstream.control.errors import EngineFailed, Refused
from midstream.instance.engines.base import Reserved
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.copier_link import CopierLink
from midstream.instance.engines.vllm.core_link import CoreLink
from midstream.migration.protocol.messages import RunState
from midstream.migration.transfers.choice import Choice

HANDLE_BYTES = 16


class Arriving:
    """All reservations of one engine life."""

    def __init__(self, core: CoreLink, copiers: CopierLink) -> None:
        self._core = core
        self._copiers = copiers
        self._key = secrets.token_bytes(32)
        self._offers: dict[str, Reserved] = {}
        self._endings: dict[str, asyncio.Task[int]] = {}

    def holds(self, slot: str) -> bool:
        """Whether there is such a reservation."""
        return slot in self._offers

    async def reserve(
        self, slot: str, request: bytes, outputs: tuple[int, ...], blocks: int, choice: Choice
    ) -> Reserved:
        """Reserve, open a handle at every worker; again: the same answer. Raises `Refused`. Cancelled: undone."""
        known = self._offers.get(slot)
        if known is not None:
            return known
        order = calls.Reserve(slot=slot, request=request, outputs=outputs, blocks=blocks)
        handle = hashlib.blake2b(slot.encode(), key=self._key, digest_size=HANDLE_BYTES).hexdigest()
        try:
            held = await self._core.call("mig_reserve", order, calls.Held)
            expect = calls.Expect(
                transfer=choice.name, handle=handle, first=held.cached, block_ids=held.block_ids[held.cached :]
            )
            await self._copiers.all(expect)
        except Refused:
            raise
        except BaseException:
            self._start_ending(slot, choice.name, handle)
            raise
        self._offers[slot] = Reserved(
            blocks=len(held.block_ids),
            cached=held.cached,
            transfer=choice.name,
            why=choice.why,
            address=self._copiers.addresses[choice.name],
            handle=handle,
        )
        return self._offers[slot]

    async def close(self, slot: str) -> None:
        """Refuse the handle from now on; return when everything written is in KV memory. Raises `Refused("gone")`."""
        offer = self._held(slot)
        await self._copiers.all(calls.Forget(transfer=offer.transfer, handle=offer.handle, is_kept=True))
        self._held(slot)

    async def adopt(self, slot: str, state: RunState) -> None:
        """Turn a closed reservation into a run. Raises `Refused`."""
        order = calls.Adopt(
            slot=slot,
            outputs=state.outputs,
            computed=state.computed,
            preemptions=state.preemptions,
            rng=state.rng,
        )
        await self._core.call("mig_adopt", order, type(None))
        self._offers.pop(slot, None)

    async def cancel(self, slot: str) -> int:
        """End a reservation once no write is in progress; return the blocks it held, 0 if there is none."""
        ending = self._endings.get(slot)
        if ending is not None:
            await asyncio.wait({ending})
            return 0
        offer = self._offers.get(slot)
        if offer is None:
            return 0
        return await asyncio.shield(self._start_ending(slot, offer.transfer, offer.handle))

    def lose(self) -> None:
        """The engine died: there is nothing left to free."""
        self._offers.clear()

    async def stop(self) -> None:
        """Wait for endings in progress."""
        if self._endings:
            await asyncio.wait(list(self._endings.values()))

    def _start_ending(self, slot: str, transfer: str, handle: str) -> asyncio.Task[int]:
        ending = asyncio.get_running_loop().create_task(self._end(slot, transfer, handle))
        self._endings[slot] = ending
        ending.add_done_callback(lambda _: self._endings.pop(slot, None))
        return ending

    async def _end(self, slot: str, transfer: str, handle: str) -> int:
        try:
            await self._copiers.all(calls.Forget(transfer=transfer, handle=handle, is_kept=False))
            freed = await self._core.call("mig_abort", calls.OfSlot(slot), calls.Freed)
        except EngineFailed:
            return 0
        finally:
            self._offers.pop(slot, None)
        return freed.blocks

    def _held(self, slot: str) -> Reserved:
        offer = self._offers.get(slot)
        if offer is None or slot in self._endings:
            raise Refused("gone", f"no reservation {slot} here")
        return offer
