"""The process that copies for `shm`: orders on a socket, one byte in answer to each copy. See `shm_copier`.

python -m midstream.migration.transfers.shm_copying DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import sys

import numpy as np
import numpy.typing as npt

from midstream.migration.transfers.frame_format import FRAME_PIECES_MAX
from midstream.migration.transfers.pieces import Addresses, copy_pieces

ORDER = struct.Struct("<BIIIQ")
"""op, number of the memory (of the target's, when copying), number of the source's, pieces, bytes of each. Behind it
as many offsets in the target's memory, then in the source's, 8 bytes each."""
OP_MAP = 1
"""Comes with a descriptor; memory with a source's number of 1 may be written."""
OP_UNMAP = 2
OP_COPY = 3
ORDER_BYTES_MAX = ORDER.size + 16 * FRAME_PIECES_MAX
READY, DONE, NOT_DONE = b"r", b"d", b"n"
FAULT_BYTES = 65_536
"""Linux maps so much around a page that is read for the first time, but only the page itself when it is written.

So what will be written is read first: without it, the first copy into a block takes twice as long."""
Memory = npt.NDArray[np.uint8]


class Copying:
    """What is mapped, by number."""

    def __init__(self) -> None:
        self._mapped: dict[int, Memory] = {}

    def obey(self, order: bytes, files: list[int]) -> bytes | None:
        """Carry out one order; what to answer, if anything."""
        op, number, other, pieces, length = ORDER.unpack_from(order)
        if op == OP_MAP:
            self._map(number, files[0], is_writable=bool(other))
        elif op == OP_UNMAP:
            self._mapped.pop(number, None)
        elif number in self._mapped and other in self._mapped:
            offsets = np.frombuffer(order, "<i8", 2 * pieces, ORDER.size)
            self._copy(self._mapped[number], offsets[:pieces], self._mapped[other], offsets[pieces:], length)
            return DONE
        else:
            return NOT_DONE
        return None

    def _copy(self, target: Memory, to: Addresses, source: Memory, of: Addresses, length: int) -> None:
        target[(to[:, None] + np.arange(0, length, FAULT_BYTES)).ravel()]
        start, start_of = target.ctypes.data, source.ctypes.data
        copy_pieces(to + start, of + start_of, length, lambda: True)

    def _map(self, number: int, file: int, *, is_writable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        try:
            memory = mmap.mmap(file, os.fstat(file).st_size, prot=prot)
        except OSError:
            return  # copies of it are answered with no
        finally:
            os.close(file)
        self._mapped[number] = np.frombuffer(memory, np.uint8)


def serve(orders: socket.socket) -> None:
    """Order by order, until the other end is closed."""
    copying = Copying()
    orders.send(READY)
    while True:
        order, files, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 1)
        if not order:
            return
        if (answer := copying.obey(order, list(files))) is not None:
            orders.send(answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us says when it is over
    with socket.socket(fileno=int(sys.argv[1])) as end, contextlib.suppress(ConnectionError):
        serve(end)
