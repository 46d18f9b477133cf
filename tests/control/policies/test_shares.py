"""Fair shares between tenants: nobody is starved, whatever the others do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.control.policies.shares import FairShares


def served(shares: FairShares, tokens: int) -> dict[str, int]:
    """Take in turn until so many tokens were spent; what each tenant (first letter of a request) got."""
    got: dict[str, int] = {}
    while tokens > 0 and (request := shares.next()) is not None:
        cost = shares.take(request)
        tokens -= cost
        got[request[0]] = got.get(request[0], 0) + cost
    return got


def jain(values: list[int]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


@settings(deadline=None)
@given(st.lists(st.integers(200, 2_000), min_size=2, max_size=6), st.integers(50, 4_000))
def test_of_tenants_that_always_wait_none_gets_more_than_a_request_and_a_quantum_ahead(
    costs: list[int], quantum: int
) -> None:
    """Shreedhar and Varghese's bound, in the surplus form: largest cost + quantum."""
    shares = FairShares(quantum=quantum, waiting_max=10_000)
    largest = max(costs)
    for name, cost in zip("abcdef", costs, strict=False):
        for number in range(16 * largest // cost):
            shares.add(name, f"{name}{number}", priority=0, cost=cost)
    got = served(shares, 8 * largest)
    per_tenant = [got.get(name, 0) for name, _ in zip("abcdef", costs, strict=False)]
    assert max(per_tenant) - min(per_tenant) <= 2 * (largest + quantum)


def test_a_flood_does_not_delay_others() -> None:
    shares = FairShares(quantum=1_000, waiting_max=10_000)
    for number in range(1_000):
        shares.add("f", f"f{number}", priority=0, cost=500)
    served(shares, 20_000)
    for tenant in "abcdeghij":
        for number in range(20):
            shares.add(tenant, f"{tenant}{number}", priority=0, cost=500)
    got = served(shares, 90_000)
    assert len(got) == 10
    assert jain(list(got.values())) >= 0.98


def test_within_a_tenant_class_comes_first_then_arrival() -> None:
    shares = FairShares(quantum=10_000, waiting_max=10)
    for request, priority in (("a1", 1), ("a2", 0), ("a3", 1), ("a4", 0)):
        shares.add("a", request, priority=priority, cost=1)
    order = []
    while (request := shares.next()) is not None:
        assert shares.next() == request
        shares.take(request)
        order.append(request)
    assert order == ["a2", "a4", "a1", "a3"]


def test_what_was_not_used_is_given_back() -> None:
    """Two tenants ask for 1000 tokens each time, one uses 100 of them: what they use comes out alike."""
    shares = FairShares(quantum=500, waiting_max=10_000)
    used = {"a": 0, "b": 0}
    for number in range(2_000):
        shares.add("a", f"a{number}", priority=0, cost=1_000)
        shares.add("b", f"b{number}", priority=0, cost=1_000)
    for _ in range(600):
        request = shares.next()
        assert request is not None
        shares.take(request)
        actual = 100 if request[0] == "a" else 1_000
        used[request[0]] += actual
        shares.refund(request[0], 1_000 - actual)
    assert jain(list(used.values())) >= 0.95


def test_a_tenant_that_leaves_with_debts_comes_back_with_them() -> None:
    shares = FairShares(quantum=100, waiting_max=10)
    shares.add("a", "a1", priority=0, cost=1_000)
    shares.take("a1")
    shares.add("a", "a2", priority=0, cost=100)
    shares.add("b", "b1", priority=0, cost=100)
    shares.add("b", "b2", priority=0, cost=100)
    assert [shares.take(shares.next() or "") and name for name in ("b1", "b2", "a2")] == ["b1", "b2", "a2"]


def test_a_queue_is_bounded_and_what_is_cancelled_is_gone() -> None:
    shares = FairShares(quantum=100, waiting_max=2)
    shares.add("a", "a1", priority=0, cost=5)
    shares.add("a", "a2", priority=0, cost=6)
    assert (shares.is_full("a"), shares.is_full("b"), len(shares), shares.tokens) == (True, False, 2, 11)
    shares.remove("a1")
    shares.remove("a1")
    assert (shares.next(), shares.is_full("a"), len(shares)) == ("a2", False, 1)
    shares.remove("a2")
    assert (shares.next(), len(shares), shares._tenants) == (None, 0, {}), "nothing is kept of who owes nothing"


def test_an_unknown_tenant_gets_no_refund() -> None:
    shares = FairShares(quantum=100, waiting_max=2)
    shares.refund("nobody", 5)
    assert shares.next() is None
    with pytest.raises(KeyError):
        shares.take("nothing")
