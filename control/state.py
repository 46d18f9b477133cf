"""What the fold of the log knows: instances, requests, moves. Values are frozen, tables are dicts.

`State` is owned by exactly one fold, which changes its tables in place (copying a thousand rows per
fact would cost more than the fact). Everyone else reads. Every value in a table is frozen.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from midstream.control.ids import START, Owner, Position


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on two instances before KV may pass between them."""

    engine: str
    engine_version: str
    model: str
    weights_revision: str
    dtype: str
    block_tokens: int
    block_bytes: int
    layout: str
    tensor_parallel: int = 1

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the fields in which two fingerprints differ, in field order."""
        return tuple(f for f in self.__struct_fields__ if getattr(self, f) != getattr(other, f))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's load at one moment, in KV blocks; `blocks_head` is what the first waiting request needs."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_reserved: int = 0
    blocks_head: int = 0
    blocks_waiting: int = 0
    step_ms: float = 0.0
    """Recent mean duration of one decode step, milliseconds."""
    preemptions: int = 0
    """Preemptions since the engine started."""


class RequestLoad(msgspec.Struct, frozen=True, array_like=True):
    """One request as its engine sees it."""

    request: str
    epoch: int
    tokens: int
    """Prompt plus output tokens so far."""
    blocks: int
    is_waiting: bool
    is_movable: bool = True


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as the log shows it. `health` is `up`, `suspect`, `lost` or `stopped`."""

    owner: Owner
    address: str
    fingerprint: Fingerprint
    blocks_total: int
    slots_max: int
    load: Load
    role: str = "mixed"
    """`mixed`, `prefill`: new requests go there and leave after their first token, `decode`: they come then."""
    health: str = "up"
    is_draining: bool = False
    is_drained: bool = False
    registered_at_ms: int = 0
    reported_at_ms: int = 0
    witnesses: tuple[str, ...] = ()
    """Gateways that say they lost the connection to this incarnation, sorted."""
    pair_failures: tuple[tuple[str, int], ...] = ()
    """(target instance, until_ms): targets this source could not reach, excluded until then."""

    @property
    def is_dispatchable(self) -> bool:
        """May new requests go there."""
        return self.health == "up" and not self.is_draining


HIGH_PRIORITY_MAX: Final = -1
"""Requests with this priority or a lower number are of the high class; 0 is normal, above is low, as vLLM ranks."""


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One live request. Gone from the state when it ends; the archive keeps it."""

    request: str
    gateway: str
    owner: Owner
    epoch: int
    prompt_tokens: int
    output_tokens_max: int
    priority: int = 0
    dispatched_at_ms: int = 0
    arrived_at_ms: int = 0
    """When its gateway admitted it: who waits goes in this order."""
    tokens: int = 0
    blocks: int = 0
    is_waiting: bool = True
    is_movable: bool = True
    migration: str | None = None
    """The one open move, if any."""
    moved_at_ms: int = 0
    moved_from: str | None = None
    moves: int = 0
    waited_ms: float = 0.0
    """At its gateway, before it was dispatched."""
    is_dispatched_again: bool = False
    """Has it been elsewhere before, or may it have been."""

    @property
    def is_high(self) -> bool:
        """Is it of the high class."""
        return self.priority <= HIGH_PRIORITY_MAX


class MigrationView(msgspec.Struct, frozen=True, kw_only=True):
    """One move.

    `stage` is one of `decided started prepared copying frozen adopted committed released aborted refused`.
    """

    migration: str
    request: str
    epoch: int
    source: Owner
    target: Owner
    policy: str
    reason: str
    decided_at_ms: int
    decided_at: Position
    stage: str = "decided"
    stage_at_ms: int = 0
    rounds: int = 0
    copied_blocks: int = 0
    copied_bytes: int = 0
    blocks_needed: int = 0
    code: str | None = None
    detail: str | None = None
    downtime_ms: float | None = None
    operation: str | None = None
    mode: str = "live"
    """`live blocking recompute`."""

    @property
    def is_open(self) -> bool:
        """Has no outcome yet."""
        return self.stage in OPEN_STAGES


OPEN_STAGES = frozenset({"decided", "started", "prepared", "copying", "frozen", "adopted"})


class OperationView(msgspec.Struct, frozen=True, kw_only=True):
    """One order given by a person or program through the admin API. `status`: `accepted running succeeded failed`."""

    operation: str
    kind: str
    actor: str
    subject: str
    status: str = "accepted"
    migration: str | None = None
    code: str | None = None
    detail: str | None = None
    at_ms: int = 0
    target: str | None = None
    mode: str = "live"
    """Of a move: `live blocking recompute`."""


class PolicyChoice(msgspec.Struct, frozen=True):
    """A policy by its registered name, with parameters that override its defaults."""

    name: str
    params: dict[str, Any] = {}


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which policies are in force. Changed only by a `PolicyConfigured` fact."""

    dispatch: PolicyChoice = PolicyChoice("freeness")
    moves: tuple[PolicyChoice, ...] = (
        PolicyChoice("drain"),
        PolicyChoice("priority"),
        PolicyChoice("prefill_decode"),
        PolicyChoice("defragment"),
        PolicyChoice("balance"),
    )
    scale: PolicyChoice | None = None
    """How many instances there should be; none: as many as there are."""
    cooldown_ms: int = 2_000
    """A request that moved is left alone for so long."""
    moves_per_tick_max: int = 8
    moves_per_instance_max: int = 4
    """Open moves in which one instance takes part, as source or target."""
    pair_backoff_ms: int = 30_000
    """A pair that failed to connect is excluded for so long."""
    high_headroom: float = 0.25
    """Share of its blocks that an instance with a high-priority request keeps free of others (virtual usage)."""
    decision_ttl_ms: int = 5_000
    """A start command older than this is refused by the llumlet."""
    suspect_after_ms: int = 3_000
    lost_after_ms: int = 6_000


class Speed(msgspec.Struct, frozen=True, array_like=True):
    """How fast one incarnation is, as `fold.speeds` learns it: weighted sums over load reports, milliseconds."""

    weight: float = 0.0
    """Reports, the older the less."""
    running: float = 0.0
    step_ms: float = 0.0
    running_squared: float = 0.0
    running_step: float = 0.0
    prefill_ms_per_token: float = 0.0
    """0: nothing is known yet."""
    output_tokens: float = 0.0
    """Mean length of outputs; 0: nothing is known yet."""
    prefill_seen: tuple[float, ...] = ()
    """Of the last requests, milliseconds per prompt token."""


class ScalingView(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that an instance should come or go. `status`: `open done failed cancelled dry_run`."""

    scaling: str
    action: str
    instance: str
    policy: str
    reason: str
    decided_at_ms: int
    decided_at: Position
    status: str = "open"
    ended_at_ms: int = 0
    code: str | None = None
    detail: str | None = None


class LoadSample(msgspec.Struct, frozen=True, array_like=True):
    """The cluster at one moment; fields as in `ClusterSampled`."""

    at_ms: int
    instances: int
    blocks_total: int
    blocks_used: int
    running: int
    waiting: int


class WaitingView(msgspec.Struct, frozen=True, kw_only=True):
    """What waits at one gateway for an instance that takes it at once."""

    requests: int
    tokens: int
    head_tokens: int = 0
    """Prompt of the one whose turn it is."""
    head_model: str = ""


class SourceMark(msgspec.Struct, frozen=True, array_like=True):
    """How far one source has been heard."""

    incarnation: int
    seq: int


CLOSED_MAX = 1_000
"""Closed moves and operations that the state keeps; older ones are only in the archive."""


class State(msgspec.Struct, kw_only=True):
    """The fold of the log up to `position`. Changed in place by `fold.apply` alone."""

    position: Position = START
    committed: Position = START
    """Position of the last fact committed by a controller: what the next commit is compared with."""
    control_seq: int = 0
    generation: int = 0
    last_tick_ms: int = 0
    policies: PolicySettings = PolicySettings()
    instances: dict[str, InstanceView] = {}
    requests: dict[str, RequestView] = {}
    placed: dict[str, dict[str, None]] = {}
    """Instance id to the ids of the requests it owns, in dispatch order."""
    high: dict[str, dict[str, None]] = {}
    """The same for those of the high class alone; an instance without any has no row."""
    migrations: dict[str, MigrationView] = {}
    """Open moves, and the last `CLOSED_MAX` closed ones, in decision order."""
    operations: dict[str, OperationView] = {}
    speeds: dict[str, Speed] = {}
    """Instance id to what is known of its speed."""
    waiting: dict[str, WaitingView] = {}
    """Gateway to what waits there; a gateway where nothing waits has no row."""
    scalings: dict[str, ScalingView] = {}
    """Open decisions on scaling, and the last `CLOSED_MAX` closed ones, in decision order."""
    samples: tuple[LoadSample, ...] = ()
    """The cluster's load, about once a second and without a gap, while a scale policy is in force."""
    scaled_at_ms: int = 0
    """When scaling was last decided, in the log's time."""
    boot_ms: int = 0
    """Moving mean of the time from a decision until the new instance was there; 0 until one was seen."""
    sources: dict[str, SourceMark] = {}
    uncarried: list[Any] = []
    """Entries since a generation opened, until its first commit replaces the tables (`fold`). Never encoded."""
    gaps: int = 0
    """Holes seen in `source_seq`, over all sources."""
