"""What the pure machines want done, as data. A shell performs effects in the order given."""

from __future__ import annotations

import msgspec

from midstream.control.events import Event
from midstream.control.ids import Node, Owner
from midstream.migration.protocol.messages import AnyMessage, Dispatch, Final, Prepare, RunState


class Effect(msgspec.Struct, frozen=True):
    """Base of all effects."""


# --- both sides ----------------------------------------------------------------------------------


class Record(Effect, frozen=True):
    """Say a fact."""

    event: Event


# --- the ledger's effects (gateway) --------------------------------------------------------------


class Tell(Effect, frozen=True):
    """Send to the llumlet of an owner."""

    owner: Owner
    message: AnyMessage


class SendDispatch(Effect, frozen=True):
    """Send `Dispatch` with the request's spec and every delivered token."""

    owner: Owner
    epoch: int


class Deliver(Effect, frozen=True):
    """Give tokens to the client, `finish` with the last of them."""

    ids: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    finish: str | None


class SeekOwner(Effect, frozen=True):
    """Choose an instance and answer with `Redispatch`. `cause`: `lost gone refused`."""

    cause: str
    avoid: Owner


# --- the seat's effects (instance) ---------------------------------------------------------------


class Send(Effect, frozen=True):
    """Send to a node."""

    to: Node
    message: AnyMessage


class Submit(Effect, frozen=True):
    """Start a run in the engine; refused by the engine: tell the gateway `Rejected` and input `RunEnded`."""

    slot: str
    dispatch: Dispatch
    gateway: Node


class Abort(Effect, frozen=True):
    """Free a slot in the engine, whatever it is. `fact` is said with the freed blocks filled in."""

    slot: str
    fact: Event | None = None


class Reserve(Effect, frozen=True):
    """Reserve at the target; answer with `ReserveDone` or `ReserveFailed`."""

    slot: str
    prepare: Prepare


class SendPrepare(Effect, frozen=True):
    """Describe the run and send `Prepare` to the target."""

    slot: str
    migration: str


class Copy(Effect, frozen=True):
    """Copy blocks from `first_block` on; answer with `RoundDone` or `RoundFailed`."""

    slot: str
    migration: str
    first_block: int


class Freeze(Effect, frozen=True):
    """Take the run out of its batch; answer with `FreezeDone` or `FreezeFailed`."""

    slot: str
    migration: str


class Thaw(Effect, frozen=True):
    """Let a frozen run go on."""

    slot: str


class SendFinal(Effect, frozen=True):
    """Send `Final` with the frozen state, once."""

    slot: str
    migration: str
    state: RunState


class Adopt(Effect, frozen=True):
    """Turn the reservation into a run; answer with `AdoptDone` or `AdoptFailed`."""

    slot: str
    final: Final


class SendAdopted(Effect, frozen=True):
    """Send `Adopted` with every output token from `first` on."""

    slot: str
    migration: str
    epoch: int
    first: int


class ResendTokens(Effect, frozen=True):
    """Send every unacknowledged output token again, under the run's present epoch."""

    slot: str


class StopWork(Effect, frozen=True):
    """Cancel what is in flight for a move and wait until it has let go of memory."""

    migration: str
