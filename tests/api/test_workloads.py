"""Workloads: published forms are read, made-up ones follow from their seed, shared prefixes survive every way."""

from __future__ import annotations

import json
import random
from itertools import chain, pairwise, repeat
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from midstream.api.simulation.requests import spec_of
from midstream.api.traces import TraceRow, load_trace, write_trace
from midstream.api.traces.generate import GENERATED, LONG, MEDIUM, SHORT, Bounded, Lengths, Recipe, generate, make
from midstream.api.traces.importers import FORMS, import_trace
from midstream.api.traces.load import CONTENT_TOKENS, parse_trace
from midstream.api.traces.workload import has_content, overlap, part, spread, workload
from midstream.control.errors import BadInput, UnknownThing

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:50.9951690,0,109
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s1,1.5,ChatGPT,472,18,490,Conversation log
45,s2,1.5,GPT-4,1087,230,1317,API log
118,s1,0.1,ChatGPT,417,0,417,API log
"""
MOONCAKE = """{"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30000, "input_length": 1500, "output_length": 26, "hash_ids": [46, 47, 2358]}
"""
BAILIAN = (
    '{"chat_id": 9, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 1040, "output_length": 8, "type": "text", '
    '"turn": 1, "hash_ids": ' + str(list(range(65))) + "}\n"
    '{"chat_id": 10, "parent_chat_id": 9, "timestamp": 61.1, "input_length": 1050, "output_length": 9, "type": "text", '
    '"turn": 2, "hash_ids": ' + str([*range(64), 99, 98]) + "}\n"
)


def test_the_forms_of_others_are_read() -> None:
    assert import_trace("azure", AZURE.splitlines(), "t") == (
        TraceRow(0.0, 374, 44),
        TraceRow(pytest.approx(4.314579), 396, 109),
    )
    assert import_trace("burstgpt", BURSTGPT.splitlines(), "t") == (
        TraceRow(0.0, 472, 18, client="s1"),
        TraceRow(40.0, 1_087, 230, client="s2"),
    )
    assert import_trace("mooncake", MOONCAKE.splitlines(), "t") == (
        TraceRow(0.0, 1_100, 52, content=(46, 47, 2353)),
        TraceRow(3.0, 1_500, 26, content=(46, 47, 2358)),
    )
    later, first = (row.content for row in reversed(import_trace("bailian", BAILIAN.splitlines(), "t")))
    assert (first, later) == ((31, 63, 98), (31, 63, 64))


AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
2024-05-10 02:00:02.009930+02:00,76,15
"""


def test_azures_trace_of_2024_is_read_also_in_parts() -> None:
    rows = import_trace("azure", AZURE_2024.splitlines(), "t")
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 0.99007, 2.0], abs=1e-6)
    part_of = import_trace("azure", AZURE_2024.splitlines(), "t", start_s=0.5, seconds=1.0)
    assert part_of == (TraceRow(0.0, 2_399, 6),)


def test_a_trace_that_is_too_long_says_how_to_take_a_part() -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    with pytest.raises(BadInput, match=r"more than 9 rows; .*--start and --seconds"):
        import_trace("azure", chain([head], repeat("2024-05-10 00:00:00+00:00,1,1")), "t", rows_max=9)


def test_a_mooncake_row_with_a_block_too_many_can_be_read_back() -> None:
    line = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1, 2]}'
    rows = import_trace("mooncake", [line, line], "t")
    assert [row.content for row in rows] == [(0, 1), (0, 1)]
    assert shape(parse_trace(write_trace(rows).splitlines(), "again")) == shape(rows)


def test_an_imported_trace_is_spread_as_the_shipped_one_is(tmp_path: Path) -> None:
    name, file = "mooncake_conversation_2025", tmp_path / "conversation.csv"
    file.write_text(write_trace(load_trace(name)))
    shipped, imported = workload(name, seed=1), workload(str(file), seed=1)
    assert [row.arrival_s for row in imported] == pytest.approx([row.arrival_s for row in shipped])
    assert workload("azure_conv_2023", seed=1) == load_trace("azure_conv_2023")


def test_the_turns_of_a_bailian_chat_are_one_client() -> None:
    turns = [(159, -1), (200, 159), (7, -1), (300, 200), (301, 9)]
    lines = [
        json.dumps({"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": 5, "output_length": 5,
                    "hash_ids": [], "turn": 1})
        for at, (chat, parent) in enumerate(turns)
    ]  # fmt: skip
    assert [row.client for row in import_trace("bailian", lines, "t")] == ["159", "159", "7", "159", "9"]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_in_a_form_is_refused_by_line(form: str) -> None:
    with pytest.raises(BadInput, match="line 1"):
        import_trace(form, ["arrival_s,prompt_tokens", "1,2"], "t")
    with pytest.raises(BadInput, match="no rows"):
        import_trace(form, [], "t")


def test_an_unknown_form_names_the_known_ones() -> None:
    with pytest.raises(UnknownThing, match="azure, burstgpt, mooncake, bailian"):
        import_trace("csv", [], "t")


def shape(rows: tuple[TraceRow, ...]) -> list[tuple[int, ...]]:
    """Contents, blocks numbered by their first appearance: equal for equal sharing."""
    names: dict[int, int] = {}
    return [tuple(names.setdefault(block, len(names)) for block in row.content) for row in rows]


def test_sharing_survives_writing_and_reading() -> None:
    rows = load_trace("mooncake_synthetic_2025")
    again = parse_trace(write_trace(rows).splitlines(), "again")
    assert shape(again) == shape(rows)
    assert [(r.prompt_tokens, r.output_tokens) for r in again] == [(r.prompt_tokens, r.output_tokens) for r in rows]
    assert [len(row.content) for row in rows] == [-(-row.prompt_tokens // CONTENT_TOKENS) for row in rows]


def test_what_rows_do_not_say_is_not_written() -> None:
    rows = (TraceRow(0.5, 10, 20), TraceRow(1.0, 11, 21))
    assert write_trace(rows).splitlines() == ["arrival_s,prompt_tokens,output_tokens", "0.500,10,20", "1.000,11,21"]
    assert parse_trace(write_trace(rows).splitlines(), "t") == rows
    urgent = (TraceRow(0.5, 10, 20, client="a", priority=-1), TraceRow(1.0, 11, 21, client="b"))
    assert parse_trace(write_trace(urgent).splitlines(), "t") == urgent


def test_reused_share_of_the_shipped_traces_is_what_their_page_says() -> None:
    for name, share in (("mooncake_conversation_2025", 0.37), ("mooncake_synthetic_2025", 0.65)):
        seen: set[int] = set()
        reused = total = 0
        for row in load_trace(name):
            reused += CONTENT_TOKENS * sum(block in seen for block in row.content)
            total += row.prompt_tokens
            seen.update(row.content)
        assert reused / total == pytest.approx(share, abs=0.02)


def test_sharing_that_cannot_be_is_refused() -> None:
    header = "arrival_s,prompt_tokens,output_tokens,prefix_parent_row,shared_prefix_blocks"
    with pytest.raises(BadInput, match="line 3: 2 blocks shared with row 0"):
        parse_trace([header, "0,100,1,-1,0", "1,1000,1,0,2"], "t")


def test_seeds_take_parts_that_differ_and_what_they_share_is_told() -> None:
    rows = load_trace("mooncake_conversation_2025")
    assert len({_start(rows, seed, 12_000) for seed in range(4)}) == 4
    assert overlap("mooncake_conversation_2025", 4, 12_000) > 0.99
    assert overlap("mooncake_conversation_2025", 4, 3_000) == 0.0
    assert overlap("mooncake_conversation_2025", 2, 20_000) == 1.0
    assert overlap("azure_code_2023", 3, 3_000) < 0.6
    assert overlap("heavy_tail", 4, 12_000) == overlap("azure_conv_2023", 1, 50_000) == 0.0


def _start(rows: tuple[TraceRow, ...], seed: int, requests: int) -> int:
    """Where a part begins, told by what its first rows hold."""
    head = [row.content for row in part(rows, seed, requests)[:50]]
    return next(i for i in range(len(rows)) if [row.content for row in rows[i : i + 50]] == head)


def test_the_client_of_a_row_is_a_tenant_with_a_session() -> None:
    spec = spec_of(3, TraceRow(0.0, 10, 5, client="ann", priority=-1))
    assert (spec.tenant, spec.session, spec.priority) == ("ann", "ann", -1)
    assert len({spec_of(i, row).tenant for i, row in enumerate(workload("tenants", seed=0, requests=300))}) > 8


def test_prompts_share_exactly_what_their_rows_share() -> None:
    one, other = (spec_of(i, TraceRow(0.0, 1_300, 5, content=c)).prompt for i, c in enumerate(((1, 2, 3), (1, 2, 4))))
    assert len(one) == len(other) == 1_300
    assert one[:1_024] == other[:1_024]
    assert not set(one[1_024:]) & set(other[1_024:])


def test_ties_are_spread_by_seed_and_nothing_else_moves() -> None:
    rows = [TraceRow(0.0, 1, 1), TraceRow(3.0, 2, 1), TraceRow(3.0, 3, 1), TraceRow(9.0, 4, 1)]
    moved = spread(rows, 3.0, random.Random(1))
    assert moved == spread(rows, 3.0, random.Random(1)) != spread(rows, 3.0, random.Random(2))
    assert {row.prompt_tokens: row.arrival_s for row in moved}.items() >= {1: 0.0, 4: 9.0}.items()
    assert all(3.0 <= row.arrival_s < 6.0 for row in moved[1:3])
    times = [row.arrival_s for row in workload("mooncake_conversation_2025", seed=1)]
    assert len(set(times)) > 0.99 * len(times)


def test_a_workload_is_scaled_in_time_and_each_seed_has_its_own_part() -> None:
    whole = workload("azure_conv_2023", seed=1)
    fast = workload("azure_conv_2023", seed=1, rate_scale=10.0)
    assert fast[-1].arrival_s == pytest.approx(whole[-1].arrival_s / 10)
    parts = [workload("azure_conv_2023", seed=seed, requests=500) for seed in range(3)]
    assert all(len(rows) == 500 and rows[0].arrival_s == 0.0 for rows in parts)
    assert parts[0] != parts[1] != parts[2]
    assert part(whole, 5, 10**6) is whole


@pytest.mark.parametrize("name", GENERATED)
def test_P17_a_made_up_workload_follows_from_its_seed(name: str) -> None:
    rows = generate(name, 1, 400)
    assert rows == generate(name, 1, 400) != generate(name, 2, 400)
    assert len(rows) == 400
    assert has_content(rows) == (name == "shared_prefix")


def test_a_recipe_is_followed() -> None:
    recipe = Recipe(
        requests=20_000, per_s=5.0, cv=3.0, clients=10, urgent=0.2,
        prompt=Lengths(least=100, most=5_000, tail=2.5), output=Lengths(least=10, most=100, tail=2.0),
    )  # fmt: skip
    rows = make(recipe, random.Random(7))
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(rows)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(3.0, rel=0.1)
    assert min(row.prompt_tokens for row in rows) == 100
    assert sum(row.prompt_tokens > 200 for row in rows) / len(rows) == pytest.approx(2**-1.5, rel=0.1)
    counts = {client: sum(row.client == client for row in rows) for client in ("0", "1")}
    assert counts["0"] / counts["1"] == pytest.approx(2.0, rel=0.15)
    assert sum(row.priority == -1 for row in rows) / len(rows) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(("lengths", "mean"), [(SHORT, 128), (MEDIUM, 256), (LONG, 512)])
def test_bounded_lengths_have_the_published_means(lengths: Bounded, mean: int) -> None:
    rng = random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(50_000)]
    assert fmean(drawn) == pytest.approx(mean, rel=0.12)
    assert lengths.least <= min(drawn) <= max(drawn) <= 6_000
    assert max(drawn) > 5_000, "the tail is not cut"


def test_an_unknown_workload_names_the_known_ones() -> None:
    with pytest.raises(UnknownThing, match="heavy_tail"):
        generate("nothing", 1)
    with pytest.raises(UnknownThing, match="azure_conv_2023"):
        workload("nothing", seed=1)
