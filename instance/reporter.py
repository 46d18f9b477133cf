"""Load reports: of news, at most every 100 ms, at least every second; progress of requests once a second."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from midstream.control.events import LoadReported, RequestsReported
from midstream.control.state import Load, RequestLoad
from midstream.instance.news import is_news, quiet_ms

if TYPE_CHECKING:
    from midstream.instance.llumlet import Llumlet

DUE_S: Final = 0.001
"""A report that is due within this is due."""


async def report_load(llumlet: Llumlet) -> None:
    """Report for ever. It looks at the load whenever there may be news, and wakes for nothing else."""
    block_tokens = llumlet.engine.fingerprint.block_tokens
    last: Load | None = None
    due_at = float("-inf")
    while True:
        load, now = llumlet.engine.load(), llumlet.now
        if last is None or now >= due_at - DUE_S or is_news(last, load):
            llumlet.recorder.record(LoadReported(owner=llumlet.me, load=load))
            last, due_at = load, now + llumlet.settings.report_max_ms / 1e3
        calm_ms = 0.0 if llumlet.acts.is_unheard else quiet_ms(last, load, block_tokens)
        await _until_news(llumlet, calm_ms / 1e3, due_at - now)


async def _until_news(llumlet: Llumlet, calm_s: float, due_s: float) -> None:
    """Wait until a report is due, or there may be news: time has passed, or something came from outside."""
    rest_s = llumlet.settings.report_min_ms / 1e3
    wait_s = min(calm_s, due_s)
    if wait_s > rest_s:
        until = llumlet.now + wait_s
        llumlet.news.clear()
        alarm = asyncio.get_running_loop().call_at(until, llumlet.news.set)
        try:
            await llumlet.news.wait()
        finally:
            alarm.cancel()
        due_s = until - llumlet.now
    if due_s > 0:
        await asyncio.sleep(min(rest_s, due_s))


async def report_requests(llumlet: Llumlet) -> None:
    """Tell how far each request has come, once a second while there are any."""
    while True:
        await asyncio.sleep(llumlet.settings.report_max_ms / 1e3)
        requests = tuple(_request_loads(llumlet))
        if requests:
            llumlet.recorder.record(RequestsReported(owner=llumlet.me, requests=requests))


def _request_loads(llumlet: Llumlet) -> list[RequestLoad]:
    loads = []
    for progress in llumlet.engine.progress():
        request = llumlet.acts.request_of(progress.slot)
        seat = llumlet.seats.get(request) if request is not None else None
        if seat is None or seat.run is None or seat.run.slot != progress.slot:
            continue
        loads.append(
            RequestLoad(
                seat.request,
                seat.run.epoch,
                progress.tokens,
                progress.blocks,
                progress.phase == "waiting",
                progress.refusal is None and not seat.run.is_finished,
            )
        )
    return loads
