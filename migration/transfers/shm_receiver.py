"""The target's side of an shm transfer: take bytes out of the peer's memory, into blocks whose handle still holds."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Executor

import numpy as np

from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers import rpc_format
from midstream.migration.transfers.frame_receiver import FrameReceiver
from midstream.migration.transfers.pieces import Addresses, address_of, checksum, copy_pieces
from midstream.migration.transfers.rpc_receiver import Refusal, Reservation
from midstream.migration.transfers.rpc_socket import Stream
from midstream.migration.transfers.shm_copier import Copier
from midstream.migration.transfers.shm_mappings import Mapping, Mappings
from midstream.migration.transfers.threads import in_thread


class ShmReceiver(FrameReceiver):
    """One connection, and the peer's regions that it speaks of."""

    frame_bytes_max = wire.LENT_BYTES_MAX

    def __init__(
        self, stream: Stream, reservation: Reservation, mappings: Mappings, copier: Copier, executor: Executor
    ) -> None:
        super().__init__(stream, reservation, executor)
        self._copier = copier
        self._mappings = mappings
        self._regions: list[Mapping] = []

    async def serve(self) -> None:
        """See `FrameReceiver.serve`."""
        try:
            await super().serve()
        finally:
            for mapping in self._regions:
                self._mappings.give_back(mapping)

    async def _take_region(self) -> None:
        number = await self._stream.read_descriptor()
        try:
            if len(self._regions) >= wire.REGIONS_MAX:
                raise Refusal(rpc_format.BAD_FRAME)
            self._regions.append(self._mappings.take(number))
        finally:
            os.close(number)

    async def _take_blocks(self, header: wire.Header) -> None:
        table = await self._stream.read(12 * header.pieces)
        indexes = table[: 4 * header.pieces]
        mapping, offsets = self._sources(header, table[4 * header.pieces :])
        theirs = await self._checksum(header)
        views = self._views(header, indexes)
        targets = np.array([address_of(view) for view in views], np.int64)

        def copy() -> bool:
            return copy_pieces(targets, offsets + mapping.address, header.length, self._may_go_on)

        asked = self._copier.copy(targets, mapping.number, offsets, header.length)

        async def store() -> int:
            try:
                if not await asked and not await in_thread(self._executor, copy):
                    return rpc_format.UNKNOWN_HANDLE
                if theirs is None or await in_thread(self._executor, lambda: checksum(views, indexes)) == theirs:
                    return rpc_format.STORED
                return rpc_format.BAD_CHECKSUM
            finally:
                views.clear()  # whoever keeps the job must not hold on to the engine's memory

        self._follow(asyncio.get_running_loop().create_task(store()), header.pieces)

    def _sources(self, header: wire.Header, table: bytes) -> tuple[Mapping, Addresses]:
        """What the frame's bytes are read from. Raises `Refusal`."""
        if header.region >= len(self._regions):
            raise Refusal(rpc_format.BAD_FRAME)
        region, offsets = self._regions[header.region], np.frombuffer(table, "<u8")
        if region.size < header.length or int(offsets.max()) > region.size - header.length:
            raise Refusal(rpc_format.BAD_FRAME)
        return region, offsets.astype(np.int64)
