"""Facts about instances. Said by llumlets, gateways (witnesses), the admin API (drain) and controllers (verdicts)."""

from __future__ import annotations

from midstream.control.events.base import Event, event
from midstream.control.ids import Owner
from midstream.control.state import Fingerprint, Load, RequestLoad


@event
class InstanceRegistered(Event, frozen=True, kw_only=True):
    """An instance started, with empty memory. Said by its llumlet, first of each incarnation."""

    owner: Owner
    address: str
    """Where its llumlet listens on the data plane."""
    fingerprint: Fingerprint
    blocks_total: int
    slots_max: int
    """Requests that may run at once."""
    role: str = "mixed"
    """`mixed prefill decode`: what it is for."""


@event
class LoadReported(Event, frozen=True, kw_only=True):
    """The load of an instance: when it is news (`instance.news`), at most every 100 ms, at least every second."""

    owner: Owner
    load: Load


@event
class RequestsReported(Event, frozen=True, kw_only=True):
    """Progress of the requests on an instance, at most once a second while it has any."""

    owner: Owner
    requests: tuple[RequestLoad, ...]


@event
class InstanceStopped(Event, frozen=True, kw_only=True):
    """A llumlet ended in good order; it serves nothing any more."""

    owner: Owner


@event
class ConnectionLost(Event, frozen=True, kw_only=True):
    """A gateway no longer hears an instance: the second witness of its loss."""

    gateway: str
    owner: Owner


@event
class ConnectionRestored(Event, frozen=True, kw_only=True):
    """A gateway hears an instance again."""

    gateway: str
    owner: Owner


@event
class RunsDropped(Event, frozen=True, kw_only=True):
    """An instance dropped every run of a gateway that it had not heard for its lease: nobody reads them any more."""

    owner: Owner
    gateway: str
    runs: int


@event
class InstanceSuspected(Event, frozen=True, kw_only=True):
    """Controller's verdict: no load report for `silent_ms`. Nothing new goes there."""

    owner: Owner
    silent_ms: int


@event
class InstanceRestored(Event, frozen=True, kw_only=True):
    """Controller's verdict: a suspect or lost instance of the same incarnation reports again."""

    owner: Owner


@event
class InstanceLost(Event, frozen=True, kw_only=True):
    """Controller's verdict: silent for too long and a gateway witnessed it."""

    owner: Owner
    silent_ms: int
    witnesses: tuple[str, ...]


@event
class DrainRequested(Event, frozen=True, kw_only=True):
    """Somebody asked that an instance be emptied; it takes nothing new from this fact on."""

    operation: str
    instance: str
    actor: str


@event
class DrainCancelled(Event, frozen=True, kw_only=True):
    """Somebody asked that a draining instance take requests again."""

    operation: str
    instance: str
    actor: str


@event
class InstanceDrained(Event, frozen=True, kw_only=True):
    """Controller's verdict: a draining instance has nothing left."""

    owner: Owner
