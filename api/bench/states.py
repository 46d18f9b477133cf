"""Made-up clusters of any size, as facts and as folded states."""

from __future__ import annotations

import random
from collections.abc import Iterator

from midstream.control.events import (
    Entry,
    Event,
    Fact,
    InstanceRegistered,
    LoadReported,
    RequestDispatched,
    RequestFinished,
    RequestsReported,
    TickElapsed,
)
from midstream.control.fold import fold
from midstream.control.ids import COMMIT_SOURCE, Owner, Position
from midstream.control.state import Fingerprint, Load, RequestLoad, State

BLOCKS = 4_096
SLOTS = 64
NOW_MS = 1_000_000
FINGERPRINT = Fingerprint(
    engine="sim", engine_version="1", model="sim", weights_revision="1", dtype="uint64",
    block_tokens=16, block_bytes=128, layout="planes-1",
)  # fmt: skip


class Writer:
    """Numbers facts as their sources and the log would."""

    def __init__(self) -> None:
        self._seq = -1
        self._sources: dict[str, int] = {}

    def entry(self, source: str, event: Event) -> Entry:
        """The next entry of the log."""
        self._seq += 1
        self._sources[source] = self._sources.get(source, 0) + 1
        return Entry(Position(1, self._seq), Fact(source, 1, self._sources[source], NOW_MS, event))


def cluster_state(instances: int, requests_each: int, seed: int) -> State:
    """The fold of a busy, uneven cluster: half the instances nearly full, half nearly free."""
    writer, rng = Writer(), random.Random(seed)
    entries = [writer.entry(COMMIT_SOURCE, TickElapsed(now_ms=NOW_MS, seed=1, decided_at=Position(1, 0)))]
    for index in range(instances):
        entries += _instance(writer, rng, index, requests_each)
    return fold(entries)


def life(count: int, instances: int, seed: int) -> list[Entry]:
    """About `count` facts of a cluster at work: reports, dispatches, ends."""
    writer, rng = Writer(), random.Random(seed)
    entries = [entry for index in range(instances) for entry in _instance(writer, rng, index, 0)]
    for number in range(max(count - len(entries), 0) // 4):
        owner = Owner(f"i{rng.randrange(instances)}", 1)
        entries += _request(writer, owner, f"r-{number}", rng)
    return entries


def _instance(writer: Writer, rng: random.Random, index: int, requests: int) -> Iterator[Entry]:
    owner, source = Owner(f"i{index}", 1), f"llumlet/i{index}"
    yield writer.entry(
        source,
        InstanceRegistered(
            owner=owner, address=f"tcp://127.0.0.1:{10_000 + index}", fingerprint=FINGERPRINT,
            blocks_total=BLOCKS, slots_max=SLOTS,
        ),
    )  # fmt: skip
    for number in range(requests):
        yield writer.entry("gateway/g", _dispatched(owner, f"r-{index}-{number}", rng))
    used = [rng.randrange(100, 500) if index % 2 else rng.randrange(10, 200) for _ in range(requests)]
    if requests:
        running = tuple(RequestLoad(f"r-{index}-{n}", 1, 16 * blocks, blocks, False) for n, blocks in enumerate(used))
        yield writer.entry(source, RequestsReported(owner=owner, requests=running))
    free = rng.randrange(0, BLOCKS // 20) if index % 2 else BLOCKS - sum(used)
    yield writer.entry(source, LoadReported(owner=owner, load=Load(running=requests, blocks_free=free, step_ms=30.0)))


def _request(writer: Writer, owner: Owner, name: str, rng: random.Random) -> Iterator[Entry]:
    source = f"llumlet/{owner.instance}"
    yield writer.entry("gateway/g", _dispatched(owner, name, rng))
    for running in (1, 2):
        load = Load(running=running, blocks_free=BLOCKS - 64 * running, step_ms=30.0)
        yield writer.entry(source, LoadReported(owner=owner, load=load))
    yield writer.entry(
        "gateway/g",
        RequestFinished(
            request=name, epoch=1, owner=owner, finish_reason="length", output_tokens=200,
            ttft_ms=50.0, gap_ms_mean=30.0, gap_ms_max=40.0,
        ),
    )  # fmt: skip


def _dispatched(owner: Owner, name: str, rng: random.Random) -> RequestDispatched:
    return RequestDispatched(
        request=name, gateway="g", owner=owner, epoch=1, prompt_tokens=rng.randrange(50, 4_000),
        delivered_tokens=0, output_tokens_max=400, policy="freeness",
    )  # fmt: skip
