"""The data-plane wire: one-way typed messages between gateways and llumlets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from midstream.control.ids import Node
from midstream.migration.protocol.messages import AnyMessage

Handler = Callable[[Node, AnyMessage], None]
"""Called with the sender and the message, on the event loop; must not block and must not raise."""


class Wire(Protocol):
    """One process's end of the data plane.

    Delivery is at most once, per pair in order on a healthy connection; the protocol above repeats
    what matters. Nothing here waits for a peer.
    """

    @property
    def node(self) -> Node:
        """Who we are to peers; the address is the one really bound."""
        ...

    async def start(self, handler: Handler) -> None:
        """Bind, then deliver every incoming message to `handler`."""
        ...

    def send(self, to: Node, message: AnyMessage) -> None:
        """Queue a message; drops it (counted) when the peer's bounded queue is full. Never raises for a dead peer."""
        ...

    def forget(self, to: Node) -> None:
        """Close the connection to a peer that is gone for good."""
        ...

    async def stop(self) -> None:
        """Flush briefly and close everything."""
        ...
