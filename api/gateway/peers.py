"""What a gateway knows of instances at first hand: addresses, silence, and its dispatches not yet in a report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from midstream.api.gateway.prefixes import PrefixIndex
from midstream.control.events import ConnectionLost, ConnectionRestored
from midstream.control.ids import Node, Owner
from midstream.control.policies import InFlight, needs_cached
from midstream.migration.protocol.messages import Ping, Pong

if TYPE_CHECKING:
    from midstream.api.gateway.gateway import Gateway

COUNTED_S = 0.05
"""A load report that comes so long after acceptance was surely made with the dispatch inside."""


class Peer:
    """One incarnation of one instance."""

    def __init__(self, node: Node, now: float) -> None:
        self.node = node
        self.heard_at = now
        self.is_lost = False
        self.is_given_up = False


class Pending:
    """A dispatch that the instance's load report does not show yet."""

    def __init__(self, blocks: int, tokens: int) -> None:
        self.blocks = blocks
        self.tokens = tokens
        """Of its prompt; 0 from its first token on."""
        self.accepted_at = float("inf")


class Peers:
    """The current incarnation of each instance, as heard or read in the log."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._peers: dict[str, Peer] = {}
        self._pending: dict[str, dict[str, Pending]] = {}
        self.prefixes = PrefixIndex()

    # --- who is there ------------------------------------------------------------------------

    def learn(self, owner: Owner, address: str) -> None:
        """An instance is said to listen there; a newer incarnation means that the older one is gone."""
        peer = self._peers.get(owner.instance)
        node = Node(f"llumlet/{owner.instance}", owner.incarnation, address)
        if peer is not None and peer.node.incarnation >= owner.incarnation:
            return
        self._peers[owner.instance] = Peer(node, self._gateway.now)
        if peer is not None:
            self._pending.pop(owner.instance, None)
            self._gateway.wire.forget(peer.node)
            self._gateway.lose(Owner(owner.instance, peer.node.incarnation))

    def gone(self, owner: Owner) -> None:
        """An incarnation is gone for good: nothing is kept of it and nothing sent to it (P27)."""
        node = self.node_of(owner)
        if node is not None:
            del self._peers[owner.instance]
            self._pending.pop(owner.instance, None)
            self.prefixes.forget(owner.instance)
            self._gateway.wire.forget(node)

    def heard(self, sender: Node) -> None:
        """Any message shows that its sender lives."""
        instance = sender.name.removeprefix("llumlet/")
        peer = self._peers.get(instance)
        if peer is None or peer.node.incarnation < sender.incarnation:
            self.learn(Owner(instance, sender.incarnation), sender.address)
            peer = self._peers[instance]
        if peer.node.incarnation != sender.incarnation:
            return
        peer.heard_at = self._gateway.now
        peer.is_given_up = False
        if peer.is_lost:
            peer.is_lost = False
            owner = Owner(instance, sender.incarnation)
            self._gateway.recorder.record(ConnectionRestored(gateway=self._gateway.name, owner=owner))

    def node_of(self, owner: Owner) -> Node | None:
        """Where this incarnation listens, `None` if it is unknown or gone."""
        peer = self._peers.get(owner.instance)
        return peer.node if peer is not None and peer.node.incarnation == owner.incarnation else None

    def is_current(self, owner: Owner) -> bool:
        """Is this the incarnation we know of."""
        return self.node_of(owner) is not None

    def silent(self) -> frozenset[str]:
        """Instances whose connection counts as lost."""
        return frozenset(name for name, peer in self._peers.items() if peer.is_lost)

    async def ping(self) -> None:
        """Ask every known instance for a sign of life, and say who gives none."""
        gateway, s = self._gateway, self._gateway.settings
        while True:
            self._learn_from_log()
            for name, peer in list(self._peers.items()):
                gateway.wire.send(peer.node, self._ping(Owner(name, peer.node.incarnation)))
                self._judge(Owner(name, peer.node.incarnation), peer)
            self._forget_gone()
            await asyncio.sleep(s.ping_ms / 1e3)

    def _ping(self, owner: Owner) -> Ping:
        """Asks for the prefix cache only while a policy wants to know."""
        is_wanted = needs_cached(self._gateway.follower.state)
        return Ping(request="", cache_seen=self.prefixes.seen(owner) if is_wanted else None)

    def answered(self, pong: Pong) -> None:
        """An answer to a ping: it may tell of the instance's prefix cache."""
        if pong.cache is not None and self.is_current(pong.owner):
            self.prefixes.learn(pong.owner, pong.cache)

    def cached(self, tokens: Sequence[int]) -> dict[str, int]:
        """Instance to leading tokens in its prefix cache, as far as it told."""
        return self.prefixes.cached(self._gateway.follower.state, tokens)

    def _learn_from_log(self) -> None:
        for view in self._gateway.follower.state.instances.values():
            if view.health in ("up", "suspect"):
                self.learn(view.owner, view.address)

    def _judge(self, owner: Owner, peer: Peer) -> None:
        """Silence makes us a witness; alone, without a controller's verdict, we wait much longer."""
        gateway, s = self._gateway, self._gateway.settings
        silence = gateway.now - peer.heard_at
        if silence >= s.silent_ms / 1e3 and not peer.is_lost:
            peer.is_lost = True
            gateway.recorder.record(ConnectionLost(gateway=gateway.name, owner=owner))
        if silence >= s.alone_ms / 1e3 and not peer.is_given_up:
            peer.is_given_up = True
            gateway.lose(owner)

    def _forget_gone(self) -> None:
        """Who was given up and does not live by the log either; a false suspicion is heard, and learnt again (P25)."""
        for name, peer in list(self._peers.items()):
            if peer.is_given_up and not self._is_listed(name, peer):
                self.gone(Owner(name, peer.node.incarnation))

    def _is_listed(self, name: str, peer: Peer) -> bool:
        view = self._gateway.follower.state.instances.get(name)
        is_same = view is not None and view.owner.incarnation == peer.node.incarnation
        return view is not None and is_same and view.health in ("up", "suspect")

    # --- dispatches in flight ----------------------------------------------------------------

    def dispatched(self, owner: Owner, request: str, blocks: int, tokens: int) -> None:
        """A request was just sent there; so many tokens it brings."""
        self.forget_request(request)
        self._pending.setdefault(owner.instance, {})[request] = Pending(blocks, tokens)

    def accepted(self, owner: Owner, request: str) -> None:
        """The instance has it: reports made from now on will show it."""
        pending = self._pending.get(owner.instance, {}).get(request)
        if pending is not None:
            pending.accepted_at = min(pending.accepted_at, self._gateway.now)

    def began(self, owner: Owner, request: str) -> None:
        """A token came: the request stands in no line any more."""
        pending = self._pending.get(owner.instance, {}).get(request)
        if pending is not None:
            pending.tokens = 0

    def reported(self, owner: Owner) -> None:
        """A load report came: dispatches accepted well before it are inside it."""
        table = self._pending.get(owner.instance)
        if not table:
            return
        counted_at = self._gateway.now - COUNTED_S
        for request, pending in list(table.items()):
            if pending.accepted_at <= counted_at:
                del table[request]

    def forget_request(self, request: str) -> None:
        """A request ended or goes elsewhere."""
        for table in self._pending.values():
            table.pop(request, None)

    def in_flight(self) -> dict[str, InFlight]:
        """Requests and blocks sent to each instance and not yet in its load."""
        return {
            name: InFlight(
                requests=len(table),
                blocks=sum(p.blocks for p in table.values()),
                line=sum(1 for p in table.values() if p.tokens),
                line_tokens=sum(p.tokens for p in table.values()),
            )
            for name, table in self._pending.items()
            if table
        }
