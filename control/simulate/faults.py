"""What goes wrong in a simulated run, as data: drawn from a seed, asked by the in-memory ports, shrunk on a failure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

FAULTS_MAX = 500
SHRINK_RUNS_MAX = 400
FAULT_MS_MIN = 20
FAULT_MS_MAX = 4_000
RESTART_MS_MAX = 6_000
FAULTS_PER_MS = 1 / 10_000
"""At intensity 1, faults per node and millisecond."""


class Window(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Base of all faults: in force from `at_ms` to `until_ms`, virtual time since the network started."""

    at_ms: int
    until_ms: int


class Lossy(Window, frozen=True, kw_only=True, tag=True):
    """Messages from `source` to `target` are lost, doubled, late or overtaken with these probabilities.

    An empty `source` or `target` means anybody; `only` names the kinds of message concerned, all if empty.
    """

    source: str
    target: str
    only: tuple[str, ...] = ()
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_ms: int = 0
    """Added to every message, on top of the network's own delay."""


class Cut(Window, frozen=True, kw_only=True, tag=True):
    """Nothing passes between two nodes, either way; the end of the window heals it."""

    a: str
    b: str


class Crash(Window, frozen=True, kw_only=True, tag=True):
    """A node dies at `at_ms`, with its memory, and a next incarnation starts at `until_ms`."""

    node: str


class Slow(Window, frozen=True, kw_only=True, tag=True):
    """All that a node sends, receives or copies takes `factor` times as long."""

    node: str
    factor: float


class LoseReply(Window, frozen=True, kw_only=True, tag=True):
    """Calls of a node to the log have their effect, but the answer is lost with this probability."""

    node: str
    probability: float


class CorruptBlock(Window, frozen=True, kw_only=True, tag=True):
    """A block copied from a node arrives with one wrong byte, with this probability."""

    source: str
    probability: float


Fault = Lossy | Cut | Crash | Slow | LoseReply | CorruptBlock


class Link(msgspec.Struct, frozen=True):
    """One direction between two nodes right now. Delay in milliseconds; the others are probabilities."""

    is_cut: bool = False
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_ms: float = 0.0
    slow: float = 1.0


HEALTHY = Link()


class FaultPlan:
    """The faults of a run, to be asked at a point in time. Overlapping faults of a kind add up, the worst wins."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)
        self._links = [fault for fault in self.faults if isinstance(fault, Lossy | Cut | Slow)]
        self.quiet_after_ms = max((fault.until_ms for fault in self.faults), default=0)
        """From here on nothing more goes wrong."""

    def link(self, source: str, target: str, now_ms: float, kind: str = "") -> Link:
        """The state of the way from `source` to `target`, for messages of a kind."""
        if now_ms >= self.quiet_after_ms:
            return HEALTHY
        active = [fault for fault in self._links if fault.at_ms <= now_ms < fault.until_ms]
        lossy = [f for f in active if isinstance(f, Lossy) and _concerns(f, source, target, kind)]
        ends = {source, target}
        return Link(
            is_cut=any(isinstance(fault, Cut) and {fault.a, fault.b} == ends for fault in active),
            drop=max((fault.drop for fault in lossy), default=0.0),
            duplicate=max((fault.duplicate for fault in lossy), default=0.0),
            reorder=max((fault.reorder for fault in lossy), default=0.0),
            delay_ms=sum(fault.delay_ms for fault in lossy),
            slow=max((fault.factor for fault in active if isinstance(fault, Slow) and fault.node in ends), default=1.0),
        )

    def slow(self, node: str, now_ms: float) -> float:
        """By what factor a node is slower right now."""
        return max((fault.factor for fault in self._active(Slow, now_ms) if fault.node == node), default=1.0)

    def lost_reply(self, node: str, now_ms: float) -> float:
        """Probability that a reply of the log to this node is lost."""
        return max((f.probability for f in self._active(LoseReply, now_ms) if f.node == node), default=0.0)

    def corruption(self, source: str, now_ms: float) -> float:
        """Probability that a block copied from this node arrives wrong."""
        return max((f.probability for f in self._active(CorruptBlock, now_ms) if f.source == source), default=0.0)

    def crashes(self) -> tuple[Crash, ...]:
        """All crashes in the order of time; the harness carries them out."""
        return tuple(sorted((f for f in self.faults if isinstance(f, Crash)), key=lambda f: (f.at_ms, f.node)))

    def _active(self, kind: type[Any], now_ms: float) -> list[Any]:
        return [f for f in self.faults if isinstance(f, kind) and f.at_ms <= now_ms < f.until_ms]


def _concerns(fault: Lossy, source: str, target: str, kind: str) -> bool:
    is_between = fault.source in ("", source) and fault.target in ("", target)
    return is_between and (not fault.only or kind in fault.only)


def plan_faults(
    rng: random.Random,
    nodes: Sequence[str],
    horizon_ms: int,
    intensity: float,
    *,
    crashable: Sequence[str] | None = None,
) -> tuple[Fault, ...]:
    """Draw faults among `nodes`, in order of time, all over by `horizon_ms`.

    At `intensity` 1 a node sees about one fault in ten seconds. Only `crashable` nodes (all by default) crash; two
    crashes of one node never overlap.
    """
    count = min(FAULTS_MAX, round(intensity * len(nodes) * horizon_ms * FAULTS_PER_MS))
    mortal = list(nodes if crashable is None else crashable)
    drawn = [_draw(rng, list(nodes), mortal, horizon_ms) for _ in range(count)]
    return _without_double_crashes(sorted(drawn, key=lambda fault: fault.at_ms))


def _draw(rng: random.Random, nodes: list[str], mortal: list[str], horizon_ms: int) -> Fault:
    kinds: list[type[Fault]] = [Slow, LoseReply, CorruptBlock]
    kinds += [Lossy, Lossy, Lossy, Cut, Cut] if len(nodes) > 1 else []
    kinds += [Crash, Crash] if mortal else []
    kind = rng.choice(kinds)
    longest = RESTART_MS_MAX if kind is Crash else FAULT_MS_MAX
    length = min(horizon_ms, int(FAULT_MS_MIN * (longest / FAULT_MS_MIN) ** rng.random()))
    at_ms = rng.randint(0, horizon_ms - length)
    return _make(rng, kind, nodes, mortal, {"at_ms": at_ms, "until_ms": at_ms + length})


def _make(rng: random.Random, kind: type[Fault], nodes: list[str], mortal: list[str], window: dict[str, Any]) -> Fault:
    if kind is Crash:
        return Crash(node=rng.choice(mortal), **window)
    if kind is Slow:
        return Slow(node=rng.choice(nodes), factor=rng.choice([2.0, 5.0, 20.0]), **window)
    if kind is LoseReply:
        return LoseReply(node=rng.choice(nodes), probability=rng.choice([0.1, 0.5, 1.0]), **window)
    if kind is CorruptBlock:
        return CorruptBlock(source=rng.choice(nodes), probability=rng.choice([0.01, 0.2, 1.0]), **window)
    one, other = rng.sample(nodes, 2)
    if kind is Cut:
        return Cut(a=one, b=other, **window)
    return Lossy(
        source=one,
        target=other,
        drop=rng.choice([0.0, 0.05, 0.3, 1.0]),
        duplicate=rng.choice([0.0, 0.1, 0.5]),
        reorder=rng.choice([0.0, 0.1, 0.5]),
        delay_ms=rng.choice([0, 5, 100, 1500]),
        **window,
    )


def _without_double_crashes(faults: list[Fault]) -> tuple[Fault, ...]:
    down_until: dict[str, int] = {}
    kept: list[Fault] = []
    for fault in faults:
        if isinstance(fault, Crash):
            if fault.at_ms <= down_until.get(fault.node, -1):
                continue
            down_until[fault.node] = fault.until_ms
        kept.append(fault)
    return tuple(kept)


def shrink(faults: Sequence[Fault], fails: Callable[[tuple[Fault, ...]], bool]) -> tuple[Fault, ...]:
    """A small subset for which `fails` still answers true, found by taking away ever smaller parts (ddmin).

    Runs `fails` at most `SHRINK_RUNS_MAX` times; without a smaller failing subset it returns all faults.
    """
    kept, part, runs = tuple(faults), max(1, len(faults) // 2), 0
    while kept and runs < SHRINK_RUNS_MAX:
        smaller = None
        for start in range(0, len(kept), part):
            candidate = kept[:start] + kept[start + part :]
            runs += 1
            if fails(candidate):
                smaller = candidate
                break
            if runs >= SHRINK_RUNS_MAX:
                break
        if smaller is not None:
            kept, part = smaller, min(part, max(1, len(smaller) // 2))
        elif part == 1:
            break
        else:
            part = max(1, part // 2)
    return kept
