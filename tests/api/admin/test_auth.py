"""Every route asks for a key and a scope; the document that lists the routes is complete."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from midstream.api.admin.app import create_admin
from midstream.api.admin.deps import AdminDeps, AdminSettings
from midstream.api.auth import check_guarded
from midstream.api.keys import Key, hash_key
from midstream.control.adapters.clock import SystemClock
from midstream.control.errors import BadInput
from tests.api.admin.cluster import MemoryJobs, client_of, code_of, small_cluster

SCOPES = ("read", "migrate", "replay", "admin", "generate")
KEYS = tuple(Key(name=f"{scope}er", sha256=hash_key(f"{scope}-secret"), scopes=(scope,)) for scope in SCOPES)
NEEDED = {
    ("post", "/api/v1/instances/{instance}/drain"): "migrate",
    ("post", "/api/v1/instances/{instance}/undrain"): "migrate",
    ("post", "/api/v1/migrations"): "migrate",
    ("put", "/api/v1/policies"): "admin",
    ("post", "/api/v1/replays"): "replay",
}
OPEN = {("get", "/api/v1/health")}


def bearer(scope: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {scope}-secret"}


async def operations(client: httpx.AsyncClient) -> list[tuple[str, str, dict[str, Any]]]:
    document = (await client.get("/openapi.json", headers=bearer("read"))).json()
    return [(method, path, item) for path, items in document["paths"].items() for method, item in items.items()]


async def test_every_route_in_the_document_needs_a_key_and_its_scope() -> None:
    async with client_of(small_cluster(), keys=KEYS) as client:
        routes = await operations(client)
        assert len(routes) >= 20 and set(NEEDED) <= {(method, path) for method, path, _ in routes}
        for method, template, _ in routes:
            path = template.removeprefix("/api/v1").replace("{", "").replace("}", "")
            anonymous = await client.request(method, path)
            if (method, template) in OPEN:
                assert anonymous.status_code == 200
                continue
            assert code_of(anonymous) == (401, "key_required"), template
            assert anonymous.headers["www-authenticate"] == "Bearer"
            unknown = await client.request(method, path, headers={"Authorization": "Bearer nonsense"})
            assert code_of(unknown) == (401, "key_unknown"), template
            needed = NEEDED.get((method, template), "read")
            for scope in SCOPES:
                if scope not in (needed, "admin"):
                    denied = await client.request(method, path, headers=bearer(scope))
                    assert code_of(denied) == (403, "scope_missing"), (template, scope)


async def test_the_right_scope_opens_and_admin_opens_everything() -> None:
    log = small_cluster()
    async with client_of(log, keys=KEYS) as client:
        for scope, key in (("migrate", "a"), ("admin", "b")):
            headers = bearer(scope) | {"Idempotency-Key": key}
            path = "/instances/i1/drain" if scope == "migrate" else "/instances/i2/drain"
            assert (await client.post(path, headers=headers)).status_code == 202
        assert (await client.get("/instances", headers=bearer("admin"))).status_code == 200
        assert code_of(await client.get("/openapi.json")) == (401, "key_required")
    assert [event.actor for event in log.recorded] == ["migrateer", "adminer"]  # type: ignore[attr-defined]


async def test_two_callers_with_the_same_idempotency_key_give_two_orders() -> None:
    log = small_cluster()
    async with client_of(log, keys=KEYS) as client:
        for scope, instance in (("migrate", "i1"), ("admin", "i2")):
            await client.post(f"/instances/{instance}/drain", headers=bearer(scope) | {"Idempotency-Key": "same"})
    assert len({event.operation for event in log.recorded}) == 2  # type: ignore[attr-defined]


async def test_the_document_describes_every_answer() -> None:
    async with client_of(small_cluster(), keys=KEYS) as client:
        for method, path, item in await operations(client):
            good = next(item["responses"][status] for status in ("200", "202") if status in item["responses"])
            assert good.get("content"), (method, path)
            assert item.get("security") or (method, path) in OPEN, (method, path)
            assert "4XX" in item["responses"] or (method, path) in OPEN


@pytest.mark.parametrize("host", ["a/docs?", "evil.example:80", "127.0.0.1:1:2", "", "127.0.0.1@evil"])
async def test_an_anonymous_api_answers_only_to_loopback_names(host: str) -> None:
    async with client_of(small_cluster()) as client:
        assert code_of(await client.get("/instances", headers={"Host": host})) == (400, "bad_host")
        assert (await client.get("/instances", headers={"Host": "LOCALHOST:1234"})).status_code == 200


async def test_with_keys_any_well_formed_host_will_do() -> None:
    async with client_of(small_cluster(), keys=KEYS) as client:
        named = await client.get("/instances", headers=bearer("read") | {"Host": "midstream.internal:8001"})
        assert named.status_code == 200
        assert code_of(await client.get("/instances", headers=bearer("read") | {"Host": "a/docs?"})) == (
            400,
            "bad_host",
        )


def test_anonymous_is_for_loopback_only() -> None:
    log = small_cluster()

    def deps(host: str, keys: tuple[Key, ...]) -> AdminDeps:
        return AdminDeps(
            follower=log, archive=log.archive, recorder=log, jobs=MemoryJobs(), clock=SystemClock(),
            settings=AdminSettings(host=host, keys=keys),
        )  # fmt: skip

    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(BadInput, match="loopback"):
            create_admin(deps(host, ()))
        create_admin(deps(host, KEYS))
    for host in ("127.0.0.1", "::1", "localhost"):
        create_admin(deps(host, ()))


def test_a_route_without_a_scope_is_found_at_start() -> None:
    router = APIRouter()
    router.add_api_route("/naked", lambda: None)
    with pytest.raises(TypeError, match="naked"):
        check_guarded(router.routes)
