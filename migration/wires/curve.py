"""Who may speak on the wire: CURVE keys from the cluster's shared secret, and the check at the door."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from hashlib import blake2b

import zmq
from zmq.utils import z85

from midstream.control.errors import BadInput

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


def cluster_keys(secret: bytes) -> tuple[bytes, bytes]:
    """The cluster's CURVE pair (public, secret) in Z85: every member derives the same one from the shared secret."""
    if not secret:
        raise BadInput("the data plane needs a shared secret")
    private = z85.encode(blake2b(secret, digest_size=32, person=b"midstream-wire").digest())
    return zmq.curve_public(private), private


class Door:
    """Answers ZeroMQ's authentication requests (ZAP, rfc.zeromq.org/spec/27): only the cluster's own key may enter."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: bytes, counters: Counter[str]) -> None:
        self._admitted = admitted
        self._counters = counters
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._answer)

    def _answer(self) -> None:
        while not self._socket.closed:
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, number, _domain, _address, _identity, mechanism, *credentials = request
            is_member = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), self._admitted)
            if not is_member:
                self._counters["refused"] += 1
            status = (b"200", b"welcome") if is_member else (b"400", b"unknown key")
            self._socket.send_multipart([version, number, *status, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        """Answer no more; nobody new gets in."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
