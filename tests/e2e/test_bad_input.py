"""Whatever a person or program gets wrong: one clear line or a problem document, the right code, nothing half done."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import pytest_asyncio

from midstream.control.events import MoveDecided, MoveRejected, MoveRequested
from tests.e2e.helpers import FAST, Client, Rig, cli, running, until

BAD_INPUT, FAILED = 2, 1
SIZES = (400, 400, 8, 400)
"""Room for everything, draining, nearly none, dead."""
HOME, DRAINING, SMALL, DEAD = "i0", "i1", "i2", "i3"
TIMERS = {"load_report_max_ms": 300, "suspect_after_ms": 700, "lost_after_ms": 1_500}
"""So that a silent instance is given up soon."""
TOKENS = 3_000
NOBODY = "redis://127.0.0.1:1"
SERVICES = ("controller", "archiver", "worker", "llumlet", "gateway", "admin")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


# --- commands and processes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MIDSTREAM_GATWAY_PORT", "1", "did you mean MIDSTREAM_GATEWAY_PORT?"),
        ("MIDSTREAM_GATEWAY_PORT", "99999", "MIDSTREAM_GATEWAY_PORT"),
        ("MIDSTREAM_ADMIN_PORT", "many", "MIDSTREAM_ADMIN_PORT"),
        ("MIDSTREAM_LEASE_MS", "5", "lease"),
    ],
)
async def test_P29_a_bad_setting_is_one_line_and_nothing_was_begun(
    tmp_path: Path, name: str, value: str, told: str
) -> None:
    ports = ("--gateway-port", "0", "--admin-port", "0") if "PORT" not in name else ()
    done = await cli("--data-dir", str(tmp_path / "data"), "up", *ports, **{name: value})
    done.assert_one_line(BAD_INPUT, told)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("kind", SERVICES)
async def test_P13_without_a_valkey_a_service_gives_up_and_says_so(tmp_path: Path, kind: str) -> None:
    settings = {"REDIS_URL": NOBODY, "START_WAIT_MS": "200", "SECRET": "s" * 32, "DATA_DIR": str(tmp_path)}
    done = await cli(kind, **{f"MIDSTREAM_{name}": value for name, value in settings.items()})
    assert done.code == FAILED
    assert done.out == "", "it never said that it was ready"
    last = done.err.splitlines()[-1]
    assert last.startswith(f"midstream: the log at {NOBODY} cannot be reached")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("option", ["--gateway-port", "--admin-port"])
async def test_P30_a_taken_port_is_one_line_and_nothing_was_begun(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--gateway-port": "0", "--admin-port": "0"} | {option: str(port)}
        done = await cli("--data-dir", str(tmp_path / "data"), "up", *[part for pair in ports.items() for part in pair])
        done.assert_one_line(BAD_INPUT, f"cannot listen on 127.0.0.1:{port}")
    assert left_in(tmp_path) == []


def left_in(folder: Path) -> list[psutil.Process]:
    """Processes that work in a folder."""
    return [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or ())]


# --- orders ----------------------------------------------------------------------------------------------------------


class Bad(NamedTuple):
    """A move that cannot be: of the running request or another, to where, and what is said about it."""

    request: str | None
    target: str
    status: int
    code: str


ORDERS = [
    Bad("r-nobody", "i0", 404, "unknown_request"),
    Bad(None, "i9", 404, "unknown_instance"),
    Bad(None, HOME, 409, "same_instance"),
    Bad(None, DRAINING, 409, "target_draining"),
    Bad(None, SMALL, 409, "too_small"),
    Bad(None, DEAD, 409, "target_down"),
]


class Scene(NamedTuple):
    """A cluster with an instance of each sort, and a request that runs on the good one."""

    rig: Rig
    client: Client

    async def undisturbed_by_moves(self, moves: int = 0) -> None:
        """The request runs on where it was; so many moves of it were ever decided."""
        assert await self.rig.owner(self.client) == HOME
        assert not self.client.is_over
        decided = [e.fact.event for e in await self.rig.facts() if isinstance(e.fact.event, MoveDecided)]
        assert len(decided) == moves

    def body(self, bad: Bad) -> dict[str, Any]:
        return {"request": bad.request or self.client.request, "target": bad.target}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with running(tmp_path_factory.mktemp("bad"), SIZES, sim_time_scale=4 * FAST, **TIMERS) as rig:
        await rig.order(f"/instances/{DRAINING}/drain")
        rig.signal(DEAD, signal.SIGSTOP)
        try:
            await until(lambda: is_lost(rig))
            client = rig.stream(TOKENS, prompt_tokens=600)
            await client.has(3)
            assert await rig.owner(client) == HOME
            yield Scene(rig, client)
        finally:
            rig.signal(DEAD, signal.SIGCONT)


async def is_lost(rig: Rig) -> bool:
    return bool((await rig.get(f"/instances/{DEAD}"))["health"] == "lost")


async def post(rig: Rig, path: str, body: object, key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {rig.state.admin_key}", "Idempotency-Key": key}
    async with httpx.AsyncClient(base_url=f"{rig.state.admin}/api/v1", headers=headers, trust_env=False) as http:
        return await http.post(path, json=body)


@pytest.mark.parametrize("bad", ORDERS, ids=lambda bad: bad.code)
async def test_the_api_refuses_with_a_problem_and_records_nothing(scene: Scene, bad: Bad) -> None:
    response = await post(scene.rig, "/migrations", scene.body(bad), f"key {bad.code}")
    problem = response.json()
    assert response.status_code == problem["status"] == bad.status
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["code"] == bad.code
    assert problem["detail"] and "\n" not in problem["detail"]
    assert not [e for e in await scene.rig.facts() if isinstance(e.fact.event, MoveRequested | MoveRejected)]
    await scene.undisturbed_by_moves()


@pytest.mark.parametrize("bad", ORDERS, ids=lambda bad: bad.code)
async def test_the_command_line_says_so_in_one_line(scene: Scene, bad: Bad) -> None:
    body = scene.body(bad)
    done = await scene.rig.cli("migrations", "start", body["request"], "--to", body["target"])
    done.assert_one_line(BAD_INPUT if bad.status == 404 else FAILED, f"({bad.code})")
    await scene.undisturbed_by_moves()


async def test_P18_what_gets_past_the_api_is_rejected_by_the_controller_with_a_fact(scene: Scene) -> None:
    """Another program's orders, or ones that were right when they were given."""
    orders = {f"op-{bad.code}": bad for bad in ORDERS}
    facts = [MoveRequested(operation=name, actor="test", **scene.body(bad)) for name, bad in orders.items()]
    await scene.rig.say(*facts)
    for name, bad in orders.items():
        done = await until(lambda name=name: ended(scene.rig, name))
        assert (done["status"], done["code"]) == ("failed", bad.code)
    rejected = [e.fact.event for e in await scene.rig.facts() if isinstance(e.fact.event, MoveRejected)]
    assert {event.operation: event.code for event in rejected} == {name: bad.code for name, bad in orders.items()}
    assert len(rejected) == len(orders)
    await scene.undisturbed_by_moves()


async def ended(rig: Rig, operation: str) -> dict[str, Any] | None:
    found = [one for one in await rig.items("/operations") if one["operation"] == operation]
    return found[0] if found and found[0]["status"] in ("succeeded", "failed") else None


async def test_P18_the_same_order_twice_is_one_move(scene: Scene) -> None:
    rig, client = scene
    await rig.order(f"/instances/{DRAINING}/undrain")
    body = {"request": client.request, "target": DRAINING}
    first = await post(rig, "/migrations", body, "once")
    again = await post(rig, "/migrations", body, "once")
    assert first.status_code == again.status_code == 202
    assert first.json() == again.json()
    twin = await post(rig, "/migrations", body, "other")
    done = await until(lambda: ended(rig, first.json()["operation"]))
    assert done["status"] == "succeeded"
    if twin.status_code == 202:  # between the fact of the first and its decision, or after its end
        twin_code = (await until(lambda: ended(rig, twin.json()["operation"])))["code"]
    else:
        assert twin.status_code == 409
        twin_code = twin.json()["code"]
    assert twin_code in ("already_moving", "same_instance")
    assert await rig.owner(client) == DRAINING
    decided = [e.fact.event for e in await rig.facts() if isinstance(e.fact.event, MoveDecided)]
    assert [event.request for event in decided] == [client.request]


async def test_P18_a_drain_twice_is_one_drain(scene: Scene) -> None:
    done = await scene.rig.cli("instances", "drain", "i9")
    done.assert_one_line(BAD_INPUT, "(unknown_instance)")
    done = await scene.rig.cli("instances", "undrain", HOME)
    done.assert_one_line(FAILED, "(not_draining)")
    assert (await scene.rig.cli("instances", "drain", SMALL)).code == 0
    done = await scene.rig.cli("instances", "drain", SMALL)
    done.assert_one_line(FAILED, "(already_draining)")


async def test_P02_after_all_that_the_stream_is_what_it_would_have_been(scene: Scene) -> None:
    got = tuple(scene.client.ids)
    assert scene.client.error is None
    assert len(got) > 100
    assert got == scene.client.expected()[: len(got)]
