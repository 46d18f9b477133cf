"""`midstream up` as its user has it: real processes, a real Valkey, one Ctrl-C; what dies comes back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from midstream.api.cli.up.state import ProcessState, UpState, last_state, read_state
from midstream.control.adapters.sql_store import ArchiveStore

CLI = [sys.executable, "-m", "midstream.api.cli"]
DEADLINE_S = 60.0
pytestmark = pytest.mark.timeout(240)


class Up:
    """One running `midstream up`."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir = data_dir
        self.errors = (data_dir.parent / "up.err").open("w+")
        self.process = subprocess.Popen(
            [*CLI, "--data-dir", str(data_dir), "up", "-o", "jsonl", "--gateway-port", "0", "--admin-port", "0",
             "--time-scale", "0.2", *options],
            stdout=subprocess.PIPE, stderr=self.errors, text=True, start_new_session=True,
        )  # fmt: skip

    def ready(self) -> dict[str, Any]:
        """Its one line on stdout."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()
        return dict(json.loads(line))

    @property
    def state(self) -> UpState:
        state = read_state(self.data_dir)
        assert state is not None
        return state

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def cli(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [*CLI, "--data-dir", str(self.data_dir), *arguments],
            capture_output=True, text=True, check=False, timeout=DEADLINE_S,
        )  # fmt: skip
        assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}{self.said()}"
        return done.stdout if code == 0 else done.stderr

    def json(self, *arguments: str) -> Any:
        return json.loads(self.cli(*arguments, "-o", "json"))

    def pids(self) -> list[int]:
        return [process.pid for process in self.state.processes if process.pid is not None]

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self.process.poll() is None:
            self.end()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("cluster") / "data", "--sizes", "1500,1000")
    try:
        up.ready()
        yield up
    finally:
        up.close()


def wait(condition: Callable[[], Any]) -> Any:
    """Until it is truthy."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def left_of(data_dir: Path) -> list[psutil.Process]:
    """Processes that still work in a folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if str(data_dir) in " ".join(process.info["cmdline"] or ())
        or (process.info["environ"] or {}).get("MIDSTREAM_DATA_DIR") == str(data_dir)
    ]


def test_it_publishes_where_everything_is(cluster: Up) -> None:
    state = cluster.state
    kinds = sorted(process.kind for process in state.processes)
    assert kinds == ["admin", "archiver", "controller", "gateway", "llumlet", "llumlet", "valkey", "worker"]
    assert all(is_alive(pid) for pid in cluster.pids())
    assert (cluster.data_dir / "up.json").stat().st_mode & 0o777 == 0o600
    assert (cluster.data_dir / "secret").stat().st_mode & 0o777 == 0o600


def test_each_process_leads_its_own_group(cluster: Up) -> None:
    pids = cluster.pids()
    assert [os.getpgid(pid) for pid in pids] == pids


def test_instances_have_the_sizes_asked_for(cluster: Up) -> None:
    found = wait(lambda: (items := cluster.json("instances", "list")) and len(items) == 2 and items)
    assert {item["instance"]: item["blocks_total"] for item in found} == {"i0": 1500, "i1": 1000}


def test_a_played_trace_is_served_and_replays_equal(cluster: Up) -> None:
    played = cluster.json("trace", "send", "azure_conv_2023", "--start", "4", "--seconds", "6", "--speed", "5")
    assert played["failed"] == 0
    assert played["requests"] > 0
    for where in ("--local", "--remote"):
        report = cluster.json("replay", "verify", where)
        assert report["first_difference"] is None
        assert report["ticks"] > 0


def test_operator_commands_answer(cluster: Up) -> None:
    assert cluster.json("requests", "list") == []
    assert isinstance(cluster.json("migrations", "list"), list)
    shown = cluster.json("state", "show")
    assert shown["position"].partition("-")[0] == str(shown["state"]["generation"])
    assert cluster.json("events", "tail", "--kind", "InstanceRegistered")[-1]["event"]["blocks_total"] in (1500, 1000)
    assert len(cluster.json("events", "tail", "--limit", "5")) == 5
    cluster.cli("policies", "set", "cooldown_ms=777")
    assert cluster.json("policies", "show")["cooldown_ms"] == 777


def test_P16_an_instance_is_drained_and_taken_back(cluster: Up) -> None:
    assert cluster.json("instances", "drain", "i1", "--wait")["status"] == "succeeded"
    assert cluster.json("instances", "get", "i1")["is_draining"]
    assert "already_draining" in cluster.cli("instances", "drain", "i1", code=1)
    cluster.cli("instances", "undrain", "i1")
    wait(lambda: not cluster.json("instances", "get", "i1")["is_draining"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["instances", "drain", "i9"], "unknown_instance"),
        (["migrations", "start", "r-nobody"], "unknown_request"),
        (["migrations", "get", "m-nobody"], "unknown_migration"),
        (["events", "tail", "--kind", "Nothing"], "unknown_kind"),
        (["state", "show", "--at", "yesterday"], "bad_position"),
        (["replay", "verify", "--set", "balance.nonsense=1", "--remote"], "nonsense"),
    ],
)
def test_bad_orders_are_one_clear_line(cluster: Up, arguments: list[str], told: str) -> None:
    said = cluster.cli(*arguments, code=2)
    assert told in said
    assert said.count("\n") == 1


def test_a_second_up_in_the_same_folder_is_refused(cluster: Up) -> None:
    said = cluster.cli("up", "--gateway-port", "0", "--admin-port", "0", code=1)
    assert "already runs" in said
    assert str(cluster.process.pid) in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["controller-0", "archiver", "gateway", "i1", "admin"])
def test_P14_a_killed_process_comes_back(cluster: Up, name: str) -> None:
    before = cluster.state.process(name)
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    after: ProcessState = wait(lambda: (now := cluster.state.process(name)).restarts > before.restarts and now)
    assert after.pid != before.pid and after.pid is not None and is_alive(after.pid)
    if name in {"gateway", "admin"}:
        assert after.address == before.address
    assert name in cluster.said()


def test_P19_a_killed_valkey_comes_back_and_the_log_has_no_hole(cluster: Up) -> None:
    before = cluster.state.process("valkey")
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    after = wait(lambda: (now := cluster.state.process("valkey")).restarts > before.restarts and now)
    assert after.address == before.address
    played = cluster.json("trace", "send", "azure_conv_2023", "--start", "4", "--seconds", "3", "--speed", "5")
    assert played["failed"] == 0
    opened = wait(lambda: len(found := cluster.json("events", "tail", "--kind", "GenerationOpened")) > 1 and found)
    generations = [item["event"]["generation"] for item in opened]
    assert generations == sorted(set(generations))
    store = ArchiveStore(cluster.state.database_url)
    try:
        wait(lambda: store.counts().get("RequestFinished", 0) >= played["requests"])
        assert store.holes() == []
    finally:
        store.close()


def test_one_ctrl_c_ends_all_and_leaves_nothing(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", "--instances", "1")
    try:
        said = up.ready()
        assert said["ready"] is True and said["gateway"].startswith("http://127.0.0.1:")
        pids = up.pids()
        assert len(pids) == 7
        assert up.end() == 0
        assert [pid for pid in pids if is_alive(pid)] == []
        assert left_of(up.data_dir) == []
        assert last_state(up.data_dir) is None
    finally:
        up.close()


def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", "--instances", "1")
    try:
        up.ready()
        up.process.send_signal(signal.SIGINT)
        wait(lambda: "stopping" in up.said())
        up.end()
        assert wait(lambda: left_of(up.data_dir) == [])
    finally:
        up.close()


def test_ctrl_c_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", "--instances", "1")
    try:
        parent = psutil.Process(up.process.pid)
        children = wait(lambda: len(found := parent.children(recursive=True)) >= 3 and found)
        up.end()
        assert [child for child in children if child.is_running() and is_alive(child.pid)] == []
    finally:
        up.close()


def test_a_killed_up_leaves_nothing_that_harms(tmp_path: Path) -> None:
    """Its processes end with it; the next `up` finds the Valkey that was left and ends it before it starts its own."""
    up = Up(tmp_path / "data", "--instances", "1")
    try:
        up.ready()
        pids, valkey = up.pids(), up.state.process("valkey").pid
        up.end(signal.SIGKILL)
        wait(lambda: not [pid for pid in pids if pid != valkey and is_alive(pid)])
        up.close()
        up = Up(tmp_path / "data", "--instances", "1")
        up.ready()
        assert valkey is not None and not is_alive(valkey)
    finally:
        up.close()


def test_P30_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = Up(tmp_path / "data", "--gateway-port", str(port))
        try:
            assert up.process.wait(DEADLINE_S) != 0
            assert f"cannot listen on 127.0.0.1:{port}" in up.said()
            assert up.said().count("\n") == 1
        finally:
            up.close()


def test_a_process_that_cannot_start_fails_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_DISPATCH_POLICY", "coin_flip")
    up = Up(tmp_path / "data", "--instances", "1")
    try:
        assert up.process.wait(DEADLINE_S) != 0
        assert "coin_flip" in up.said()
        assert left_of(up.data_dir) == []
    finally:
        up.close()
