"""Both ends take the best that both have, and say why."""

from __future__ import annotations

import pytest

from midstream.control.errors import Refused
from midstream.migration.transfers.choice import choose, name_of, unusable


def test_the_sources_first_that_the_target_has_is_taken():
    assert choose(("shm@a", "rpc"), ("rpc", "shm@a")).name == "shm"
    assert choose(("gloo", "rpc"), ("rpc",)).name == "rpc"


def test_P26_what_works_within_one_host_is_not_taken_between_two():
    choice = choose(("shm@a", "rpc"), ("shm@b", "rpc"))
    assert choice == ("rpc", "the source has shm@a, rpc; the target has shm@b, rpc")


def test_P26_an_offer_that_is_none_is_not_taken_and_its_reason_is_told():
    nothing = unusable("nccl", "KV is in host memory")
    assert choose((nothing, "rpc"), (nothing, "rpc")) == (
        "rpc",
        "the source has nccl!KV is in host memory, rpc; the target has nccl!KV is in host memory, rpc",
    )
    assert choose(("nccl@22703", "rpc"), (nothing, "rpc")).name == "rpc"
    assert name_of(nothing) == name_of("nccl@22703") == "nccl"


def test_P26_nothing_in_common_is_a_refusal_that_says_what_there_was():
    with pytest.raises(Refused, match=r"no_transfer: the source has shm@a; the target has shm@b, rpc"):
        choose(("shm@a",), ("shm@b", "rpc"))
    with pytest.raises(Refused, match="the source has nothing; the target has nothing"):
        choose((), ())
