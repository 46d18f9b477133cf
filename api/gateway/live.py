"""One admitted request at the gateway: its ledger, its tokens, its times, and the stream its client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from midstream.api.gateway.port import Chunk
from midstream.control.ids import Node
from midstream.control.state import HIGH_PRIORITY_MAX
from midstream.migration.protocol.ledger import Ledger
from midstream.migration.protocol.messages import RequestSpec


class Gaps:
    """Times between deliveries of one request, milliseconds."""

    def __init__(self, admitted_at: float) -> None:
        self.admitted_at = admitted_at
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.tokens = 0
        self.largest_ms = 0.0

    @property
    def ttft_ms(self) -> float:
        """Admission to first token, queueing included; 0 without one."""
        return 0.0 if self.first_at is None else (self.first_at - self.admitted_at) * 1e3

    @property
    def mean_ms(self) -> float:
        """Mean gap per token; 0 until there are two."""
        if self.first_at is None or self.last_at is None or self.tokens < 2:
            return 0.0
        return (self.last_at - self.first_at) * 1e3 / (self.tokens - 1)

    def add(self, tokens: int, now: float) -> float:
        """Note a delivery; return the gap before it, 0 for the first."""
        gap_ms = 0.0 if self.last_at is None else (now - self.last_at) * 1e3
        self.first_at = now if self.first_at is None else self.first_at
        self.last_at = now
        self.tokens += tokens
        self.largest_ms = max(self.largest_ms, gap_ms)
        return gap_ms


class Seam:
    """A hand-over whose cost to the client is being measured: the larger of the gaps around the tail."""

    def __init__(self, migration: str, normal_gap_ms: float) -> None:
        self.migration = migration
        self.normal_gap_ms = normal_gap_ms
        self.gap_ms = 0.0
        self.is_past_tail = False
        """The tail was delivered (or was empty): the next tokens are the new owner's own."""


class Keeper(Protocol):
    """What a stream asks of its gateway."""

    def cancel(self, live: Live, cause: str) -> None: ...


class Live:
    """An admitted request, and the stream of its tokens: iterate over it, or `watch` and `take`, or `cancel` it.

    The stream reads from the ledger's own tokens, so a slow client costs a cursor, not a queue.
    """

    def __init__(self, spec: RequestSpec, keeper: Keeper, now: float) -> None:
        self.request = spec.request
        self.spec = spec
        self.ledger = Ledger(request=spec.request)
        self.ids: list[int] = []
        self.logprobs: list[bytes] = []
        self.finish: str | None = None
        self.error: tuple[str, str] | None = None
        self.gaps = Gaps(now)
        self.seam: Seam | None = None
        self.node: Node | None = None
        """Where the present owner listens."""
        self.heard_at = now
        self.sent_at = now
        self.refusals = 0
        self.avoid: dict[str, None] = {}
        """Instances that refused or lost this request since its last token."""
        self._keeper = keeper
        self._changed = asyncio.Event()
        self._on_news: Callable[[], None] = self._changed.set
        self._taken = 0
        self._is_told = False
        """Its end was taken."""

    @property
    def tokens(self) -> int:
        """What an instance would have to compute now: its prompt, and what was delivered."""
        return len(self.spec.prompt) + len(self.ids)

    @property
    def is_high(self) -> bool:
        """Is it of the high class."""
        return self.spec.priority <= HIGH_PRIORITY_MAX

    @property
    def is_over(self) -> bool:
        """Nothing more will be delivered."""
        return self.finish is not None or self.error is not None

    def wake(self) -> None:
        """There is something new for the client."""
        self._on_news()

    def watch(self, on_news: Callable[[], None]) -> None:
        """See `api.gateway.port.Stream`."""
        self._on_news = on_news
        on_news()

    def take(self) -> Chunk | None:
        """See `api.gateway.port.Stream`."""
        first, self._taken = self._taken, len(self.ids)
        if self._is_told or (first == self._taken and not self.is_over):
            return None
        self._is_told = self.is_over
        return Chunk(
            ids=tuple(self.ids[first:]), logprobs=tuple(self.logprobs[first:]), finish=self.finish, error=self.error
        )

    def cancel(self, cause: str = "client") -> None:
        """End the request now; after its end a no-op."""
        self._keeper.cancel(self, cause)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        while not self._is_told:
            chunk = self.take()
            if chunk is None:
                self._changed.clear()
                await self._changed.wait()
            else:
                yield chunk
