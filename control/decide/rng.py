"""Randomness from a seed that the log carries; the same on every Python and machine."""

from __future__ import annotations

from typing import Final

_MASK: Final = (1 << 64) - 1


class SplitMix:
    """SplitMix64 (Steele, Lea, Flood, OOPSLA'14): small, pure, and of enough quality to break ties."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def random(self) -> float:
        """A float from [0, 1) with 53 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
