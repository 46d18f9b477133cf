"""The wire of the simulation: one network in memory, with delays, losses, cuts and crashes drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from midstream.control.ids import Node
from midstream.control.simulate.faults import HEALTHY, FaultPlan, Link
from midstream.migration.protocol.messages import AnyMessage
from midstream.migration.wires.base import Handler
from midstream.migration.wires.frames import decode_frame, encode_frame

IN_FLIGHT_MAX = 100_000
"""Messages on their way in the whole network; what comes on top is dropped and counted."""
ORDER_GAP_S = 1e-6
"""Two messages of one pair never arrive at the same instant: equal timers have no order."""


class MemoryNetwork:
    """All nodes of a simulated cluster and what lies between them.

    Works on any event loop. Messages of a pair stay in order unless a fault reorders them. `counters` has
    `sent delivered duplicated reordered`, and, for what never arrived, `cut dropped lost_in_crash stale
    unreachable full`.
    """

    def __init__(
        self,
        rng: random.Random,
        faults: FaultPlan | None = None,
        *,
        delay_ms_min: float = 0.05,
        delay_ms_max: float = 0.5,
        encode: bool = False,
    ) -> None:
        self.rng = rng
        self.faults = faults or FaultPlan()
        self.counters: Counter[str] = Counter()
        self._delay_s = (delay_ms_min / 1000, delay_ms_max / 1000)
        self._encode = encode
        self._wires: dict[str, MemoryWire] = {}
        self._cuts: set[frozenset[str]] = set()
        self._crashed: set[Node] = set()
        self._arrival_s: dict[tuple[Node, Node], float] = {}
        self._in_flight = 0
        self.transfers: dict[str, Any] = {}
        """Endpoints of `MemoryTransfer`, by address."""
        self._origin_s = asyncio.get_running_loop().time()

    def now_ms(self) -> float:
        """Milliseconds since the network was made: the time of its fault plan."""
        return (asyncio.get_running_loop().time() - self._origin_s) * 1000

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass between two nodes until `heal`."""
        self._cuts.add(frozenset((a, b)))

    def heal(self, a: str, b: str) -> None:
        """Undo `cut`."""
        self._cuts.discard(frozenset((a, b)))

    def crash(self, name: str) -> None:
        """End a node without a word: it says and hears nothing from now on.

        The caller cancels its tasks. What it sent just before may or may not arrive.
        """
        if wire := self._wires.get(name):
            self._end(wire.node)
        self._crashed.update(transfer.node for transfer in self.transfers.values() if transfer.node.name == name)

    def _end(self, node: Node) -> None:
        self._crashed.add(node)
        del self._wires[node.name]
        self._arrival_s = {pair: at for pair, at in self._arrival_s.items() if node not in pair}

    def is_crashed(self, node: Node) -> bool:
        """Whether this incarnation has died."""
        return node in self._crashed

    def is_alive(self, node: Node) -> bool:
        """Whether this very incarnation is there."""
        wire = self._wires.get(node.name)
        return wire is not None and wire.node == node

    def link(self, source: str, target: str, kind: str = "") -> Link:
        """The way between two nodes right now, by plan and by hand, for messages of a kind."""
        if self._cuts and frozenset((source, target)) in self._cuts:
            return Link(is_cut=True)
        if not self.faults.faults:
            return HEALTHY
        return self.faults.link(source, target, self.now_ms(), kind)

    def join(self, wire: MemoryWire) -> None:
        """A node starts; a former incarnation of it is gone."""
        if former := self._wires.get(wire.node.name):
            self._end(former.node)
        self._wires[wire.node.name] = wire

    def leave(self, wire: MemoryWire) -> None:
        """A node stops in good order."""
        if self._wires.get(wire.node.name) is wire:
            del self._wires[wire.node.name]

    def send(self, sender: Node, to: Node, message: AnyMessage) -> None:
        """Put a message on its way, or lose it."""
        self.counters["sent"] += 1
        if not self.is_alive(sender):
            self.counters["unreachable"] += 1
            return
        link = self.link(sender.name, to.name, type(message).__name__)
        if link.is_cut or (link.drop and self.rng.random() < link.drop):
            self.counters["cut" if link.is_cut else "dropped"] += 1
            return
        self._launch(sender, to, message, link)
        if link.duplicate and self.rng.random() < link.duplicate:
            self.counters["duplicated"] += 1
            self._launch(sender, to, message, link)

    def _launch(self, sender: Node, to: Node, message: AnyMessage, link: Link) -> None:
        if self._in_flight >= IN_FLIGHT_MAX:
            self.counters["full"] += 1
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + self.rng.uniform(*self._delay_s) * link.slow + link.delay_ms / 1000
        if link.reorder and self.rng.random() < link.reorder:
            self.counters["reordered"] += 1
            when += self.rng.uniform(0, 10) * self._delay_s[1]
        else:
            when = max(when, self._arrival_s.get((sender, to), 0.0) + ORDER_GAP_S)
            self._arrival_s[sender, to] = when
        self._in_flight += 1
        wire_form = encode_frame(to, sender, [message]) if self._encode else message
        loop.call_at(when, self._deliver, sender, to, wire_form)

    def _deliver(self, sender: Node, to: Node, wire_form: AnyMessage | bytes) -> None:
        self._in_flight -= 1
        wire = self._wires.get(to.name)
        if wire is None or wire.node.address != to.address:
            self.counters["unreachable"] += 1
        elif wire.node.incarnation != to.incarnation:
            self.counters["stale"] += 1
        elif self.link(sender.name, to.name).is_cut:
            self.counters["cut"] += 1
        elif sender in self._crashed and self.rng.random() < 0.5:
            self.counters["lost_in_crash"] += 1
        else:
            self.counters["delivered"] += 1
            message = decode_frame(wire_form).messages[0] if isinstance(wire_form, bytes) else wire_form
            wire.receive(sender, message)


class MemoryWire:
    """One node's end of a `MemoryNetwork`; its address is its name."""

    def __init__(self, network: MemoryNetwork, name: str, incarnation: int) -> None:
        self._network = network
        self._node = Node(name=name, incarnation=incarnation, address=name)
        self._handler: Handler | None = None
        self.counters: Counter[str] = Counter()

    @property
    def node(self) -> Node:
        """Who we are to peers."""
        return self._node

    async def start(self, handler: Handler) -> None:
        """Join the network."""
        self._handler = handler
        self._network.join(self)

    def send(self, to: Node, message: AnyMessage) -> None:
        """Put a message on its way; a node that crashed or stopped says nothing any more."""
        self.counters["sent"] += 1
        self._network.send(self._node, to, message)

    def receive(self, sender: Node, message: AnyMessage) -> None:
        """Called by the network on arrival."""
        self.counters["received"] += 1
        if self._handler is not None:
            self._handler(sender, message)

    def forget(self, to: Node) -> None:
        """There is no connection to close."""

    async def stop(self) -> None:
        """Leave the network."""
        self._network.leave(self)
        self._handler = None
