"""The stack of docker-compose.yml: what the file promises, and every service's real command, run without Docker.

The two servers are real (Valkey, PostgreSQL). Each order of starting is shown once, with all checks on it.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from midstream import __version__
from midstream.api.keys import create_key
from midstream.api.settings import load_settings
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.errors import TransferFailed
from midstream.control.events import MigrationCommitted
from midstream.control.replay import verify
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.reference import reference_output
from midstream.migration.protocol.messages import Ping, RequestSpec, Sampling
from midstream.migration.transfers.base import Where
from midstream.migration.transfers.rpc import RpcTransfer
from midstream.migration.wires.zmq import ZmqWire
from tests.e2e.compose import Service, load
from tests.e2e.stack import SERVERS, Stack

FILE = Path(__file__).parents[2] / "docker-compose.yml"
EXAMPLE = FILE.with_name(".env.example")
CLIENT_KEY, CLIENT = create_key("client", ("generate",))
OPERATOR_KEY, OPERATOR = create_key("operator", ("read", "migrate", "replay"))
SECRETS = {
    "MIDSTREAM_SECRET": "data-plane-secret-of-this-test",
    "MIDSTREAM_API_KEYS": f"{CLIENT.line()},{OPERATOR.line()}",
    "REDIS_PASSWORD": "redisPasswordOfThisTest",
    "POSTGRES_PASSWORD": "postgresPasswordOfThisTest",
}
DEADLINE_S = 60.0
SAID_CHARS = 4_000
SEED = 20
SECRET = SECRETS["MIDSTREAM_SECRET"].encode()
PROMPT = tuple(range(300, 340))
TOKENS = 160
pytestmark = pytest.mark.timeout(240)


def services() -> dict[str, Service]:
    """The file with all that must be set."""
    return load(FILE, SECRETS)


ONE_SHOT = "schema"
EVERY = list(services())
OURS = [name for name in EVERY if name not in SERVERS]
WATCHED = ("redis", "controller-1", "worker", "gateway")
"""One of each way to check health."""


# --- what the file promises ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", SECRETS)
def test_a_secret_that_is_not_set_refuses_to_start(missing: str) -> None:
    with pytest.raises(KeyError, match=missing):
        load(FILE, SECRETS | {missing: ""})


def test_no_secret_is_in_the_file_nor_in_the_example() -> None:
    text = FILE.read_text()
    for name in SECRETS:
        assert set(re.findall(rf"\$\{{{name}[^}}]*\}}", text)) == {f"${{{name}:?set it in .env}}"}
        assert f"\n{name}=\n" in EXAMPLE.read_text()
    values = re.findall(r"^ *\w*(?:SECRET|PASSWORD|API_KEYS): *(.*)", text, re.MULTILINE)
    assert values and all(value.startswith("${") for value in values)


def test_the_example_names_every_variable_of_the_file() -> None:
    named = set(re.findall(r"^#?([A-Z_]+)=", EXAMPLE.read_text(), re.MULTILINE))
    assert named == set(re.findall(r"(?<!\$)\$\{(\w+)", FILE.read_text()))


@pytest.mark.parametrize("name", EVERY)
def test_every_service_is_watched_restarted_and_hardened(name: str) -> None:
    raw = services()[name].raw
    assert raw["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
    assert raw["restart"] == ("on-failure" if name == ONE_SHOT else "unless-stopped")
    assert raw["read_only"] is True
    assert raw["cap_drop"] == ["ALL"]
    assert raw["security_opt"] == ["no-new-privileges:true"]
    assert raw["user"] not in {"root", "0", "0:0"}
    assert raw["logging"]["options"]["max-size"]


@pytest.mark.parametrize("name", EVERY)
def test_images_are_pinned(name: str) -> None:
    repository, _, tag = services()[name].image.partition(":")
    assert re.match(r"\d+\.\d+", tag)
    assert tag == __version__ if repository == "midstream" else tag != "latest"


def test_only_the_two_faces_publish_a_port_and_only_on_loopback() -> None:
    published = {name: service.raw["ports"] for name, service in services().items() if "ports" in service.raw}
    assert published == {"gateway": ["127.0.0.1:8000:8000"], "admin": ["127.0.0.1:8001:8001"]}


def test_the_data_plane_has_a_network_of_its_own() -> None:
    """Who carries tokens and KV blocks listens there and on no other interface."""
    members = {name for name, service in services().items() if "data" in service.raw["networks"]}
    assert members == {"gateway", "llumlet-1", "llumlet-2"}
    for name in members:
        service = services()[name]
        assert service.raw["networks"]["data"]["aliases"] == [service.environment["MIDSTREAM_BIND_HOST"]]
        assert "MIDSTREAM_DATA_PORT" not in service.environment
    networks = FILE.read_text().partition("\nnetworks:\n")[2]
    assert "data: { internal: true }" in networks
    assert "control: { internal: true }" in networks


def test_redis_keeps_what_it_was_told() -> None:
    command = " ".join(services()["redis"].argv)
    assert "--appendonly yes --appendfsync everysec" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--requirepass" in command


@pytest.mark.parametrize("name", OURS)
def test_P29_every_variable_is_a_known_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in services()[name].environment.items():
        assert variable.startswith("MIDSTREAM_")
        monkeypatch.setenv(variable, value)
    load_settings()


@pytest.mark.parametrize("name", OURS)
def test_a_service_gets_no_secret_that_it_does_not_need(name: str) -> None:
    environment = services()[name].environment
    assert ("MIDSTREAM_SECRET" in environment) == (name in {"gateway", "llumlet-1", "llumlet-2"})
    assert ("MIDSTREAM_API_KEYS" in environment) == (name in {"gateway", "admin"})


async def test_P30_the_data_plane_binds_and_advertises_a_name() -> None:
    """What keeps llumlets off the other networks: the alias of the `data` network is all they listen on."""
    heard = asyncio.Event()
    here = ZmqWire("a", 1, "localhost", secret=SECRET)
    there = ZmqWire("b", 1, "localhost", secret=SECRET)
    source, target = (RpcTransfer(Where(bind_host="localhost", secret=SECRET)) for _ in "st")
    await here.start(lambda _sender, _message: heard.set())
    await there.start(lambda _sender, _message: None)
    try:
        assert here.node.address.startswith("tcp://localhost:")
        there.send(here.node, Ping(request="r"))
        async with asyncio.timeout(DEADLINE_S):
            await heard.wait()
        await source.start()
        address = await target.start()
        assert address.startswith("tcp://localhost:")
        with pytest.raises(TransferFailed, match="refused"):
            await source.open(address, "handle")
    finally:
        for part in (source, target, here, there):
            await part.stop()


def test_it_can_be_stopped_while_it_waits() -> None:
    waiting = ("archiver", "gateway", "worker", "schema")
    running = Stack(services())
    try:
        for name in waiting:
            running.start(name)
        for name in waiting:
            running.wait_said(name, "wait", DEADLINE_S)
        running.stop()
        assert [running.exit_code(name) for name in waiting] == [0, 0, 0, -signal.SIGTERM]
        assert running.leftover() == []
    finally:
        running.close()


# --- what it does ----------------------------------------------------------------------------------------------------


def reversed_order(stack: Stack) -> None:
    """Last things first, and the servers only when everybody waits for them."""
    for name in reversed(OURS):
        stack.start(name)
    for name in OURS:
        stack.wait_said(name, "wait", DEADLINE_S)
    assert not [name for name in WATCHED if stack.is_healthy(name)]
    for name in SERVERS:
        stack.start(name)


def shuffled_order(stack: Stack) -> None:
    """Any order."""
    for name in random.Random(SEED).sample(EVERY, len(EVERY)):
        stack.start(name)


@pytest.fixture(scope="module", params=[reversed_order, shuffled_order], ids=["reversed", "shuffled"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A running stack."""
    running = Stack(services())
    try:
        request.param(running)
        running.wait_healthy(EVERY, DEADLINE_S)
        yield running
    finally:
        running.close()


class Admin:
    """The admin API as an operator has it."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()

    def order(self, path: str, body: dict[str, Any], key: str) -> dict[str, Any]:
        """Order, and wait for what becomes of it."""
        accepted = self._http.post(path, json=body, headers={"Idempotency-Key": key})
        assert accepted.status_code == 202, accepted.text
        operation = accepted.json()["operation"]
        return dict(wait(lambda: ended(self.get(f"/operations/{operation}"))))


@pytest.fixture
def admin(stack: Stack) -> Iterator[Admin]:
    key = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    url = f"{stack.url('admin', 8001)}/api/v1"
    with httpx.Client(base_url=url, headers=key, trust_env=False, timeout=DEADLINE_S) as http:
        yield Admin(http)


def ended(operation: dict[str, Any]) -> dict[str, Any] | None:
    return operation if operation["status"] in {"succeeded", "failed"} else None


def wait(condition: Callable[[], Any]) -> Any:
    """Until it is truthy."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


class Streaming(threading.Thread):
    """A client of the gateway, reading one completion."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self.request: str | None = None
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._url = f"{stack.url('gateway', 8000)}/v1"
        self.start()

    def run(self) -> None:
        """Read to the end."""
        with openai.OpenAI(base_url=self._url, api_key=CLIENT_KEY, max_retries=0) as client:
            asked = {"return_token_ids": True, "ignore_eos": True}
            stream = client.completions.create(
                model="sim", prompt=PROMPT, max_tokens=TOKENS, seed=SEED, stream=True, extra_body=asked
            )
            for chunk in stream:
                self.request = chunk.id.removeprefix("cmpl-")
                for choice in chunk.choices:
                    self.tokens += getattr(choice, "token_ids", None) or []
                    self.finish = choice.finish_reason or self.finish


def undisturbed() -> list[int]:
    """The tokens of the same request when nothing happens to it."""
    sampling = Sampling(max_tokens=TOKENS, temperature=1.0, seed=SEED, ignore_eos=True)
    spec = RequestSpec(request="r", prompt=PROMPT, sampling=sampling, priority=0, arrival_ms=0)
    return list(reference_output(spec, SimConfig(model="sim"))[0])


def test_it_comes_up_in_any_order_without_a_crash(stack: Stack) -> None:
    """Whoever waits says so once per reason, and nobody ends but the one-shot."""
    for name in OURS:
        said = stack.said(name)
        assert "Traceback" not in said
        assert "task failed" not in said
        waits = [line for line in said.splitlines() if "wait" in line]
        assert len(waits) == len(set(waits)) <= 5, waits
        assert stack.exit_code(name) == (0 if name == ONE_SHOT else None)


def test_it_serves_and_moves_a_running_request_by_the_admin_api(stack: Stack, admin: Admin) -> None:
    wait(lambda: [item["health"] for item in admin.get("/instances")["items"]] == ["up", "up"])
    client = Streaming(stack)
    wait(lambda: len(client.tokens) > 5)
    source = wait(lambda: owner_of(admin, client.request))
    target = {"i1": "i2", "i2": "i1"}[source]
    done = admin.order("/migrations", {"request": client.request, "target": target}, f"move-{target}")
    assert done["status"] == "succeeded", done
    assert owner_of(admin, client.request) == target, "the move came too late to say anything"
    client.join(DEADLINE_S)
    assert client.finish == "length"
    assert client.tokens == undisturbed()


def owner_of(admin: Admin, request: str | None) -> str | None:
    found = [item for item in admin.get("/requests")["items"] if item["request"] == request]
    return found[0]["owner"]["instance"] if found and found[0]["owner"] else None


def test_a_replay_by_the_worker_finds_every_decision_equal(admin: Admin) -> None:
    done = admin.order("/replays", {}, "replay")
    assert done["status"] == "succeeded", done
    assert done["result"]["is_equal"] is True
    assert done["result"]["equal"] == done["result"]["decisions"] > 0


def test_the_archive_in_postgresql_is_whole_and_replays_equal(stack: Stack) -> None:
    store = ArchiveStore(stack.runnable("archiver").environment["MIDSTREAM_DATABASE_URL"])
    try:
        wait(lambda: store.counts().get("RequestFinished"))
        entries = list(store.iterate())
        report = verify(entries)
        assert report.is_equal and report.decisions > 0
        assert report.ticks_skipped == 0
        assert sum(isinstance(entry.fact.event, MigrationCommitted) for entry in entries) == 1
        assert store.holes() == []
    finally:
        store.close()


def test_no_secret_is_logged(stack: Stack) -> None:
    for name in EVERY:
        for variable, value in SECRETS.items():
            assert value not in stack.said(name), f"{name} logs {variable}"


def test_it_stops_in_time_and_leaves_nothing(stack: Stack) -> None:
    """The last one of each order."""
    took = stack.stop()
    assert took.keys() == set(EVERY)
    failed = [f"{name}: {stack.said(name)[-SAID_CHARS:]}" for name in EVERY if stack.exit_code(name) != 0]
    assert not failed, "\n".join(failed)
    assert stack.leftover() == []
    for name in OURS:
        assert "did not stop in time" not in stack.said(name)
    assert not [name for name in WATCHED if stack.is_healthy(name)]
