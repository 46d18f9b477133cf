"""The demo's operator: moves requests by hand, drains an instance under load, and can kill processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable

from midstream.api.cli.client import AdminClient, AdminProblem
from midstream.api.cli.up.cluster import LocalCluster

HAND_MOVE_EVERY_S = 0.7
DRAIN_AT = 0.35
"""Share of the play after which an instance is drained."""
UNDRAIN_AT = 0.7
KILL_AT = (0.25, 0.5, 0.75)


class Operator:
    """Acts through the admin API alone, besides killing."""

    def __init__(self, cluster: LocalCluster, admin: AdminClient, seconds: float, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._admin = admin
        self._seconds = seconds
        self._say = say
        self._rng = random.Random(7)
        self.ordered = 0
        self.refused = 0

    async def work(self, kill: tuple[str, ...]) -> None:
        """Do everything; ends with the play."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._move_by_hand())
            group.create_task(self._drain())
            for share, name in zip(KILL_AT, kill, strict=False):
                group.create_task(self._kill(self._seconds * share, name))

    async def _move_by_hand(self) -> None:
        end = asyncio.get_running_loop().time() + self._seconds
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(HAND_MOVE_EVERY_S)
            try:
                await asyncio.to_thread(self._move_one)
            except AdminProblem:
                self.refused += 1

    def _move_one(self) -> None:
        requests = [one for one in self._admin.items("/requests", limit=50) if one["migration"] is None]
        instances = [one["instance"] for one in self._admin.items("/instances") if not one["is_draining"]]
        if not requests:
            return
        request = self._rng.choice(requests)
        others = [name for name in instances if name != request["owner"]["instance"]]
        if others:
            self._admin.post("/migrations", {"request": request["request"], "target": self._rng.choice(others)})
            self.ordered += 1

    async def _drain(self) -> None:
        await asyncio.sleep(self._seconds * DRAIN_AT)
        self._say("draining i1 under load")
        order = await asyncio.to_thread(self._admin.post, "/instances/i1/drain", {})
        begun = asyncio.get_running_loop().time()
        await asyncio.to_thread(self._admin.finished, order["operation"], 60.0)
        self._say(f"i1 drained after {asyncio.get_running_loop().time() - begun:.1f} s")
        await asyncio.sleep(max(0.0, self._seconds * (UNDRAIN_AT - DRAIN_AT) - 2.0))
        await asyncio.to_thread(self._admin.post, "/instances/i1/undrain", {})

    async def _kill(self, after_s: float, name: str) -> None:
        await asyncio.sleep(after_s)
        for process in self._cluster.state.processes:
            if process.pid is not None and name in (process.name, process.kind):
                os.kill(process.pid, signal.SIGKILL)
                self._say(f"kill -9 {process.name}")
                return
