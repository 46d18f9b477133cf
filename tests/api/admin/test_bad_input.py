"""Bad input: always a problem document with the right code, never anything half done."""

from __future__ import annotations

import base64

import pytest

from midstream.control.errors import ArchiveUnavailable
from midstream.control.events import Entry
from midstream.control.ids import Position
from midstream.control.state import State
from tests.api.admin.cluster import client_of, code_of, small_cluster

CURSOR = "/instances?cursor="
JSON = {"content-type": "application/json", "Idempotency-Key": "k"}


def cursor(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    ("method", "path", "content", "expected"),
    [
        ("GET", "/nothing", None, (404, "not_found")),
        ("DELETE", "/instances", None, (405, "method_not_allowed")),
        ("POST", "/migrations", b"{", (400, "malformed_json")),
        ("POST", "/migrations", b"[1]", (422, "invalid_input")),
        ("POST", "/migrations", b'"' + b"x" * 70_000 + b'"', (413, "body_too_large")),
        ("GET", "/instances?limit=0", None, (422, "invalid_input")),
        ("GET", "/instances?limit=1001", None, (422, "invalid_input")),
        ("GET", "/instances?limit=x", None, (422, "invalid_input")),
        ("GET", "/instances?cursor=%20", None, (400, "bad_cursor")),
        ("GET", CURSOR + cursor("{}"), None, (400, "bad_cursor")),
        ("GET", CURSOR + cursor('["requests","r"]'), None, (400, "bad_cursor")),
        ("GET", CURSOR + cursor('["instances",5]'), None, (400, "bad_cursor")),
        ("GET", CURSOR + cursor('["instances",null]'), None, (400, "bad_cursor")),
        ("GET", "/events?after=x", None, (400, "bad_position")),
        ("GET", "/events?cursor=5", None, (400, "bad_position")),
        ("GET", "/events?kind=Nonsense", None, (400, "unknown_kind")),
        ("GET", "/events/stream?after=1-", None, (400, "bad_position")),
        ("GET", "/events/stream?kind=Nonsense", None, (400, "unknown_kind")),
        ("GET", "/migrations?open=maybe", None, (422, "invalid_input")),
        ("GET", "/requests/" + "r" * 300, None, (404, "unknown_request")),
        ("PUT", "/policies", b"{}", (422, "invalid_input")),
    ],
)
async def test_P28_bad_input_is_a_problem(
    method: str, path: str, content: bytes | None, expected: tuple[int, str]
) -> None:
    log = small_cluster()
    async with client_of(log) as client:
        assert code_of(await client.request(method, path, content=content, headers=JSON)) == expected
    assert log.recorded == []


@pytest.mark.parametrize("value", ["1e999", "NaN", '"\\ud800"'])
async def test_P17_what_the_log_cannot_carry_exactly_is_refused(value: str) -> None:
    log = small_cluster()
    async with client_of(log) as client:
        policies = (await client.get("/policies")).text
        assert '"moves":[' in policies
        moves = f'"moves":[{{"name":"balance","params":{{"low":{value}}}}},'
        put = await client.put("/policies", content=policies.replace('"moves":[', moves), headers=JSON)
        replay = await client.post("/replays", content=f'{{"overrides":{{"balance.low":{value}}}}}', headers=JSON)
    assert code_of(put) == code_of(replay) == (422, "invalid_input")
    assert log.recorded == []


async def test_input_is_not_echoed_into_problems() -> None:
    log = small_cluster()
    async with client_of(log) as client:
        response = await client.post("/migrations", content=b'{"request": {"canary": 1}}', headers=JSON)
    assert code_of(response)[0] == 422 and "canary" not in response.text


class GoneArchive:
    """An archive whose database is away."""

    async def read(self, after: Position, count: int = 500, **_: object) -> list[Entry]:
        raise ArchiveUnavailable("the database is away")

    async def position(self) -> Position:
        raise ArchiveUnavailable("the database is away")

    async def state_at(self, position: Position) -> State:
        raise ArchiveUnavailable("the database is away")

    async def story(self, request: str) -> list[Entry]:
        raise ArchiveUnavailable("the database is away")


async def test_P20_without_the_archive_the_live_state_is_served_and_the_rest_is_503() -> None:
    log = small_cluster()
    async with client_of(log, archive=GoneArchive()) as client:
        for path in ("/events", "/state?at=1-1", "/requests/r1?story=true", "/migrations/m-9-9-0"):
            response = await client.get(path)
            assert code_of(response) == (503, "archive_unavailable") and response.headers["retry-after"] == "1"
        for path in ("/instances", "/requests/r1", "/state", "/migrations", "/policies", "/health", "/metrics"):
            assert (await client.get(path)).status_code == 200
        order = await client.post("/instances/i1/drain", headers={"Idempotency-Key": "k"})
    assert order.status_code == 202 and len(log.recorded) == 1
