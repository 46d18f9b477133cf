"""The command line: quick help, one clear line for every error, the right exit code, every form of output."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from midstream.api.cli.checks import finite, quoted
from midstream.api.cli.main import app, run
from midstream.api.cli.output import Output, column, show_item, show_items
from midstream.api.cli.overrides import apply_overrides, parse_overrides
from midstream.api.cli.up.command import parse_sizes
from midstream.api.http_server import serve
from midstream.api.keys import hash_key
from midstream.control.errors import BadInput

HEAVY = ("fastapi", "sqlalchemy", "redis", "pydantic", "httpx", "zmq", "numpy", "rq", "uvicorn", "structlog", "asyncio")
COMMANDS = (
    *("up", "demo", "bench", "trace", "replay", "settings", "doctor", "db", "keys"),
    *("instances", "requests", "migrations", "scalings", "events", "state", "policies"),
    *("controller", "archiver", "worker", "llumlet", "gateway", "admin"),
)


@pytest.fixture(autouse=True)
def clean_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("MIDSTREAM_")]:  # noqa: TID251
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_help_imports_nothing_heavy() -> None:
    """What makes `midstream --help` quick, without a stopwatch."""
    code = (
        "import sys\nfrom midstream.api.cli.main import run\nrun(['--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    top = capsys.readouterr().out
    for command in COMMANDS:
        assert command in top
        assert run([command, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("bogus", 2, "No such command"),
        ("instances", 2, "Missing command"),
        ("up --sizes 4,x", 2, "sizes are numbers of blocks"),
        ("up --sizes 0", 2, "sizes are numbers of blocks"),
        ("up --instances 0", 2, "1 to 64 instances"),
        ("up --instances 65", 2, "1 to 64 instances"),
        ("up --gateway-port 99999", 2, "MIDSTREAM_GATEWAY_PORT"),
        ("up --nonsense", 2, "--nonsense"),
        ("instances list -o yaml", 2, "yaml"),
        ("instances list", 2, "no cluster"),
        ("--url ftp://x instances list", 2, "MIDSTREAM_ADMIN_URL"),
        ("--url http://127.0.0.1:9 instances list", 1, "does not answer"),
        ("controller", 2, "MIDSTREAM_REDIS_URL"),
        ("worker", 2, "MIDSTREAM_REDIS_URL"),
        ("llumlet --name a/b", 2, "MIDSTREAM_NAME"),
        ("trace send nothing --to http://127.0.0.1:9", 2, "no trace nothing"),
        ("trace send azure_conv_2023", 2, "--to"),
        ("trace send azure_conv_2023 --to http://127.0.0.1:9 --speed 0", 2, "speed"),
        ("trace send azure_conv_2023 --to http://127.0.0.1:9 --start 1e6", 2, "no requests"),
        ("replay verify", 2, "no archive"),
        ("replay verify --set low", 2, "balance.low=20"),
        ("trace send azure_conv_2023 --to http://127.0.0.1:9 --speed nan", 2, "must be a finite number"),
        ("bench schedule --rate-scale nan", 2, "must be a finite number"),
        ("bench schedule --plot /proc/x", 2, "/proc/x cannot be written"),
        ("bench schedule --kept /proc/x/y", 2, "/proc/x/y cannot be written"),
        ("bench profile http://127.0.0.1:9 --constants .", 2, ". cannot be written"),
        ("keys create bob --scope fly", 2, "unknown scope 'fly'"),
        ("keys create a/b", 2, "bad API key name"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], line: str, code: int, told: str) -> None:
    assert run(line.split()) == code
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.startswith("midstream: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("command", ["settings", "doctor", "up", "controller", "instances list", "db status"])
def test_P29_an_unknown_setting_stops_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("MIDSTREAM_GATWAY_PORT", "1")
    assert run(command.split()) == 2
    assert "did you mean MIDSTREAM_GATEWAY_PORT" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "controller"])
@pytest.mark.parametrize(
    ("params", "told"),
    [
        ('{"slo": {"ttft_ms": 0}}', "policy slo: Expected `float` >= 0.1 - at `$.ttft_ms`"),
        ('{"balance": {"low": 50, "high": 5}}', "policy balance: must hold: low <= high"),
        ('{"magic": {}}', "'magic'; known: "),
    ],
)
def test_P29_nothing_starts_with_parameters_out_of_range(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, params: str, told: str
) -> None:
    monkeypatch.setenv("MIDSTREAM_POLICY_PARAMS", params)
    monkeypatch.setenv("MIDSTREAM_REDIS_URL", "redis://127.0.0.1:9")
    assert run(["--data-dir", "nowhere", command]) == 2
    assert told in capsys.readouterr().err
    assert not Path("nowhere").exists()


def options_of(command: Any) -> Iterator[tuple[str, Any]]:
    for child in getattr(command, "commands", {}).values():
        yield from options_of(child)
    yield from ((f"{command.name} {option.name}", option) for option in command.params)


FLOATS = [pair for pair in options_of(typer.main.get_command(app)) if pair[1].type_descriptor.annotation is float]


@pytest.mark.parametrize("option", [option for _, option in FLOATS], ids=[name for name, _ in FLOATS])
def test_P29_a_number_on_the_command_line_is_finite(option: Any) -> None:
    assert option.callback.__wrapped__ is finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    assert finite(1.5) == 1.5 and finite(None) is None
    with pytest.raises(typer.BadParameter, match="finite number"):
        finite(value)


@pytest.mark.parametrize(("name", "path"), [
    ("r-1", "r-1"), ("x/../y", "x%2F..%2Fy"), ("..", "%2E%2E"), ("a?b#c", "a%3Fb%23c"), ("a.b", "a.b"),
])  # fmt: skip
def test_an_id_is_one_part_of_a_path(name: str, path: str) -> None:
    assert quoted(name) == path
    assert httpx.Client(base_url="http://h").build_request("GET", f"/v1/{quoted(name)}/explain").url.raw_path == (
        f"/v1/{path}/explain".encode()
    )


def test_settings_page_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["settings", "--markdown"]) == 0
    assert "| `MIDSTREAM_TICK_MS` | int | 250 |" in capsys.readouterr().out


def test_created_keys_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "create", "bob", "--scope", "read", "--scope", "migrate", "-o", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["MIDSTREAM_API_KEYS"] == f"bob:read+migrate:{hash_key(made['key'])}"


def test_database_comes_up_and_doctor_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--data-dir", "here", "db", "upgrade"]) == 0
    assert run(["--data-dir", "here", "db", "status", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["revision"] == found["newest"]
    (Path("here") / "secret").write_text("s" * 32)
    assert run(["--data-dir", "here", "doctor", "-o", "jsonl"]) == 0
    checks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {check["check"] for check in checks} >= {"redis", "archive", "secret", "policies"}
    assert all(check["ok"] for check in checks)


def test_doctor_finds_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_REDIS_URL", "redis://127.0.0.1:9")
    monkeypatch.setenv("MIDSTREAM_DISPATCH_POLICY", "coin_flip")
    Path(".midstream").mkdir()
    assert run(["doctor", "-o", "jsonl"]) == 1
    said = capsys.readouterr()
    bad = {check["check"] for check in map(json.loads, said.out.splitlines()) if not check["ok"]}
    assert bad == {"redis", "archive", "secret", "policies"}
    assert "not in order" in said.err


def test_doctor_shows_what_is_set_and_masks_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_SECRET", "a-secret-that-nobody-may-see")
    monkeypatch.setenv("MIDSTREAM_TICK_MS", "99")
    assert run(["doctor", "-o", "json"]) == 0
    said = capsys.readouterr().out
    shown = json.loads(said)["settings"]
    assert shown["MIDSTREAM_TICK_MS"] == "99"
    assert shown["MIDSTREAM_SECRET"] == "********"
    assert "nobody-may-see" not in said
    assert run(["doctor"]) == 0
    assert "MIDSTREAM_TICK_MS" in capsys.readouterr().out


def test_forms_of_output(capsys: pytest.CaptureFixture[str]) -> None:
    items = [{"a": {"b": 1.5}, "c": True}, {"a": {"b": None}, "c": "x" * 100}]
    columns = [column("head", "a.b"), column("c")]
    show_items(items, columns, Output.jsonl)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == items
    show_items(items, columns, Output.json)
    assert json.loads(capsys.readouterr().out) == items
    show_items(items, columns, Output.table)
    table = capsys.readouterr().out
    assert "head" in table and "1.5" in table and "yes" in table and "x" * 100 not in table
    show_item({"a": {"b": 2}, "long": "y" * 100}, Output.table)
    shown = capsys.readouterr().out
    assert "a.b" in shown and "y" * 100 in shown


def test_overrides_are_json_or_text() -> None:
    assert parse_overrides(["balance.low=20", "x=up", "y=a=b"]) == {"balance.low": 20, "x": "up", "y": "a=b"}
    document = {"cooldown_ms": 1, "dispatch": {"name": "freeness", "params": {}}}
    changed = apply_overrides(document, ["cooldown_ms=5", "dispatch.params.low=2"])
    assert changed == {"cooldown_ms": 5, "dispatch": {"name": "freeness", "params": {"low": 2}}}
    assert document["cooldown_ms"] == 1
    for bad in ("nothing=1", "cooldown_ms.x=1", "a.b=1"):
        with pytest.raises(BadInput, match="there is no"):
            apply_overrides(document, [bad])
    for bad in ("x", "=1", "a..b=1"):
        with pytest.raises(BadInput, match="override"):
            parse_overrides([bad])


def test_sizes_are_read() -> None:
    assert parse_sizes("400, 200,100") == (400, 200, 100)
    assert parse_sizes(None) == ()


class ScriptedAdmin:
    """Answers as the admin API does, from a script; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.statuses = ["accepted", "running", "succeeded"]
        self.items = [{"instance": f"i{index}", "load": {"running": index}} for index in range(450)]
        self.app = Starlette(
            routes=[Route("/api/v1/{path:path}", self.answer, methods=["GET", "POST", "PUT"])],
        )

    async def answer(self, request: Request) -> Response:
        path = request.path_params["path"]
        body = await request.body()
        given = json.loads(body) if body else None
        self.asked.append((request.method, path, dict(request.headers), given))
        if path == "instances":
            return self._page(request)
        if path == "events/stream":
            return StreamingResponse(self._events(), media_type="text/event-stream")
        if path.startswith("operations/"):
            status = self.statuses.pop(0)
            return JSONResponse({"operation": "o-1", "status": status, "code": "no_blocks", "detail": "it is full"})
        if request.method == "POST":
            return JSONResponse({"operation": "o-1", "href": "/api/v1/operations/o-1"}, status_code=202)
        if path == "policies":
            return JSONResponse(given or {"cooldown_ms": 2000})
        problem = {"type": "x", "title": "Not Found", "status": 404, "detail": "there is no such thing", "code": "gone"}
        return JSONResponse(problem, status_code=404, media_type="application/problem+json")

    def _page(self, request: Request) -> Response:
        start = int(request.query_params.get("cursor", 0))
        end = start + int(request.query_params["limit"])
        following = str(end) if end < len(self.items) else None
        return JSONResponse({"items": self.items[start:end], "next": following})

    async def _events(self) -> AsyncIterator[str]:
        for seq in range(3):
            yield f'id: 1-{seq}\nevent: RoundCopied\ndata: {{"kind": "RoundCopied", "event": {{"migration": "m"}}}}\n\n'
        yield ": silence\n\n"
        yield 'event: error\ndata: {"code": "server_closing", "detail": "the server is shutting down"}\n\n'


@pytest.fixture
async def admin() -> AsyncIterator[tuple[ScriptedAdmin, list[str]]]:
    scripted = ScriptedAdmin()
    served = await serve(scripted.app, "127.0.0.1", 0)
    yield scripted, ["--url", served.url, "--key", "ms-key"]
    await served.stop()


Admin = tuple[ScriptedAdmin, list[str]]


async def test_P29_lists_page_to_the_end(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    scripted, where = admin
    assert await asyncio.to_thread(run, [*where, "instances", "list", "-o", "jsonl"]) == 0
    assert [json.loads(line)["instance"] for line in capsys.readouterr().out.splitlines()] == [
        f"i{index}" for index in range(450)
    ]
    assert scripted.asked[0][2]["authorization"] == "Bearer ms-key"


async def test_an_order_is_waited_for(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    scripted, where = admin
    order = ["migrations", "start", "r-1", "--to", "i2", "--mode", "blocking", "-o", "json"]
    assert await asyncio.to_thread(run, [*where, *order]) == 0
    method, path, headers, body = scripted.asked[0]
    assert (method, path, body) == ("POST", "migrations", {"request": "r-1", "target": "i2", "mode": "blocking"})
    assert headers["idempotency-key"]
    assert json.loads(capsys.readouterr().out)["status"] == "succeeded"


async def test_a_failed_order_fails_the_command(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    scripted, where = admin
    scripted.statuses = ["failed"]
    assert await asyncio.to_thread(run, [*where, "instances", "drain", "i1", "--wait"]) == 1
    assert "midstream: it is full (no_blocks)\n" in capsys.readouterr().err


async def test_an_order_that_takes_too_long_fails(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    scripted, where = admin
    scripted.statuses = ["running"] * 50
    assert await asyncio.to_thread(run, [*where, "migrations", "start", "r-1", "--timeout", "0.3"]) == 1
    assert "still running" in capsys.readouterr().err


async def test_a_problem_becomes_one_line(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    _, where = admin
    assert await asyncio.to_thread(run, [*where, "requests", "get", "r-9"]) == 2
    assert capsys.readouterr().err == "midstream: there is no such thing (gone)\n"


async def test_events_follow_until_the_server_ends(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    _, where = admin
    assert await asyncio.to_thread(run, [*where, "events", "tail", "--follow"]) == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert "server_closing" in said.err


async def test_policies_are_changed_by_name(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    scripted, where = admin
    assert await asyncio.to_thread(run, [*where, "policies", "set", "cooldown_ms=500", "-o", "json"]) == 0
    assert scripted.asked[-1][3] == {"cooldown_ms": 500}
    assert json.loads(capsys.readouterr().out) == {"cooldown_ms": 500}
    assert await asyncio.to_thread(run, [*where, "policies", "set", "nothing=1"]) == 2
