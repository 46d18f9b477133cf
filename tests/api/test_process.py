"""How a process lives: one ready line, a graceful first signal, a hard second one, and an end when it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

SCRIPT = """
import asyncio, contextlib, sys
from midstream.api.process import Running, configure_logging, die_with_parent, run_service

@contextlib.asynccontextmanager
async def service():
    if {start_s}:
        print("starting", flush=True)
        await asyncio.sleep({start_s})
    async def failed():
        await asyncio.sleep({fail_s})
        return "it broke"
    yield Running("tcp://here", failed)
    await asyncio.sleep({stop_s})
    print("ended well", flush=True)

configure_logging("info", "json")
sys.exit(run_service("toy", "t1", service))
"""
NEVER_S = 600
DEADLINE_S = 30.0
Toys = list[subprocess.Popen[str]]


@pytest.fixture
def toys() -> Iterator[Toys]:
    started: Toys = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(toys: Toys, *, start_s: float = 0, fail_s: float = NEVER_S, stop_s: float = 0) -> subprocess.Popen[str]:
    code = SCRIPT.format(start_s=start_s, fail_s=fail_s, stop_s=stop_s)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    toys.append(process)
    return process


def ready(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_it_in_good_order(toys: Toys, number: signal.Signals) -> None:
    process = start(toys)
    assert ready(process) == {"ready": True, "service": "toy", "name": "t1", "address": "tcp://here"}
    process.send_signal(number)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "ended well\n")


def test_P13_the_second_signal_ends_it_at_once(toys: Toys) -> None:
    process = start(toys, stop_s=NEVER_S)
    ready(process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (1, "")


def test_P14_a_service_that_fails_says_so_and_ends(toys: Toys) -> None:
    process = start(toys, fail_s=0.1)
    ready(process)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert json.loads(errors.splitlines()[-1])["reason"] == "it broke"


def test_a_signal_ends_a_start_that_hangs(toys: Toys) -> None:
    process = start(toys, start_s=NEVER_S)
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "")


def test_a_process_ends_with_the_one_that_started_it(toys: Toys) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernel tells of a parent's death only on Linux")
    child = (
        "import time; from midstream.api.process import die_with_parent; die_with_parent(); print(1); time.sleep(600)"
    )
    parent = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-u', '-c', {child!r}],"
        " stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    toys.append(process)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_logs_are_json_without_locals(toys: Toys) -> None:
    code = (
        "import logging, structlog; from midstream.api.process import configure_logging\n"
        "configure_logging('warning', 'json')\n"
        "def broken():\n    password = 'hunter2'\n    raise ValueError('x')\n"
        "try:\n    broken()\nexcept ValueError as error:\n"
        "    structlog.get_logger().error('it broke', exc_info=error)\n"
        "structlog.get_logger().info('unseen')\nlogging.getLogger('other').warning('from %s', 'afar')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["event"], first["level"]) == ("it broke", "error")
    assert "hunter2" not in json.dumps(first["exception"])
    assert (second["event"], second["level"]) == ("from afar", "warning")
