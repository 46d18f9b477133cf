"""Explicit-state check of the two protocol machines: every reachable world, its invariants, and a way out of each.

`python -m tests.migration.model [--deep] [WORD...]` explores the configurations whose names hold a word, and
prints states, transitions and violations. Safety is checked in every transition (scene.py). Liveness: from every
state an end is reachable in which the client has all tokens (or went away) and nothing is held anywhere, by
transitions that are no faults.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from midstream.control.ids import Owner
from midstream.migration.plan import BLOCKING, RECOMPUTE
from midstream.migration.protocol import ledger as gateway
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol.ledger import Ledger
from midstream.migration.protocol.seat import Seat
from tests.migration.acts import Act, acts, deliver
from tests.migration.scene import Scene
from tests.migration.world import REQUEST, Broken, Budget, Machines, Packet, Slot, Work, World, leftovers


class Config(NamedTuple):
    """One thing to explore. `is_cold`: the first `Dispatch` is still on its way."""

    name: str
    budget: Budget
    instances: int = 2
    tokens: int = 2
    is_cold: bool = False
    is_waiting: bool = False
    """The request has no KV yet, so it moves without."""
    is_incremental: bool = True
    """Each step's output is sent once as it comes; otherwise all that is unacknowledged, each time."""
    keeps_stale: bool = False
    """Messages stay on their way even when their arrival can change nothing any more."""


class Report(NamedTuple):
    """What an exploration found. `is_complete`: every reachable state was visited."""

    states: int
    transitions: int
    is_complete: bool
    violation: str | None
    trace: tuple[str, ...]
    seconds: float


def first_world(config: Config) -> World:
    """The request was just dispatched to A, or runs there already."""
    owners = [Owner("ABC"[i], 1) for i in range(config.instances)]
    seats = tuple(Seat(me=owner, request=REQUEST) for owner in owners)
    start = World(Ledger(request=REQUEST), 1, seats, ((),) * len(seats), frozenset(), frozenset(), config.budget)
    scene = Scene(start, Machines(), config.tokens)
    scene.feed_ledger(gateway.Redispatch(owners[0]))
    if config.is_cold:
        return scene.world()
    for _ in range(2):
        for packet in list(scene.net):
            deliver(scene, packet)
    if config.is_waiting:
        scene.put(0, scene.engines[0][0]._replace(blocks=0))
    return scene.world()


def is_goal(world: World, config: Config) -> bool:
    """The request is over as it should be and nothing is held for it."""
    is_right = world.is_cut_short or world.ledger.delivered == config.tokens
    return world.ledger.phase == "ended" and is_right and not world.work and not any(leftovers(world))


# --- exploring -----------------------------------------------------------------------------------


class Explorer:
    """Breadth-first search with parents, so that a trace is a shortest one."""

    def __init__(self, config: Config, machines: Machines, states_max: int) -> None:
        self.config = config
        self.machines = machines
        self.states_max = states_max
        self.worlds: list[World] = []
        self.index: dict[World, int] = {}
        self.parents: list[tuple[int, Act | None]] = []
        self.sources, self.targets = array("i"), array("i")
        """Transitions that are no faults."""
        self.transitions = 0
        self.dead: dict[Any, dict[Packet, bool]] = {}

    def run(self, progress: Callable[[int, int], None] | None = None) -> Report:
        """Explore everything, or up to the first violation or `states_max`."""
        started = perf_counter()
        self._add(first_world(self.config), -1, None)
        at = 0
        while at < len(self.worlds) and len(self.worlds) < self.states_max:
            for act in acts(self.worlds[at]):
                broken = self._try(at, act)
                if broken is not None:
                    return self._report(started, False, broken, (*self.trace(at), describe(act)))
            at += 1
            if progress is not None and at % 10_000 == 0:
                progress(at, len(self.worlds))
        is_complete = at == len(self.worlds)
        stuck = self._stuck() if is_complete else None
        if stuck is not None:
            left = ", ".join(leftovers(self.worlds[stuck])) or "nothing held"
            return self._report(started, is_complete, f"no way to the end from here ({left})", self.trace(stuck))
        return self._report(started, is_complete, None, ())

    def _report(self, started: float, is_complete: bool, violation: str | None, trace: tuple[str, ...]) -> Report:
        took = perf_counter() - started
        return Report(len(self.worlds), self.transitions, is_complete, violation, trace, took)

    def _add(self, world: World, parent: int, act: Act | None) -> int:
        known = self.index.get(world)
        if known is not None:
            return known
        self.index[world] = len(self.worlds)
        self.worlds.append(world)
        self.parents.append((parent, act))
        return len(self.worlds) - 1

    def _try(self, at: int, act: Act) -> str | None:
        world, config = self.worlds[at], self.config
        scene = Scene(
            world,
            self.machines,
            config.tokens,
            is_incremental=config.is_incremental,
            keeps_stale=config.keeps_stale,
            dead=self.dead,
        )
        try:
            act.do(scene, *act.args)
            after = scene.world()
        except Broken as broken:
            return str(broken)
        self.transitions += 1
        to = self._add(after, at, act)
        if not act.is_fault and to != at:
            self.sources.append(at)
            self.targets.append(to)
        return None

    def trace(self, at: int) -> tuple[str, ...]:
        """What led to a state, one line each."""
        lines: list[str] = []
        while True:
            parent, act = self.parents[at]
            if act is None:
                return tuple(reversed(lines))
            lines.append(describe(act))
            at = parent

    def _stuck(self) -> int | None:
        """The first state from which no end can be reached without a fault."""
        into: list[list[int]] = [[] for _ in self.worlds]
        for source, target in zip(self.sources, self.targets, strict=True):
            into[target].append(source)
        good = bytearray(len(self.worlds))
        queue = deque(i for i, world in enumerate(self.worlds) if is_goal(world, self.config))
        for i in queue:
            good[i] = 1
        while queue:
            for source in into[queue.popleft()]:
                if not good[source]:
                    good[source] = 1
                    queue.append(source)
        return None if all(good) else good.index(0)


def describe(act: Act) -> str:
    """One line of a trace."""
    name = act.do.__name__.replace("_", " ")
    return f"{name} {', '.join(_brief(arg) for arg in act.args)}".rstrip()


def _brief(arg: Any) -> str:
    match arg:
        case Packet(to, sender, message):
            fields = ("migration", "epoch", "from_epoch", "first", "delivered", "finish")
            shown = [f"{f}={getattr(message, f)}" for f in fields if getattr(message, f, None) is not None]
            if isinstance(message, msg.Tokens | msg.Adopted):
                shown.append(f"ids={len(message.ids)}")
            return (
                f"{type(message).__name__}({', '.join(shown)}) {sender.name}#{sender.incarnation} -> {to or 'gateway'}"
            )
        case Work(kind, at, slot, migration):
            return f"{kind} {migration or slot} at {'ABC'[at]}"
        case Slot(name):
            return name
        case int():
            return f"at {'ABC'[arg]}"
        case _:
            return str(arg)


def explore(
    config: Config,
    machines: Machines | None = None,
    states_max: int = 2_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check one configuration."""
    return Explorer(config, machines or Machines(), states_max).run(progress)


# --- what is explored ----------------------------------------------------------------------------

ONE, TWO, THREE = ("AB",), ("AB", "BA"), ("AB", "BC")

CONFIGS = (
    Config("dispatch, losses", Budget(moves=ONE, losses=1), tokens=1, is_cold=True),
    Config("dispatch, suspicion and late message", Budget(suspicions=1, repeats=1), tokens=1, is_cold=True),
    Config("dispatch, failure and losses", Budget(failures=1, losses=2), tokens=1, is_cold=True),
    Config("move", Budget(moves=ONE)),
    Config("move, all unacknowledged sent each time", Budget(moves=ONE), is_incremental=False),
    Config("move, loss", Budget(moves=ONE, losses=1), tokens=1),
    Config("move, client goes", Budget(moves=ONE, ends=1), tokens=1),
    Config("move, crash", Budget(moves=ONE, crashes=1), tokens=1),
    Config("move, suspicion", Budget(moves=ONE, suspicions=1), tokens=1),
    Config("move, engine failure", Budget(moves=ONE, failures=1), tokens=1),
    Config("move, late message", Budget(moves=ONE, repeats=1), tokens=1),
    Config("move, needless probe", Budget(moves=ONE, probes=1), tokens=1),
    Config("move, gateway taken for lost", Budget(moves=ONE, gateway_losses=1), tokens=1),
    Config("two tries of one move", Budget(moves=("AB", "AB")), tokens=1),
    Config("move and back", Budget(moves=TWO), tokens=1),
    Config("move and back, loss", Budget(moves=TWO, losses=1), tokens=1),
    Config("move of a waiting request, failure", Budget(moves=ONE, failures=1), tokens=1, is_waiting=True),
    Config("two moves over three instances", Budget(moves=THREE), instances=3, tokens=1),
    Config("blocking move, loss", Budget(moves=ONE, mode=BLOCKING, losses=1), tokens=1),
    Config("blocking move, engine failure", Budget(moves=ONE, mode=BLOCKING, failures=1), tokens=1),
    Config("blocking move and back", Budget(moves=TWO, mode=BLOCKING), tokens=1),
    Config("recomputing move, loss", Budget(moves=ONE, mode=RECOMPUTE, losses=1), tokens=1),
    Config("recomputing move, crash", Budget(moves=ONE, mode=RECOMPUTE, crashes=1), tokens=1),
    Config("recomputing move, suspicion", Budget(moves=ONE, mode=RECOMPUTE, suspicions=1), tokens=1),
    Config("recomputing move and back", Budget(moves=TWO, mode=RECOMPUTE), tokens=1),
)
"""Small enough for every test run."""

DEEP = (
    Config(
        "all stale messages kept: dispatch", Budget(losses=1, suspicions=1), tokens=1, is_cold=True, keeps_stale=True
    ),
    Config("all stale messages kept: move", Budget(moves=ONE), tokens=1, keeps_stale=True),
    Config("move, loss, tokens one by one", Budget(moves=ONE, losses=1)),
    Config("move, client goes, two tokens", Budget(moves=ONE, ends=1)),
    Config("move, loss and late message", Budget(moves=ONE, losses=1, repeats=1), tokens=1),
    Config("move, engine failure and loss", Budget(moves=ONE, failures=1, losses=1), tokens=1),
    Config("move, crash and suspicion", Budget(moves=ONE, crashes=1, suspicions=1), tokens=1),
    Config("move, two suspicions", Budget(moves=ONE, suspicions=2), tokens=1),
    Config("move and back, late message", Budget(moves=TWO, repeats=1), tokens=1),
    Config("move and back, crash and loss", Budget(moves=TWO, crashes=1, losses=1), tokens=1),
    Config("three instances, loss", Budget(moves=THREE, losses=1), instances=3, tokens=1),
    Config("three instances, crash", Budget(moves=THREE, crashes=1), instances=3, tokens=1),
    Config("three instances, late message", Budget(moves=THREE, repeats=1), instances=3, tokens=1),
    Config("three instances, suspicion", Budget(moves=THREE, suspicions=1), instances=3, tokens=1),
    Config("move and back, loss and late message", Budget(moves=TWO, losses=1, repeats=1), tokens=1),
    Config("move and back, suspicion and loss", Budget(moves=TWO, suspicions=1, losses=1), tokens=1),
    Config("move, suspicion, two tokens", Budget(moves=ONE, suspicions=1)),
)
"""For a quiet hour: two faults, three instances, and nothing taken out."""


def main(arguments: list[str]) -> int:
    """Explore and print; 1 if anything was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.migration.model", description=__doc__)
    parser.add_argument("--deep", action="store_true", help="the long list instead of the short one")
    parser.add_argument("--states-max", type=int, default=3_000_000)
    parser.add_argument("words", nargs="*", help="only configurations whose name holds one of these")
    options = parser.parse_args(arguments)
    chosen = [
        c for c in (DEEP if options.deep else CONFIGS) if not options.words or any(w in c.name for w in options.words)
    ]
    violations = 0
    for config in chosen:
        report = explore(config, states_max=options.states_max, progress=_say_progress)
        violations += report.violation is not None
        verdict = report.violation or ("no violation" if report.is_complete else "no violation up to the bound")
        size = f"{report.states:,} states, {report.transitions:,} transitions, {report.seconds:.0f} s"
        lines = (f"\r{config.name}: {size}: {verdict}", *(f"    {step}" for step in report.trace))
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    return 1 if violations else 0


def _say_progress(visited: int, known: int) -> None:
    sys.stderr.write(f"\r{visited:,} of {known:,} states ")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
