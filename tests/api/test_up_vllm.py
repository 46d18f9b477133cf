"""`midstream up --engine vllm` as its user has it: real engines, a moved stream, a killed engine, no orphan."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from midstream.api.cli.client import AdminClient
from midstream.api.cli.up.state import UpState, read_state
from midstream.api.demo.settle import settle
from midstream.api.demo.vllm.chat import Answer, Ask, Delta, ask
from midstream.api.demo.vllm.moves import move_only_request
from midstream.api.demo.vllm.run import CHANGES, kill_core

CLI = [sys.executable, "-m", "midstream.api.cli"]
READY_S = 500.0
GONE_S = 60.0
MODEL = "tiny"
STORY = Ask(title="story", prompt="Tell me a story.", tokens=400, temperature=0.8, seed=5)
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="`make vllm` installs vLLM"),
]


class Up:
    """One running `midstream up --engine vllm` with two engines of a made-up model."""

    def __init__(self, folder: Path) -> None:
        from tests.instance.engines.vllm.tiny_model import write_tiny_model

        self.data_dir = folder / "data"
        self.errors = (folder / "up.err").open("w+")
        model = write_tiny_model(folder / MODEL)
        flags = "--load-format dummy --max-model-len 1024 --max-num-batched-tokens 1024 --no-enable-prefix-caching"
        changes = CHANGES | {"vllm_model": model, "vllm_args": flags, "vllm_kv_gib": 0.25, "vllm_cpu_threads": 1}
        self.process = subprocess.Popen(
            [*CLI, "--data-dir", str(self.data_dir), "up", "--engine", "vllm", "-o", "jsonl"],
            env=os.environ  # noqa: TID251 - what the processes inherit
            | {f"MIDSTREAM_{name.upper()}": str(value) for name, value in changes.items()},
            stdout=subprocess.PIPE, stderr=self.errors, text=True, start_new_session=True,
        )  # fmt: skip

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.errors.seek(0)
        assert line, self.errors.read()
        assert json.loads(line)["ready"] is True

    @property
    def state(self) -> UpState:
        state = read_state(self.data_dir)
        assert state is not None
        return state

    def family(self) -> list[psutil.Process]:
        """Every process that came from this one, the engines' cores included."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(GONE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = Up(tmp_path_factory.mktemp("up-vllm"))
    try:
        started.ready()
        yield started
    finally:
        started.close()


@pytest.fixture
def admin(up: Up) -> Iterator[AdminClient]:
    client = AdminClient(up.state.admin, up.state.admin_key)
    yield client
    client.close()


async def stream(up: Up, on_delta: Callable[[Delta], None] = lambda _: None) -> Answer:
    async with httpx.AsyncClient(base_url=up.state.gateway, timeout=120, trust_env=False) as http:
        return await ask(http, MODEL, STORY, on_delta)


async def wait(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + GONE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.1)
    return found


async def test_a_stream_is_moved_and_no_token_changes(up: Up, admin: AdminClient) -> None:
    undisturbed = await stream(up)
    moving: list[asyncio.Task[Any]] = []

    def on_delta(_: Delta) -> None:
        if not moving:
            moving.append(asyncio.create_task(asyncio.to_thread(move_only_request, admin)))

    moved = await stream(up, on_delta)
    seam = await moving[0]
    assert undisturbed.error is None and moved.error is None
    assert {seam.source, seam.target} == {"i0", "i1"}
    assert 0 < seam.index < len(moved.ids)
    assert (moved.ids, moved.text, moved.finish) == (undisturbed.ids, undisturbed.text, undisturbed.finish)
    assert moved.completion_tokens == len(moved.ids) == STORY.tokens
    assert await asyncio.to_thread(settle, admin, up.state.database_url) == ()


async def test_a_killed_engine_core_is_noticed_and_comes_back_and_its_stream_goes_on(
    up: Up, admin: AdminClient
) -> None:
    killed: list[str] = []

    def on_delta(_: Delta) -> None:
        if not killed:
            owner = next(admin.items("/requests", limit=1))["owner"]["instance"]
            kill_core(up.state, owner)
            killed.append(owner)

    answer = await stream(up, on_delta)
    assert answer.error is None
    assert answer.completion_tokens == len(answer.ids) == STORY.tokens
    await wait(lambda: "is back" in Path(up.errors.name).read_text())
    again = await stream(up)
    assert again.error is None


async def test_a_killed_llumlet_takes_its_engine_core_along(up: Up) -> None:
    llumlet = next(process for process in up.state.processes if process.name == "i0")
    assert llumlet.pid is not None
    cores = psutil.Process(llumlet.pid).children(recursive=True)
    assert cores
    os.kill(llumlet.pid, signal.SIGKILL)
    await wait(lambda: not any(is_alive(core) for core in cores))


async def test_one_sigterm_ends_all_of_it(up: Up) -> None:
    family = up.family()
    assert any("EngineCore" in " ".join(one.cmdline()) for one in family)
    up.close()
    assert up.process.returncode == 0
    await wait(lambda: not any(is_alive(one) for one in family))


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
