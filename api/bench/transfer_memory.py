"""Paged KV memory as an engine lays it out: planes, each an array of pieces, one piece per block."""

from __future__ import annotations

import random
import zlib
from typing import NamedTuple

import numpy as np

from midstream.migration.transfers.shm_memory import Region

MIB = 1 << 20


class Layout(NamedTuple):
    """A model's KV block of 16 tokens."""

    name: str
    planes: int
    """Keys and values of each layer."""
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return self.planes * self.piece_bytes


LAYOUTS = {
    "7b": Layout("7b", planes=64, piece_bytes=128 * 1024),
    "small": Layout("small", planes=60, piece_bytes=6 * 1024),
}
"""32 layers of 32 heads x 128 in 16 bits; 30 layers of 3 heads x 64 (SmolLM2-135M)."""


class Paged:
    """One process's KV memory, in a region, and a table that scatters blocks over it."""

    def __init__(self, layout: Layout, size: int, seed: int) -> None:
        self.layout = layout
        self.blocks = size // layout.block_bytes
        self.region = Region(self.blocks * layout.block_bytes)
        self.array = np.frombuffer(self.region.view, np.uint8)
        self._table = list(range(self.blocks))
        random.Random(seed).shuffle(self._table)

    def fill(self, seed: int) -> None:
        """Random content (0: zeros, which makes it resident)."""
        words = self.array.view(np.uint64)
        words[:] = np.random.default_rng(seed).integers(0, 2**63, len(words), np.uint64) if seed else 0

    def blocks_in(self, size: int) -> int:
        """Blocks that hold `size` bytes."""
        return size // self.layout.block_bytes

    def piece(self, index: int) -> memoryview:
        """Piece `index` of a request: `block * planes + plane`. Raises `IndexError`."""
        block, plane = divmod(index, self.layout.planes)
        start = (plane * self.blocks + self._table[block]) * self.layout.piece_bytes
        return self.region.view[start : start + self.layout.piece_bytes]

    def pieces(self, blocks: int) -> list[tuple[int, memoryview]]:
        """The first blocks of a request, piece by piece."""
        return [(index, self.piece(index)) for index in range(blocks * self.layout.planes)]

    def digest(self, blocks: int) -> int:
        """CRC-32 of the first blocks of a request."""
        value = 0
        for _, view in self.pieces(blocks):
            value = zlib.crc32(view, value)
        return value
