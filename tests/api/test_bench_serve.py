"""`midstream bench serve`: what its figures mean, its open-loop client, equal arrivals for every arm, one short run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.api import event_loop
from midstream.api.bench import serve_load
from midstream.api.bench.report import is_missing
from midstream.api.bench.serve import ARMS, Plan, measure, order, rows_of
from midstream.api.bench.serve_figures import Load, decode_ms, figures, in_flight_max, row_of, summary_of
from midstream.api.bench.serve_load import Answer, Ask, asks_of, draw, load
from midstream.api.bench.serve_plots import draw as draw_plots
from midstream.api.bench.sse import Timed, request_of
from midstream.api.cli.main import run

STALL_S = 0.5
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def answer(planned_at: float, *arrivals: float, sent_at: float | None = None) -> Answer:
    timed = Timed(sent_at=planned_at if sent_at is None else sent_at, arrivals=arrivals, tokens=len(arrivals))
    return Answer(planned_at=planned_at, ended_at=arrivals[-1], timed=timed)


TIMELINE = Load(
    answers=(
        answer(0.0, 0.1, 0.2, 0.4, sent_at=0.05),
        answer(1.0, 1.3, 1.4),
        answer(1.2, 1.6, 1.9, 2.2, 2.5),
        Answer(planned_at=1.5, ended_at=1.6, error="refused"),
    ),
    downtimes_ms=(12.0,),
    moves=1,
    preemptions=3,
)
"""By hand: prefills 100, 300, 400 ms; decodes 150, 100, 300 ms; one request failed."""


# --- what the figures mean -----------------------------------------------------------------------


def test_prefill_counts_from_the_planned_arrival_and_decode_is_a_mean_per_request() -> None:
    assert TIMELINE.prefills_ms == pytest.approx([100, 300, 400]), "0.05 s until it was sent are in the first"
    assert TIMELINE.decodes_ms == pytest.approx([150, 100, 300])
    assert TIMELINE.gaps_ms == pytest.approx([100, 200, 100, 300, 300, 300])
    found = figures(TIMELINE)
    assert found["prefill_ms"] == pytest.approx(
        {"p25": 100, "p50": 300, "p75": 400, "p95": 400, "p99": 400, "mean": 800 / 3}
    )
    assert found["decode_ms"]["p99"] == pytest.approx(300), "over requests, of their means"
    assert found["gap_ms"] == pytest.approx({"p50": 300, "p99": 300, "max": 300})
    assert found["late_ms_max"] == pytest.approx(50)
    assert found["tokens_per_s"] == pytest.approx(9 / 2.5)
    assert (found["in_flight_max"], found["drain_s"]) == (2, pytest.approx(1.0))


def test_tokens_that_come_together_count_in_the_mean_and_have_one_gap() -> None:
    timed = Timed(sent_at=0.0, arrivals=(1.0, 2.0), tokens=5)
    assert decode_ms(timed) == pytest.approx(250)
    assert timed.gaps_ms == pytest.approx([1000])


def test_requests_overlap_between_arrival_and_end() -> None:
    assert in_flight_max([answer(0.0, 1.0), answer(1.0, 2.0)]) == 1
    assert in_flight_max([answer(0.0, 1.5), answer(1.0, 2.0), answer(1.2, 1.3)]) == 3


def test_a_row_has_the_agreed_fields_over_all_repeats() -> None:
    slow = Load(answers=(answer(0.0, 0.5, 1.0),))
    row = row_of("freeness", [TIMELINE, slow])
    wanted = {"arm", "requests", "prefill_ms", "decode_ms", "gap_ms", "downtime_ms", "moves", "tokens_per_s"}
    assert wanted <= set(row)
    assert set(row["prefill_ms"]) >= {"p25", "p50", "p75", "p95", "p99", "mean", "p50_min", "p50_max"}
    assert (row["requests"], row["errors"], row["repeats"]) == (5, 1, 2)
    assert row["prefill_ms"]["p50"] == pytest.approx(400), "between the two repeats"
    assert (row["prefill_ms"]["p50_min"], row["prefill_ms"]["p50_max"]) == (pytest.approx(300), pytest.approx(500))
    assert row["downtime_ms"] == {"p50": 12.0, "p99": 12.0, "max": 12.0}
    assert row_of("round_robin", [slow])["downtime_ms"] == {"p50": None, "p99": None, "max": None}


def test_ratios_are_taken_per_repeat_between_arms_side_by_side() -> None:
    def one(first_s: float) -> Load:
        return Load(answers=(answer(0.0, first_s, first_s + 0.1),), preemptions=int(first_s * 10))

    found = summary_of({"round_robin": [one(0.2), one(9.0)], "freeness": [one(0.1), one(3.0)]})
    against = found["round_robin_over_freeness"]
    assert (against["prefill_p99_min"], against["prefill_p99_max"]) == (pytest.approx(2), pytest.approx(3))
    assert against["prefill_p99"] == pytest.approx(2.5)
    assert against["preemptions_fewer_max"] == 60
    assert found["errors"] == 0
    assert not is_missing(found)


def test_P31_an_arm_that_answered_nothing_is_missing_from_the_summary() -> None:
    dead = Load(answers=(Answer(planned_at=0.0, ended_at=1.0, error="gone"),))
    found = summary_of({"round_robin": [dead], "freeness": [TIMELINE]})
    assert found["errors"] == 2
    assert is_missing(found)


# --- what is played ------------------------------------------------------------------------------


def test_a_seed_says_arrivals_and_lengths_and_every_arm_gets_the_same() -> None:
    plan = Plan(requests=200)
    rows = rows_of(plan, 0)
    assert rows == rows_of(plan, 0)
    assert rows != rows_of(plan, 1)
    assert len(rows) == 200
    asks = [asks_of(rows, "http://127.0.0.1:1", "sim", 1, first) for first in (0, 200)]
    assert [(ask.at_s, ask.tokens) for ask in asks[0]] == [(ask.at_s, ask.tokens) for ask in asks[1]]
    assert len({ask.request for ask in itertools.chain(*asks)}) == 400, "no two prompts share a beginning"


def test_arrivals_are_poisson_at_the_rate_asked_for() -> None:
    rows = draw("heavy_tail", 3, 4_000, rate_per_s=20.0, scale=0.25, longest=512)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(rows)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    assert variance**0.5 / mean == pytest.approx(1, rel=0.1), "as of an exponential distribution"


def test_lengths_are_scaled_and_fit_the_engine() -> None:
    rows = draw("heavy_tail", 1, 2_000, rate_per_s=1.0, scale=0.25, longest=512)
    assert all(row.prompt_tokens + row.output_tokens <= 512 for row in rows)
    assert min(row.output_tokens for row in rows) >= serve_load.OUTPUT_MIN
    whole = [row.prompt_tokens for row in rows if row.prompt_tokens + row.output_tokens < 500]
    assert min(whole) == 16, "64, the least, by four"
    assert 0 < len(rows) - len(whole) < len(rows) / 5, "a few are shrunk"


def test_every_arm_is_first_once() -> None:
    assert [order("abc", repeat) for repeat in range(4)] == [tuple("abc"), tuple("bca"), tuple("cab"), tuple("abc")]


# --- the client ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def server(tokens: int, *, stall_s: float = 0.0, status: bytes = b"") -> AsyncIterator[str]:
    """Answers so many tokens each; does nothing at all for `stall_s` from its first request on."""
    held = asyncio.Event()
    stalled: list[asyncio.TimerHandle] = []

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                if not stalled:
                    stalled.append(asyncio.get_running_loop().call_later(stall_s, held.set))
                await held.wait()
                if status:
                    writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
                    continue
                writer.write(HEAD)
                for index in range(tokens):
                    writer.write(chunk(b'data: {"choices":[{"text":"","token_ids":[%d]}]}\n\n' % index))
                    await writer.drain()
                    await asyncio.sleep(0.005)
                writer.write(chunk(b'data: {"usage":{"completion_tokens":%d}}\n\n' % tokens))
                writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(answer_one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


def asks(url: str, count: int, tokens: int, every_s: float = 0.05) -> list[Ask]:
    return [Ask(at_s=every_s * i, tokens=tokens, request=request_of(url, {"n": i})) for i in range(count)]


async def _loaded(count: int, tokens: int, **how: object) -> list[Answer]:
    async with server(tokens, **how) as url:  # type: ignore[arg-type]
        return await load(url, asks(url, count, 3))


def test_requests_leave_at_their_time_while_the_server_stalls_and_their_wait_counts_from_it() -> None:
    answers = event_loop.run(_loaded(6, 3, stall_s=STALL_S))
    found = Load(answers=tuple(answers))
    assert found.errors == []
    planned = [one.planned_at - answers[0].planned_at for one in answers]
    assert planned == pytest.approx([0.05 * i for i in range(6)])
    sent = [timed.sent_at for _, timed in found.well]
    assert max(sent) - min(sent) < STALL_S, "none waited for an earlier one to come back"
    assert in_flight_max(answers) == 6
    assert all(
        prefill_ms > 1e3 * (STALL_S - 0.05 * index) * 0.8 for index, prefill_ms in enumerate(found.prefills_ms)
    ), "the stall is in the wait of each, less by what it came later"
    assert all(len(timed.arrivals) == 3 for _, timed in found.well), "tokens without text are tokens"


@pytest.mark.parametrize(("tokens", "status", "told"), [(2, b"", "2 of 3 tokens"), (3, b"503 No", "503")])
def test_P31_a_request_that_does_not_end_well_is_counted_not_raised(tokens: int, status: bytes, told: str) -> None:
    answers = event_loop.run(_loaded(3, tokens, status=status))
    assert all(one.timed is None and one.error is not None and told in one.error for one in answers)
    assert len(Load(answers=tuple(answers)).errors) == 3


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--engine", "tpu"], "no engine 'tpu'"),
        (["--policies", "chance"], "chance"),
        (["--policies", "freeness", "--policies", "freeness"], "named once"),
        (["--trace", "none.csv"], "no trace none.csv"),
        (["--rate", "0"], "rate must be above 0"),
        (["--length-scale", "-1"], "length-scale must be above 0"),
        (["--model", "there"], "only vllm loads a model"),
        (["--requests", "many"], "--requests"),
    ],
)
def test_P29_what_cannot_be_played_is_one_line(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", *options]) != 0
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said


@pytest.mark.timeout(240)
def test_P32_all_arms_are_measured_on_one_real_cluster_of_simulated_engines(tmp_path: Path) -> None:
    found = measure(Plan(requests=40, rate=20.0, repeats=1, instances=2), tmp_path)
    rows = {row["arm"]: row for row in found.rows}
    assert tuple(rows) == ARMS
    assert found.summary["errors"] == 0
    assert not is_missing(found.summary)
    assert all(row["requests"] == 40 and row["tokens_per_s"] > 0 for row in rows.values())
    assert all(rows[arm]["moves"] == 0 for arm in ARMS[:2]), "nothing moves where no policy says so"
    assert (tmp_path / "serve-sim.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(found.params)


def test_plots_are_pictures(tmp_path: Path) -> None:
    draw_plots(tmp_path, "vllm", {"round_robin": [TIMELINE], "freeness": [TIMELINE, TIMELINE]})
    assert (tmp_path / "serve-vllm.png").read_bytes().startswith(b"\x89PNG")
