"""Raw media, for comparison: what the same bytes take without blocks, handles or negotiation."""

from __future__ import annotations

import socket
import struct
import threading
import time

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
LENGTH = struct.Struct("<Q")


def copy_s(target: Bytes, source: Bytes, size: int) -> float:
    """One thread, contiguous memory to contiguous memory."""
    begun = time.perf_counter()
    np.copyto(target[:size], source[:size])
    return time.perf_counter() - begun


class TcpSink:
    """Reads streams of bytes into memory, in a thread, and acknowledges each."""

    def __init__(self, target: Bytes) -> None:
        self._target = target.data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            while head := sock.recv(LENGTH.size, socket.MSG_WAITALL):
                (left,) = LENGTH.unpack(head)
                at = 0
                while at < left:
                    at += sock.recv_into(self._target[at:left])
                sock.send(b"!")

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


class TcpSource:
    """The other end."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))

    def send_s(self, source: Bytes, size: int) -> float:
        """Seconds until all bytes are in the other's memory."""
        begun = time.perf_counter()
        self._sock.sendall(LENGTH.pack(size))
        self._sock.sendall(source[:size].data)
        self._sock.recv(1)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
