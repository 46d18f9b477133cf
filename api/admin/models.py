"""The documents of the admin API. Field names are those of the state's views (`control.state`), which explain them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from midstream.control.state import InstanceView, MigrationView, OperationView, RequestView, ScalingView

Place = Annotated[
    str, BeforeValidator(str), Field(description="A log position, `generation-seq`.", examples=["1764579000123-17"])
]

MoveMode = Literal["live", "blocking", "recompute"]

MS_MAX = 86_400_000
"""Longest time a policy setting may name: a day."""


class _Body(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class OwnerBody(_Body):
    instance: str
    incarnation: int


class LoadBody(_Body):
    running: int
    waiting: int
    blocks_free: int
    blocks_reserved: int
    blocks_head: int
    blocks_waiting: int
    step_ms: float
    preemptions: int


class FingerprintBody(_Body):
    engine: str
    engine_version: str
    model: str
    weights_revision: str
    dtype: str
    block_tokens: int
    block_bytes: int
    layout: str
    tensor_parallel: int


class InstanceBody(_Body):
    """One engine instance."""

    instance: str
    owner: OwnerBody
    address: str
    fingerprint: FingerprintBody
    blocks_total: int
    slots_max: int
    role: str = Field(description="`mixed prefill decode`")
    load: LoadBody
    health: str = Field(description="`up suspect lost stopped`")
    is_draining: bool
    is_drained: bool
    registered_at_ms: int
    reported_at_ms: int
    witnesses: tuple[str, ...]
    pair_failures: tuple[tuple[str, int], ...]
    requests: int = Field(description="Live requests it owns.")

    @classmethod
    def of(cls, view: InstanceView, requests: int) -> Self:
        """From the state's view."""
        fields = {name: getattr(view, name) for name in view.__struct_fields__}
        return cls.model_validate({**fields, "instance": view.owner.instance, "requests": requests})


class EventBody(BaseModel):
    """One fact of the log."""

    position: Place
    kind: str
    version: int
    source: str
    incarnation: int
    source_seq: int
    at_ms: int
    event: dict[str, Any]


class RequestBody(_Body):
    """One request: live, or as it was when it ended."""

    request: str
    gateway: str
    owner: OwnerBody
    epoch: int
    prompt_tokens: int
    output_tokens_max: int
    priority: int
    dispatched_at_ms: int
    arrived_at_ms: int
    tokens: int
    blocks: int
    is_waiting: bool
    is_movable: bool
    migration: str | None
    moved_at_ms: int
    moved_from: str | None
    moves: int
    waited_ms: float
    is_dispatched_again: bool
    status: str = Field("live", description="`live finished cancelled failed`")

    @classmethod
    def of(cls, view: RequestView) -> Self:
        """From the state's view."""
        return cls.model_validate(view)


class RequestDetail(RequestBody):
    """One request, with its facts if `story=true`."""

    story: list[EventBody] | None = None


class MigrationBody(_Body):
    """One move."""

    migration: str
    request: str
    epoch: int
    source: OwnerBody
    target: OwnerBody
    policy: str
    reason: str
    decided_at_ms: int
    decided_at: Place
    stage: str
    stage_at_ms: int
    rounds: int
    copied_blocks: int
    copied_bytes: int
    blocks_needed: int
    code: str | None
    detail: str | None
    downtime_ms: float | None
    operation: str | None
    mode: str = Field(description="`live blocking recompute`")
    is_open: bool

    @classmethod
    def of(cls, view: MigrationView) -> Self:
        """From the state's view."""
        return cls.model_validate(view)


class ScalingBody(_Body):
    """One decision about the number of instances, and what became of it."""

    scaling: str
    action: str = Field(description="`add remove keep`")
    instance: str
    policy: str
    reason: str
    decided_at_ms: int
    decided_at: Place
    status: str = Field(description="`open done failed cancelled dry_run`")
    ended_at_ms: int
    code: str | None
    detail: str | None

    @classmethod
    def of(cls, view: ScalingView) -> Self:
        """From the state's view."""
        return cls.model_validate(view)


class OperationBody(_Body):
    """One order, and what became of it."""

    operation: str
    kind: str = Field(description="`move drain undrain replay`")
    actor: str
    subject: str
    status: str = Field(description="`accepted running succeeded failed`")
    migration: str | None = None
    code: str | None = None
    detail: str | None = None
    at_ms: int
    target: str | None = None
    mode: str = "live"
    progress: float | None = Field(None, description="Of a replay, 0 to 1.")
    result: dict[str, Any] | None = None

    @classmethod
    def of(cls, view: OperationView) -> Self:
        """From the state's view."""
        return cls.model_validate(view)


class Accepted(BaseModel):
    """The order was taken; its outcome is at `href`."""

    operation: str
    href: str


class InstancePage(BaseModel):
    items: list[InstanceBody]
    next: str | None


class RequestPage(BaseModel):
    items: list[RequestBody]
    next: str | None


class MigrationPage(BaseModel):
    items: list[MigrationBody]
    next: str | None


class ScalingPage(BaseModel):
    items: list[ScalingBody]
    next: str | None


class OperationPage(BaseModel):
    items: list[OperationBody]
    next: str | None


class EventPage(BaseModel):
    items: list[EventBody]
    next: str | None


class StateBody(BaseModel):
    """The fold of the log at a position, in the form that snapshots have."""

    position: Place
    digest: str = Field(description="BLAKE2b-128 of the encoded state: equal states have equal digests.")
    state: dict[str, Any]


class PolicyChoiceBody(_Body):
    name: str
    params: dict[str, Any] = {}


class PolicySettingsBody(_Body):
    """The policies in force (`control.state.PolicySettings`)."""

    model_config = ConfigDict(from_attributes=True, extra="forbid")

    dispatch: PolicyChoiceBody
    moves: tuple[PolicyChoiceBody, ...] = Field(max_length=32)
    scale: PolicyChoiceBody | None = None
    cooldown_ms: int = Field(ge=0, le=MS_MAX)
    moves_per_tick_max: int = Field(ge=0, le=1_000)
    moves_per_instance_max: int = Field(ge=1, le=100)
    pair_backoff_ms: int = Field(ge=0, le=MS_MAX)
    high_headroom: float = Field(0.25, ge=0, le=1)
    decision_ttl_ms: int = Field(ge=100, le=MS_MAX)
    suspect_after_ms: int = Field(ge=200, le=MS_MAX)
    lost_after_ms: int = Field(ge=200, le=MS_MAX)


class MoveOrder(BaseModel):
    """Move a request; without a target the controller chooses one."""

    model_config = ConfigDict(extra="forbid")

    request: str = Field(min_length=1, max_length=256)
    target: str | None = Field(None, min_length=1, max_length=256)
    mode: MoveMode = Field(
        "live", description="KV is copied while the request decodes on, once it is frozen, or not at all."
    )


class ReplayOrder(BaseModel):
    """Re-derive every archived decision, with some parameters of policies changed (`{"balance.low": 3}`)."""

    model_config = ConfigDict(extra="forbid")

    overrides: dict[str, Any] = Field({}, max_length=64)


class HealthBody(BaseModel):
    """Whether the API serves, and how far its fold is."""

    status: str
    position: Place
