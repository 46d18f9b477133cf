"""Fair shares between tenants: nobody is starved, whatever the others do and ask for."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.control.policies.shares import FairShares

PROMPT = 100


def put(shares: FairShares, request: str, most: int, *, priority: int = 0, prompt: int = PROMPT) -> None:
    """A request of the tenant that is its first letter."""
    shares.add(request[0], request, priority=priority, prompt_tokens=prompt, output_tokens_max=most)


def served(shares: FairShares, tokens: int, *, most: int) -> Counter[str]:
    """Take in turn, one at a time, until so many tokens were used, each the largest output; tokens by tenant."""
    got: Counter[str] = Counter()
    while tokens > 0 and (request := shares.next()) is not None:
        shares.take(request)
        shares.ended(request, output_tokens=most)
        tokens -= PROMPT + most
        got[request[0]] += PROMPT + most
    return got


def always_waiting(
    most: Mapping[str, int], places: int, ends: int, output: Callable[[str], int], late: str = ""
) -> Counter[str]:
    """Tokens used by tenants that always have one more waiting, with so many places; `late` comes at half time."""
    shares, used, running = FairShares(waiting_max=10), Counter[str](), deque[str]()
    for name in most:
        if name != late:
            put(shares, f"{name}0", most[name])
    for number in range(ends):
        if late and number == ends // 2:
            used.clear()
            put(shares, f"{late}0", most[late])
        while len(running) < places:
            request = shares.next()
            assert request is not None
            shares.take(request)
            running.append(request)
            put(shares, f"{request[0]}{number}-{len(running)}", most[request[0]])
        ended = running.popleft()
        tokens = output(ended[0])
        shares.ended(ended, output_tokens=tokens)
        used[ended[0]] += PROMPT + tokens
    return used


def jain(values: list[int]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


@settings(deadline=None)
@given(st.lists(st.integers(1, 2_000), min_size=2, max_size=6), st.integers(1, 32), st.integers(0, 2**32))
def test_of_tenants_that_always_wait_none_gets_more_than_what_fits_ahead(
    mosts: list[int], places: int, seed: int
) -> None:
    """However long they wait: counts differ by a request, and what was expected of those under way may be wrong."""
    rng, most = random.Random(seed), dict(zip("abcdef", mosts, strict=False))
    used = always_waiting(most, places, 1_500, lambda name: rng.randint(1, most[name]))
    got = [used[name] for name in most]
    assert max(got) - min(got) <= (places + 1) * (PROMPT + max(mosts))


def test_what_is_asked_for_and_not_used_costs_no_share() -> None:
    """One asks for twenty times what it uses; all requests use the same."""
    used = always_waiting({"a": 4_000, "b": 100}, 16, 3_200, lambda _: 100)
    assert jain(list(used.values())) >= 0.999


def test_who_asked_for_much_while_alone_has_saved_up_nothing() -> None:
    used = always_waiting({"a": 100_000, "b": 100}, 16, 2_000, lambda _: 100, late="b")
    assert jain(list(used.values())) >= 0.98


def test_who_uses_more_than_expected_pays_for_it() -> None:
    outputs = {"a": iter([10] * 50 + [4_000] * 5_000), "b": iter([100] * 100_000)}
    used = always_waiting({"a": 4_000, "b": 100}, 8, 4_000, lambda name: next(outputs[name]))
    assert jain(list(used.values())) >= 0.98


def test_a_flood_does_not_delay_others() -> None:
    shares = FairShares(waiting_max=10_000)
    for number in range(1_000):
        put(shares, f"f{number}", 400)
    served(shares, 20_000, most=400)
    for tenant in "abcdeghij":
        for number in range(20):
            put(shares, f"{tenant}{number}", 400)
    got = served(shares, 90_000, most=400)
    assert len(got) == 10
    assert jain(list(got.values())) >= 0.98


def test_within_a_tenant_class_comes_first_then_arrival() -> None:
    shares = FairShares(waiting_max=10)
    for request, priority in (("a1", 1), ("a2", 0), ("a3", 1), ("a4", 0)):
        put(shares, request, 1, priority=priority)
    order = []
    while (request := shares.next()) is not None:
        assert shares.next() == request
        shares.take(request)
        order.append(request)
    assert order == ["a2", "a4", "a1", "a3"]


def test_equal_tenants_take_turns() -> None:
    shares = FairShares(waiting_max=10)
    for number in range(2):
        for name in "abc":
            put(shares, f"{name}{number}", 1)
    order = []
    while (request := shares.next()) is not None:
        shares.take(request)
        order.append(request)
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1"]


def test_what_a_tenant_has_under_way_counts_against_it() -> None:
    shares = FairShares(waiting_max=10)
    put(shares, "a1", 1_000)
    shares.take("a1")
    for request in ("a2", "b1", "b2"):
        put(shares, request, 100)
    order = []
    while (request := shares.next()) is not None:
        shares.take(request)
        order.append(request)
    assert order == ["b1", "b2", "a2"]


def test_a_tenant_that_leaves_with_debts_comes_back_with_them() -> None:
    shares = FairShares(waiting_max=10)
    put(shares, "b1", 100)
    put(shares, "a1", 1_000)
    shares.take("a1")
    shares.ended("a1", output_tokens=1_000)
    for request in ("a2", "b2", "b3"):
        put(shares, request, 100)
    order = []
    while (request := shares.next()) is not None:
        shares.take(request)
        order.append(request)
    assert order == ["b1", "b2", "b3", "a2"]


def test_a_queue_is_bounded_and_what_is_cancelled_is_gone() -> None:
    shares = FairShares(waiting_max=2)
    put(shares, "a1", 5)
    put(shares, "a2", 6)
    assert (shares.is_full("a"), shares.is_full("b"), len(shares), shares.tokens) == (True, False, 2, 2 * PROMPT + 11)
    shares.ended("a1", output_tokens=0)
    shares.ended("a1", output_tokens=0)
    assert (shares.next(), shares.is_full("a"), len(shares)) == ("a2", False, 1)
    shares.ended("a2", output_tokens=0)
    assert (shares.next(), len(shares), shares._tenants) == (None, 0, {}), "nothing is kept of who owes nothing"


def test_P28_tenants_that_owe_nothing_any_more_are_forgotten() -> None:
    shares = FairShares(waiting_max=2)
    for number in range(100):
        name = chr(200 + number)
        put(shares, name, 10)
        shares.take(name)
        shares.ended(name, output_tokens=10)
        for request in ("z0", "z1"):
            put(shares, request, 400)
            shares.take(request)
            shares.ended(request, output_tokens=400)
    assert len(shares._tenants) <= 2


def test_an_unknown_request_is_no_error_at_its_end_only() -> None:
    shares = FairShares(waiting_max=2)
    shares.ended("nobody", output_tokens=5)
    assert shares.next() is None
    with pytest.raises(KeyError):
        shares.take("nothing")
