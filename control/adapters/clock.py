"""The wall clock of the machine, as a port."""

from __future__ import annotations

import time


class SystemClock:
    """`control.ports.Clock` on the operating system's clock."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def now_us(self) -> int:
        """Microseconds since the Unix epoch."""
        return time.time_ns() // 1_000
