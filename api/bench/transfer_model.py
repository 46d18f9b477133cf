"""What a simulation takes KV to cost on its way, from the table that `bench transfer` made."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from midstream.control.errors import BadInput
from midstream.instance.engines.sim.fit import relative_fit

LAYOUT: Final = "7b"
SENDS_MIN: Final = 2
WAYS: Final = 2
"""Of a send: there, and the answer back."""


class TransferModel(NamedTuple):
    """A send takes `latency_ms` each way, and its bytes at `gbit_per_s`."""

    gbit_per_s: float
    latency_ms: float


class _Row(msgspec.Struct):
    backend: str
    layout: str
    size_mb: float
    gib_s: float

    @property
    def size_bits(self) -> float:
        return self.size_mb * 2**20 * 8

    @property
    def took_s(self) -> float:
        return self.size_bits / (self.gib_s * 2**30 * 8)


class _Table(msgspec.Struct):
    rows: list[_Row]


def transfer_model(said: str) -> TransferModel:
    """The line through the times of a backend's sends, layout `7b`, by least squares of relative errors.

    `said` is BACKEND=FILE; the file is what `bench transfer --json` printed. Raises `BadInput`.
    """
    backend, _, path = said.partition("=")
    if not path:
        raise BadInput(f"--transfer takes BACKEND=FILE, as rpc=transfer.json, not {said!r}")
    rows = [row for row in _read(Path(path)) if (row.backend, row.layout) == (backend, LAYOUT) and row.gib_s > 0]
    if len({row.size_mb for row in rows}) < SENDS_MIN:
        raise BadInput(f"{path}: {backend} needs sends of {SENDS_MIN} sizes or more, layout {LAYOUT}")
    terms = np.array([[1.0, row.size_bits] for row in rows])
    fixed_s, bit_s = relative_fit(terms, np.array([row.took_s for row in rows]))
    if bit_s <= 0:
        raise BadInput(f"{path}: larger sends of {backend} take no longer")
    return TransferModel(1e-9 / bit_s, max(0.0, fixed_s) / WAYS * 1e3)


def _read(path: Path) -> list[_Row]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Table).rows
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BadInput(f"{path} is not what `bench transfer --json` prints: {error}") from None
