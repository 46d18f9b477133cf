"""Fair shares of what there is between tenants: deficit round robin (Shreedhar, Varghese, SIGCOMM'95). Pure.

The surplus form, which needs no cost below the quantum: whose turn it is serves while its deficit is above zero, each
request takes its cost off, and a new turn adds the quantum. A cost is prompt plus largest output in tokens; what a
request did not use of it is given back when it ends.
"""

from __future__ import annotations

from bisect import insort
from math import floor


class _Tenant:
    """What one tenant has waiting, first the one that is next, and what it may still spend in this turn."""

    __slots__ = ("deficit", "queue")

    def __init__(self) -> None:
        self.deficit = 0.0
        self.queue: list[tuple[int, int, str, int]] = []
        """(priority, order of arrival, request, cost)."""


class FairShares:
    """The requests that wait at one gateway for instances of one model. `waiting_max` bounds each tenant's queue."""

    def __init__(self, *, quantum: int, waiting_max: int) -> None:
        self._quantum = quantum
        self._waiting_max = waiting_max
        self._tenants: dict[str, _Tenant] = {}
        """In the order of their turns; those with nothing waiting are only debtors."""
        self._count = 0
        self._waiting: dict[str, tuple[str, tuple[int, int, str, int]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Cost of all that waits."""
        return sum(row[3] for _, row in self._waiting.values())

    def is_full(self, tenant: str) -> bool:
        """Does the tenant have as many waiting as it may."""
        known = self._tenants.get(tenant)
        return known is not None and len(known.queue) >= self._waiting_max

    def add(self, tenant: str, request: str, *, priority: int, cost: int) -> None:
        """Put a request behind those of its tenant that are of its class or a better one."""
        self._count += 1
        row = (priority, self._count, request, cost)
        insort(self._tenants.setdefault(tenant, _Tenant()).queue, row)
        self._waiting[request] = tenant, row

    def remove(self, request: str) -> None:
        """It waits no more, and was not served; unknown ones are no error."""
        if request in self._waiting:
            self._forget(request)

    def next(self) -> str | None:
        """The request whose turn it is; the same until it is taken or removed."""
        if not self._waiting:
            return None
        if not any(tenant.queue and tenant.deficit > 0 for tenant in self._tenants.values()):
            self._lift()
        return next(tenant.queue[0][2] for tenant in self._tenants.values() if tenant.queue and tenant.deficit > 0)

    def take(self, request: str) -> int:
        """It is served: its tenant pays. Returns the cost."""
        name, row = self._waiting[request]
        tenant = self._tenants[name]
        tenant.deficit -= row[3]
        self._forget(request)
        if name in self._tenants and tenant.deficit <= 0:
            self._tenants[name] = self._tenants.pop(name)
        return row[3]

    def refund(self, tenant: str, tokens: int) -> None:
        """A request ended that had been charged so much more than it used."""
        known = self._tenants.get(tenant)
        if known is not None:
            known.deficit = min(known.deficit + tokens, float(self._quantum))
            self._settle(tenant)

    def _lift(self) -> None:
        """A round: every waiting tenant gets its quantum; as many rounds at once as bring somebody's turn."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.queue]
        rounds = 1 + min(floor(max(0.0, -tenant.deficit) / self._quantum) for tenant in waiting)
        for tenant in waiting:
            tenant.deficit = min(tenant.deficit + rounds * self._quantum, float(self._quantum))

    def _forget(self, request: str) -> None:
        name, row = self._waiting.pop(request)
        self._tenants[name].queue.remove(row)
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Who has nothing waiting keeps its debts and nothing else."""
        tenant = self._tenants[name]
        if not tenant.queue and tenant.deficit >= 0:
            del self._tenants[name]
