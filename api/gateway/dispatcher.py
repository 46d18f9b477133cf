"""Choosing an instance for a request, the first time and again, by the dispatch policy in force."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from midstream.api.gateway.live import Live
from midstream.control.events import RequestDispatched
from midstream.control.ids import Owner
from midstream.control.policies import DispatchChoice, DispatchWanted, choose, needs_cached
from midstream.control.policies.base import CANDIDATES_MAX
from midstream.control.policies.candidates import candidates
from midstream.control.policies.saturation import saturated, takes
from midstream.migration.plan import blocks_for
from midstream.migration.protocol.ledger import Redispatch

if TYPE_CHECKING:
    from midstream.api.gateway.gateway import Gateway

SEEK_RETRY_S = 0.2


class Dispatcher:
    """Reads the gateway's fold and its own dispatches in flight; what it chooses becomes a fact."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._turn = 0

    def choose(self, live: Live) -> DispatchChoice | None:
        """An instance for the request; one that just refused it only when there is no other."""
        wanted = self._wanted(live)
        spared = replace(wanted, exclude=wanted.exclude | frozenset(live.avoid))
        return self._choose(spared) or self._choose(wanted)

    def choose_open(self, live: Live) -> DispatchChoice | None:
        """An instance that takes a new request at once; any while the log is away and nobody knows."""
        gateway, wanted = self._gateway, self._wanted(live)
        choice = self._choose(wanted)
        if choice is None or gateway.admission.is_blind:
            return choice
        state, sent, depth = gateway.follower.state, gateway.peers.in_flight(), gateway.settings.queue_depth
        if takes(state, choice.owner.instance, wanted, sent, depth):
            return choice
        return self._choose(replace(wanted, exclude=wanted.exclude | saturated(state, wanted, sent, depth)))

    def has_any(self, live: Live) -> bool:
        """Is there an instance that may take the request, at once or later."""
        return bool(candidates(self._gateway.follower.state, self._asked(live)))

    def _choose(self, wanted: DispatchWanted) -> DispatchChoice | None:
        gateway = self._gateway
        return choose(gateway.follower.state, wanted, gateway.peers.in_flight(), self._turn)

    def _wanted(self, live: Live) -> DispatchWanted:
        return replace(self._asked(live), cached=self._cached(live))

    def _asked(self, live: Live) -> DispatchWanted:
        """What is wanted, without where it is cached: looking that up costs."""
        spec = live.spec
        return DispatchWanted(
            request=spec.request,
            prompt_tokens=live.tokens,
            output_tokens_max=spec.sampling.max_tokens - len(live.ids),
            priority=spec.priority,
            model=spec.model or None,
            exclude=self._gateway.peers.silent(),
            session=spec.session,
        )

    def _cached(self, live: Live) -> dict[str, int]:
        """Where how much of its prompt is cached, if the policy in force wants to know."""
        if not needs_cached(self._gateway.follower.state):
            return {}
        return self._gateway.peers.cached((*live.spec.prompt, *live.ids))

    def dispatch(self, live: Live, choice: DispatchChoice, cause: str) -> None:
        """Give the request to the chosen instance, as a fact and as the ledger's next epoch."""
        gateway, owner = self._gateway, choice.owner
        self._turn += 1
        gateway.peers.learn(owner, choice.address)
        gateway.peers.dispatched(owner, live.request, self._blocks(live, choice), live.tokens)
        self._say(
            live,
            owner,
            live.ledger.epoch + 2,
            cause,
            policy=gateway.follower.state.policies.dispatch.name,
            scores=choice.scores[:CANDIDATES_MAX],
            reason=choice.reason,
            waited_ms=float(round((gateway.now - live.gaps.admitted_at) * 1e3)) if live.ledger.phase == "new" else 0.0,
        )
        gateway.feed(live, Redispatch(owner))

    def announce_again(self, live: Live) -> None:
        """The log may have lost its memory: say again where a live request is, if it is anywhere."""
        if live.ledger.phase != "new":
            self._say(live, live.ledger.owner, live.ledger.epoch, "again")

    async def seek(self, live: Live, cause: str) -> None:
        """Look for a new owner until there is one, the old one is heard again, or time is up."""
        gateway = self._gateway
        deadline = gateway.now + gateway.settings.seek_ms / 1e3
        while live.ledger.phase == "seeking":
            choice = self.choose(live)
            if choice is not None:
                self.dispatch(live, choice, cause)
                return
            if gateway.now >= deadline:
                gateway.fail(live, "no_capacity", f"no instance could take the request on ({cause})")
                return
            await asyncio.sleep(SEEK_RETRY_S)

    def _say(self, live: Live, owner: Owner, epoch: int, cause: str, **choice: Any) -> None:
        """Record where a request is; `choice` is policy, scores and reason, if it was just chosen."""
        fact = RequestDispatched(
            request=live.request,
            gateway=self._gateway.name,
            owner=owner,
            epoch=epoch,
            prompt_tokens=len(live.spec.prompt),
            delivered_tokens=len(live.ids),
            output_tokens_max=live.spec.sampling.max_tokens,
            priority=live.spec.priority,
            tenant=live.spec.tenant,
            cause=cause,
            **choice,
        )
        self._gateway.recorder.record(fact)

    def _blocks(self, live: Live, choice: DispatchChoice) -> int:
        view = self._gateway.follower.state.instances[choice.owner.instance]
        return blocks_for(live.tokens + 1, view.fingerprint.block_tokens)
