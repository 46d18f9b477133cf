"""vLLM's own server as a child process: the other arm of a comparison. It ends with the process that started it.

Run as a module it is that child: what `vllm serve` starts, with the flags it is given and `--model`.
"""

from __future__ import annotations

import asyncio
import contextlib
import runpy
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx
import psutil

from midstream.api.http_server import bind
from midstream.api.process import die_with_parent
from midstream.control.errors import MidstreamError

BOOT_S: Final = 300.0
POLL_S: Final = 0.2
STOP_S: Final = 15.0
HOST: Final = "127.0.0.1"


@contextlib.asynccontextmanager
async def vllm_server(flags: Sequence[str], env: Mapping[str, str], log: Path) -> AsyncIterator[tuple[str, int]]:
    """Its URL and process id; gone afterwards, with all its children. Raises `MidstreamError` if it does not start."""
    with contextlib.closing(bind(HOST, 0)) as probe:
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, *flags, "--host", HOST, "--port", str(port),
            env=dict(env), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://{HOST}:{port}"
        await _until_healthy(url, process, log)
        yield url, process.pid
    finally:
        await _end(process)


async def _until_healthy(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline = asyncio.get_running_loop().time() + BOOT_S
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/health")).is_success:
                    return
            if process.returncode is not None:
                raise MidstreamError(f"vLLM's own server ended with {process.returncode}: {_last_line(log)}")
            if asyncio.get_running_loop().time() > deadline:
                raise MidstreamError(f"vLLM's own server was not ready within {BOOT_S:g} s: {_last_line(log)}")
            await asyncio.sleep(POLL_S)


def _last_line(log: Path) -> str:
    return next(reversed(log.read_text(errors="replace").strip().splitlines()), "it said nothing")


async def _end(process: asyncio.subprocess.Process) -> None:
    """In good order, or hard; vLLM's engine core is a child that a hard end would leave behind."""
    family = _family(process.pid)
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    await process.wait()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def main() -> None:
    """Be vLLM's server (its command line asks for a package `vllm`, which builds for CPUs are not called)."""
    die_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
