"""Facts about the log and the cluster as a whole."""

from __future__ import annotations

from midstream.control.events.base import Event, event
from midstream.control.ids import Position
from midstream.control.state import PolicySettings


@event
class GenerationOpened(Event, frozen=True, kw_only=True):
    """The Redis behind the log was new, restarted or rewound; a new generation of the log begins.

    Producers append again what they had not seen confirmed for long; the fold drops what it knows.
    """

    generation: int
    cause: str
    opened_by: str


@event
class StateCarried(Event, frozen=True, kw_only=True):
    """The first commit of a new generation: the committing controller's fold, which replaces everybody's.

    Facts of the previous generation may have been lost with Redis; from here on all folds agree again.
    """

    state: str
    """`codec.encode_state` of a fold (JSON text). Entries between its position and this fact are applied to it."""
    digest: str


@event
class PolicyConfigured(Event, frozen=True, kw_only=True):
    """The policies in force from here on."""

    policies: PolicySettings
    actor: str


@event
class TickElapsed(Event, frozen=True, kw_only=True):
    """A controller looked at the state: the only source of time and randomness for decisions."""

    now_ms: int
    seed: int
    decided_at: Position
    """The fold position at which this tick's decisions were made."""


@event
class TaskFailed(Event, frozen=True, kw_only=True):
    """A supervised task of a process ended unexpectedly; it was restarted or its owner failed."""

    task: str
    error: str
    """Type and message, no content of requests."""


@event
class FactsMissed(Event, frozen=True, kw_only=True):
    """A source's numbers jumped: facts `from_seq` to `to_seq` never reached the log."""

    source: str
    incarnation: int
    from_seq: int
    to_seq: int


@event
class FactsDropped(Event, frozen=True, kw_only=True):
    """A producer's bounded buffer was full while the log was away; `count` load reports were coalesced away.

    Their numbers were never given out, so this is no hole.
    """

    count: int
