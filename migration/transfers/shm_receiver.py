"""The target's side of an shm transfer: take bytes out of the peer's memory, into blocks whose handle still holds."""

from __future__ import annotations

import os
from concurrent.futures import Executor

import numpy as np

from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers import rpc_format
from midstream.migration.transfers.frame_receiver import FrameReceiver
from midstream.migration.transfers.pieces import Addresses, address_of, checksum, copy_pieces
from midstream.migration.transfers.rpc_receiver import Refusal, Reservation
from midstream.migration.transfers.rpc_socket import Stream
from midstream.migration.transfers.shm_memory import Mapping, Mappings


class ShmReceiver(FrameReceiver):
    """One connection, and the peer's regions that it speaks of."""

    def __init__(self, stream: Stream, reservation: Reservation, mappings: Mappings, executor: Executor) -> None:
        super().__init__(stream, reservation, executor)
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
        indexes = await self._indexes(header)
        sources = self._sources(header, await self._stream.read(8 * header.pieces))
        theirs = await self._checksum(header)
        views = self._views(header, indexes)
        targets = np.array([address_of(view) for view in views], np.int64)

        def store() -> int:
            try:
                if not copy_pieces(targets, sources, header.length, self._may_go_on):
                    return rpc_format.UNKNOWN_HANDLE
                is_right = theirs is None or checksum(views, indexes) == theirs
                return rpc_format.STORED if is_right else rpc_format.BAD_CHECKSUM
            finally:
                views.clear()  # whoever keeps the job must not hold on to the engine's memory

        self._start(store, header.pieces)

    def _sources(self, header: wire.Header, table: bytes) -> Addresses:
        if header.region >= len(self._regions):
            raise Refusal(rpc_format.BAD_FRAME)
        region, offsets = self._regions[header.region], np.frombuffer(table, "<u8")
        if region.size < header.length or int(offsets.max()) > region.size - header.length:
            raise Refusal(rpc_format.BAD_FRAME)
        return offsets.astype(np.int64) + region.address
