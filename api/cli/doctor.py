"""What `midstream doctor` checks. Each check says what it found; none of them changes anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from midstream.api.cli.up.state import read_state
from midstream.api.http_server import bind
from midstream.api.settings import Settings
from midstream.control.errors import MidstreamError

CHECK_S = 10.0


async def checks(settings: Settings) -> list[dict[str, Any]]:
    """Run all checks, at most `CHECK_S` each."""
    every: list[tuple[str, Callable[[Settings], Awaitable[str]]]] = [
        ("redis", _redis),
        ("archive", _archive),
        ("secret", _secret),
        ("gateway port", _gateway_port),
        ("admin port", _admin_port),
        ("policies", _policies),
    ]
    return [await _run(name, check, settings) for name, check in every]


async def _run(name: str, check: Callable[[Settings], Awaitable[str]], settings: Settings) -> dict[str, Any]:
    try:
        async with asyncio.timeout(CHECK_S):
            return {"check": name, "ok": True, "detail": await check(settings)}
    except TimeoutError:
        return {"check": name, "ok": False, "detail": f"no answer within {CHECK_S:g} s"}
    except MidstreamError as error:
        return {"check": name, "ok": False, "detail": str(error)}


async def _redis(settings: Settings) -> str:
    from midstream.api.bootstrap import make_log

    running = read_state(settings.data_dir)
    if settings.redis_url is None and running is None:
        return "not set: `midstream up` starts a local Valkey"
    url = settings.redis_url or (running.redis_url if running else None)
    log = make_log(settings.model_copy(update={"redis_url": url}), "doctor")
    try:
        await log.check()
    finally:
        await log.close()
    return "it answers, is new enough and evicts nothing"


async def _archive(settings: Settings) -> str:
    from midstream.migrations.schema import current, head

    if settings.database_url is None and not settings.data_dir.exists():
        return "not made yet: `midstream up` makes it"
    found, newest = await asyncio.to_thread(current, settings.archive_url), head()
    if found != newest:
        raise MidstreamError(f"its tables are at revision {found}, not {newest}: run `midstream db upgrade`")
    return f"its tables are at revision {found}"


async def _secret(settings: Settings) -> str:
    if settings.secret is None and not settings.data_dir.exists():
        return "not made yet: `midstream up` makes it"
    return f"{len(settings.data_secret())} characters"


async def _gateway_port(settings: Settings) -> str:
    return _port(settings, settings.gateway_host, settings.gateway_port)


async def _admin_port(settings: Settings) -> str:
    return _port(settings, settings.admin_host, settings.admin_port)


def _port(settings: Settings, host: str, port: int) -> str:
    running = read_state(settings.data_dir)
    if running and port and any(url.endswith(f":{port}") for url in (running.gateway, running.admin)):
        return f"{port}: in use by the cluster of this folder"
    bind(host, port).close()
    return f"{port} on {host} is free" if port else "any free one"


async def _policies(settings: Settings) -> str:
    from midstream.api.bootstrap import check_policies

    check_policies(settings)
    return ", ".join([settings.dispatch_policy, *(choice.name for choice in settings.policies.moves)])
