"""What a load needs of the cluster's operator: policies put in force, idleness, and what the log says of moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from midstream.api.bench.arms import policies_of
from midstream.api.bench.serve_figures import Load
from midstream.api.bench.serve_load import Answer
from midstream.api.cli.client import AdminClient
from midstream.control.errors import MidstreamError

IDLE_S: Final = 60.0
SETTLE_S: Final = 0.5
"""From a policy's fact being seen by one process to all having seen it."""
POLL_S: Final = 0.1

Facts = dict[str, list[dict[str, Any]]]
KINDS: Final = ("MigrationCommitted", "MigrationAborted", "DowntimeMeasured")


def load_of(answers: Sequence[Answer], said: Facts, *, preemptions: int) -> Load:
    """Answers, and facts about moves by kind."""
    return Load(
        answers=tuple(answers),
        downtimes_ms=tuple(fact["event"]["downtime_ms"] for fact in said["DowntimeMeasured"]),
        moves=len(said["MigrationCommitted"]),
        moves_failed=len(said["MigrationAborted"]),
        preemptions=preemptions,
    )


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the log at which the cluster was idle."""

    position: str
    preemptions: int
    """Since the engines started."""


class Operator:
    """What the bench asks of the admin API. Calls block: not from the event loop."""

    def __init__(self, admin: AdminClient, params: Mapping[str, Mapping[str, float]]) -> None:
        self._admin = admin
        self._params = params

    def configure(self, arm: str) -> None:
        """Put policies in force, everywhere."""
        chosen = policies_of(arm)
        moves = [
            {"name": move.name, "params": {**self._params.get(move.name, {}), **move.params}} for move in chosen.moves
        ]
        dispatch = {"name": chosen.dispatch.name, "params": chosen.dispatch.params}
        self._admin.put("/policies", self._admin.get("/policies") | {"dispatch": dispatch, "moves": moves})
        time.sleep(SETTLE_S)

    def when_idle(self) -> Moment:
        """Wait until no instance holds anything. Raises `MidstreamError`."""
        _wait(
            lambda: all(map(_is_idle, self._instances())), f"the cluster is not idle {IDLE_S:g} s after the last answer"
        )
        position = self._admin.get("/health")["position"]
        return Moment(position=position, preemptions=sum(one["load"]["preemptions"] for one in self._instances()))

    def _instances(self) -> list[dict[str, Any]]:
        return list(self._admin.items("/instances"))

    def moves(self, before: Moment, after: Moment) -> Facts:
        """Facts about moves in between, once the archive has all of them. Raises `MidstreamError`.

        There will be later facts: each instance reports every second.
        """
        _wait(
            lambda: bool(list(self._admin.items("/events", limit=1, after=after.position))),
            f"the archive has not got to {after.position} within {IDLE_S:g} s",
        )
        return {kind: list(self._admin.items("/events", kind=kind, after=before.position)) for kind in KINDS}


def _wait(is_so: Callable[[], bool], problem: str) -> None:
    """Ask until it is so. Raises `MidstreamError` after `IDLE_S`."""
    deadline = time.monotonic() + IDLE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise MidstreamError(problem)
        time.sleep(POLL_S)


def _is_idle(instance: dict[str, Any]) -> bool:
    load = instance["load"]
    is_empty = load["blocks_free"] == instance["blocks_total"]
    return is_empty and not (load["blocks_reserved"] or load["running"] or load["waiting"])
