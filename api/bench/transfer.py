"""How fast KV travels from paged blocks into another process's paged blocks, beside the raw medium, in one run."""

from __future__ import annotations

import asyncio
import csv
import json
import secrets
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Final

from midstream.api.bench.lag import LagMeter
from midstream.api.bench.plots import plot
from midstream.api.bench.report import Measured, machine, rank
from midstream.api.bench.signals import ended_by_signal
from midstream.api.bench.transfer_decode import WINDOWS, decode_slowdown
from midstream.api.bench.transfer_memory import LAYOUTS, MIB, Layout, Paged
from midstream.api.bench.transfer_raw import TcpSource
from midstream.api.cli.output import say
from midstream.control.errors import BadInput, MidstreamError
from midstream.migration.transfers.base import Transfer, Where
from midstream.migration.transfers.registry import TRANSFERS, make_transfers

SEED: Final = 1
SIZES_MB: Final = (8, 16, 32, 64, 128, 256, 512, 960)
BACKENDS: Final = ("shm", "rpc")
REPEATS: Final = 5
CHECKED_MB: Final = 64
LAG_BYTES: Final = 10 * 10**9
STEADY_MB: Final = 64
ANSWER_S: Final = 120.0
PEER: Final = ("-m", "midstream.api.bench.transfer_peer")

Pieces = list[tuple[int, memoryview]]
Raw = Callable[[int], Awaitable[float]]
"""Seconds that so many bytes take over the bare medium."""


def measure(
    backends: Sequence[str] = BACKENDS,
    sizes_mb: Sequence[int] = SIZES_MB,
    layouts: Sequence[str] = tuple(LAYOUTS),
    repeats: int = REPEATS,
    lag_bytes: int = LAG_BYTES,
    windows: int = WINDOWS,
) -> Measured:
    """Everything; some minutes. Raises `BadInput`, `UnknownThing`, `MidstreamError` if it is ended before."""
    if unknown := [name for name in layouts if name not in LAYOUTS]:
        raise BadInput(f"no layout {unknown[0]!r}; known: {', '.join(LAYOUTS)}")
    if unmeasured := [name for name in backends if name in TRANSFERS and name not in RAW]:
        raise BadInput(f"no raw medium to compare {unmeasured[0]!r} with; there is one for: {', '.join(RAW)}")
    if not (backends and layouts and sizes_mb and min(sizes_mb) >= 1):
        raise BadInput("backends, layouts and sizes of 1 MB and more are needed, at least one of each")
    return asyncio.run(_watched(tuple(backends), tuple(sizes_mb), tuple(layouts), repeats, lag_bytes, windows))


async def _watched(*plan: Any) -> Measured:
    with ended_by_signal():
        return await _measure(*plan)


async def _measure(
    backends: tuple[str, ...],
    sizes_mb: tuple[int, ...],
    layouts: tuple[str, ...],
    repeats: int,
    lag_bytes: int,
    windows: int,
) -> Measured:
    found = machine()
    rows: list[dict[str, Any]] = []
    lag: dict[str, float | None] = {}
    for name in layouts:
        async with _pair(LAYOUTS[name], max(sizes_mb) * MIB, backends) as pair:
            for size_mb in sizes_mb:
                say(f"layout {name}: {size_mb} MB ...")
                rows += await _rows(pair, backends, size_mb, repeats)
            if name == layouts[0]:
                say("watching event loops ...")
                lag = {backend: await _lag_ms_p99(pair, backend, max(sizes_mb), lag_bytes) for backend in backends}
    say("watching an engine decode ...")
    slowed = {backend: await decode_slowdown(backend, windows) for backend in backends}
    params = {
        "backends": backends, "sizes_mb": sizes_mb, "layouts": layouts, "repeats": repeats, "windows": windows,
        "seed": SEED,
    }  # fmt: skip
    summary = _summary(rows, backends, layouts[0], lag) | {
        "decode_slowdown": {backend: of.median for backend, of in slowed.items()},
        "decode_slowdown_mean": {backend: of.mean for backend, of in slowed.items()},
        "decode_copied_gib_s": {backend: of.gib_s for backend, of in slowed.items()},
    }
    return Measured(params=params, rows=tuple(rows), summary=summary, machine=found)


class Pair:
    """Source and target, in two processes."""

    def __init__(self, process: asyncio.subprocess.Process, memory: Paged) -> None:
        self._process = process
        self.memory = memory
        self.transfers: Mapping[str, Transfer] = {}
        self.addresses: dict[str, str] = {}
        self.raw: dict[str, Raw] = {}
        self.at_end = ExitStack()
        """Closes raw media."""

    async def ask(self, do: str, **order: Any) -> Any:
        """Have the other process do something; its answer. Raises `MidstreamError` if it is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            answer = await self._process.stdout.readline()
        if not answer:
            raise MidstreamError("the other process of this measurement has ended")
        return json.loads(answer)

    async def move_s(self, backend: str, pieces: Pieces) -> float:
        """Seconds of one send over a channel that is open, as each round of a move finds it.

        Not to be used again after it was cancelled: the other process's answer would be taken for the next one's.
        """
        handle = secrets.token_hex(16)
        await self.ask("expect", backend=backend, handle=handle)
        channel = await self.transfers[backend].open(self.addresses[backend], handle)
        try:
            begun = asyncio.get_running_loop().time()
            await channel.send(pieces)
            took_s = asyncio.get_running_loop().time() - begun
        finally:
            await channel.close()
        await self.ask("forget", backend=backend, handle=handle)
        return took_s


@asynccontextmanager
async def _pair(layout: Layout, size: int, backends: tuple[str, ...]) -> AsyncIterator[Pair]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *PEER,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us: it ends when its stdin does
    )  # fmt: skip
    memory = Paged(layout, size, SEED)
    memory.fill(SEED)
    pair = Pair(process, memory)
    secret = secrets.token_bytes(16)
    pair.transfers = make_transfers(backends, Where(bind_host="127.0.0.1", secret=secret), [memory.region])
    try:
        pair.addresses = await pair.ask(
            "begin", layout=layout.name, size=size, secret=secret.hex(), backends=list(backends)
        )
        for transfer in pair.transfers.values():
            await transfer.start()
        pair.raw = {backend: await RAW[backend](pair) for backend in backends}
        yield pair
    finally:
        pair.at_end.close()
        for transfer in pair.transfers.values():
            await transfer.stop()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _raw_copy(pair: Pair) -> Raw:
    async def copy(size: int) -> float:
        return float(await pair.ask("copy", size=size))

    return copy


async def _raw_tcp(pair: Pair) -> Raw:
    source = TcpSource(await pair.ask("tcp"))
    pair.at_end.callback(source.close)
    return lambda size: asyncio.to_thread(source.send_s, pair.memory.array, size)


async def _raw_gloo(pair: Pair) -> Raw:
    from midstream.api.bench.transfer_gloo import RawGloo

    raw = RawGloo(pair.memory.array)
    await asyncio.gather(pair.ask("gloo", port=raw.port), asyncio.to_thread(raw.connect))
    return lambda size: asyncio.to_thread(raw.send_s, size)


RAW: Final = {"shm": _raw_copy, "rpc": _raw_tcp, "gloo": _raw_gloo}


async def _rows(pair: Pair, backends: tuple[str, ...], size_mb: int, repeats: int) -> list[dict[str, Any]]:
    """One row per backend: raw and ours in turn, the first of each left out."""
    blocks = max(1, pair.memory.blocks_in(size_mb * MIB))
    size, pieces = blocks * pair.memory.layout.block_bytes, pair.memory.pieces(blocks)
    speeds: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {backend: [] for backend in backends}
    for number in range(repeats + 1):
        for backend in backends:
            raw = size / await pair.raw[backend](size) / 2**30
            ours = size / await pair.move_s(backend, pieces) / 2**30
            if number:
                speeds.setdefault(backend, []).append(ours)
                speeds.setdefault(f"{backend} raw", []).append(raw)
                ratios[backend].append(ours / raw)
            elif size_mb == CHECKED_MB and await pair.ask("digest", blocks=blocks) != pair.memory.digest(blocks):
                raise RuntimeError(f"{backend} brought other bytes than it was given")
    return [_row(pair, backend, size_mb, speeds, ratios[backend]) for backend in backends]


def _row(pair: Pair, backend: str, size_mb: int, speeds: dict[str, list[float]], ratios: list[float]) -> dict[str, Any]:
    ours, raw = speeds[backend], speeds[f"{backend} raw"]
    middle, raw_middle = statistics.median(ours), statistics.median(raw)
    return {
        "backend": backend,
        "layout": pair.memory.layout.name,
        "size_mb": size_mb,
        "gib_s": round(middle, 3),
        "min": round(min(ours), 3),
        "max": round(max(ours), 3),
        "raw_gib_s": round(raw_middle, 3),
        "ratio": round(middle / raw_middle, 3),
        "ratio_paired": round(statistics.median(ratios), 3),
    }


async def _lag_ms_p99(pair: Pair, backend: str, size_mb: int, lag_bytes: int) -> float | None:
    """The worse of both event loops while so many bytes pass.

    The list of what is sent is made before: an engine makes one for a round, not for a gigabyte.
    """
    blocks = pair.memory.blocks_in(size_mb * MIB)
    pieces = pair.memory.pieces(blocks)
    ours = LagMeter()
    ours.start()
    await pair.ask("watch")
    for _ in range(-(-lag_bytes // (blocks * pair.memory.layout.block_bytes))):
        await pair.move_s(backend, pieces)
    lags = rank(await ours.stop(), 0.99), await pair.ask("lag")
    return max((lag for lag in lags if lag is not None), default=None)


def _summary(
    rows: list[dict[str, Any]], backends: tuple[str, ...], layout: str, lag: dict[str, float | None]
) -> dict[str, Any]:
    speeds = {(row["backend"], row["layout"], row["size_mb"]): row for row in rows}
    layouts = dict.fromkeys(row["layout"] for row in rows)
    lags = [value for value in lag.values() if value is not None]
    summary: dict[str, Any] = {
        "ratio_min_64mb_up": {backend: _ratio_min(rows, backend, layout) for backend in backends},
        "small_over_64mb": {backend: _small(speeds, backend, layout) for backend in backends},
        "loop_lag_ms_p99": max(lags) if len(lags) == len(backends) else None,
        "loop_lag_ms_p99_of": lag,
    }
    for other in list(layouts)[1:]:
        summary[f"ratio_min_64mb_up_{other}"] = {backend: _ratio_min(rows, backend, other) for backend in backends}
    return summary


def _ratio_min(rows: list[dict[str, Any]], backend: str, layout: str) -> float | None:
    of = [row for row in rows if (row["backend"], row["layout"]) == (backend, layout)]
    return min((row["ratio"] for row in of if row["size_mb"] >= STEADY_MB), default=None)


def _small(speeds: dict[Any, dict[str, Any]], backend: str, layout: str) -> float | None:
    small, steady = speeds.get((backend, layout, 8)), speeds.get((backend, layout, STEADY_MB))
    return None if small is None or steady is None else round(small["gib_s"] / steady["gib_s"], 3)


def draw(measured: Measured, folder: Path) -> None:
    """Our curves over their raw media, and the founding ones of another machine. Raises `BadInput`."""
    with plot(folder, "transfer", width=10.0, height=4.5, ncols=2) as (_, (ours, ratios)):
        for backend in measured.params["backends"]:
            rows = [
                r for r in measured.rows if r["backend"] == backend and r["layout"] == measured.params["layouts"][0]
            ]
            sizes = [row["size_mb"] for row in rows]
            (line,) = ours.plot(sizes, [row["gib_s"] for row in rows], marker="o", label=backend)
            ours.plot(
                sizes, [row["raw_gib_s"] for row in rows], "--", color=line.get_color(), label=f"raw of {backend}"
            )
            ratios.plot(sizes, [row["ratio"] for row in rows], marker="o", color=line.get_color(), label=backend)
        for backend, points in founding().items():
            ours.plot(*zip(*sorted(points.items()), strict=True), ":", alpha=0.6, label=f"{backend}, founding machine")
        ours.set(xlabel="MB", ylabel="GiB/s at the destination", xscale="log", ylim=(0, None))
        ratios.set(xlabel="MB", ylabel="speed / raw medium", xscale="log", ylim=(0, 1.2))
        ours.legend(fontsize="x-small")
        ratios.legend(fontsize="x-small")


def founding() -> dict[str, dict[float, float]]:
    """GiB/s by size (MB) and backend: means of the founding work's runs (`data/README.md`)."""
    text = resources.files(__package__).joinpath("data/founding_migration_speed.csv").read_text(encoding="utf-8")
    seen: dict[str, dict[float, list[float]]] = {}
    for row in csv.DictReader(text.splitlines()):
        seen.setdefault(row["backend"], {}).setdefault(float(row["size_mb"]), []).append(float(row["gib_per_s"]))
    return {backend: {size: statistics.mean(of) for size, of in sizes.items()} for backend, sizes in seen.items()}
