"""The scaler: does what is decided, once each, tries again, gives up with a fact; and the two that call others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from midstream.api.bootstrap import make_scaler
from midstream.api.http_server import serve
from midstream.api.settings import load_settings
from midstream.control import scaler
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.adapters.scaler_calls import CommandScaler, WebhookScaler
from midstream.control.errors import BadInput, ScalerFailed
from midstream.control.events import DrainCancelled, InstanceDrained, InstanceRegistered, ScaleDecided, ScaleFailed
from midstream.control.follower import Follower
from midstream.control.ids import Position
from midstream.control.scaler import Act, ScalerService, wanted
from tests.control.fixtures import Story, owner


def decided(scaling: str, action: str, instance: str) -> ScaleDecided:
    return ScaleDecided(
        scaling=scaling, action=action, instance=instance, policy="scale_freeness", policy_version=1, params={},
        freeness=1.0, reason="test", decided_at=Position(1, 1),
    )  # fmt: skip


class Orchestrator:
    """A scaler that remembers its calls, and fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.calls: list[tuple[str, str]] = []
        self._failures = failures

    async def add(self, instance: str, scaling: str) -> None:
        self._call("add", instance)

    async def remove(self, instance: str, scaling: str) -> None:
        self._call("remove", instance)

    def _call(self, action: str, instance: str) -> None:
        self.calls.append((action, instance))
        if self._failures:
            self._failures -= 1
            raise ScalerFailed("no quota")


class Said(list[Any]):
    def record(self, event: object) -> None:
        self.append(event)


@contextlib.asynccontextmanager
async def service(story: Story, orchestrator: Orchestrator) -> AsyncIterator[Said]:
    follower = Follower(MemoryLog(MemoryLogStore(), opened_by="test"))
    follower.state = story.state
    said = Said()
    running = asyncio.create_task(ScalerService(follower=follower, scaler=orchestrator, recorder=said).run())
    try:
        yield said
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(test: Any) -> None:
    async with asyncio.timeout(10):
        while not test():
            await asyncio.sleep(0.01)


def test_what_is_decided_is_wanted_until_it_is_so_and_nobody_goes_before_it_is_drained() -> None:
    story = Story()
    me = story.instance("old")
    story.control(decided("s1", "add", "new"), decided("s2", "remove", "old"))
    assert list(wanted(story.state)) == [Act("s1", "add", "new")]
    story.control(InstanceDrained(owner=me))
    assert list(wanted(story.state)) == [Act("s1", "add", "new"), Act("s2", "remove", "old")]
    story.dispatch("late", me)
    assert list(wanted(story.state)) == [Act("s1", "add", "new")], "a request that came meanwhile must leave first"
    story.instance("new")
    assert list(wanted(story.state)) == []


async def test_P18_each_act_is_begun_once_by_one_scaler() -> None:
    story, orchestrator = Story(), Orchestrator()
    story.control(decided("s1", "add", "new"))
    async with service(story, orchestrator):
        await until(lambda: orchestrator.calls)
        story.control(decided("s2", "add", "newer"))
        await until(lambda: len(orchestrator.calls) == 2)
        await asyncio.sleep(2.5 * scaler.LOOK_S)
    assert orchestrator.calls == [("add", "new"), ("add", "newer")]


async def test_a_scaler_that_starts_again_does_it_again() -> None:
    story, orchestrator = Story(), Orchestrator()
    story.control(decided("s1", "add", "new"))
    for _ in range(2):
        async with service(story, orchestrator):
            await asyncio.sleep(0.05)
    assert orchestrator.calls == [("add", "new")] * 2


async def test_a_failure_is_tried_again_and_in_the_end_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "BACKOFF_FIRST_S", 0.01)
    story, orchestrator = Story(), Orchestrator(failures=2)
    story.control(decided("s1", "add", "new"))
    async with service(story, orchestrator) as said:
        await until(lambda: len(orchestrator.calls) == 3)
        await asyncio.sleep(0.1)
    assert (len(orchestrator.calls), list(said)) == (3, [])
    never = Orchestrator(failures=100)
    async with service(story, never) as said:
        await until(lambda: said)
    assert (len(never.calls), said[0]) == (5, ScaleFailed(scaling="s1", code="scaler_failed", reason="no quota"))


async def test_P12_before_it_tries_again_it_looks_whether_that_is_still_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "BACKOFF_FIRST_S", 0.1)
    story, orchestrator = Story(), Orchestrator(failures=100)
    me = story.instance("old")
    story.control(decided("s1", "remove", "old"), InstanceDrained(owner=me))
    async with service(story, orchestrator) as said:
        await until(lambda: orchestrator.calls)
        story.say("admin", DrainCancelled(operation="o", instance="old", actor="ann"))
        await asyncio.sleep(1.0)
        assert (orchestrator.calls, list(said)) == ([("remove", "old")], []), "it serves again"
        story.control(decided("s2", "remove", "old"), InstanceDrained(owner=me))
        await until(lambda: len(orchestrator.calls) == 2)


async def test_what_a_failed_start_may_have_left_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "BACKOFF_FIRST_S", 0.01)
    story, orchestrator = Story(), Orchestrator(failures=5)
    story.control(decided("s1", "add", "new"))
    async with service(story, orchestrator) as said:
        await until(lambda: said)
        story.control(said[0])
        await until(lambda: len(orchestrator.calls) == 6)
        await asyncio.sleep(1.5 * scaler.LOOK_S)
    assert orchestrator.calls == [("add", "new")] * 5 + [("remove", "new")]
    story.control(decided("s2", "add", "late"), ScaleFailed(scaling="s2", code="scaler_failed", reason="no quota"))
    assert Act("s2", "remove", "late") in wanted(story.state)
    story.instance("late")
    assert list(wanted(story.state)) == [Act("s1", "remove", "new")], "it has come all the same, and serves"
    story.tick(scaler.CLEAN_UP_MS)
    assert list(wanted(story.state)) == []


async def test_P14_a_scaler_that_breaks_is_a_failure_and_stops_nobody_else() -> None:
    class Broken(Orchestrator):
        async def add(self, instance: str, scaling: str) -> None:
            if instance == "new":
                raise RuntimeError("broken")
            await super().add(instance, scaling)

    story, orchestrator = Story(), Broken()
    story.control(decided("s1", "add", "new"), decided("s2", "add", "newer"))
    async with service(story, orchestrator) as said:
        await until(lambda: said and orchestrator.calls)
    assert said == [ScaleFailed(scaling="s1", code="scaler_failed", reason="RuntimeError: broken")]
    assert orchestrator.calls == [("add", "newer")]


def test_an_instance_that_was_to_go_and_restarted_serves() -> None:
    story = Story()
    story.instance("old")
    story.control(decided("s1", "remove", "old"))
    first = story.state.instances["old"]
    event = InstanceRegistered(
        owner=owner("old", 2), address="x", fingerprint=first.fingerprint, blocks_total=10, slots_max=1
    )
    story.say("llumlet/old", event, 2)
    assert not story.state.instances["old"].is_draining
    assert story.state.scalings["s1"].code == "restarted"


def command_scaler(script: Path, *environment: tuple[str, str]) -> CommandScaler:
    own = dict(os.environ) | dict(environment)  # noqa: TID251 - a child's
    return CommandScaler([sys.executable, str(script)], own, named_in="MIDSTREAM_NAME")


async def test_a_command_is_told_what_to_do_and_its_failure_is_told(tmp_path: Path) -> None:
    script = tmp_path / "scale.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "words = [*sys.argv[1:], os.environ['MIDSTREAM_NAME']]\n"
        f"pathlib.Path({str(tmp_path / 'said')!r}).write_text(' '.join(words))\n"
        "sys.exit('no quota' if sys.argv[1] == 'remove' else 0)\n"
    )
    command = command_scaler(script, ("MIDSTREAM_NAME", "the-scaler"))
    await command.add("i7", "s-1-2-0")
    assert (tmp_path / "said").read_text() == "add i7 s-1-2-0 i7", "who is started takes the instance's name"
    with pytest.raises(ScalerFailed, match="exit code 1: no quota"):
        await command.remove("i7", "s-1-2-0")
    with pytest.raises(ScalerFailed, match="No such file"):
        await CommandScaler(["/nowhere/at-all"], {}, named_in="MIDSTREAM_NAME").add("i7", "s")


async def test_a_command_gets_the_settings_without_what_is_the_scalers_own(tmp_path: Path) -> None:
    script = tmp_path / "scale.sh"
    script.write_text(f"#!/bin/sh\nenv | grep MIDSTREAM_ | sort > {tmp_path / 'said'}\n")
    script.chmod(0o755)
    settings = load_settings(
        name="the-scaler", scale_command=str(script), scale_token="t", health_file=tmp_path / "health", cluster="c7",
    )  # fmt: skip
    await make_scaler(settings).add("i7", "s")
    assert (tmp_path / "said").read_text().splitlines() == ["MIDSTREAM_CLUSTER=c7", "MIDSTREAM_NAME=i7"]


async def test_what_a_command_leaves_running_keeps_nobody_waiting_and_may_write_on(tmp_path: Path) -> None:
    script = tmp_path / "scale.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "if sys.argv[1] == 'child':\n"
        f"    while not pathlib.Path({str(tmp_path / 'end')!r}).exists(): time.sleep(0.01)\n"
        "    print('still there', flush=True)\n"
        f"    pathlib.Path({str(tmp_path / 'wrote')!r}).touch()\n"
        "else:\n"
        "    subprocess.Popen([sys.executable, __file__, 'child'])\n"
    )
    try:
        async with asyncio.timeout(30):
            await command_scaler(script).add("i7", "s")
    finally:
        (tmp_path / "end").touch()
    await until((tmp_path / "wrote").exists)


async def test_P13_a_command_that_is_given_up_ends_with_all_it_started(tmp_path: Path) -> None:
    script = tmp_path / "scale.py"
    script.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.replace({str(tmp_path / 'new')!r}, {str(tmp_path / 'pids')!r})\n"
        "time.sleep(600)\n"
    )
    running = asyncio.create_task(command_scaler(script).add("i7", "s"))
    await until((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_webhook_is_told_with_an_idempotency_key() -> None:
    app, seen = FastAPI(), list[Any]()

    @app.post("/scale")
    async def take(request: Request) -> Response:
        body = await request.json()
        seen.append((body, request.headers["idempotency-key"], request.headers.get("authorization")))
        return Response(status_code=202 if body["action"] == "add" else 507)

    served = await serve(app, "127.0.0.1", 0)
    try:
        hook = WebhookScaler(f"{served.url}/scale", "secret")
        await hook.add("i7", "s1")
        with pytest.raises(ScalerFailed, match="answered 507"):
            await hook.remove("i7", "s2")
    finally:
        await served.stop()
    assert seen[0] == ({"action": "add", "instance": "i7", "scaling": "s1"}, "s1", "Bearer secret")
    with pytest.raises(ScalerFailed, match="ConnectError"):
        await hook.add("i7", "s1")


@pytest.mark.parametrize("url", ["http://[::1", "ftp://x/", "not a url", "http://", "http://127.0.0.1:99999/"])
def test_P29_a_url_that_nobody_can_be_called_at_is_refused_at_once(url: str) -> None:
    with pytest.raises(BadInput, match="no webhook can be called at"):
        WebhookScaler(url)
