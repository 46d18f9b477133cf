"""A range of a device's memory, as transfers pass it on: what a `memoryview` is for the host's."""

from __future__ import annotations

from typing import Any


class DeviceRange:
    """`length` bytes from `start` on of `flat`, a tensor of bytes in one piece. Ranges of one tensor object are moved
    together, so whoever makes them keeps one tensor per allocation."""

    __slots__ = ("flat", "length", "start")

    def __init__(self, flat: Any, start: int, length: int) -> None:
        self.flat = flat
        self.start = start
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> DeviceRange:
        first, end, _ = part.indices(self.length)
        return DeviceRange(self.flat, self.start + first, end - first)

    def cast(self, _: str) -> DeviceRange:
        """Bytes are all it has."""
        return self
