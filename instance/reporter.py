"""Load reports: on change, at most every 100 ms, at least every second; progress of requests once a second."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from midstream.control.events import LoadReported, RequestsReported
from midstream.control.state import Load, RequestLoad

if TYPE_CHECKING:
    from midstream.instance.llumlet import Llumlet


async def report_load(llumlet: Llumlet) -> None:
    """Report for ever. While nothing is served it wakes only for the report that is due anyway."""
    settings = llumlet.settings
    last: Load | None = None
    reported_at = float("-inf")
    while True:
        load = llumlet.engine.load()
        is_due = llumlet.now - reported_at >= settings.report_max_ms / 1e3
        if load != last or is_due:
            llumlet.recorder.record(LoadReported(owner=llumlet.me, load=load))
            last, reported_at = load, llumlet.now
        if load.running or load.waiting or load.blocks_reserved:
            await asyncio.sleep(settings.report_min_ms / 1e3)
        else:
            await _until_active(llumlet, settings.report_max_ms / 1e3)


async def _until_active(llumlet: Llumlet, bound_s: float) -> None:
    llumlet.activity.clear()
    try:
        async with asyncio.timeout(bound_s):
            await llumlet.activity.wait()
            await asyncio.sleep(llumlet.settings.report_min_ms / 1e3)
    except TimeoutError:
        return


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
