"""Small builders for tests of the two protocol machines: owners, messages, and all that a small exploration met."""

from __future__ import annotations

from functools import cache
from typing import Any

from midstream.control.ids import Node, Owner
from midstream.migration.plan import BLOCKING, RECOMPUTE, PlanLimits
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol.ledger import Ledger, Redispatch
from midstream.migration.protocol.ledger import step as ledger_step
from midstream.migration.protocol.seat import Rules, Seat
from tests.migration.model import Config, Explorer
from tests.migration.world import FINGERPRINT, GATEWAY, REQUEST, SPEC, Budget, Machines, node_of

A, B, C = Owner("A", 1), Owner("B", 1), Owner("C", 1)
A2 = Owner("A", 2)
RULES = Rules(here=node_of(A), block_bytes=1, limits=PlanLimits())

SEEN = (
    Config("move", Budget(moves=("AB",), failures=1), tokens=1),
    Config("loss", Budget(moves=("AB",), losses=1), tokens=2, is_incremental=False),
    Config("doubt", Budget(moves=("AB",), suspicions=1), tokens=1, is_cold=True),
    Config("back", Budget(moves=("AB", "BA")), tokens=1),
    Config("blocking", Budget(moves=("AB",), mode=BLOCKING, failures=1), tokens=1),
    Config("recompute", Budget(moves=("AB",), mode=RECOMPUTE, failures=1), tokens=1),
)
"""What the tables of states and inputs are taken from."""


@cache
def met() -> tuple[tuple[Ledger, ...], tuple[Seat, ...], tuple[Any, ...]]:
    """Distinct ledgers, seats and packets of some reachable states, in the order they were met."""
    ledgers: dict[Ledger, None] = {}
    seats: dict[Seat, None] = {}
    packets: dict[Any, None] = {}
    for config in SEEN:
        explorer = Explorer(config, Machines(), states_max=8_000)
        explorer.run()
        for world in explorer.worlds:
            ledgers.setdefault(world.ledger)
            seats.update(dict.fromkeys(world.seats))
            packets.update(dict.fromkeys(world.net))
    return tuple(ledgers), tuple(seats), tuple(packets)


def tokens(owner: Owner, epoch: int, first: int, *ids: int, finish: str | None = None) -> msg.Tokens:
    """`Tokens` of one run."""
    return msg.Tokens(request=REQUEST, owner=owner, epoch=epoch, first=first, ids=ids, finish=finish)


def adopted(owner: Owner, epoch: int, first: int, *ids: int, finish: str | None = None) -> msg.Adopted:
    """`Adopted` of a move that began at `epoch`."""
    return msg.Adopted(request=REQUEST, owner=owner, migration="m1", epoch=epoch, first=first, ids=ids, finish=finish)


def reclaim(owner: Owner, epoch: int) -> msg.Reclaim:
    """`Reclaim` of a source in doubt."""
    return msg.Reclaim(request=REQUEST, owner=owner, epoch=epoch, migration="m1")


def dispatch(owner: Owner, epoch: int, *delivered: int) -> msg.Dispatch:
    """`Dispatch` after some delivered tokens."""
    return msg.Dispatch(request=REQUEST, owner=owner, epoch=epoch, spec=SPEC, delivered=delivered)


def prepare(epoch: int, *, migration: str = "m1", source: Owner = A, target: Owner = B, blocks: int = 4) -> msg.Prepare:
    """`Prepare` of a move."""
    return msg.Prepare(
        request=REQUEST,
        migration=migration,
        epoch=epoch,
        source=source,
        target=target,
        gateway=GATEWAY,
        fingerprint=FINGERPRINT,
        spec=SPEC,
        outputs=(),
        blocks=blocks,
        transfers=("rpc",),
    )


def run_state(*outputs: int, blocks: int = 4) -> msg.RunState:
    """A frozen run."""
    return msg.RunState(spec=SPEC, outputs=outputs, computed=len(outputs), blocks=blocks)


def final(epoch: int, *outputs: int, acknowledged: int = 0, migration: str = "m1", target: Owner = B) -> msg.Final:
    """`Final` of a move."""
    return msg.Final(
        request=REQUEST,
        migration=migration,
        epoch=epoch,
        target=target,
        state=run_state(*outputs),
        acknowledged=acknowledged,
        frozen_at_us=0,
    )


def running(owner: Owner = A, *ids: int) -> Ledger:
    """A ledger whose first owner was heard and delivered `ids`."""
    ledger, _ = ledger_step(Ledger(request=REQUEST), Redispatch(owner))
    ledger, _ = ledger_step(ledger, msg.Accepted(request=REQUEST, owner=owner, epoch=2))
    if ids:
        ledger, _ = ledger_step(ledger, tokens(owner, 2, 0, *ids))
    return ledger


def gateway_node() -> Node:
    """Where the gateway listens."""
    return GATEWAY
