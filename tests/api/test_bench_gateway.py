"""`bench gateway`: its light client, its figures, and one small run on real engines."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from midstream.api import event_loop
from midstream.api.bench import gateway
from midstream.api.bench.gateway import Block, Plan
from midstream.api.bench.report import Measured, machine, show
from midstream.api.bench.sse import Timed, play
from midstream.control.errors import BadInput, MidstreamError
from midstream.instance.engines.vllm.model_files import make_models

ROOT = Path(__file__).parents[2]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}}


def event(said: object) -> bytes:
    text = said if isinstance(said, str) else json.dumps(said, separators=(",", ":"))
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n" % len(data) + data + b"\r\n"


def word(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


WHOLE = [HEAD + event(ROLE), word("a"), word("b"), word("c"), event(USAGE), event("[DONE]") + b"0\r\n\r\n"]


@contextlib.asynccontextmanager
async def server(*pieces: bytes) -> AsyncIterator[str]:
    """Answers every request with these pieces, one after the other; closes after an incomplete answer."""

    answering: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02)
                if not pieces[-1].endswith(b"0\r\n\r\n"):
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(10):
            await asyncio.gather(*filter(None, answering))


async def test_the_client_sees_when_text_came_and_how_many_tokens_there_were() -> None:
    async with server(*WHOLE) as url:
        answers = await play(url, [{"turn": turn} for turn in range(5)], 2)
    assert [answer.tokens for answer in answers] == [3] * 5
    assert all(len(answer.arrivals) == 3 and len(answer.gaps_ms) == 2 for answer in answers)
    assert all(answer.ttft_ms > 10 and min(answer.gaps_ms) > 5 for answer in answers), "the role alone is no text"


def test_the_client_runs_on_the_loop_of_live_processes() -> None:
    async def main() -> int:
        async with server(*WHOLE) as url:
            return len(await play(url, [{}, {}], 2))

    assert event_loop.run(main()) == 2


@pytest.mark.parametrize(
    "pieces",
    [WHOLE[:3], [*WHOLE[:4], b"0\r\n\r\n"], [b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"]],
    ids=["cut off", "not done", "refused"],
)
async def test_P31_an_answer_that_is_not_whole_fails_the_run(pieces: list[bytes]) -> None:
    async with server(*pieces) as url:
        with pytest.raises(MidstreamError):
            await play(url, [{}], 1)


def block(ttft_ms: float, took_s: float) -> Block:
    answer = Timed(sent_at=0.0, arrivals=tuple(ttft_ms / 1e3 + 0.01 * step for step in range(4)), tokens=4)
    return Block(answers=(answer,) * 4, took_s=took_s, cpu_s={"server": 0.001}, engine_cpu_s=0.5)


def test_rows_and_summary_are_those_agreed_on(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = {
        (4, "direct"): [block(20, 1.0), block(22, 1.0), block(90, 2.0)],
        (4, "midstream"): [block(21, 1.0), block(24, 1.25), block(91, 2.0)],
    }
    row = gateway._row(4, blocks)
    assert (row["concurrency"], row["repeats"]) == (4, 3)
    for arm in gateway.ARMS:
        assert {"requests_per_s", "ttft_ms_p50", "ttft_ms_p99", "gap_ms_p50"} <= set(row[arm])
    assert row["direct"]["ttft_ms_p50"] == pytest.approx(22)
    assert (row["direct"]["ttft_ms_p50_min"], row["direct"]["ttft_ms_p50_max"]) == (20, 90)
    assert row["ttft_added_ms_p50"] == pytest.approx(1), "of pairs side by side, not of medians"
    assert (row["throughput_ratio"], row["throughput_ratio_min"]) == (1.0, pytest.approx(0.8))
    assert row["direct"]["ttft_ms_p99"] == 90, "of all repeats"
    assert (row["direct"]["engine_busy"], row["midstream"]["engine_busy"]) == (
        1.5 / 4.0,
        pytest.approx(1.5 / 4.25, 1e-3),
    )
    assert row["engine_busy_ratio"] == pytest.approx(4.0 / 4.25, 1e-3)
    summary = gateway._summary([row], {"gateway": 1.0, "llumlet": 2.0, "server": 3.0})
    assert {"ttft_added_ms_p50", "throughput_ratio", "rss_mb"} <= set(summary)
    assert show("gateway", Measured(params={}, rows=(row,), summary=summary, machine=machine()), as_json=False) == 0
    assert "ttft_ms_p50" in capsys.readouterr().out


def test_P29_a_bad_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no model"):
        Plan(model=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="concurrencies"):
        Plan(model=tmp_path, concurrencies=(1, 0))
    assert "--load-format dummy" in Plan(model=tmp_path).vllm_flags


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="`make vllm` installs vLLM")
def test_P32_a_small_run_measures_both_and_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    import psutil

    tmp_path = tmp_path_factory.mktemp("bench")  # sockets lie in it, and their paths must be short
    _, tiny = make_models(ROOT / ".midstream" / "models", lambda _: None)
    done = subprocess.run(
        [sys.executable, "-m", "midstream.api.cli", "bench", "gateway", "--json", "--model", str(tiny),
         "--concurrency", "1,2", "--repeats", "1", "--tokens", "4", "--plot", str(tmp_path / "plots")],
        env=os.environ | {"TMPDIR": str(tmp_path)},  # noqa: TID251 - what the processes inherit
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    printed: dict[str, Any] = json.loads(done.stdout)
    assert [row["concurrency"] for row in printed["rows"]] == [1, 2]
    assert printed["summary"]["throughput_ratio"] > 0
    assert printed["summary"]["rss_mb"] > 0
    assert (tmp_path / "plots" / "gateway.png").exists()
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or ())]
    assert left == []
