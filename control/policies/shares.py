"""Fair shares of what there is between tenants: who used the least is next (virtual token counters, OSDI'24). Pure.

After Sheng et al., "Fairness in Serving Large Language Models". A tenant's count is what its requests that waited here
used, prompts and outputs in tokens; for those under way, what they are expected to use: the prompt and the mean output
of its requests before, or the largest while there were none. When one ends, what it did use counts, more or less. Who
begins to wait starts no lower than the least that one of those who wait has used: nobody saves up turns.
"""

from __future__ import annotations

from bisect import insort
from typing import Final, NamedTuple

MEAN_WEIGHT: Final = 1 / 8
"""Weight of the latest output in a tenant's mean."""


class _Waiting(NamedTuple):
    """A request that waits; the order is that of its tenant's queue."""

    priority: int
    arrival: int
    request: str
    prompt_tokens: int
    output_tokens_max: int


class _Running(NamedTuple):
    """A request that was taken, and what it is expected to use."""

    tenant: str
    prompt_tokens: int
    expected: float


class _Tenant:
    """What one tenant has waiting, first the one that is next, and what it used, tokens."""

    __slots__ = ("expected", "mean_output", "queue", "running", "used")

    def __init__(self) -> None:
        self.queue: list[_Waiting] = []
        self.running = 0
        self.used = 0.0
        """By requests that ended."""
        self.expected = 0.0
        """By those under way."""
        self.mean_output: float | None = None

    @property
    def count(self) -> float:
        """The tenant with the least is next."""
        return self.used + self.expected

    def estimate(self, row: _Waiting) -> float:
        """Tokens that a request is expected to use."""
        most = float(row.output_tokens_max)
        return row.prompt_tokens + (most if self.mean_output is None else min(most, self.mean_output))

    def learn(self, output_tokens: int) -> None:
        """One more output for the mean."""
        mean = self.mean_output
        self.mean_output = float(output_tokens) if mean is None else mean + MEAN_WEIGHT * (output_tokens - mean)


class FairShares:
    """The requests that wait at one gateway for instances of one model. `waiting_max` bounds each tenant's queue."""

    def __init__(self, *, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._tenants: dict[str, _Tenant] = {}
        """Who was served last comes last: of equal counts the first is next."""
        self._arrivals = 0
        self._floor = 0.0
        """The least that any of those who wait has used; never falls."""
        self._waiting: dict[str, tuple[str, _Waiting]] = {}
        self._running: dict[str, _Running] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Prompts and largest outputs of all that waits."""
        return sum(row.prompt_tokens + row.output_tokens_max for _, row in self._waiting.values())

    def is_full(self, tenant: str) -> bool:
        """Does the tenant have as many waiting as it may."""
        known = self._tenants.get(tenant)
        return known is not None and len(known.queue) >= self._waiting_max

    def add(self, name: str, request: str, *, priority: int, prompt_tokens: int, output_tokens_max: int) -> None:
        """Put a request behind those of its tenant that are of its class or a better one."""
        self._arrivals += 1
        row = _Waiting(priority, self._arrivals, request, prompt_tokens, output_tokens_max)
        tenant = self._tenants.setdefault(name, _Tenant())
        if not tenant.queue:
            tenant.used = max(tenant.used, self._floor - tenant.expected)
        insort(tenant.queue, row)
        self._waiting[request] = name, row

    def next(self) -> str | None:
        """The request whose turn it is; the same until it is taken or one ends."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.queue]
        return min(waiting, key=lambda tenant: tenant.count).queue[0].request if waiting else None

    def take(self, request: str) -> None:
        """It is served: what it is expected to use counts."""
        self._raise_floor()
        name, row = self._waiting.pop(request)
        tenant = self._tenants[name] = self._tenants.pop(name)
        tenant.queue.remove(row)
        running = _Running(name, row.prompt_tokens, tenant.estimate(row))
        tenant.running += 1
        tenant.expected += running.expected
        self._running[request] = running

    def ended(self, request: str, *, output_tokens: int) -> None:
        """It waits no more, or was served and used so much; unknown ones are no error."""
        if request in self._waiting:
            name, row = self._waiting.pop(request)
            self._tenants[name].queue.remove(row)
            self._forget(name)
        elif request in self._running:
            running = self._running.pop(request)
            self._settle(running, self._tenants[running.tenant], output_tokens)
            self._forget(running.tenant)

    def _settle(self, running: _Running, tenant: _Tenant, output_tokens: int) -> None:
        tenant.running -= 1
        tenant.expected = tenant.expected - running.expected if tenant.running else 0.0
        tenant.used += running.prompt_tokens + output_tokens
        tenant.learn(output_tokens)

    def _raise_floor(self) -> None:
        least = min((tenant.used for tenant in self._tenants.values() if tenant.queue), default=self._floor)
        if least > self._floor:
            self._floor = least
            for name in list(self._tenants):
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Who has nothing here and would start at the floor anyway is forgotten; who used more is remembered."""
        tenant = self._tenants[name]
        if not tenant.queue and not tenant.running and tenant.used <= self._floor:
            del self._tenants[name]
