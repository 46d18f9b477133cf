"""Lists, single things, state, policies, metrics: what the log adds up to, page by page."""

from __future__ import annotations

import httpx
import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from midstream.api.admin import models
from midstream.control import state as views
from midstream.control.codec import decode_state, digest, encode_state
from midstream.control.events import (
    MigrationAborted,
    MoveDecided,
    PolicyConfigured,
    RequestFinished,
    ScaleDecided,
    ScaleFailed,
)
from midstream.control.ids import Owner, Position, scaling_id
from midstream.control.state import PolicyChoice, PolicySettings
from tests.api.admin.cluster import Log, client_of, code_of, small_cluster


async def all_pages(client: httpx.AsyncClient, path: str, key: str, limit: int, between=None) -> list[str]:  # type: ignore[no-untyped-def]
    """Every item of a list, page by page, with something happening between pages."""
    found: list[str] = []
    cursor = None
    while True:
        params = {"limit": limit} | ({"cursor": cursor} if cursor else {})
        page = (await client.get(path, params=params)).raise_for_status().json()
        assert len(page["items"]) <= limit
        found += [item[key] for item in page["items"]]
        cursor = page["next"]
        if cursor is None:
            return found
        if between is not None:
            between()


def moves(log: Log, count: int) -> list[str]:
    names = []
    for index in range(count):
        names.append(f"m-1-{len(log.entries)}-0")
        log.say(
            "control",
            MoveDecided(
                migration=names[-1], request=f"q{index}", epoch=2, source=Owner("i1", 1), target=Owner("i2", 1),
                policy="balance" if index % 2 else "drain", policy_version=1, params={}, candidates=(), reason="why",
                decided_at=Position(1, len(log.entries)), blocks_needed=1,
            ),
        )  # fmt: skip
    return names


async def test_P29_lists_page_to_the_end_exactly_once_while_things_come_and_go() -> None:
    log = small_cluster()
    owner = Owner("i1", 1)
    for index in range(25):
        log.request(f"s{index:02}", owner)
    extra = iter(range(100))

    def churn() -> None:
        log.request(f"a-new-{next(extra)}", owner)
        log.request(f"z-new-{next(extra):02}", owner)

    async with client_of(log) as client:
        seen = await all_pages(client, "/requests", "request", 4, churn)
        names = moves(log, 23)
        moved = await all_pages(client, "/migrations", "migration", 5, lambda: moves(log, 1))
        instances = await all_pages(client, "/instances", "instance", 1)
    assert len(seen) == len(set(seen)) and {f"s{i:02}" for i in range(25)} <= set(seen)
    assert [name for name in moved if name in names] == names[::-1] and len(moved) == len(set(moved))
    assert instances == ["i1", "i2"]


async def test_P29_events_page_to_the_end_exactly_once() -> None:
    log = small_cluster()
    moves(log, 50)
    async with client_of(log) as client:
        for limit in (1, 7, 1000):
            positions = await all_pages(client, "/events", "position", limit)
            assert positions == [str(entry.position) for entry in log.entries]
        decided = (await client.get("/events", params={"kind": "MoveDecided", "after": "1-30", "limit": 3})).json()
    assert [item["position"] for item in decided["items"]] == ["1-31", "1-32", "1-33"]
    item = decided["items"][0]
    assert (item["kind"], item["version"], item["source"], item["event"]["policy_version"]) == (
        "MoveDecided",
        1,
        "control",
        1,
    )


async def test_filters_choose() -> None:
    log = small_cluster()
    log.request("r2", Owner("i2", 1))
    names = moves(log, 4)
    log.say("llumlet/i1", MigrationAborted(migration=names[0], request="q0", stage="x", code="lost", reason="r"))

    async def ids(client: httpx.AsyncClient, path: str, key: str, **params: object) -> list[str]:
        return [item[key] for item in (await client.get(path, params=params)).json()["items"]]  # type: ignore[arg-type]

    async with client_of(log) as client:
        assert await ids(client, "/requests", "request", instance="i2") == ["r2"]
        assert await ids(client, "/requests", "request", gateway="nobody") == []
        assert await ids(client, "/migrations", "migration", open=False) == [names[0]]
        assert await ids(client, "/migrations", "migration", open=True, policy="drain") == [names[2]]
        assert await ids(client, "/migrations", "migration", request="q1") == [names[1]]
        assert await ids(client, "/migrations", "migration", instance="i9") == []
        assert await ids(client, "/events", "kind", migration=names[0]) == ["MoveDecided", "MigrationAborted"]


def scale(log: Log, action: str, instance: str) -> str:
    name = scaling_id(Position(1, len(log.entries)), 0)
    log.say(
        "control",
        ScaleDecided(
            scaling=name, action=action, instance=instance, policy="scale_freeness", policy_version=1, params={},
            freeness=1.5, reason=f"freeness 1.5: {action}", decided_at=Position(1, len(log.entries)),
        ),
    )  # fmt: skip
    return name


async def test_scalings_say_what_was_decided_when_why_and_what_came_of_it() -> None:
    log = small_cluster()
    added, lost, removed = scale(log, "add", "i3"), scale(log, "add", "i4"), scale(log, "remove", "i2")
    log.instance("i3")
    log.say("scaler", ScaleFailed(scaling=lost, code="command_failed", reason="exit code 1, five times"))

    async with client_of(log) as client:

        async def names(**params: str) -> list[str]:
            return [item["scaling"] for item in (await client.get("/scalings", params=params)).json()["items"]]

        everything = await all_pages(client, "/scalings", "scaling", 2, lambda: scale(log, "add", "i9"))
        done, failed = [(await client.get(f"/scalings/{name}")).json() for name in (added, lost)]
        assert await names(status="open", action="remove") == [removed]
        assert await names(instance="i3") == [added]
        assert await names(instance="i7") == []
    assert everything == [removed, lost, added]
    assert (done["action"], done["instance"], done["status"], done["reason"], done["decided_at"]) == (
        "add", "i3", "done", "freeness 1.5: add", "1-4",
    )  # fmt: skip
    assert (failed["status"], failed["code"], failed["detail"]) == (
        "failed", "command_failed", "exit code 1, five times",
    )  # fmt: skip


async def test_single_things_and_their_absence() -> None:
    log = small_cluster()
    name = moves(log, 1)[0]
    async with client_of(log) as client:
        instance = (await client.get("/instances/i1")).json()
        request = (await client.get("/requests/r1")).json()
        move = (await client.get(f"/migrations/{name}")).json()
        for path, code in (
            ("/instances/nope", "unknown_instance"),
            ("/requests/nope", "unknown_request"),
            ("/migrations/nope", "unknown_migration"),
            ("/scalings/nope", "unknown_scaling"),
            ("/operations/nope", "unknown_operation"),
        ):
            assert code_of(await client.get(path)) == (404, code)
    assert (instance["instance"], instance["requests"], instance["load"]["blocks_free"]) == ("i1", 1, 100)
    assert (request["owner"], request["epoch"], request["status"]) == ({"instance": "i1", "incarnation": 1}, 2, "live")
    assert (move["is_open"], move["decided_at"], move["target"]["instance"]) == (True, "1-4", "i2")


async def test_an_ended_request_and_its_story_come_from_the_archive() -> None:
    log = small_cluster()
    end = RequestFinished(
        request="r1", epoch=2, owner=Owner("i1", 1), finish_reason="stop", output_tokens=5, ttft_ms=1.0,
        gap_ms_mean=1.0, gap_ms_max=2.0,
    )  # fmt: skip
    log.say("gateway/g1", end)
    async with client_of(log) as client:
        found = (await client.get("/requests/r1", params={"story": True})).json()
        plain = (await client.get("/requests/r1")).json()
    assert (found["status"], found["gateway"], found["prompt_tokens"]) == ("finished", "g1", 32)
    assert [fact["kind"] for fact in found["story"]] == ["RequestDispatched", "RequestFinished"]
    assert plain["story"] is None


async def test_state_now_and_at_any_position() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        now = (await client.get("/state")).json()
        then = (await client.get("/state", params={"at": "1-2"})).json()
        bad = await client.get("/state", params={"at": "yesterday"})
    assert now["position"] == "1-4" and now["digest"] == digest(encode_state(log.state))
    assert decode_state(httpx.Response(200, json=now["state"]).content) == replace(log.state, uncarried=[])
    assert then["position"] == "1-2" and list(then["state"]["instances"]) == ["i1"]
    assert code_of(bad) == (400, "bad_position")


async def test_policies_change_by_a_fact_and_only_what_was_seen() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        before = await client.get("/policies")
        body = before.json() | {"cooldown_ms": 7, "dispatch": {"name": "round_robin"}}
        changed = await client.put("/policies", json=body, headers={"If-Match": before.headers["etag"]})
        stale = await client.put("/policies", json=body, headers={"If-Match": before.headers["etag"]})
        after = await client.get("/policies")
        unknown = await client.put("/policies", json=body | {"dispatch": {"name": "magic"}})
        parameter = await client.put("/policies", json=body | {"moves": [{"name": "drain", "params": {"x": 1}}]})
        ranges = [
            await client.put("/policies", json=body | {"dispatch": {"name": "slo", "params": {"ttft_ms": 0}}}),
            await client.put("/policies", json=body | {"moves": [{"name": "defragment", "params": {"keep": -1000}}]}),
            await client.put("/policies", json=body | {"scale": {"name": "scale_freeness", "params": {"step_max": 0}}}),
        ]
        field = await client.put("/policies", json=body | {"magic": 1})
        order = await client.put("/policies", json=body | {"suspect_after_ms": 9_000})
    expected = PolicySettings(cooldown_ms=7, dispatch=PolicyChoice("round_robin"))
    assert (
        changed.status_code == 200
        and changed.json() == after.json()
        and changed.headers["etag"] == after.headers["etag"]
    )
    assert log.recorded == [PolicyConfigured(policies=expected, actor="anonymous")]
    assert code_of(stale) == (412, "etag_mismatch")
    assert code_of(unknown) == code_of(parameter) == code_of(order) == (422, "bad_policy")
    assert {code_of(response) for response in ranges} == {(422, "bad_policy")}
    assert "policy slo: Expected `float` >= 0.1 - at `$.ttft_ms`" in ranges[0].text
    assert code_of(field) == (422, "invalid_input")


async def test_P27_metrics_speak_only_of_what_is_there() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        text = (await client.get("/metrics")).text
    assert 'midstream_instances{health="up"} 2.0' in text
    assert "midstream_requests 1.0" in text
    assert 'midstream_instance_blocks_free{instance="i1"} 100.0' in text


@pytest.mark.parametrize(
    ("view", "body", "renamed"),
    [
        (views.InstanceView, models.InstanceBody, {"instance", "requests"}),
        (views.RequestView, models.RequestBody, {"status"}),
        (views.MigrationView, models.MigrationBody, {"is_open"}),
        (views.ScalingView, models.ScalingBody, set()),
        (views.OperationView, models.OperationBody, {"progress", "result"}),
        (views.Load, models.LoadBody, set()),
        (views.Fingerprint, models.FingerprintBody, set()),
        (views.PolicySettings, models.PolicySettingsBody, set()),
    ],
)
def test_documents_show_every_field_of_their_view(view: type, body: type[BaseModel], renamed: set[str]) -> None:
    assert set(body.model_fields) == set(view.__struct_fields__) | renamed  # type: ignore[attr-defined]
