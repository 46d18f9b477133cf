"""An engine's processes end with it, with its llumlet, and with each other; whoever waits for them hears of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from midstream.control.errors import EngineFailed
from midstream.instance.engines.vllm.engine import VllmEngine
from midstream.instance.engines.vllm.processes import shared_memory_of
from midstream.migration.protocol.messages import RequestSpec, Sampling
from tests.instance.engines.vllm.pair import ENVIRONMENT, ROOT, config_of

pytestmark = pytest.mark.timeout(600)

LONG = RequestSpec(request="x", prompt=(5, 6, 7), sampling=Sampling(max_tokens=400, temperature=0.0, ignore_eos=True))
OWN_WORKER = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}


def members(group: int) -> list[psutil.Process]:
    """Living processes of a group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


async def until_gone(group: int) -> None:
    async with asyncio.timeout(60):
        while members(group):
            await asyncio.sleep(0.05)


def with_own_worker(folder: Path) -> VllmEngine:
    """vLLM's usual shape: the worker is a process of its own."""
    return VllmEngine(msgspec.structs.replace(config_of(folder, pace_ms=10), environment=OWN_WORKER))


@pytest.mark.parametrize("victim", ["core", "worker"])
async def test_P13_a_killed_process_is_noticed_at_once_and_takes_its_group_along(tmp_path: Path, victim: str) -> None:
    engine = with_own_worker(tmp_path)
    await engine.start()
    group = engine.process_group
    assert group is not None
    assert len(members(group)) >= 2
    segments = shared_memory_of(group)
    await engine.submit("x", LONG)
    while not (await engine.describe("x")).outputs:
        await asyncio.sleep(0.01)
    failed = asyncio.create_task(engine.failed())
    await asyncio.sleep(0)
    victims = [process for process in members(group) if (process.pid == group) == (victim == "core")]
    killed_at = time.monotonic()
    for process in victims:
        process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        reason = await failed
    assert reason
    noticed_s = time.monotonic() - killed_at
    print(f"a killed {victim} was noticed after {noticed_s:.3f} s")  # noqa: T201
    assert noticed_s < 10, "generous: this machine is shared"
    with pytest.raises(EngineFailed):
        await engine.submit("y", LONG)
    with pytest.raises(EngineFailed):
        await engine.freeze("x")
    assert await engine.abort("x") == 0
    assert engine.progress() == ()
    await until_gone(group)
    await engine.stop()
    assert not any(segment.exists() for segment in segments)


async def test_P13_a_core_that_hangs_is_as_one_that_died(tmp_path: Path) -> None:
    config = msgspec.structs.replace(config_of(tmp_path), call_s=3.0, heartbeat_s=0.5)
    engine = VllmEngine(config)
    await engine.start()
    group = engine.process_group
    assert group is not None
    os.killpg(group, signal.SIGSTOP)
    async with asyncio.timeout(60):
        assert "no answer" in await engine.failed()
    await until_gone(group)
    await engine.stop()


async def test_stop_leaves_no_process_and_no_memory(tmp_path: Path) -> None:
    engine = with_own_worker(tmp_path)
    await engine.start()
    group = engine.process_group
    assert group is not None
    segments = shared_memory_of(group)
    await engine.submit("x", LONG)
    await engine.stop()
    await until_gone(group)  # killed, and ended as soon as the kernel comes to it
    assert segments
    assert not any(segment.exists() for segment in segments)


async def test_what_cannot_boot_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    engine = VllmEngine(config_of(tmp_path, kv_cache_memory_bytes=1024, num_gpu_blocks_override=None))
    with pytest.raises(EngineFailed, match="did not start"):
        await engine.start()
    group = engine.process_group
    assert group is not None
    await until_gone(group)  # killed, and ended as soon as the kernel comes to it


async def test_an_engine_does_not_outlive_a_killed_llumlet(tmp_path: Path) -> None:
    llumlet = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from midstream.instance.engines.vllm.engine import VllmEngine
        from tests.instance.engines.vllm.pair import config_of

        async def main():
            engine = VllmEngine(config_of(Path({str(tmp_path)!r})))
            await engine.start()
            print("group", engine.process_group, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
        """
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", llumlet, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    while not (line := await process.stdout.readline()).startswith(b"group"):
        assert line, "the llumlet did not come up"
    group = int(line.split()[1])
    assert members(group)
    process.kill()
    await process.wait()
    await until_gone(group)
