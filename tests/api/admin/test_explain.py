"""Explanations: what the log says of a decision, and what follows from it by deciding again."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.api.cli.explain import show_move, show_request
from midstream.api.cli.output import Output
from midstream.control.decide import decide
from midstream.control.events import (
    CommandRefused,
    LoadReported,
    MoveDecided,
    PolicyConfigured,
    RequestDispatched,
    RequestFinished,
    RequestsReported,
    TickElapsed,
)
from midstream.control.ids import Owner
from midstream.control.state import Load, PolicyChoice, PolicySettings, RequestLoad
from tests.api.admin.cluster import FINGERPRINT, Log, client_of, code_of

I1, I2 = Owner("i1", 1), Owner("i2", 1)


def dispatched(request: str, owner: Owner, **changes: Any) -> RequestDispatched:
    fields: dict[str, Any] = {
        "request": request, "gateway": "g1", "owner": owner, "epoch": 2, "prompt_tokens": 160, "delivered_tokens": 0,
        "output_tokens_max": 64, "policy": "freeness", "scores": (("i1", 44.0), ("i2", 10.0)), "reason": "freest of 2",
    }  # fmt: skip
    return RequestDispatched(**fields | changes)


def crowded() -> tuple[Log, MoveDecided]:
    """Three instances of which i1 is full; a committed tick that moves something off it."""
    log = Log()
    for name in ("i1", "i2", "i3"):
        other = "HND" if name == "i3" else FINGERPRINT.layout
        log.instance(name, fingerprint=type(FINGERPRINT)(**{**_fields(FINGERPRINT), "layout": other}))
    for index in range(6):
        log.say("gateway/g1", dispatched(f"r{index}", I1))
    rows = tuple(RequestLoad(f"r{index}", 2, 256, 16, False, index > 0) for index in range(6))
    log.say("llumlet/i1", RequestsReported(owner=I1, requests=rows))
    log.say("llumlet/i1", LoadReported(owner=I1, load=Load(running=6, blocks_free=4)))
    moves = (PolicyChoice("balance", {"low": 5.0, "high": 20.0}),)
    log.say("admin", PolicyConfigured(policies=PolicySettings(moves=moves), actor="ann"))
    tick = TickElapsed(now_ms=2_000_000, seed=1, decided_at=log.state.position)
    decision = decide(log.state, tick)
    log.say("control", tick)
    for event in decision.events:
        log.say("control", event)
    (move,) = [event for event in decision.events if isinstance(event, MoveDecided)]
    return log, move


def _fields(fingerprint: Any) -> dict[str, Any]:
    return {name: getattr(fingerprint, name) for name in fingerprint.__struct_fields__}


async def test_a_move_is_explained_by_its_rule_its_candidates_and_what_was_refused() -> None:
    log, move = crowded()
    async with client_of(log) as client:
        found = (await client.get(f"/migrations/{move.migration}/explain")).raise_for_status().json()
    assert found["is_rederived"] is True
    assert (found["policy"], found["reason"]) == ("balance", move.reason)
    assert found["params"]["low"] == 5.0
    assert [row["name"] for row in found["targets"]] == ["i2", "i3"]
    assert (found["targets"][0]["code"], found["targets"][1]["code"]) == (None, "different_fingerprint")
    requests = {row["name"]: row["code"] for row in found["requests"]}
    assert move.request not in requests
    assert requests["r0"] == "not_movable"
    assert found["limits"]["moves"][0]["name"] == "balance"


async def test_a_decision_that_this_build_would_not_make_says_so() -> None:
    log, move = crowded()
    log.say("admin", PolicyConfigured(policies=PolicySettings(moves=(PolicyChoice("none"),)), actor="ann"))
    tick = TickElapsed(now_ms=2_000_250, seed=2, decided_at=log.state.position)
    log.say("control", tick)
    other = f"m-{tick.decided_at}-0"
    log.say("control", type(move)(**{**_fields(move), "migration": other, "decided_at": tick.decided_at}))
    async with client_of(log) as client:
        found = (await client.get(f"/migrations/{other}/explain")).raise_for_status().json()
    assert found["is_rederived"] is False


async def test_a_request_is_explained_from_its_first_dispatch_to_where_it_could_go_now() -> None:
    log, move = crowded()
    log.say("llumlet/i1", CommandRefused(migration=move.migration, owner=I1, code="stale", reason="too late"))
    async with client_of(log) as client:
        found = (await client.get(f"/requests/{move.request}/explain")).raise_for_status().json()
    assert found["status"] == "live"
    (row,) = found["dispatches"]
    assert (row["policy"], row["reason"], row["cause"]) == ("freeness", "freest of 2", "new")
    assert row["scores"] == [["i1", 44.0], ["i2", 10.0]]
    assert [one["name"] for one in row["instances"]][:2] == ["i1", "i2"]
    assert [(step["what"], step["code"]) for step in found["moves"]] == [("decided", "balance"), ("refused", "stale")]
    assert found["now"]["targets"][0]["name"] == "i2"


async def test_an_ended_request_is_explained_too() -> None:
    log, _ = crowded()
    log.say(
        "gateway/g1",
        RequestFinished(
            request="r5", epoch=2, owner=I1, finish_reason="stop", output_tokens=3, ttft_ms=1.0, gap_ms_mean=1.0,
            gap_ms_max=1.0,
        ),
    )  # fmt: skip
    async with client_of(log) as client:
        found = (await client.get("/requests/r5/explain")).raise_for_status().json()
    assert (found["status"], found["now"]) == ("finished", None)


async def test_what_is_not_there_is_a_problem() -> None:
    log, move = crowded()
    hasty = f"{move.migration}9"
    log.state.migrations[hasty] = log.state.migrations[move.migration]
    async with client_of(log) as client:
        assert code_of(await client.get("/requests/nobody/explain")) == (404, "unknown_request")
        assert code_of(await client.get("/migrations/m-1-1-0/explain")) == (404, "unknown_migration")
        assert code_of(await client.get(f"/migrations/{hasty}/explain")) == (503, "not_archived_yet")


async def test_explanations_read_as_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    log, move = crowded()
    async with client_of(log) as client:
        show_move((await client.get(f"/migrations/{move.migration}/explain")).json(), Output.table)
        show_request((await client.get(f"/requests/{move.request}/explain")).json(), Output.table)
    said = capsys.readouterr().out
    assert "rule      balance v1 (low=5.0, high=20.0" in said
    assert "no: i1 and i3 differ in layout (different_fingerprint)" in said
    assert "no: r0 cannot be moved exactly (not_movable)" in said
    assert "dispatched (new) to i1 at epoch 2" in said
    assert f"decided {move.migration} balance" in said
