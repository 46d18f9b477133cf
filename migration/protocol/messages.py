"""Everything that gateways and llumlets say to each other. One-way, may be lost, repeated, late, reordered.

Rule numbers are those of the ledger's rule table (docs/protocol.md). Token ids travel here and never in the log.
"""

from __future__ import annotations

import msgspec

from midstream.control.ids import Node, Owner
from midstream.control.state import Fingerprint


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Counts are over the whole request, wherever its tokens were made."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request as an engine needs it. `payload` is the engine's own form of it (vLLM: EngineCoreRequest)."""

    request: str
    prompt: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    """Lower runs first, as in vLLM."""
    arrival_ms: int = 0
    payload: bytes = b""
    model: str = ""
    """What instances must have registered as their model; empty: any."""
    session: str = ""
    """What the client says belongs together: only a hint where it runs well."""
    tenant: str = ""
    """Who asks: the name of its key. The gateway shares out what there is by it; engines do not look at it."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a frozen run besides its KV: enough to go on exactly."""

    spec: RequestSpec
    outputs: tuple[int, ...]
    computed: int
    """Tokens whose KV is in the blocks: prompt + outputs - 1 while decoding, less during prefill, 0 if waiting."""
    blocks: int
    """Blocks that hold those tokens."""
    logprobs: tuple[bytes, ...] = ()
    """One encoded entry per output token, empty if none were asked for."""
    rng: bytes = b""
    preemptions: int = 0
    extra: bytes = b""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all wire messages. Subclasses about one request carry its id in `request`."""

    request: str


# --- gateway to instance -------------------------------------------------------------------------


class Dispatch(Message, frozen=True, kw_only=True, tag=True):
    """Rule 1: run this request from prompt + `delivered`, as owner at `epoch`."""

    owner: Owner
    epoch: int
    spec: RequestSpec
    delivered: tuple[int, ...] = ()
    delivered_logprobs: tuple[bytes, ...] = ()


class Acknowledge(Message, frozen=True, kw_only=True, tag=True):
    """The ledger holds tokens 0 .. delivered-1; the run at `epoch` need not keep them."""

    epoch: int
    delivered: int


class Flipped(Message, frozen=True, kw_only=True, tag=True):
    """Rule 5/6: the ledger made you, at `epoch`, the owner."""

    epoch: int
    delivered: int


class Granted(Message, frozen=True, kw_only=True, tag=True):
    """Rule 7/8: your reclaim from `from_epoch` holds; go on at `epoch`."""

    from_epoch: int
    epoch: int


class Drop(Message, frozen=True, kw_only=True, tag=True):
    """Rule 9: runs and reservations of epoch <= `epoch` are to be freed; newer ones are untouched."""

    epoch: int


class Probe(Message, frozen=True, kw_only=True, tag=True):
    """Rule 10: do you still hold the run at `epoch`?"""

    epoch: int


# --- instance to gateway -------------------------------------------------------------------------


class Accepted(Message, frozen=True, kw_only=True, tag=True):
    """A dispatch arrived and its run exists."""

    owner: Owner
    epoch: int


class Rejected(Message, frozen=True, kw_only=True, tag=True):
    """A dispatch arrived and will not be run: full, draining, too long, engine failed."""

    owner: Owner
    epoch: int
    code: str
    reason: str


class Tokens(Message, frozen=True, kw_only=True, tag=True):
    """Rule 2: output tokens `first` .. of the run at `epoch`. `finish` comes with the last of them."""

    owner: Owner
    epoch: int
    first: int
    ids: tuple[int, ...]
    logprobs: tuple[bytes, ...] = ()
    finish: str | None = None


class Adopted(Message, frozen=True, kw_only=True, tag=True):
    """Rule 5: I run the request at `epoch` + 1. Carries every output token from `first` that may be unacknowledged."""

    owner: Owner
    """The target."""
    migration: str
    epoch: int
    """The epoch the move started from."""
    first: int
    ids: tuple[int, ...]
    logprobs: tuple[bytes, ...] = ()
    finish: str | None = None


class Reclaim(Message, frozen=True, kw_only=True, tag=True):
    """Rule 7: I sent `Final` at `epoch` and heard nothing; may I go on?"""

    owner: Owner
    epoch: int
    migration: str


class Holding(Message, frozen=True, kw_only=True, tag=True):
    """Answer to `Probe`: the run (or a frozen one that waits for a grant) is here."""

    owner: Owner
    epoch: int


class Gone(Message, frozen=True, kw_only=True, tag=True):
    """Answer to `Probe`: no run at `epoch` is here."""

    owner: Owner
    epoch: int


# --- source to target ----------------------------------------------------------------------------


class Prepare(Message, frozen=True, kw_only=True, tag=True):
    """Rule 3: reserve room for this request."""

    migration: str
    epoch: int
    source: Owner
    target: Owner
    gateway: Node
    fingerprint: Fingerprint
    spec: RequestSpec
    outputs: tuple[int, ...]
    """Output tokens so far: with the prompt they tell which blocks the target already has."""
    blocks: int
    """Blocks wanted, head-room included; 0 for a waiting request, which moves without KV."""
    transfers: tuple[str, ...]
    """Backends the source can use, best first."""


class Cancel(Message, frozen=True, kw_only=True, tag=True):
    """Rule 3: the move is off; free its reservation."""

    migration: str


class Final(Message, frozen=True, kw_only=True, tag=True):
    """Rule 4: all KV is at the target; adopt at `epoch` + 1. Sent once per (request, epoch)."""

    migration: str
    epoch: int
    target: Owner
    state: RunState
    acknowledged: int
    """Output tokens the gateway is known to hold: the tail in `Adopted` starts here."""
    frozen_at_us: int
    """Source's wall clock when the request was out of its batch."""


# --- target to source ----------------------------------------------------------------------------


class Prepared(Message, frozen=True, kw_only=True, tag=True):
    """Rule 3: reserved. `handle` authorises writes into exactly these blocks."""

    migration: str
    owner: Owner
    transfer: str
    why: str = ""
    """Why this transfer and no better one."""
    address: str
    handle: str
    blocks_reserved: int
    blocks_cached: int


class PrepareRefused(Message, frozen=True, kw_only=True, tag=True):
    """Rule 3: no, and why. Nothing is reserved. Also sent when an adoption failed."""

    migration: str
    owner: Owner
    code: str
    reason: str


class Committed(Message, frozen=True, kw_only=True, tag=True):
    """Rule 6: the gateway flipped; free your copy of `epoch`."""

    migration: str
    epoch: int


# --- liveness ------------------------------------------------------------------------------------


class Ping(Message, frozen=True, kw_only=True, tag=True):
    """Gateway to instance, every second; `request` is empty. Renews the lease of the gateway's runs."""

    cache_seen: int | None = None
    """Last change of the prefix cache that the gateway knows; `None`: it does not want to."""


class CacheChange(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an instance's prefix cache. Keys of `protocol.prefixes`, one after the other."""

    upto: int
    """Number of the last change told."""
    is_whole: bool = False
    """`stored` is all there is: forget what was known."""
    stored: bytes = b""
    removed: bytes = b""


class Pong(Message, frozen=True, kw_only=True, tag=True):
    """Answer to `Ping`: who is there now."""

    owner: Owner
    cache: CacheChange | None = None
    """What changed in the prefix cache, if the ping asked and anything did."""


AnyMessage = (
    Dispatch
    | Acknowledge
    | Flipped
    | Granted
    | Drop
    | Probe
    | Accepted
    | Rejected
    | Tokens
    | Adopted
    | Reclaim
    | Holding
    | Gone
    | Prepare
    | Cancel
    | Final
    | Prepared
    | PrepareRefused
    | Committed
    | Ping
    | Pong
)
