"""The documents of explanations. Field names are those of `control.decide.explain`, which explains them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from midstream.api.admin.models import OwnerBody, Place, PolicySettingsBody


class _Body(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class WeighedBody(_Body):
    """An instance or request that was looked at; `code` and `reason` say why not."""

    name: str
    score: float | None
    code: str | None
    reason: str | None


class RefusedProposalBody(_Body):
    """What a policy wanted in the same tick and the limits refused."""

    policy: str
    request: str
    target: str
    code: str
    reason: str


class MoveExplanationBody(_Body):
    """One move: the rule that chose it, and what else could have been."""

    migration: str
    request: str
    source: OwnerBody
    target: OwnerBody
    policy: str
    policy_version: int
    params: dict[str, Any]
    reason: str
    decided_at: Place
    candidates: tuple[tuple[str, float], ...]
    targets: tuple[WeighedBody, ...] = Field(description="Every other instance at that moment, 64 at most.")
    requests: tuple[WeighedBody, ...] = Field(description="What else was on the source, 64 at most.")
    refused: tuple[RefusedProposalBody, ...] = Field(description="Refused in the same tick, 64 at most.")
    limits: PolicySettingsBody
    is_rederived: bool = Field(description="Deciding again gave this very fact.")


class DispatchExplanationBody(_Body):
    """One choice of an instance."""

    position: Place = "0-0"
    at_ms: int = 0
    policy: str
    reason: str
    cause: str
    owner: OwnerBody
    epoch: int
    scores: tuple[tuple[str, float], ...]
    instances: tuple[WeighedBody, ...] = Field(description="As the log showed them just before, 64 at most.")


class Happened(_Body):
    """A step of a move, or a no."""

    position: Place
    at_ms: int
    what: str = Field(description="`decided committed aborted reclaimed refused rejected`")
    migration: str | None
    code: str | None = Field(description="Of a decision the policy.")
    reason: str | None


class StayExplanationBody(_Body):
    """Where a live request could go now; `code` and `reason` say why no policy may move it at all."""

    code: str | None
    reason: str | None
    targets: tuple[WeighedBody, ...]


class RequestExplanationBody(BaseModel):
    """Why a request is, or was, where it is."""

    request: str
    status: str = Field(description="`live finished cancelled failed unknown`")
    dispatches: list[DispatchExplanationBody]
    moves: list[Happened]
    now: StayExplanationBody | None = Field(description="Of a live request.")
