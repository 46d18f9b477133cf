"""The live wire: ZeroMQ over TCP, encrypted and authenticated by the cluster's shared secret.

Each process binds one ROUTER to hear and opens one DEALER per peer to speak, so that a connection has one
direction and a dead peer costs one bounded queue. Messages of one loop turn to one peer travel as one frame.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import structlog
import zmq
from zmq.utils import z85

from midstream.control.errors import BadInput
from midstream.control.ids import Node
from midstream.migration.protocol.messages import AnyMessage
from midstream.migration.wires.base import Handler
from midstream.migration.wires.curve import Door, cluster_keys
from midstream.migration.wires.frames import FRAME_BYTES_MAX, BadFrame, decode_frame, encode_frame

PEERS_MAX = 4096
"""Open outgoing connections; beyond it the oldest is closed and made again when needed."""
PENDING_MESSAGES_MAX = 10_000
"""Messages to one peer within one loop turn."""
BATCH_MESSAGES_MAX = 256
"""Messages in one frame."""
FRAMES_QUEUED_MAX = 1000
"""Frames that wait for one peer (ZeroMQ's high-water mark), on each side."""
MESSAGES_PER_TURN_MAX = 256
"""Messages handled before other callbacks of the loop get their turn."""
FLUSH_S = 0.05
"""What `stop` leaves the last messages to get out."""
HEARTBEAT_MS = 1000
PEER_SILENT_MS = 3000
"""A connection without an answer for so long is closed and made again."""
RECONNECT_MS = 20
RECONNECT_MS_MAX = 1000
HANDSHAKE_MS = 5000
SOCKETS_MAX = PEERS_MAX + 16
ANY_HOST = ("0.0.0.0", "::", "*", "")

logger = structlog.get_logger(__name__)


class ZmqWire:
    """One process's end of the data plane over TCP.

    `counters`: `sent received`, and for what was dropped `full large unreachable garbage stale refused`;
    `handler_failed` counts messages whose handler raised.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        bind_host: str,
        port: int = 0,
        *,
        secret: bytes,
        advertise_host: str | None = None,
    ) -> None:
        if bind_host in ANY_HOST and not advertise_host:
            raise BadInput(f"bound to {bind_host!r}, a wire needs an advertised host that peers can reach")
        self.counters: Counter[str] = Counter()
        self._name, self._incarnation = name, incarnation
        self._bind_host, self._port = bind_host, port
        self._advertise_host = advertise_host or bind_host
        self._public, self._private = cluster_keys(secret)
        self._node = Node(name=name, incarnation=incarnation, address="")
        self._handler: Handler | None = None
        self._peers: dict[str, _Peer] = {}
        self._unflushed: dict[str, _Peer] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._is_resuming = False

    @property
    def node(self) -> Node:
        """Who we are to peers; the address is empty until `start`."""
        return self._node

    async def start(self, handler: Handler) -> None:
        """Bind and listen. Raises `BadInput` when the address cannot be bound."""
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._door = Door(self._context, z85.decode(self._public), self.counters)
        self._router = self._make_socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        try:
            self._router.bind(f"tcp://{_bracketed(self._bind_host)}:{self._port or '*'}")
        except zmq.ZMQError as error:
            self._close(self._context)
            raise BadInput(f"cannot listen on {self._bind_host}:{self._port}: {error}") from None
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        address = f"tcp://{_bracketed(self._advertise_host)}:{bound.rpartition(':')[2]}"
        self._node = Node(name=self._name, incarnation=self._incarnation, address=address)
        self._loop.add_reader(self._router.fileno(), self._receive)
        self._loop.call_soon(self._receive)

    def _make_socket(self, kind: int) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.SNDHWM, FRAMES_QUEUED_MAX)
        socket.setsockopt(zmq.RCVHWM, FRAMES_QUEUED_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PEER_SILENT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, PEER_SILENT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._private
        return socket

    # --- speaking ---

    def send(self, to: Node, message: AnyMessage) -> None:
        """Queue a message; it leaves at the end of this loop turn. Never blocks, never raises for a dead peer."""
        peer = self._peers.get(to.address) or self._connect(to)
        if peer is None:
            self.counters["unreachable"] += 1
            return
        if len(peer.pending) >= PENDING_MESSAGES_MAX:
            self.counters["full"] += 1
            return
        if not self._unflushed:
            self._loop.call_soon(self._flush)
        self._unflushed[to.address] = peer
        peer.pending.append((to, message))

    def _connect(self, to: Node) -> _Peer | None:
        if self._context is None or not to.address.startswith("tcp://"):
            return None
        former = [(address, peer) for address, peer in self._peers.items() if peer.name == to.name]
        if any(peer.incarnation > to.incarnation for _, peer in former):
            return None
        for address, _ in former:
            self._drop_peer(address)
        if len(self._peers) >= PEERS_MAX:
            self._drop_peer(next(iter(self._peers)))
        socket = self._make_socket(zmq.DEALER)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        socket.curve_serverkey = self._public
        try:
            socket.connect(to.address)
        except zmq.ZMQError:
            socket.close()
            return None
        self._peers[to.address] = peer = _Peer(to.name, to.incarnation, socket)
        return peer

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, {}
        for peer in unflushed.values():
            pending, peer.pending = peer.pending, []
            for start in range(0, len(pending), BATCH_MESSAGES_MAX):
                self._send_batch(peer, pending[start : start + BATCH_MESSAGES_MAX])

    def _send_batch(self, peer: _Peer, batch: list[tuple[Node, AnyMessage]]) -> None:
        """One frame per run of messages to the same incarnation; a batch too large to send is sent in halves."""
        to = batch[0][0]
        same = [message for node, message in batch if node.incarnation == to.incarnation]
        rest = [item for item in batch if item[0].incarnation != to.incarnation]
        frame = encode_frame(to, self._node, same)
        if len(frame) > FRAME_BYTES_MAX and len(same) > 1:
            middle = len(same) // 2
            self._send_batch(peer, [(to, message) for message in same[:middle]])
            self._send_batch(peer, [(to, message) for message in same[middle:]])
        else:
            self._send_frame(peer, frame, len(same))
        if rest:
            self._send_batch(peer, rest)

    def _send_frame(self, peer: _Peer, frame: bytes, count: int) -> None:
        if len(frame) > FRAME_BYTES_MAX:
            logger.error("message too large for the wire", peer=peer.name, bytes=len(frame))
            self.counters["large"] += count
            return
        try:
            peer.socket.send(frame, zmq.NOBLOCK)
            self.counters["sent"] += count
        except zmq.Again:
            self.counters["full"] += count

    def forget(self, to: Node) -> None:
        """Close the connection to a peer that is gone for good."""
        self._drop_peer(to.address)

    def _drop_peer(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._unflushed.pop(address, None)
            self.counters["unreachable"] += len(peer.pending)
            peer.socket.close()

    # --- hearing ---

    def _receive(self) -> None:
        """Handle what has arrived. ZeroMQ's descriptor only tells of changes, so read until nothing is left."""
        handled = 0
        while self._context is not None and handled < MESSAGES_PER_TURN_MAX:
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            handled += self._handle(parts)
        if self._context is not None and not self._is_resuming:
            self._is_resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._is_resuming = False
        self._receive()

    def _handle(self, parts: list[bytes]) -> int:
        try:
            if len(parts) != 2:
                raise BadFrame(f"{len(parts)} parts")
            frame = decode_frame(parts[1])
        except BadFrame:
            self.counters["garbage"] += 1
            return 1
        if frame.to_incarnation != self._incarnation:
            self.counters["stale"] += len(frame.messages)
            return 1
        self.counters["received"] += len(frame.messages)
        for message in frame.messages:
            self._call(frame.sender, message)
        return len(frame.messages)

    def _call(self, sender: Node, message: AnyMessage) -> None:
        assert self._handler is not None
        try:
            self._handler(sender, message)
        except Exception as error:  # noqa: BLE001 - one bad message must not deafen the process
            self.counters["handler_failed"] += 1
            logger.error("wire handler failed", message=type(message).__name__, error=repr(error), exc_info=error)

    async def stop(self) -> None:
        """Give the last messages a moment to leave, then close everything."""
        if self._context is None:
            return
        self._flush()
        if self._peers:
            await asyncio.sleep(FLUSH_S)
        context, self._context = self._context, None
        if context is not None:
            self._loop.remove_reader(self._router.fileno())
            self._close(context)

    def _close(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        for address in list(self._peers):
            self._drop_peer(address)
        self._door.close()
        self._router.close()
        context.term()
        self._context = None


class _Peer:
    """One outgoing connection and what this loop turn wants to say on it."""

    __slots__ = ("incarnation", "name", "pending", "socket")

    def __init__(self, name: str, incarnation: int, socket: zmq.Socket[bytes]) -> None:
        self.name = name
        self.incarnation = incarnation
        self.socket = socket
        self.pending: list[tuple[Node, AnyMessage]] = []


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
