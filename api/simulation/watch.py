"""What no client can see: whose tokens the ledgers take, and which phase a move is in. The parts are the production
ones; they are only looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from midstream.api.gateway.gateway import Gateway
from midstream.control.ids import Node
from midstream.instance.llumlet import Llumlet
from midstream.migration.protocol.inputs import Input
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


class Moving(NamedTuple):
    """A move that has just entered a phase at its source. Nodes by their names."""

    phase: str
    source: str
    target: str
    gateway: str


class WatchedLlumlet(Llumlet):
    """The production llumlet; `on_phase` hears of every phase that a move enters at its source."""

    def __init__(self, *, on_phase: Callable[[Moving], None], **parts: Any) -> None:
        super().__init__(**parts)
        self._on_phase = on_phase

    def feed(self, request: str, what: Input) -> None:
        """See `Llumlet.feed`."""
        before = self._moving(request)
        super().feed(request, what)
        after = self._moving(request)
        if after is not None and after != before:
            self._on_phase(after)

    def _moving(self, request: str) -> Moving | None:
        seat = self.seats.get(request)
        run = None if seat is None else seat.run
        if run is None or run.move is None:
            return None
        return Moving(run.move.phase, self.wire.node.name, run.move.node.name, run.gateway.name)
