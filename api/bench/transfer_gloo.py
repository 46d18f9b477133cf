"""The raw medium of gloo: one send and receive of contiguous memory between two ranks."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from midstream.api.bench.transfer_raw import Bytes
from midstream.migration.transfers.gloo import GlooPair, gloo_device
from midstream.migration.transfers.paired import SOURCE, TARGET

HOST = "127.0.0.1"
WAIT_S = 60.0
DATA, SIZE, DONE = 1, 2, 3


class _Plain:
    """An array as the group takes it."""

    def __init__(self, array: Bytes) -> None:
        self.tensor = torch.from_numpy(array)


class RawGloo:
    """The source's rank."""

    def __init__(self, source: Bytes) -> None:
        self._source: Any = _Plain(source)
        self._size: Any = _Plain(np.zeros(8, np.uint8))
        self._store = TCPStore(HOST, 0, 2, True, timeout=timedelta(seconds=WAIT_S), wait_for_workers=False)
        self.port: int = self._store.port

    def connect(self) -> None:
        """Meet the other rank."""
        self._group = GlooPair(self._store, gloo_device(HOST), SOURCE, WAIT_S)

    def send_s(self, size: int) -> float:
        """Seconds until all bytes are in the other's memory."""
        self._size.tensor.view(torch.int64)[0] = size
        begun = time.perf_counter()
        self._group.send(self._size, 0, 8, SIZE).wait()
        self._group.send(self._source, 0, size, DATA).wait()
        self._group.receive(self._size, 0, 8, DONE).wait()
        return time.perf_counter() - begun


def serve_raw(port: int, target: Bytes) -> None:
    """The target's rank, in a thread that ends with the process."""
    threading.Thread(target=_serve, args=(port, target), daemon=True).start()


def _serve(port: int, target: Bytes) -> None:
    group = GlooPair(TCPStore(HOST, port, 2, False, timeout=timedelta(seconds=WAIT_S)), gloo_device(HOST), TARGET, 1e6)
    memory: Any = _Plain(target)
    size: Any = _Plain(np.zeros(8, np.uint8))
    while True:
        try:
            group.receive(size, 0, 8, SIZE).wait()
        except RuntimeError:
            return  # the source is gone
        group.receive(memory, 0, int(size.tensor.view(torch.int64)[0]), DATA).wait()
        group.send(size, 0, 8, DONE).wait()
