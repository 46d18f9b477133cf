"""What no client can see: whose tokens the ledgers take. Breaches of P01 as the gateway makes them, not as they end."""

from __future__ import annotations

from typing import Any

from midstream.api.gateway.gateway import Gateway
from midstream.control.ids import Node
from midstream.migration.protocol.ledger import Ledger
from midstream.migration.protocol.messages import Adopted, AnyMessage, Tokens


class WatchedGateway(Gateway):
    """The production gateway; each message is looked at with the ledger before and after it."""

    def __init__(self, *, breaches: list[str], **parts: Any) -> None:
        super().__init__(**parts)
        self._breaches = breaches

    def receive(self, sender: Node, message: AnyMessage) -> None:
        """See `Gateway.receive`."""
        live = self.live.get(message.request)
        before = None if live is None else live.ledger
        super().receive(sender, message)
        if live is not None and before is not None:
            breach = ownership_breach(before, live.ledger, message)
            if breach is not None:
                self._breaches.append(f"P01 {message.request}: {breach}")


def ownership_breach(before: Ledger, after: Ledger, message: AnyMessage) -> str | None:
    """What is wrong with the step of a ledger, if anything.

    The simulated model makes the same tokens wherever it runs, so a client's tokens alone would hide who made them.
    """
    if isinstance(message, Tokens) and after != before and not before.is_held_by(message.owner, message.epoch):
        return f"took tokens of {message.owner} at epoch {message.epoch}; {before.owner} owns it at {before.epoch}"
    if isinstance(message, Adopted) and before.epoch == message.epoch != after.epoch:
        known = message.first + len(message.ids)
        if before.delivered > known:
            return f"{before.delivered} tokens were delivered, {message.owner} took over at {known}: the source went on"
    return None
