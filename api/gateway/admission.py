"""Requests that wait at the gateway while every instance is saturated, and whose turn it is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from midstream.api.gateway.live import Live
from midstream.control.errors import Refused
from midstream.control.events import WaitingReported
from midstream.control.policies.shares import FairShares

if TYPE_CHECKING:
    from midstream.api.gateway.gateway import Gateway

PUMP_S: Final = 0.01
"""After a sign of room, so long until waiting requests are tried: signs come in bunches."""
REPORT_S: Final = 0.25
"""As often as controllers decide: they make room for the one whose turn it is."""
NOBODY: Final = (0, 0, 0, "")
BLIND_S: Final = 3.0
"""Without any load report for so long the fold says nothing about room: then nothing waits here (P20)."""


class Admission:
    """One queue of fair shares for each model. Who is dispatched at once never waits behind nobody."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._shares: dict[str, FairShares] = {}
        self._reported: tuple[int, int, int, str] = NOBODY
        self._reported_at = float("-inf")
        self._heard_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(len(shares) for shares in self._shares.values())

    @property
    def is_blind(self) -> bool:
        """Is the log away, so that nobody knows who has room."""
        return self._gateway.now - self._heard_at > BLIND_S

    def must_wait(self, live: Live) -> bool:
        """Is it somebody else's turn. A request of the high class never waits here."""
        return bool(self._shares.get(live.spec.model)) and not live.is_high

    def check(self, model: str, tenant: str) -> None:
        """Raises `Refused` if the tenant has too many waiting."""
        shares = self._shares.get(model)
        if shares is not None and shares.is_full(tenant):
            limit = self._gateway.settings.tenant_waiting_max
            raise Refused("tenant_queue_full", f"{limit} requests of {tenant or 'this gateway'} are waiting")

    def put(self, live: Live) -> None:
        """Let it wait. Raises `Refused` if its tenant has too many waiting."""
        spec = live.spec
        self.check(spec.model, spec.tenant)
        if spec.model not in self._shares:
            self._shares[spec.model] = FairShares(waiting_max=self._gateway.settings.tenant_waiting_max)
        self._shares[spec.model].add(
            spec.tenant,
            live.request,
            priority=spec.priority,
            prompt_tokens=len(spec.prompt),
            output_tokens_max=spec.sampling.max_tokens,
        )
        self.room()

    def ended(self, live: Live) -> None:
        """A request is over, waiting or not: it waits no more, and what it used counts for its tenant."""
        shares = self._shares.get(live.spec.model)
        if shares is not None:
            shares.ended(live.request, output_tokens=len(live.ids))
            self.room()

    def keep(self, live: Live) -> None:
        """It waits for room as long as there is an instance at all, and for one as long as any other request would."""
        gateway = self._gateway
        if gateway.dispatcher.has_any(live):
            live.sent_at = gateway.now
            self.room()
        elif gateway.now - live.sent_at >= gateway.settings.seek_ms / 1e3:
            gateway.fail(live, "no_capacity", "no instance takes requests any more")

    def reported(self) -> None:
        """A load report was folded."""
        self._heard_at = self._gateway.now
        self.room()

    def room(self) -> None:
        """There may be room: try soon."""
        if self._timer is None and (self.waiting or any(self._reported)):
            self._timer = asyncio.get_running_loop().call_later(PUMP_S, self.pump)

    def pump(self) -> None:
        """Dispatch in turn until the next in turn finds no room."""
        self._timer = None
        for shares in self._shares.values():
            while (request := shares.next()) is not None:
                live = self._gateway.live[request]
                choice = self._gateway.dispatcher.choose_open(live)
                if choice is None:
                    break
                shares.take(request)
                self._gateway.dispatcher.dispatch(live, choice, "new")
        self.report()

    def report(self) -> None:
        """Say how much waits, if that changed and was not said a moment ago."""
        gateway = self._gateway
        if gateway.now - self._reported_at < REPORT_S and self.waiting > 0:
            return
        size = (self.waiting, sum(shares.tokens for shares in self._shares.values()), *self._head())
        if size == self._reported:
            return
        self._reported, self._reported_at = size, gateway.now
        requests, tokens, head_tokens, head_model = size
        gateway.recorder.record(
            WaitingReported(
                gateway=gateway.name, requests=requests, tokens=tokens, head_tokens=head_tokens, head_model=head_model
            )
        )

    def _head(self) -> tuple[int, str]:
        """Prompt tokens and model of the one whose turn it is; of several models' the longest."""
        turns = (shares.next() for shares in self._shares.values())
        heads = (self._gateway.live[request] for request in turns if request is not None)
        return max(((live.tokens, live.spec.model) for live in heads), default=(0, ""))
