"""The gateway's core on virtual time: who owns a request when instances die and come back at the wrong moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec

from midstream.api.gateway.gateway import Gateway
from midstream.api.gateway.settings import GatewaySettings
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.events import InstanceRegistered, InstanceStopped
from midstream.control.follower import Follower
from midstream.control.ids import Node, Owner
from midstream.control.publisher import Publisher
from midstream.control.simulate.loop import VirtualClock, run_virtual
from midstream.migration.protocol.messages import (
    Adopted,
    AnyMessage,
    Dispatch,
    Ping,
    Pong,
    RequestSpec,
    Sampling,
    Tokens,
)
from midstream.migration.wires.memory import MemoryNetwork, MemoryWire
from tests.control.fixtures import Story, fingerprint

PATIENCE_S = 1.0
"""Far less than any timer that gives an instance up for its silence."""


class Instance:
    """An instance that answers pings, notes its dispatches, and says what a test tells it to."""

    def __init__(self, network: MemoryNetwork, name: str, incarnation: int) -> None:
        self.owner = Owner(name, incarnation)
        self.wire = MemoryWire(network, f"llumlet/{name}", incarnation)
        self.dispatches: list[Dispatch] = []

    @property
    def node(self) -> Node:
        return self.wire.node

    async def start(self) -> Instance:
        await self.wire.start(self._receive)
        return self

    def _receive(self, sender: Node, message: AnyMessage) -> None:
        if isinstance(message, Ping):
            self.wire.send(sender, Pong(request="", owner=self.owner))
        elif isinstance(message, Dispatch):
            self.dispatches.append(message)


class Scene:
    """A gateway whose fold knows instances `a` and `b` in their first incarnations."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(random.Random(1))
        clock = VirtualClock(asyncio.get_running_loop(), 1_700_000_000_000)
        log = MemoryLog(MemoryLogStore(clock=clock), opened_by="test")
        self.follower = Follower(log)
        self.follower.state = _registered("a", "b").state
        self.gateway = Gateway(
            name="g",
            wire=MemoryWire(self.network, "gateway/g", 1),
            follower=self.follower,
            recorder=Publisher(log, "gateway/g", 1, clock),
            clock=clock,
            settings=GatewaySettings(),
            models=("sim",),
        )

    async def instance(self, name: str, incarnation: int = 1) -> Instance:
        """One that has just started."""
        return await Instance(self.network, name, incarnation).start()


def _registered(*names: str) -> Story:
    story = Story()
    for name in names:
        event = InstanceRegistered(
            owner=Owner(name, 1), address=f"llumlet/{name}", fingerprint=fingerprint(), blocks_total=99, slots_max=9
        )
        story.say(f"llumlet/{name}", event)
    story.tick()
    return story


def play(scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        at = Scene()
        await at.gateway.start()
        await scene(at)
        await at.gateway.stop()

    run_virtual(main, seed=1)


SPEC = RequestSpec(request="r", prompt=(5, 6, 7), sampling=Sampling(max_tokens=9))


def test_P04_a_hand_over_to_an_incarnation_that_is_gone_already_does_not_strand_the_request() -> None:
    """Its `Adopted` was on the way for so long that its successor was heard first."""

    async def scene(at: Scene) -> None:
        a, b = await at.instance("a"), await at.instance("b")
        await asyncio.sleep(0.1)
        live = at.gateway.admit(SPEC)
        await asyncio.sleep(0.1)
        source, target = (a, b) if a.dispatches else (b, a)
        epoch = source.dispatches[0].epoch
        source.wire.send(
            at.gateway.wire.node, Tokens(request="r", owner=source.owner, epoch=epoch, first=0, ids=(1, 2))
        )
        await asyncio.sleep(0.1)
        assert live.ids == [1, 2]
        await at.instance(target.owner.instance, 2)
        at.gateway.receive(Node(target.node.name, 2, target.node.address), Pong(request="", owner=target.owner))
        late = Adopted(request="r", owner=target.owner, migration="m", epoch=epoch, first=2, ids=(3,))
        at.gateway.receive(target.node, late)
        assert live.ids == [1, 2, 3]
        await asyncio.sleep(PATIENCE_S)
        assert live.ledger.owner != target.owner
        assert live.ledger.epoch > epoch + 1

    play(scene)


def test_P04_a_choice_made_from_a_fold_that_lags_behind_does_not_strand_the_request() -> None:
    """The gateway has heard the new incarnation; its fold still offers the old one."""

    async def scene(at: Scene) -> None:
        del at.follower.state.instances["b"]
        a = await at.instance("a", 2)
        at.gateway.receive(a.node, Pong(request="", owner=a.owner))
        live = at.gateway.admit(SPEC)
        assert live.ledger.owner == Owner("a", 1)
        view = at.follower.state.instances["a"]
        await asyncio.sleep(PATIENCE_S)
        at.follower.state.instances["a"] = msgspec.structs.replace(view, owner=a.owner)
        await asyncio.sleep(PATIENCE_S)
        assert live.ledger.owner == a.owner
        assert a.dispatches

    play(scene)


def pings_to(at: Scene, name: str) -> list[Node]:
    """Pings to that instance from now on."""
    seen: list[Node] = []
    send = at.gateway.wire.send

    def counted(to: Node, message: AnyMessage) -> None:
        if isinstance(message, Ping) and to.name == f"llumlet/{name}":
            seen.append(to)
        send(to, message)

    at.gateway.wire.send = counted  # type: ignore[method-assign]
    return seen


def test_P27_an_instance_that_stopped_is_not_asked_for_a_sign_of_life_any_more() -> None:
    async def scene(at: Scene) -> None:
        await at.instance("a")
        await at.instance("b")
        await asyncio.sleep(1.5)
        at.follower.state.instances["b"] = msgspec.structs.replace(at.follower.state.instances["b"], health="stopped")
        at.gateway.on_entry(Story().say("llumlet/b", InstanceStopped(owner=Owner("b", 1))))
        pings = pings_to(at, "b")
        assert at.gateway.peers.node_of(Owner("b", 1)) is None
        await asyncio.sleep(30)
        assert (pings, at.gateway.peers.silent()) == ([], frozenset())
        assert at.gateway.peers.node_of(Owner("a", 1)) is not None

    play(scene)


def test_P25_P27_one_that_was_lost_is_forgotten_after_a_long_silence_and_known_again_when_it_speaks() -> None:
    async def scene(at: Scene) -> None:
        await at.instance("a")
        b = await at.instance("b")
        await asyncio.sleep(1.5)
        await b.wire.stop()
        at.follower.state.instances["b"] = msgspec.structs.replace(at.follower.state.instances["b"], health="lost")
        await asyncio.sleep(5)
        assert at.gateway.peers.silent() == {"b"}
        await asyncio.sleep(20)
        pings = pings_to(at, "b")
        await asyncio.sleep(20)
        assert (pings, at.gateway.peers.silent()) == ([], frozenset())
        back = await at.instance("b")
        at.gateway.receive(back.node, Pong(request="", owner=back.owner))
        assert at.gateway.peers.is_current(back.owner)
        await asyncio.sleep(20)
        assert pings, "as long as it answers"

    play(scene)


def test_P20_one_that_the_log_says_is_up_is_asked_for_ever() -> None:
    async def scene(at: Scene) -> None:
        await at.instance("a")
        await asyncio.sleep(60)
        pings = pings_to(at, "b")
        await asyncio.sleep(20)
        assert len(pings) > 10

    play(scene)
