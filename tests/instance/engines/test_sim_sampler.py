"""The sampler: every parameter does what it says, and nothing but parameters, candidates and outputs matters."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.model import EOS, FIRST_ID, Candidates, Model
from midstream.instance.engines.sim.reference import reference_output
from midstream.instance.engines.sim.sampler import Chooser, decode_entry
from midstream.migration.protocol.messages import RequestSpec, Sampling

CANDIDATES = Candidates((10, 11, 12, 13), (1.0, 4.0, 2.0, 3.0), False)
ENDING = CANDIDATES._replace(ends=True)
CONFIG = SimConfig(eos_probability=0.05)


def chooser(request: str = "r", outputs: tuple[int, ...] = (), **sampling: object) -> Chooser:
    return Chooser(spec(request, **sampling), outputs)


def spec(request: str = "r", **sampling: object) -> RequestSpec:
    settings = {"max_tokens": 500} | sampling
    return RequestSpec(request=request, prompt=(5, 6, 7), sampling=Sampling(**settings))


def draws(count: int = 400, candidates: Candidates = CANDIDATES, **sampling: object) -> Counter[int]:
    c = chooser(**sampling)
    return Counter(c.choose(candidates, index) for index in range(count))


def test_greedy_takes_the_likeliest() -> None:
    assert draws(temperature=0.0) == {11: 400}


def test_temperature_spreads_and_order_follows_the_logits() -> None:
    cold, hot = draws(temperature=0.5), draws(temperature=5.0)
    assert cold[11] > hot[11]
    assert cold[11] > cold[13] > cold[12] >= cold[10]
    assert len(hot) == 4


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(draws(temperature=5.0, top_k=2)) == {11, 13}
    assert set(draws(temperature=5.0, top_k=1)) == {11}
    assert set(draws(temperature=1.0, top_p=0.6)) == {11}
    assert set(draws(temperature=1.0, top_p=0.9)) == {11, 13, 12}
    assert set(draws(temperature=5.0, top_k=-1, top_p=1.0)) == {10, 11, 12, 13}


def test_P03_seeds_decide_and_nothing_else() -> None:
    def tokens(request: str, **sampling: object) -> list[int]:
        c = chooser(request, **sampling)
        return [c.choose(CANDIDATES, index) for index in range(64)]

    assert tokens("a", seed=1) == tokens("b", seed=1) != tokens("a", seed=2)
    assert tokens("a") == tokens("a") != tokens("b")


def test_A8_draws_are_counted_by_output_index() -> None:
    whole, late = chooser(seed=42, temperature=0.7), chooser(seed=42, temperature=0.7)
    expected = [whole.choose(CANDIDATES, index) for index in range(20)]
    assert [late.choose(CANDIDATES, index) for index in range(9, 20)] == expected[9:]


def test_A5_penalties_count_generated_tokens_replayed_ones_too() -> None:
    assert chooser(temperature=0.0, presence_penalty=1.5).choose(CANDIDATES, 0) == 11
    assert chooser(outputs=(11,), temperature=0.0, presence_penalty=1.5).choose(CANDIDATES, 1) == 13
    frequent = {"temperature": 0.0, "frequency_penalty": 0.4}
    assert chooser(outputs=(11, 11), **frequent).choose(CANDIDATES, 2) == 11
    assert chooser(outputs=(11, 11, 11), **frequent).choose(CANDIDATES, 3) == 13


def test_A3_min_tokens_bans_the_end_and_stops_until_then() -> None:
    c = chooser(temperature=0.0, min_tokens=3, stop_token_ids=(11,))
    assert [c.choose(ENDING, index) for index in range(4)] == [13, 13, 13, EOS]
    everything = chooser(temperature=0.0, min_tokens=3, stop_token_ids=(3, 10, 11, 12, 13))
    assert everything.choose(ENDING, 0) == 4


def test_the_end_is_taken_when_the_model_wants_it_unless_ignored() -> None:
    assert draws(candidates=ENDING, temperature=1.0) == {EOS: 400}
    assert EOS not in draws(candidates=ENDING, temperature=1.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("sampling", "token", "outputs", "finish"),
    [
        ({}, EOS, 1, "stop"),
        ({"ignore_eos": True}, EOS, 1, None),
        ({"stop_token_ids": (9,)}, 9, 1, "stop"),
        ({"stop_token_ids": (9,), "min_tokens": 2}, 9, 1, None),
        ({"max_tokens": 4}, 8, 3, None),
        ({"max_tokens": 4}, 8, 4, "length"),
        ({"max_tokens": 4}, EOS, 4, "stop"),
    ],
)
def test_finish(sampling: dict[str, object], token: int, outputs: int, finish: str | None) -> None:
    assert chooser(**sampling).finish(token, outputs) == finish


def test_logprobs_are_of_the_raw_logits_chosen_first() -> None:
    c = chooser(temperature=0.3, logprobs=2, presence_penalty=2.0)
    entry = decode_entry(c.entry(CANDIDATES, 10))
    assert [token for token, _ in entry] == [10, 11, 13]
    assert entry[1][1] - entry[0][1] == pytest.approx(3.0)
    assert all(logprob < 0 for _, logprob in entry)


@given(st.integers(0, 2**64 - 1))
def test_candidates_are_ordinary_ids(digest: int) -> None:
    candidates = Model(SimConfig(vocab_size=128)).candidates(digest)
    assert all(FIRST_ID <= token < 128 for token in candidates.ids)
    assert all(0 <= logit < 6 for logit in candidates.logits)


def test_reference_runs_end_by_themselves_and_differ_by_request_seed_and_weights() -> None:
    runs = [reference_output(spec(f"r{i}", seed=i), CONFIG) for i in range(40)]
    assert {finish for _, finish in runs} == {"stop"}
    assert len({ids for ids, _ in runs}) > 30
    assert reference_output(spec(seed=1), SimConfig(weights_revision="2")) != reference_output(spec(seed=1), CONFIG)
    ids, finish = reference_output(spec(ignore_eos=True), CONFIG)
    assert (len(ids), finish) == (500, "length")
    assert min(ids) >= FIRST_ID
