"""A transfer that could not connect to a target is asked for last there, for a while."""

from __future__ import annotations

from midstream.control.ids import Owner
from midstream.instance.detours import AVOID_S, Detours
from midstream.migration.transfers.choice import choose

A, B = Owner("a", 1), Owner("b", 1)
OFFERED = ("nccl@2.27", "shm@here", "rpc")


def test_P26_a_transfer_that_failed_gives_way_there_and_only_there() -> None:
    detours = Detours()
    detours.add(B, "nccl", 10.0)
    offers = detours.offers(OFFERED, B, 14.0)
    assert offers == ("nccl!no connection to b#1 4 s ago", "shm@here", "rpc", "nccl@2.27")
    name, why = choose(offers, OFFERED)
    assert name == "shm"
    assert "nccl!no connection to b#1 4 s ago" in why
    assert detours.offers(OFFERED, A, 14.0) == OFFERED
    assert detours.offers(OFFERED, Owner("b", 2), 14.0) == OFFERED, "it came back: a new try"


def test_P26_where_nothing_else_is_left_it_is_tried_again() -> None:
    detours = Detours()
    detours.add(B, "rpc", 10.0)
    assert choose(detours.offers(("rpc",), B, 11.0), OFFERED).name == "rpc"
    detours.add(B, "shm", 11.0)
    assert choose(detours.offers(OFFERED, B, 12.0), ("shm@here", "rpc")).name == "shm"


def test_it_is_forgotten_after_a_while() -> None:
    detours = Detours()
    detours.add(B, "shm", 10.0)
    assert detours.offers(OFFERED, B, 10.0 + AVOID_S) == OFFERED
