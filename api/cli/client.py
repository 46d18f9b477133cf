"""A small client of the admin REST API, for the operator commands."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from midstream.api.cli.checks import quoted
from midstream.api.cli.up.state import read_state
from midstream.api.settings import Settings
from midstream.control.errors import BadInput, MidstreamError, UnknownThing

TIMEOUT_S = 30.0
POLL_S = 0.2
PAGE_ITEMS = 200
API = "/api/v1"
_BAD_INPUT = frozenset({400, 404, 413, 415, 422})


class AdminProblem(MidstreamError):
    """The admin API said no; `code` is machine-readable."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{detail} ({code})")
        self.status = status
        self.code = code


class AdminBadInput(AdminProblem, BadInput):
    """The admin API said that the caller said something wrong."""


class AdminClient:
    """Calls that answer decoded JSON. Raises `AdminProblem`, or `MidstreamError` when nobody answers."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        """Give up connections."""
        self._http.close()

    def get(self, path: str, **params: object) -> dict[str, Any]:
        """GET one thing."""
        return self._call("GET", path, params=_given(params))

    def items(self, path: str, *, limit: int | None = None, **params: object) -> Iterator[dict[str, Any]]:
        """Everything that a list has, page by page, or its first `limit` items (P29)."""
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = PAGE_ITEMS if left is None else min(left, PAGE_ITEMS)
            page = self.get(path, **params, cursor=cursor, limit=size)
            yield from page["items"][:left]
            left = None if left is None else left - len(page["items"])
            cursor = page["next"]
            if cursor is None:
                return

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST, once however often it is repeated below."""
        return self._call("POST", path, json=body, headers={"Idempotency-Key": secrets.token_hex(16)})

    def put(self, path: str, body: Mapping[str, Any], *, etag: str | None = None) -> dict[str, Any]:
        """PUT."""
        return self._call("PUT", path, json=body, headers={"If-Match": etag} if etag else {})

    def finished(self, operation: str, timeout_s: float) -> dict[str, Any]:
        """Wait until an operation has ended. Raises `MidstreamError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.get(f"/operations/{quoted(operation)}")
            if found["status"] in {"succeeded", "failed"}:
                return found
            if time.monotonic() > deadline:
                raise MidstreamError(f"operation {operation} is still {found['status']} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def stream(self, path: str, **params: object) -> Iterator[dict[str, Any]]:
        """The data of server-sent events, until the server ends. Raises `MidstreamError` when the connection breaks."""
        try:
            yield from self._stream(path, params)
        except httpx.HTTPError as error:
            raise MidstreamError(f"the stream of {self._url} broke: {error}") from None

    def _stream(self, path: str, params: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        kind = ""
        headers = {"Accept": "text/event-stream"}
        timeout = httpx.Timeout(TIMEOUT_S, read=None)
        with self._http.stream("GET", API + path, params=_given(params), headers=headers, timeout=timeout) as response:
            if response.status_code != 200:
                response.read()
                raise _problem(response)
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    kind = value
                elif field == "data":
                    data: dict[str, Any] = json.loads(value)
                    if kind == "error":
                        raise MidstreamError(f"{data['detail']} ({data['code']})")
                    yield data

    def _call(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, API + path, **kwargs)
        except httpx.HTTPError as error:
            raise MidstreamError(f"the admin API at {self._url} does not answer: {error}") from None
        if response.is_success:
            answer: dict[str, Any] = response.json()
            return answer
        raise _problem(response)


def connect(settings: Settings) -> AdminClient:
    """The client for these settings, else for the `midstream up` of their `data_dir`. Raises `BadInput`."""
    key = settings.admin_key.get_secret_value() if settings.admin_key else None
    if settings.admin_url:
        return AdminClient(settings.admin_url, key)
    state = read_state(settings.data_dir)
    if state is None:
        raise UnknownThing(
            f"no cluster: nothing runs in {settings.data_dir}; start one with `midstream up`, or say where with --url"
        )
    return AdminClient(state.admin, key or state.admin_key)


def _given(params: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in params.items() if value is not None}


def _problem(response: httpx.Response) -> AdminProblem:
    try:
        body = response.json()
        code, detail = str(body["code"]), str(body["detail"])
    except (ValueError, KeyError, TypeError):
        code, detail = "http_error", f"HTTP {response.status_code} from {response.url}"
    kind = AdminBadInput if response.status_code in _BAD_INPUT else AdminProblem
    return kind(response.status_code, code, detail)
