"""Reservations as peers see them: handles authorise writes, and writes end before blocks change hands."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

from midstream.control.errors import Refused
from midstream.instance.engines.base import Reserved
from midstream.instance.engines.sim.core import EngineCore
from midstream.instance.engines.sim.run import Reservation
from midstream.migration.protocol.messages import RequestSpec, RunState
from midstream.migration.transfers.base import Transfer
from midstream.migration.transfers.choice import choose

HANDLE_BYTES = 16


class Arrivals:
    """All reservations of one engine life, with their handles."""

    def __init__(self, core: EngineCore, transfers: Mapping[str, Transfer], secret: bytes) -> None:
        self._core = core
        self._transfers = transfers
        self._key = hashlib.blake2b(secret).digest()
        self._addresses: dict[str, str] = {}
        self._offers: dict[str, Reserved] = {}
        self._endings: dict[str, asyncio.Task[int]] = {}

    async def start(self) -> None:
        """Start every transfer and learn its address."""
        for name, transfer in self._transfers.items():
            self._addresses[name] = await transfer.start()

    async def stop(self) -> None:
        """Wait for endings in progress, then stop the transfers."""
        if self._endings:
            await asyncio.wait(list(self._endings.values()))
        for transfer in self._transfers.values():
            await transfer.stop()

    def reserve(
        self, slot: str, spec: RequestSpec, outputs: tuple[int, ...], blocks: int, transfers: tuple[str, ...]
    ) -> Reserved:
        """Reserve and open a handle; again: the same answer. Raises `Refused`."""
        known = self._offers.get(slot)
        if known is not None:
            return known
        name, why = choose(transfers, [transfer.offer for transfer in self._transfers.values()])
        reservation = self._core.reserve(slot, spec, outputs, blocks)
        offer = Reserved(
            blocks=len(reservation.blocks),
            cached=reservation.cached,
            transfer=name,
            why=why,
            address=self._addresses[name],
            handle=hashlib.blake2b(slot.encode(), key=self._key, digest_size=HANDLE_BYTES).hexdigest(),
        )
        self._offers[slot] = offer
        self._transfers[name].expect(offer.handle, lambda index: self._core.incoming(reservation, index))
        return offer

    async def adopt(self, slot: str, state: RunState) -> None:
        """Close the handle, then turn the reservation into a run. Raises `Refused`."""
        reservation = self._held(slot)
        await self._forget(slot)
        if slot in self._core.runs:
            return
        if self._held(slot) is reservation:
            self._core.adopt(reservation, state)
            del self._offers[slot]

    async def cancel(self, slot: str) -> int:
        """End a reservation once no write is in progress; return the blocks it held, 0 if there is none."""
        if slot not in self._core.reservations:
            return 0
        ending = self._endings.get(slot)
        if ending is not None:
            await asyncio.wait({ending})
            return 0
        ending = asyncio.get_running_loop().create_task(self._end(self._core.reservations[slot]))
        self._endings[slot] = ending
        ending.add_done_callback(lambda _: self._endings.pop(slot, None))
        return await asyncio.shield(ending)

    def lose(self) -> None:
        """The engine died: end what is in progress, nothing is left to free."""
        for ending in self._endings.values():
            ending.cancel()
        self._core.reservations.clear()

    async def _end(self, reservation: Reservation) -> int:
        await self._forget(reservation.slot)
        self._offers.pop(reservation.slot, None)
        return self._core.cancel(reservation)

    async def _forget(self, slot: str) -> None:
        offer = self._offers.get(slot)
        if offer is not None:
            await self._transfers[offer.transfer].forget(offer.handle)

    def _held(self, slot: str) -> Reservation:
        reservation = self._core.reservations.get(slot)
        if reservation is None or slot in self._endings:
            raise Refused("gone", f"no reservation {slot} here")
        return reservation
