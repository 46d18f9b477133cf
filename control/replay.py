"""Re-derives every decision from the log: fold to where a tick was decided, decide again, compare. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from midstream.control import codec, policies
from midstream.control.decide import decide
from midstream.control.errors import BadInput, UnknownThing
from midstream.control.events import Entry, Event, StateCarried, TickElapsed
from midstream.control.fold import apply
from midstream.control.ids import COMMIT_SOURCE, Position
from midstream.control.state import PolicyChoice, PolicySettings, State

PENDING_MAX: Final = 200_000
"""Entries held back while the next tick is awaited: it was decided somewhere among them."""

PROGRESS_EVERY: Final = 2_000

Progress = Callable[[int], None]
"""Told now and then how many entries have been read."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first fact that the log and the re-derivation do not agree on. One of the two may be missing."""

    position: Position
    """Of the recorded fact, or of its tick if there is none."""
    decided_at: Position
    recorded: dict[str, Any] | None
    derived: dict[str, Any] | None
    explanation: str


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a verification found."""

    facts: int
    """Entries read."""
    ticks: int
    """Ticks decided again."""
    ticks_skipped: int
    """Ticks decided before the first state that was known: nothing can be said about them."""
    decisions: int
    """Facts that controllers recorded with those ticks."""
    equal: int
    """Of those, re-derived the same, field for field."""
    first_difference: Difference | None
    last: Position

    @property
    def is_equal(self) -> bool:
        """Did every decision come out the same."""
        return self.first_difference is None


def as_json(report: ReplayReport) -> dict[str, Any]:
    """The report as JSON values, positions written `1764579000123-17`."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(report))
    values |= {"last": str(report.last), "is_equal": report.is_equal}
    if report.first_difference is not None:
        difference = report.first_difference
        values["first_difference"] |= {
            "position": str(difference.position),
            "decided_at": str(difference.decided_at),
        }
    return values


def verify(
    entries: Iterable[Entry],
    *,
    overrides: Mapping[str, Any] | None = None,
    from_state: State | None = None,
    on_progress: Progress | None = None,
) -> ReplayReport:
    """Decide every recorded tick again and compare with what was recorded.

    `entries` is the log as it was (`Archive.history`), from its beginning or from right behind `from_state`, which
    is used up. `overrides` changes parameters of policies in force: `{"balance.low": 3, "cooldown_ms": 0}`; the
    state is folded from recorded facts all the same, so each tick is judged on its own.
    Raises `UnknownThing` or `BadInput` for an override that names nothing or has a value of the wrong kind, and
    `UnknownThing` for one of a policy that was in force at no tick.
    """
    check_overrides(overrides or {})
    replay = _Replay(State() if from_state is None else from_state, dict(overrides or {}))
    for entry in entries:
        replay.take(entry)
        if on_progress is not None and replay.facts % PROGRESS_EVERY == 0:
            on_progress(replay.facts)
    return replay.finish()


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raises `UnknownThing` or `BadInput` unless every override names a parameter that exists and is in its range.

    Whether it goes together with the others depends on what was in force, so that is judged with the first tick.
    """
    for key, value in overrides.items():
        name, dot, param = key.partition(".")
        if not dot:
            _with_field(PolicySettings(), key, value)
        else:
            policies.check_param(name, param, value)


def each_once(entries: Iterable[Entry]) -> Iterator[Entry]:
    """A history without its repeats: what a source said again after the log had lost its memory counts once."""
    seen: set[tuple[str, int, int]] = set()
    for entry in entries:
        fact = entry.fact
        identity = (fact.source, fact.incarnation, fact.source_seq)
        if identity not in seen:
            seen.add(identity)
            yield entry


class _Replay:
    """A state that trails the log: at each tick it stands exactly where the tick was decided."""

    def __init__(self, state: State, overrides: dict[str, Any]) -> None:
        self.facts = 0
        self._state = state
        self._known_from = state.position
        self._overrides = Overrides(overrides)
        self._pending: deque[Entry] = deque()
        self._ticks = self._skipped = self._decisions = self._equal = 0
        self._difference: Difference | None = None
        self._commit: _Commit | None = None

    def take(self, entry: Entry) -> None:
        """Read on by one entry."""
        self.facts += 1
        event = entry.fact.event
        is_committed = entry.fact.source == COMMIT_SOURCE
        if self._commit is not None and is_committed and not isinstance(event, TickElapsed | StateCarried):
            self._compare(self._commit, entry)
        else:
            self._end_commit(entry.position.generation)
            if isinstance(event, TickElapsed) and is_committed:
                self._decide(entry, event)
        self._pending.append(entry)
        if isinstance(event, StateCarried) or len(self._pending) > PENDING_MAX:
            self._fold_to(entry.position)

    def finish(self) -> ReplayReport:
        """Sum up. The last commit may go on behind the end of what was given, so nothing is missing from it."""
        last = self._pending[-1].position if self._pending else self._state.position
        self._overrides.check_used(self._ticks)
        return ReplayReport(
            facts=self.facts, ticks=self._ticks, ticks_skipped=self._skipped, decisions=self._decisions,
            equal=self._equal, first_difference=self._difference, last=last,
        )  # fmt: skip

    def _fold_to(self, position: Position) -> None:
        while self._pending and self._pending[0].position <= position:
            entry = self._pending.popleft()
            if isinstance(entry.fact.event, StateCarried):
                self._check_carried(entry, entry.fact.event)
            apply(self._state, entry)

    def _decide(self, entry: Entry, tick: TickElapsed) -> None:
        if tick.decided_at < self._known_from:
            self._skipped += 1
            return
        if tick.decided_at < self._state.position:
            explanation = f"the tick at {entry.position} was decided at {tick.decided_at}, before a later commit"
            self._note(entry.position, tick.decided_at, explanation)
            return
        self._fold_to(tick.decided_at)
        recorded = self._state.policies
        self._state.policies = self._overrides.apply_to(recorded)
        derived = decide(self._state, tick).events
        self._state.policies = recorded
        self._ticks += 1
        self._commit = _Commit(entry.position, tick, deque(_as_recorded(event) for event in derived))

    def _compare(self, commit: _Commit, entry: Entry) -> None:
        derived = commit.derived.popleft() if commit.derived else None
        self._decisions += 1
        if derived == entry.fact.event:
            self._equal += 1
        else:
            self._differ(entry.position, commit.tick.decided_at, entry.fact.event, derived)

    def _end_commit(self, generation: int) -> None:
        """Something else follows. In another generation, the end of the commit may have been lost with Redis."""
        commit, self._commit = self._commit, None
        if commit is not None and commit.derived and commit.position.generation == generation:
            self._differ(commit.position, commit.tick.decided_at, None, commit.derived[0])

    def _check_carried(self, entry: Entry, carried: StateCarried) -> None:
        if codec.digest(carried.state.encode()) != carried.digest:
            explanation = f"the state carried at {entry.position} does not have the digest recorded with it"
            self._note(entry.position, entry.position, explanation)

    def _differ(self, position: Position, decided_at: Position, recorded: Event | None, derived: Event | None) -> None:
        explanation = explain(position, decided_at, recorded, derived)
        self._note(position, decided_at, explanation, recorded, derived)

    def _note(
        self,
        position: Position,
        decided_at: Position,
        explanation: str,
        recorded: Event | None = None,
        derived: Event | None = None,
    ) -> None:
        self._difference = self._difference or Difference(
            position=position, decided_at=decided_at, explanation=explanation,
            recorded=_plain(recorded), derived=_plain(derived),
        )  # fmt: skip


class _Commit:
    """The tick being compared, and the derived facts that no recorded one has matched yet."""

    def __init__(self, position: Position, tick: TickElapsed, derived: deque[Event]) -> None:
        self.position = position
        self.tick = tick
        self.derived = derived


class Overrides:
    """Policy parameters to decide with instead of the recorded ones."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._unused = set(values)
        self._patched: tuple[PolicySettings, PolicySettings] | None = None

    def apply_to(self, settings: PolicySettings) -> PolicySettings:
        """The policies in force, with the overridden parameters."""
        if not self._values:
            return settings
        if self._patched is None or self._patched[0] is not settings:
            self._patched = settings, self._patch(settings)
        return self._patched[1]

    def check_used(self, ticks: int) -> None:
        """Raises `UnknownThing` if some override never applied to anything."""
        if self._unused and ticks:
            raise UnknownThing(f"in force at no tick: {', '.join(sorted(self._unused))}")

    def _patch(self, settings: PolicySettings) -> PolicySettings:
        for key, value in self._values.items():
            settings = self._set(settings, key, value)
        return settings

    def _set(self, settings: PolicySettings, key: str, value: Any) -> PolicySettings:
        name, dot, param = key.partition(".")
        scale = settings.scale
        choices = (settings.dispatch, *settings.moves, *(() if scale is None else (scale,)))
        if not dot or any(choice.name == name for choice in choices):
            self._unused.discard(key)
        if not dot:
            return _with_field(settings, key, value)
        dispatch, *moves = (_with_param(choice, name, param, value) for choice in (settings.dispatch, *settings.moves))
        scale = None if scale is None else _with_param(scale, name, param, value)
        return replace(settings, dispatch=dispatch, moves=tuple(moves), scale=scale)


def _with_field(settings: PolicySettings, field: str, value: Any) -> PolicySettings:
    if field not in settings.__struct_fields__:
        raise UnknownThing(f"no policy setting {field!r}; known: {', '.join(settings.__struct_fields__)}")
    try:
        return msgspec.convert({**msgspec.structs.asdict(settings), field: value}, PolicySettings)
    except msgspec.ValidationError as error:
        raise BadInput(f"{field}: {error}") from error


def _with_param(choice: PolicyChoice, name: str, param: str, value: Any) -> PolicyChoice:
    if choice.name != name:
        return choice
    return PolicyChoice(choice.name, {**choice.params, param: value})


def explain(position: Position, decided_at: Position, recorded: Event | None, derived: Event | None) -> str:
    """One sentence for people."""
    at = f"decided at {decided_at}"
    if recorded is None:
        return f"after {position}, {at}: nothing more is recorded, but {_brief(derived)} is derived"
    if derived is None:
        return f"{position}, {at}: {_brief(recorded)} is recorded, but nothing more is derived"
    if type(recorded) is not type(derived):
        return f"{position}, {at}: {_brief(recorded)} is recorded, but {_brief(derived)} is derived"
    fields = [f for f in recorded.__struct_fields__ if getattr(recorded, f) != getattr(derived, f)]
    parts = (f"{f} is {getattr(recorded, f)!r}, derived {getattr(derived, f)!r}" for f in fields)
    return f"{position}, {at}: {_brief(recorded)}: {'; '.join(parts)}"


def _brief(event: Event | None) -> str:
    subjects = ("migration", "request", "operation", "scaling")
    named = [f"{f} {getattr(event, f)}" for f in subjects if getattr(event, f, None) is not None]
    return " ".join([type(event).__name__, *named[:1]])


def _as_recorded(event: Event) -> Event:
    """The event as a reader of the log gets it: floats that were integers, tuples that became lists, and the like."""
    return msgspec.json.decode(msgspec.json.encode(event), type=type(event))


def _plain(event: Event | None) -> dict[str, Any] | None:
    if event is None:
        return None
    return {"kind": type(event).__name__, **msgspec.to_builtins(event)}
