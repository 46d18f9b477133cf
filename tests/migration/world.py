"""A whole cluster for one request as one hashable value: what the explicit-state check in model.py explores.

A token's id spells out its whole history (`token_after`), so that a token made from another prefix is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from midstream.control.ids import Node, Owner
from midstream.control.state import Fingerprint
from midstream.migration.protocol import effects as fx
from midstream.migration.protocol import ledger as gateway
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol import seat as instance
from midstream.migration.protocol.ledger import Ledger
from midstream.migration.protocol.seat import Seat

REQUEST = "r"
GATEWAY = Node("gateway/g", 1, "g")
FINGERPRINT = Fingerprint(
    engine="sim",
    engine_version="1",
    model="m",
    weights_revision="1",
    dtype="f",
    block_tokens=1,
    block_bytes=1,
    layout="l",
)
SPEC = msg.RequestSpec(request=REQUEST, prompt=(), sampling=msg.Sampling())
BLOCKS = 2
"""Every run with KV has two blocks: one travels while it decodes, one after it was frozen."""
LINEAGES = 64


class Broken(Exception):
    """An invariant does not hold."""


def token_after(before: int, lineage: int) -> int:
    """The token that a run started at epoch `lineage` makes after the token `before` (1: after none)."""
    return before * LINEAGES + lineage


def history(last: int) -> tuple[int, ...]:
    """All tokens up to `last`, which spells them out."""
    tokens: list[int] = []
    while last > 1:
        tokens.append(last)
        last //= LINEAGES
    return tuple(reversed(tokens))


class Slot(NamedTuple):
    """One slot of a pretended engine. `state`: `running frozen finished reserved`. `kv`: what was copied in."""

    name: str
    state: str
    lineage: int = 0
    tokens: tuple[int, ...] = ()
    blocks: int = BLOCKS
    kv: tuple[int, ...] = ()


class Packet(NamedTuple):
    """A message in the network; `to` is an incarnation of an instance, or `None` for the gateway."""

    to: Owner | None
    sender: Node
    message: Any


class Work(NamedTuple):
    """Something an engine has been asked to do and has not answered yet."""

    kind: str
    at: int
    slot: str
    migration: str = ""
    detail: Any = None


class Budget(NamedTuple):
    """How many of each fault may still happen; commands still to come as (source, target) pairs, all of one mode."""

    losses: int = 0
    repeats: int = 0
    crashes: int = 0
    suspicions: int = 0
    failures: int = 0
    probes: int = 0
    ends: int = 0
    gateway_losses: int = 0
    moves: tuple[str, ...] = ()
    mode: str = "live"


class World(NamedTuple):
    """Everything, at one moment."""

    ledger: Ledger
    last: int
    """The last token the client got (1: none); it spells out all of them."""
    seats: tuple[Seat, ...]
    engines: tuple[tuple[Slot, ...], ...]
    net: frozenset[Packet]
    work: frozenset[Work]
    budget: Budget
    late: frozenset[Packet] = frozenset()
    """Copies of messages that may still come at any time, however stale they are by then."""
    excused: frozenset[tuple[Owner, int]] = frozenset()
    """Runs (owner, epoch) that an engine lost, or that a llumlet dropped because it took its gateway for lost."""
    drop_open: bool = False
    """The ended ledger's last `Drop` was not answered yet."""
    is_cut_short: bool = False
    """The client went away."""


class Machines(NamedTuple):
    """The two step functions under test."""

    ledger: Callable[[Ledger, Any], tuple[Ledger, tuple[fx.Effect, ...]]] = gateway.step
    seat: Callable[[Seat, Any, instance.Rules], tuple[Seat, tuple[fx.Effect, ...]]] = instance.step


def node_of(owner: Owner) -> Node:
    """Where an incarnation of an instance listens."""
    return Node(f"llumlet/{owner.instance}", owner.incarnation, owner.instance)


def owner_of(node: Node) -> Owner:
    """The reverse."""
    return Owner(node.address, node.incarnation)


def is_holding(seat: Seat, ledger: Ledger) -> bool:
    """Does the owner hold the run, or the frozen one that waits for the grant."""
    run = seat.run
    if run is None:
        return False
    is_granted = run.move is not None and run.move.phase == "doubt" and run.epoch == ledger.granted_from
    return run.epoch == ledger.epoch or is_granted


def leftovers(world: World) -> Iterable[str]:
    """What an ended request still holds somewhere."""
    for seat, engine in zip(world.seats, world.engines, strict=True):
        yield from (f"{slot.name} ({slot.state}) on {seat.me}" for slot in engine)
        if not seat.is_empty:
            yield f"the seat of {seat.me}"
