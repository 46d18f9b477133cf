"""Moves and drains: judged at once where they can be, recorded once where they cannot."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from msgspec.structs import replace

from midstream.control.events import (
    DrainCancelled,
    DrainRequested,
    InstanceLost,
    InstanceSuspected,
    LoadReported,
    MoveDecided,
    MoveRequested,
    RequestsReported,
)
from midstream.control.ids import Owner, Position
from midstream.control.state import Load, RequestLoad
from tests.api.admin.cluster import FINGERPRINT, Log, MemoryJobs, client_of, code_of, small_cluster


async def post(client: httpx.AsyncClient, path: str, body: object = None, key: str = "k1") -> httpx.Response:
    return await client.post(path, json=body, headers={"Idempotency-Key": key})


async def test_P18_a_move_is_accepted_and_is_one_fact() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        response = await post(client, "/migrations", {"request": "r1", "target": "i2"})
        assert response.status_code == 202
        operation = response.json()["operation"]
        found = (await client.get(response.json()["href"].removeprefix("/api/v1"))).json()
    assert log.recorded == [MoveRequested(operation=operation, request="r1", target="i2", actor="anonymous")]
    assert (found["kind"], found["subject"], found["target"], found["status"]) == ("move", "r1", "i2", "accepted")


async def test_P18_the_same_key_again_is_the_same_order() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        order = {"request": "r1", "target": "i2"}
        answers = await asyncio.gather(*(post(client, "/migrations", order) for _ in range(5)))
        other_body = await post(client, "/migrations", {"request": "r1", "target": None})
        other_mode = await post(client, "/migrations", order | {"mode": "blocking"})
        other_route = await post(client, "/instances/i1/drain")
    assert {a.json()["operation"] for a in answers} == {answers[0].json()["operation"]}
    assert len(log.recorded) == 1
    assert code_of(other_body) == code_of(other_route) == (409, "idempotency_key_reused")
    assert code_of(other_mode) == (409, "idempotency_key_reused")


async def test_the_mode_of_a_move_is_part_of_its_fact() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        await post(client, "/migrations", {"request": "r1", "mode": "recompute"})
    assert [fact.mode for fact in log.recorded if isinstance(fact, MoveRequested)] == ["recompute"]


async def test_P18_the_same_key_survives_a_restart_of_the_api() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        first = await post(client, "/instances/i1/drain")
    async with client_of(log) as client:
        second = await post(client, "/instances/i1/drain")
    assert first.json() == second.json() and len(log.recorded) == 1


async def test_an_order_needs_an_idempotency_key() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        for path, body in (("/migrations", {"request": "r1"}), ("/instances/i1/drain", None), ("/replays", {})):
            assert code_of(await client.post(path, json=body)) == (400, "idempotency_key_required")
    assert log.recorded == []


def moving(log: Log) -> None:
    log.say(
        "control",
        MoveDecided(
            migration="m-1-9-0", request="r1", epoch=2, source=Owner("i1", 1), target=Owner("i2", 1), policy="balance",
            policy_version=1, params={}, candidates=(), reason="", decided_at=Position(1, 4), blocks_needed=3,
        ),
    )  # fmt: skip


def full(log: Log) -> None:
    log.say("llumlet/i2", LoadReported(owner=Owner("i2", 1), load=Load(blocks_free=1, running=7)))


def slots_full(log: Log) -> None:
    log.say("llumlet/i2", LoadReported(owner=Owner("i2", 1), load=Load(blocks_free=100, running=8)))


def draining(log: Log) -> None:
    log.say("admin2", DrainRequested(operation="x", instance="i2", actor="a"))


def lost(log: Log) -> None:
    log.say("control", InstanceLost(owner=Owner("i2", 1), silent_ms=1, witnesses=("g1",)))


def source_suspect(log: Log) -> None:
    log.say("control", InstanceSuspected(owner=Owner("i1", 1), silent_ms=3_000))


def other_model(log: Log) -> None:
    log.instance("i3", fingerprint=replace(FINGERPRINT, model="other"))


def fixed(log: Log) -> None:
    fact = RequestLoad(request="r1", epoch=2, tokens=32, blocks=2, is_waiting=False, is_movable=False)
    log.say("llumlet/i1", RequestsReported(owner=Owner("i1", 1), requests=(fact,)))


@pytest.mark.parametrize(
    ("situation", "body", "expected"),
    [
        (None, {"request": "nobody", "target": "i2"}, (404, "unknown_request")),
        (None, {"request": "r1", "target": "nowhere"}, (404, "unknown_instance")),
        (None, {"request": "r1", "target": "i1"}, (409, "same_instance")),
        (moving, {"request": "r1", "target": "i2"}, (409, "already_moving")),
        (moving, {"request": "r1"}, (409, "already_moving")),
        (draining, {"request": "r1", "target": "i2"}, (409, "target_draining")),
        (full, {"request": "r1", "target": "i2"}, (409, "target_full")),
        (slots_full, {"request": "r1", "target": "i2"}, (409, "target_full")),
        (lost, {"request": "r1", "target": "i2"}, (409, "target_down")),
        (lost, {"request": "r1"}, (409, "no_target")),
        (full, {"request": "r1"}, (409, "target_full")),
        (source_suspect, {"request": "r1", "target": "i2"}, (409, "source_down")),
        (other_model, {"request": "r1", "target": "i3"}, (409, "different_fingerprint")),
        (fixed, {"request": "r1", "target": "i2"}, (409, "not_movable")),
        (None, {"request": "r1", "target": "i2", "force": True}, (422, "invalid_input")),
        (None, {"target": "i2"}, (422, "invalid_input")),
        (None, {"request": "r1", "target": ""}, (422, "invalid_input")),
        (None, {"request": "r1", "mode": "teleport"}, (422, "invalid_input")),
    ],
)
async def test_a_move_that_cannot_be_is_refused_at_once(situation, body, expected) -> None:  # type: ignore[no-untyped-def]
    log = small_cluster()
    if situation is not None:
        situation(log)
    async with client_of(log) as client:
        assert code_of(await post(client, "/migrations", body)) == expected
    assert log.recorded == []


async def test_P16_drain_and_undrain_are_facts_once_each() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        assert (await post(client, "/instances/i2/drain", key="a")).status_code == 202
        assert (await client.get("/instances/i2")).json()["is_draining"] is True
        assert code_of(await post(client, "/instances/i2/drain", key="b")) == (409, "already_draining")
        assert (await post(client, "/instances/i2/undrain", key="c")).status_code == 202
        assert code_of(await post(client, "/instances/i2/undrain", key="d")) == (409, "not_draining")
        assert code_of(await post(client, "/instances/nowhere/drain", key="e")) == (404, "unknown_instance")
        lost(log)
        assert code_of(await post(client, "/instances/i2/drain", key="f")) == (409, "instance_down")
    assert [type(event) for event in log.recorded] == [DrainRequested, DrainCancelled]


async def test_an_order_that_the_log_does_not_show_yet_blocks_its_twin() -> None:
    log = small_cluster()
    log.is_stuck = True
    async with client_of(log) as client:
        first = await post(client, "/instances/i1/drain", key="a")
        assert first.status_code == 202
        assert code_of(await post(client, "/instances/i1/drain", key="b")) == (409, "already_draining")
        assert (await post(client, "/instances/i1/drain", key="a")).json() == first.json()
        waiting = (await client.get(f"/operations/{first.json()['operation']}")).json()
        log.release()
        page = (await client.get("/operations")).json()
    assert waiting["status"] == "accepted"
    assert [item["operation"] for item in page["items"]] == [first.json()["operation"]]
    assert len(log.recorded) == 1


async def test_a_replay_is_an_operation_with_progress_and_result() -> None:
    log, jobs = small_cluster(), MemoryJobs()
    async with client_of(log, jobs) as client:
        accepted = await post(client, "/replays", {"overrides": {"cooldown_ms": 5}})
        assert accepted.status_code == 202
        operation = accepted.json()["operation"]
        again = await post(client, "/replays", {"overrides": {"cooldown_ms": 5}})
        other = await post(client, "/replays", {"overrides": {}})
        wrong = await post(client, "/replays", {"overrides": {"no_such_thing": 5}}, key="k2")
        missing = await client.get("/replays/op-none")
        jobs.jobs[operation] = replace(jobs.jobs[operation], status="succeeded", progress=1.0, result={"equal": 7})
        done = (await client.get(f"/replays/{operation}")).json()
        as_operation = (await client.get(f"/operations/{operation}")).json()
    assert again.json() == accepted.json() and len(jobs.jobs) == 1
    assert code_of(other) == (409, "idempotency_key_reused")
    assert code_of(wrong) == (422, "bad_override")
    assert code_of(missing) == (404, "unknown_operation")
    assert done == as_operation
    assert (done["status"], done["progress"], done["result"]) == ("succeeded", 1.0, {"equal": 7})
