"""Two controllers on one log under load, each stopped now and then in the middle of whatever it does.

`python -m tests.e2e.two_controllers --seconds 60` plays and prints what the log says; exit 1 if anything was decided
twice, not at all, or differently from what the log leads to.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import redis
import typer

from midstream.api.cli.client import AdminProblem
from midstream.control.events import Entry, MigrationCommitted, MoveDecided, TickElapsed
from midstream.control.ids import COMMIT_SOURCE
from midstream.control.replay import verify
from tests.e2e.helpers import CLUSTER, Client, Rig, running

SIZES = (400, 90)
SETTINGS: dict[str, Any] = {
    "tick_ms": 50,
    "cooldown_ms": 300,
    "dispatch_policy": "round_robin",
    "move_policies": "drain,balance",
    "policy_params": {"balance": {"low": 20, "high": 21}},
    "log_level": "debug",
}
"""Round-robin fills the small instance as fast as the large one, so that `balance` has work."""

CONTROLLERS = ("controller-0", "controller-1")
STREAMS = 8
LOST_RACE = "another controller was first"


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. `commits_alone` counts facts that a controller committed while the other was stopped."""

    entries: tuple[Entry, ...]
    commands: int
    """Ever appended to the command streams, by Valkey's own count."""
    commits_alone: dict[str, int]
    lost_races: dict[str, int]
    wrong: tuple[str, ...]
    """Clients that were disturbed."""

    @property
    def moves_decided(self) -> int:
        return sum(isinstance(entry.fact.event, MoveDecided) for entry in self.entries)

    @property
    def problems(self) -> list[str]:
        """Everything that was not decided exactly once."""
        found = [*self.wrong, *_repeated(self.entries), *_gaps(self.entries), *_overlapping(self.entries)]
        if self.commands != self.moves_decided:
            found.append(f"{self.moves_decided} moves were decided, {self.commands} commands given")
        found += [f"{name} never committed" for name, count in self.commits_alone.items() if count == 0]
        report = verify(self.entries)
        if report.first_difference is not None:
            found.append(f"replay differs: {report.first_difference.explanation}")
        return found


async def play(folder: Path, seconds: float) -> Play:
    """Run the load for so long, then gather everything."""
    async with running(folder, SIZES, controllers=len(CONTROLLERS), **SETTINGS) as rig:
        clients: list[Client] = []
        working = [
            asyncio.create_task(_load(rig, clients, seconds)),
            asyncio.create_task(_orders(rig, clients, seconds)),
        ]
        commits = await _disturb(rig, seconds)
        await asyncio.gather(*working)
        await rig.idle()
        return Play(
            entries=tuple(await rig.facts()),
            commands=_commands_given(rig),
            commits_alone=commits,
            lost_races={name: _log(rig, name).count(LOST_RACE) for name in CONTROLLERS},
            wrong=tuple(_wrong(clients)),
        )


# --- what happens --------------------------------------------------------------------------------


async def _load(rig: Rig, clients: list[Client], seconds: float) -> None:
    """So many streams at any time, of different lengths."""
    rng, end = random.Random(3), asyncio.get_running_loop().time() + seconds
    open_ones: list[Client] = []
    while asyncio.get_running_loop().time() < end:
        open_ones = [client for client in open_ones if not client.is_over]
        while len(open_ones) < STREAMS:
            open_ones.append(rig.stream(rng.randint(100, 500), prompt_tokens=rng.randint(20, 200)))
            clients.append(open_ones[-1])
        await asyncio.sleep(0.05)
    for client in open_ones:
        await client.end()


async def _orders(rig: Rig, clients: list[Client], seconds: float) -> None:
    """Moves by hand, in the middle of it all; refusals are fine."""
    rng, end = random.Random(4), asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.4)
        live = [client for client in clients if client.ids and not client.is_over]
        if live:
            try:
                await rig.move(rng.choice(live), rng.choice(rig.llumlets))
            except AdminProblem:
                continue


async def _disturb(rig: Rig, seconds: float) -> dict[str, int]:
    """Stop one controller, then the other, now and then none; count what the other one commits meanwhile."""
    rng, end = random.Random(5), asyncio.get_running_loop().time() + seconds
    commits = dict.fromkeys(CONTROLLERS, 0)
    pairs = [CONTROLLERS, CONTROLLERS[::-1]]
    while asyncio.get_running_loop().time() < end:
        stopped, other = pairs[0]
        pairs.reverse()
        rig.signal(stopped, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.1)
            before = await _control_seq(rig)
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            commits[other] += await _control_seq(rig) - before
        finally:
            rig.signal(stopped, signal.SIGCONT)
        await asyncio.sleep(rng.uniform(0.05, 1.0))
    return commits


async def _control_seq(rig: Rig) -> int:
    return int((await rig.get("/state"))["state"]["control_seq"])


def _commands_given(rig: Rig) -> int:
    """XINFO's `entries-added` counts every entry that a stream ever had."""
    with redis.Redis.from_url(rig.state.redis_url) as client:
        keys = list(client.scan_iter(match=f"midstream:{{{CLUSTER}}}:cmd:*"))
        return sum(int(client.xinfo_stream(key)["entries-added"]) for key in keys)


def _log(rig: Rig, name: str) -> str:
    return (rig.data_dir / "logs" / f"{name}.log").read_text()


# --- what the log says ---------------------------------------------------------------------------


def _wrong(clients: Sequence[Client]) -> Iterator[str]:
    for client in clients:
        try:
            client.assert_undisturbed()
        except AssertionError as error:
            yield f"request {client.request}: {error or client.error}"


def _repeated(entries: Iterable[Entry]) -> Iterator[str]:
    """Nothing is decided twice: neither a move nor a tick."""
    seen: Counter[str] = Counter()
    for entry in entries:
        match entry.fact.event:
            case MoveDecided() as event:
                seen[f"move {event.migration}"] += 1
            case TickElapsed() as event:
                seen[f"a tick at {event.decided_at}"] += 1
            case MigrationCommitted() as event:
                seen[f"commit of {event.request} at epoch {event.epoch}"] += 1
    yield from (f"{what} happened {times} times" for what, times in seen.items() if times > 1)


def _overlapping(entries: Iterable[Entry]) -> Iterator[str]:
    """A request has one open move: the next for the same epoch only after the one before it ended with nothing done."""
    open_moves: dict[tuple[str, int], str] = {}
    for entry in entries:
        event = entry.fact.event
        if isinstance(event, MoveDecided):
            key = (event.request, event.epoch)
            if key in open_moves:
                yield f"{event.migration} was decided while {open_moves[key]} was open for {key}"
            open_moves[key] = event.migration
        elif type(event).__name__ in ("MigrationAborted", "CommandRefused"):
            open_moves = {key: move for key, move in open_moves.items() if move != event.migration}  # type: ignore[attr-defined]


def _gaps(entries: Iterable[Entry]) -> Iterator[str]:
    """The controllers' common numbers go up by one."""
    expected = 1
    for entry in entries:
        if entry.fact.source == COMMIT_SOURCE:
            if entry.fact.source_seq != expected:
                yield f"control's number at {entry.position} is {entry.fact.source_seq}, not {expected}"
            expected = entry.fact.source_seq + 1


def report(seen: Play) -> str:
    """For people."""
    ticks = sum(isinstance(entry.fact.event, TickElapsed) for entry in seen.entries)
    moved = sum(isinstance(entry.fact.event, MigrationCommitted) for entry in seen.entries)
    lines = [
        f"facts {len(seen.entries)}, ticks {ticks}, moves decided {seen.moves_decided}, commands {seen.commands}, "
        f"committed {moved}",
        f"committed while the other was stopped: {seen.commits_alone}; races lost: {seen.lost_races}",
        *seen.problems,
        "every decision once" if not seen.problems else f"{len(seen.problems)} problems",
    ]
    return "\n".join(lines)


def main(seconds: Annotated[float, typer.Option(min=2, help="How long to play.")] = 60.0) -> None:
    """Play two controllers against each other on one log."""
    with tempfile.TemporaryDirectory(prefix="two-controllers-") as folder:
        seen = asyncio.run(play(Path(folder), seconds))
    sys.stdout.write(report(seen) + "\n")
    raise typer.Exit(1 if seen.problems else 0)


if __name__ == "__main__":
    typer.run(main)
