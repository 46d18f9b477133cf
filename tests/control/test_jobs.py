"""rq jobs against a real Valkey: replays that end once, and nothing from the queue that was not meant to run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Callback, Queue
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.serializers import DefaultSerializer, JSONSerializer

from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.adapters.sql_operations import Operation, OperationStore
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.errors import BadInput, LogUnavailable, UnknownThing
from midstream.control.events import Entry, Fact, TaskFailed
from midstream.control.ids import Position
from midstream.control.jobs import JobQueue, job_id, queue_name
from midstream.control.replay import as_json, verify
from tests.control.histories import Recorded, busy_day
from tests.crash import crash

PATIENCE_S = 60.0

WORKER = """
import sys
from midstream.control.adapters.clock import SystemClock
from midstream.control.jobs import run_worker
url, cluster, database, burst = sys.argv[1:]
run_worker(url, cluster=cluster, database_url=database, clock=SystemClock(), burst=burst == "burst")
"""


class Rig:
    """A queue on a Valkey, a database with a day in it, and workers as processes."""

    def __init__(self, server: LocalValkey, cluster: str, database_url: str, log: Recorded, path: Path) -> None:
        self.server, self.cluster, self.database_url, self.log = server, cluster, database_url, log
        self.queue = JobQueue(server.url, cluster=cluster)
        self.client = redis.Redis.from_url(server.url)
        self.archive = ArchiveStore(database_url)
        self.archive.store(log.entries)
        self.operations = OperationStore(database_url)
        self.path = path
        self.workers: list[subprocess.Popen[bytes]] = []

    def ask(self, operation_id: str, **asked: Any) -> None:
        self.operations.open(operation_id, "replay", asked, 1)
        self.queue.enqueue_replay(operation_id, **asked)

    def worker(self, *, burst: bool = False) -> subprocess.Popen[bytes]:
        arguments = [self.server.url, self.cluster, self.database_url, "burst" if burst else "on"]
        worker = subprocess.Popen([sys.executable, "-c", WORKER, *arguments], env={"PYTHONPATH": str(self.path)})
        self.workers.append(worker)
        return worker

    def work(self) -> None:
        """One worker empties the queue."""
        assert self.worker(burst=True).wait(PATIENCE_S) == 0

    def until(self, operation_id: str, is_so: Callable[[Operation], bool]) -> Operation:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(operation := self.operations.get(operation_id)):
            assert time.monotonic() < deadline, operation
            time.sleep(0.02)
        return operation

    def rq(self, serializer: Any = JSONSerializer) -> Queue:
        """The queue as anybody who can write to Redis has it."""
        return Queue(queue_name(self.cluster), connection=self.client, serializer=serializer)

    def failed(self) -> list[str]:
        return FailedJobRegistry(queue=self.rq()).get_job_ids()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.queue.close()
        self.client.close()
        self.archive.close()
        self.operations.close()


@pytest.fixture
def rig(valkey: LocalValkey, cluster: str, sqlite_url: str, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(valkey, cluster, sqlite_url, busy_day(), tmp_path)
    yield rig
    rig.close()


def test_R14_a_replay_runs_as_a_job_and_its_result_is_on_the_operation(rig: Rig):
    rig.ask("op-1")
    rig.ask("op-2", overrides={"balance.low": 0.5}, upto=str(rig.log.entries[-3].position))
    rig.work()
    one, two = rig.operations.get("op-1"), rig.operations.get("op-2")
    assert (one.status, one.progress, one.error) == ("succeeded", 1.0, None)
    assert one.result == as_json(verify(rig.log.entries))
    assert two.result == as_json(verify(rig.log.entries[:-2], overrides={"balance.low": 0.5}))
    assert two.result["is_equal"] is False
    assert rig.failed() == []


def test_R14_a_replay_asked_for_or_run_twice_has_one_result(rig: Rig):
    rig.ask("op-1")
    rig.ask("op-1")
    assert rig.rq().count == 1
    rig.work()
    ended = rig.operations.get("op-1")
    rig.client.delete(f"rq:job:{job_id(rig.cluster, 'op-1')}")
    rig.archive.store([Entry(Position(9, 0), Fact("s", 1, 1, 0, TaskFailed(task="t", error="e")))])
    rig.ask("op-1")
    rig.work()
    assert rig.operations.get("op-1") == ended


def test_R14_a_job_that_was_given_up_can_be_asked_for_again(rig: Rig):
    rig.ask("op-1")
    rig.client.hset(f"rq:job:{job_id(rig.cluster, 'op-1')}", "status", "failed")
    rig.client.delete(rig.rq().key)
    rig.ask("op-1")
    rig.work()
    assert rig.operations.get("op-1").status == "succeeded"


def test_a_replay_that_cannot_run_says_why(rig: Rig):
    day = rig.log.entries[-1].position
    with pytest.raises(UnknownThing):
        rig.ask("op-1", overrides={"nobody.x": 1})
    with pytest.raises(BadInput):
        rig.ask("op-1", upto="yesterday")
    with pytest.raises(BadInput):
        rig.queue.enqueue_replay("no spaces; please")
    assert rig.rq().count == 0
    rig.operations.open("op-2", "replay", {}, 1)
    rig.rq().enqueue_call("replay", kwargs={"operation_id": "op-2", "overrides": {"x.y": 1}, "upto": str(day)})
    rig.work()
    failed = rig.operations.get("op-2")
    assert failed.status == "failed"
    assert "UnknownThing" in str(failed.error)


TRAP = """
import pathlib
def spring(*args, **kwargs):
    pathlib.Path(__file__).with_name("sprung").touch()
class Bomb:
    def __reduce__(self):
        return spring, ()
"""


@pytest.fixture
def trap(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that workers could import, and the file that says one of its functions ran."""
    (rig.path / "trap.py").write_text(TRAP)
    monkeypatch.syspath_prepend(rig.path)
    return rig.path / "sprung"


def test_R15_a_function_that_is_not_on_the_list_is_refused(rig: Rig, trap: Path):
    job = rig.rq().enqueue_call("trap.spring")
    rig.work()
    assert rig.failed() == [job.id]
    assert not trap.exists()
    result = Job.fetch(job.id, connection=rig.client, serializer=JSONSerializer).latest_result()
    assert result is not None
    assert "unknown_job" in str(result.exc_string)


def test_R15_a_method_of_a_value_in_the_job_is_not_called(rig: Rig, trap: Path):
    job = rig.rq().enqueue_call("replay", kwargs={"operation_id": "x"})
    rig.client.hset(job.key, "data", JSONSerializer.dumps(["upper", "instance", [], {}]))
    rig.work()
    assert rig.failed() == [job.id]


def test_R15_a_pickle_in_the_queue_is_refused(rig: Rig, trap: Path):
    import trap as module

    job = rig.rq(DefaultSerializer).enqueue_call("replay", kwargs={"operation_id": module.Bomb()})
    rig.ask("op-1")
    rig.work()
    assert not trap.exists()
    assert rig.failed() == [job.id]
    assert rig.operations.get("op-1").status == "succeeded", "the jobs behind it are not held up"
    # The blob would have gone off where pickles are read.
    assert Job.fetch(job.id, connection=rig.client, serializer=DefaultSerializer).kwargs
    assert trap.exists()


def test_R15_callbacks_named_in_redis_are_not_run(rig: Rig, trap: Path):
    for index, name in enumerate(("replay", "nothing")):
        rig.operations.open(f"op-{index}", "replay", {}, 1)
        rig.rq().enqueue_call(
            name,
            kwargs={"operation_id": f"op-{index}", "overrides": {}, "upto": None},
            on_success=Callback("trap.spring"),
            on_failure=Callback("trap.spring"),
            on_stopped=Callback("trap.spring"),
        )
    rig.work()
    assert rig.operations.get("op-0").status == "succeeded"
    assert not trap.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_ends_at_once_when_told(rig: Rig, how: signal.Signals):
    worker = rig.worker()
    rig.ask("op-1")
    rig.until("op-1", lambda o: o.status == "succeeded")
    worker.send_signal(how)
    assert worker.wait(PATIENCE_S) == 0


@pytest.fixture
def long_day(rig: Rig) -> Rig:
    """A replay of some seconds."""
    end = rig.log.entries[-1].position.seq
    for first in range(end + 1, end + 80_001, 2_000):
        places = range(first, first + 2_000)
        rig.archive.store(
            [Entry(Position(1, n), Fact("s", 1, n - end, 0, TaskFailed(task="t", error="e"))) for n in places]
        )
    return rig


def test_R14_a_worker_told_to_stop_in_a_job_gives_it_back_to_the_queue(long_day: Rig):
    rig = long_day
    worker = rig.worker()
    rig.ask("op-1")
    rig.until("op-1", lambda o: o.status == "running" and o.progress > 0)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_S) == 0
    assert rig.operations.get("op-1").status == "running"
    assert rig.rq().count == 1
    rig.work()
    assert rig.operations.get("op-1").status == "succeeded"


def test_R14_a_killed_worker_s_job_is_run_again(long_day: Rig):
    rig = long_day
    worker = rig.worker()
    rig.ask("op-1")
    rig.until("op-1", lambda o: o.status == "running" and o.progress > 0)
    worker.kill()
    worker.wait()
    registry = StartedJobRegistry(queue=rig.rq())
    [(execution, due)] = rig.client.zrange(registry.key, 0, -1, withscores=True)
    assert due < rig.client.time()[0] + 40, "a dead worker is noticed within the heartbeat's time to live"
    rig.client.zadd(registry.key, {execution: 1})
    rig.work()
    rig.work()
    operation = rig.operations.get("op-1")
    assert operation.status == "succeeded"
    assert operation.result == as_json(verify(rig.archive.iterate()))


def test_P13_a_worker_outlives_a_restart_of_redis(own_valkey: LocalValkey, sqlite_url: str, tmp_path: Path):
    rig = Rig(own_valkey, "c", sqlite_url, busy_day(), tmp_path)
    worker = rig.worker()
    rig.ask("op-1")
    rig.until("op-1", lambda o: o.status == "succeeded")
    crash(own_valkey)
    with pytest.raises(LogUnavailable):
        rig.queue.enqueue_replay("op-2")
    own_valkey.start()
    rig.ask("op-2")
    rig.until("op-2", lambda o: o.status == "succeeded")
    worker.terminate()
    assert worker.wait(PATIENCE_S) == 0
    rig.close()


def test_each_cluster_has_its_own_queue():
    assert queue_name("a") != queue_name("b")
    with pytest.raises(BadInput):
        JobQueue("http://nowhere", cluster="a")
