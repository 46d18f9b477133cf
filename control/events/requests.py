"""Facts about requests. Said by the gateway that holds the request's ledger. Never any text or token ids."""

from __future__ import annotations

from midstream.control.events.base import Event, event
from midstream.control.ids import Owner


@event
class GatewayStarted(Event, frozen=True, kw_only=True):
    """A gateway started, with no ledgers: what its earlier incarnation still had in flight has ended."""

    gateway: str


@event
class RequestDispatched(Event, frozen=True, kw_only=True):
    """A request was given to an instance: first (`cause` = `new`) or again (`lost`, `gone`, `refused`)."""

    request: str
    gateway: str
    owner: Owner
    epoch: int
    prompt_tokens: int
    delivered_tokens: int
    """Output tokens the client already has; the new owner starts from prompt + these."""
    output_tokens_max: int
    priority: int = 0
    cause: str = "new"
    policy: str = ""
    scores: tuple[tuple[str, float], ...] = ()
    """(instance, score) of the best candidates weighed, best first, at most 8."""
    reason: str = ""
    tenant: str = ""
    """Name of the key that asked; empty where callers need none."""
    waited_ms: float = 0.0
    """How long it waited at its gateway for an instance that takes it at once."""


@event
class FirstTokenDelivered(Event, frozen=True, kw_only=True):
    """The prompt of a request was computed by an instance that is for prompts: it may go on elsewhere."""

    request: str
    epoch: int
    owner: Owner
    ttft_ms: float


@event
class WaitingReported(Event, frozen=True, kw_only=True):
    """What waits at a gateway because every instance is saturated: on change, at most four times a second."""

    gateway: str
    requests: int
    tokens: int
    """Prompts and largest outputs of all of them."""
    head_tokens: int = 0
    """Prompt of the one whose turn it is; of several models' the longest."""
    head_model: str = ""
    """The model that it asks for; empty: any."""


@event
class RequestFinished(Event, frozen=True, kw_only=True):
    """A request ended well; the client has every token."""

    request: str
    epoch: int
    owner: Owner
    finish_reason: str
    output_tokens: int
    ttft_ms: float
    """Admission to first token, queueing included."""
    gap_ms_mean: float
    """Mean gap between tokens of this request."""
    gap_ms_max: float


@event
class RequestCancelled(Event, frozen=True, kw_only=True):
    """The client went away or asked to stop."""

    request: str
    epoch: int
    output_tokens: int
    cause: str = "client"


@event
class RequestFailed(Event, frozen=True, kw_only=True):
    """A request ended with an error that the client was told."""

    request: str
    epoch: int
    output_tokens: int
    code: str
    reason: str
