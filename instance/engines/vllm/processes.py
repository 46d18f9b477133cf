"""A group of processes: what shared memory it has mapped, and taking back what is left of it once it is dead."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"


def shared_memory_of(group: int) -> frozenset[Path]:
    """Shared memory that the living processes of a group have mapped. Reads /proc: not for the event loop."""
    found: set[Path] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and _group_of(int(entry.name)) == group:
            found |= _mapped(entry / "maps")
    return frozenset(found)


def release(segments: frozenset[Path]) -> None:
    """Remove segments whose processes were killed: nobody else knows their names."""
    for segment in segments:
        with contextlib.suppress(FileNotFoundError):  # its owner was in time
            segment.unlink()


def _group_of(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def _mapped(maps: Path) -> set[Path]:
    try:
        lines = maps.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    names = (line.partition(SHARED_MEMORY)[2] for line in lines)
    return {Path(SHARED_MEMORY + name) for name in names if name and not name.endswith(" (deleted)")}
