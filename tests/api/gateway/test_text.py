"""The toy tokenizer, stop strings and choices: never depending on where the tokens were cut."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.api.gateway.choices import Choice
from midstream.api.gateway.port import Chunk
from midstream.api.gateway.text import (
    IncrementalDetokenizer,
    StopFinder,
    Tokenizer,
    decode_logprobs,
    encode_logprobs,
)
from midstream.control.errors import BadInput

TOKENIZER = Tokenizer()
IDS = st.lists(st.integers(0, 700), max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=6)


def cut(ids: list[int], cuts: list[int]) -> list[tuple[int, ...]]:
    bounds = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    return [tuple(ids[a:b]) for a, b in pairwise(bounds)]


@given(st.text())
def test_every_text_becomes_ids_and_back(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(3 <= token < TOKENIZER.size for token in ids)


@given(st.integers(300, 5_000), st.integers(300, 5_000))
def test_a_word_is_one_id_and_ids_are_different_words(a: int, b: int) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode([a])) == (a,)
    assert (TOKENIZER.decode([a]) == TOKENIZER.decode([b])) == (a == b)


def test_a_small_vocabulary_has_no_ids_beyond_it() -> None:
    tokenizer = Tokenizer(300)
    text = TOKENIZER.decode(range(259, 1_000))
    assert max(tokenizer.encode(text)) < 300 and tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(BadInput):
        Tokenizer(259)


@given(IDS, CUTS, st.lists(st.sampled_from(["ba", " ba b", "e", "\ufffd", " bu"]), max_size=3), st.integers(0, 5))
def test_P03_a_choice_does_not_depend_on_chunk_seams(
    ids: list[int], cuts: list[int], stops: list[str], min_tokens: int
) -> None:
    def run(chunks: list[tuple[int, ...]]) -> tuple[str, tuple[int, ...], list[str | None], int]:
        choice = Choice(stops=tuple(stops), min_tokens=min_tokens)
        deltas = [choice.feed(Chunk(ids=part)) for part in chunks] + [choice.feed(Chunk(finish="length"))]
        used = tuple(token for delta in deltas for token in delta.ids)
        return "".join(d.text for d in deltas), used, [d.finish for d in deltas if d.finish], choice.tokens

    whole = run([tuple(ids)])
    assert run(cut(ids, cuts)) == whole
    assert len(whole[2]) == 1


@given(IDS, st.lists(st.sampled_from(["ba", " ba b", "e", "\ufffd", " bu"]), min_size=1, max_size=3))
def test_P03_nothing_of_or_past_the_first_stop_string_is_shown(ids: list[int], stops: list[str]) -> None:
    choice = Choice(stops=tuple(stops))
    shown = ""
    for token in ids:
        shown += choice.feed(Chunk(ids=(token,))).text
    shown += choice.feed(Chunk(finish="length")).text
    text = TOKENIZER.decode(ids)
    first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    assert shown == (text if first is None else text[:first])
    assert choice.was_stopped == (first is not None)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_a_possible_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown = ""
    for character in text:
        piece, found = finder.feed(character)
        shown += piece
        if found:
            return
    held = text[len(shown) :]
    assert text == shown + held
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_an_unfinished_character_waits_for_its_rest() -> None:
    detokenizer = IncrementalDetokenizer()
    pieces = [detokenizer.feed(token) for token in TOKENIZER.encode("é")]
    assert pieces == ["", "é"]
    assert detokenizer.feed(TOKENIZER.encode("é")[0]) + detokenizer.feed(300) == "\ufffd" + TOKENIZER.decode([300])


def test_logprobs_travel_and_infinities_are_clamped() -> None:
    entry = encode_logprobs([(300, -0.5), (301, -math.inf)])
    assert decode_logprobs(entry) == ((300, -0.5), (301, -math.inf))
    delta = Choice().feed(Chunk(ids=(300,), logprobs=(entry,)))
    assert (delta.logprobs[0].logprob, delta.logprobs[0].top) == (-0.5, ((301, -9999.0),))
