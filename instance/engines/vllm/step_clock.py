"""What one can see of an engine's steps from its scheduler: how long decoding takes, how often it preempts."""

from __future__ import annotations

import time

MEAN_WEIGHT = 0.2
"""Weight of the newest decode step in the moving mean."""
PAUSE_S = 1.0
"""A longer time between two steps was no step."""


class StepClock:
    """Fed once per step."""

    def __init__(self) -> None:
        self.decode_ms = 0.0
        self.preemptions = 0
        self._ended_s = 0.0

    def step(self, *, tokens: int, requests: int) -> None:
        """A step that computed `tokens` tokens for `requests` requests has ended."""
        now = time.monotonic()
        took_s, self._ended_s = now - self._ended_s, now
        if requests and tokens == requests and took_s < PAUSE_S:
            weight = MEAN_WEIGHT if self.decode_ms else 1.0
            self.decode_ms += weight * (took_s * 1000 - self.decode_ms)
