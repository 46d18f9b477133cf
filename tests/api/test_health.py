"""Processes that wait for what they need, and say whether they are well: what containers rely on."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream.api.cli.main import run
from midstream.api.health import HEALTH_PATHS, beat, check, end
from midstream.api.heartbeat import BEAT_S, beating
from midstream.api.http_server import serve
from midstream.api.waiting import until_there
from midstream.control.errors import ArchiveUnavailable, BadInput, LogUnavailable, MidstreamError

DEADLINE_S = 30.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "health"


@pytest.fixture(autouse=True)
def clean_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("MIDSTREAM_")]:  # noqa: TID251
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def ended_process() -> int:
    """The id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_P14_a_process_is_well_as_long_as_its_loop_turns(file: Path) -> None:
    async with beating(file, "controller", "c1", None):
        first = await asyncio.to_thread(check, file)
        await asyncio.sleep(2 * BEAT_S)
        second = await asyncio.to_thread(check, file)
    assert (first.service, first.name, first.pid) == ("controller", "c1", os.getpid())
    assert second.good_until_s > first.good_until_s
    with pytest.raises(MidstreamError, match="nothing serves here"):
        check(file)


def test_P14_a_loop_that_hangs_is_not_well(file: Path) -> None:
    beat(file, "controller", "c1", good_s=-2.0)
    with pytest.raises(MidstreamError, match="controller c1 should have been heard 2 s ago"):
        check(file)


def test_a_killed_process_is_not_well(file: Path) -> None:
    beat(file, "worker", "w", good_s=DEADLINE_S)
    pid = ended_process()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": pid}))
    with pytest.raises(MidstreamError, match=f"worker w is gone: there is no process {pid}"):
        check(file)


@pytest.mark.parametrize("service", HEALTH_PATHS)
async def test_a_face_is_asked_itself(file: Path, service: str) -> None:
    status = 200

    async def health(_: Request) -> Response:
        return JSONResponse({}, status_code=status)

    served = await serve(Starlette(routes=[Route(HEALTH_PATHS[service], health)]), "127.0.0.1", 0)
    beat(file, service, "face", served.url, good_s=DEADLINE_S)
    try:
        assert (await asyncio.to_thread(check, file)).address == served.url
        status = 503
        with pytest.raises(MidstreamError, match="answers 503"):
            await asyncio.to_thread(check, file)
    finally:
        await served.stop()
    with pytest.raises(MidstreamError, match="does not answer"):
        await asyncio.to_thread(check, file)


async def test_a_place_that_cannot_be_written_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot write health_file"):
        async with beating(tmp_path / "nowhere" / "health", "controller", "c1", None):
            pytest.fail("it started")


def test_the_command_says_it_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(file, "archiver", "a")
    assert run(["health", "--file", str(file)]) == 0
    monkeypatch.setenv("MIDSTREAM_HEALTH_FILE", str(file))
    assert run(["health"]) == 0
    assert capsys.readouterr().out.count("archiver a is well") == 2
    end(file)
    assert run(["health"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.delenv("MIDSTREAM_HEALTH_FILE")
    assert run(["health"]) == 2


async def test_waiting_says_each_reason_once_and_ends_with_the_answer() -> None:
    refusals = iter([LogUnavailable("away")] * 3 + [ArchiveUnavailable("no tables")] * 2)
    told: list[str] = []

    async def ask() -> str:
        for error in refusals:
            raise error
        return "there"

    assert await until_there(ask, 0.0, told.append) == "there"
    assert told == ["away", "no tables"]


async def test_P13_waiting_has_an_end() -> None:
    async def ask() -> None:
        raise LogUnavailable("away")

    with pytest.raises(LogUnavailable, match="away"):
        await until_there(ask, 0.3, lambda _: None)


async def test_waiting_does_not_hide_bad_input() -> None:
    async def ask() -> None:
        raise BadInput("too old")

    with pytest.raises(BadInput):
        await until_there(ask, 0.0, lambda _: None)


def test_a_schema_upgrade_waits_for_the_database(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_DATABASE_URL", "postgresql://nobody:pass@127.0.0.1:9/none")
    monkeypatch.setenv("MIDSTREAM_START_WAIT_MS", "500")
    assert run(["db", "upgrade", "--wait"]) == 1
    waited = capsys.readouterr().err
    assert waited.count("waiting: ") == 1 and waited.count("\n") == 2
    assert run(["db", "upgrade"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_database_status_is_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    Path(".midstream").mkdir()
    assert run(["db", "status", "--check"]) == 1
    assert "run `midstream db upgrade`" in capsys.readouterr().err
    assert run(["db", "upgrade"]) == 0
    assert run(["db", "status", "--check"]) == 0
