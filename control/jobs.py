"""Slow, offline jobs on rq: enqueuing them, the functions that may run, and the worker that runs them.

What stands in Redis is untrusted input: jobs are JSON, never pickle; a job may only name a function
of `JOBS`; the database's address is the worker's own, never the job's.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final, NoReturn

import structlog
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry as RedisRetry
from rq import Queue, Retry, SimpleWorker
from rq.exceptions import DuplicateJobError, NoSuchJobError, StopRequested
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from midstream.control.adapters.sql_operations import ENDED, OperationStore
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.codec import digest
from midstream.control.errors import ArchiveUnavailable, BadInput, LogUnavailable, MidstreamError, Refused
from midstream.control.ids import START, parse_position
from midstream.control.ports import Clock
from midstream.control.replay import as_json, check_overrides, verify

WORKER_TTL_S: Final = 30
MAINTENANCE_S: Final = 10
"""How often a worker looks for jobs whose worker died (R14)."""

HEARTBEAT_TTL_S: Final = 30
"""A running job whose worker was not heard for so long is run again."""

BEAT_S: Final = 1.0
"""How often a running job writes its progress and tells Redis that it lives."""

JOB_TIMEOUT_S: Final = 3_600
RETRIES_MAX: Final = 5
"""How often a job is begun again after its worker died or was stopped, or the database was away."""

RECONNECT_S: Final = 1.0
RECONNECT_MAX_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 2.0
COMMAND_TIMEOUT_S: Final = 4.0
WORKER_TIMEOUT_S: Final = float(WORKER_TTL_S)
"""Of the worker's socket: longer than its blocking wait for a job, `WORKER_TTL_S` - 15 s."""

RESULT_TTL_S: Final = 600
"""rq forgets a job so long after its end; the operation keeps its result."""

GIVEN_UP: Final = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)
REPLAY: Final = "replay"

logger = structlog.get_logger(__name__)


class JobInterrupted(MidstreamError):
    """The worker was told to stop; the job is queued again."""


def queue_name(cluster: str) -> str:
    """Each cluster has its own queue."""
    return f"midstream-{cluster}"


def job_id(cluster: str, operation_id: str) -> str:
    """Job ids are global in a Redis, and made of fewer characters than cluster names."""
    return f"{digest(cluster.encode())[:8]}-{operation_id}"


class JobQueue:
    """Where jobs are put. Calls block; an asyncio caller puts them into a thread."""

    def __init__(self, redis_url: str, *, cluster: str) -> None:
        """Connects at the first call. Raises `BadInput` for a bad address."""
        self._cluster = cluster
        self._client = _client(redis_url, COMMAND_TIMEOUT_S)
        self._queue = Queue(queue_name(cluster), connection=self._client, serializer=JSONSerializer)

    def enqueue_replay(
        self, operation_id: str, *, overrides: Mapping[str, Any] | None = None, upto: str | None = None
    ) -> None:
        """Have a replay run for an operation that is in the archive; a second call for one that waits is a no-op.

        Raises `BadInput` (`UnknownThing`) for a bad id, override or position, `LogUnavailable` if Redis is away.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", operation_id):
            raise BadInput(f"an operation's id is made of letters, digits, '_' and '-', not {operation_id!r}")
        check_overrides(overrides or {})
        if upto is not None:
            parse_position(upto)
        kwargs = {"operation_id": operation_id, "overrides": dict(overrides or {}), "upto": upto}
        try:
            self._enqueue(job_id(self._cluster, operation_id), kwargs)
        except RedisError as error:
            raise LogUnavailable(f"the job could not be queued: {error}") from error

    def _enqueue(self, id: str, kwargs: dict[str, Any]) -> None:
        """Put it into the queue unless it waits, runs or is done; one that was given up is begun afresh."""
        for _ in range(2):
            try:
                self._queue.enqueue_call(
                    REPLAY, kwargs=kwargs, job_id=id, unique=True, timeout=JOB_TIMEOUT_S, description=REPLAY,
                    retry=Retry(max=RETRIES_MAX), result_ttl=RESULT_TTL_S, failure_ttl=RESULT_TTL_S,
                )  # fmt: skip
                return
            except DuplicateJobError:
                if not self._forget_given_up(id):
                    return

    def _forget_given_up(self, id: str) -> bool:
        try:
            job = Job.fetch(id, connection=self._client, serializer=JSONSerializer)
        except NoSuchJobError:
            return True
        if job.get_status() not in GIVEN_UP:
            return False
        job.delete()
        return True

    def close(self) -> None:
        """Give up connections."""
        self._client.close()


class JobContext:
    """What a worker lends to a job function."""

    def __init__(self, database_url: str, clock: Clock, beat: Callable[[], None], is_stopping: Callable[[], bool]):
        self.database_url = database_url
        self.clock = clock
        self._beat = beat
        self._is_stopping = is_stopping
        self._due = time.monotonic()

    def is_beat_due(self) -> bool:
        """Once per `BEAT_S`: tell Redis that the job is alive. Raises `JobInterrupted` if it should stop."""
        if self._is_stopping():
            raise JobInterrupted("the worker stops")
        if time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + BEAT_S
        self._beat()
        return True


def run_replay(context: JobContext, operation_id: str, overrides: Mapping[str, Any], upto: str | None) -> None:
    """Verify the archive's decisions up to a position, progress and result on the operation.

    Running it again after it ended changes nothing. Raises `ArchiveUnavailable` and `JobInterrupted`: run it again.
    """
    archive, operations = ArchiveStore(context.database_url), OperationStore(context.database_url)
    try:
        if operations.get(operation_id).status in ENDED:
            return
        _replay(context, archive, operations, operation_id, overrides, upto)
    finally:
        archive.close()
        operations.close()


def _replay(
    context: JobContext,
    archive: ArchiveStore,
    operations: OperationStore,
    operation_id: str,
    overrides: Mapping[str, Any],
    upto: str | None,
) -> None:
    now_ms = context.clock.now_ms
    end = archive.position() if upto is None else parse_position(upto)
    total = max(archive.length(end), 1)

    def report(facts: int) -> None:
        if context.is_beat_due():
            operations.report(operation_id, min(facts / total, 1.0), now_ms())

    operations.report(operation_id, 0.0, now_ms())
    try:
        found = verify(archive.iterate(START, end), overrides=overrides, on_progress=report)
    except (ArchiveUnavailable, JobInterrupted):
        raise
    except Exception as error:
        logger.exception("replay failed", operation=operation_id)
        operations.fail(operation_id, f"{type(error).__name__}: {error}", now_ms())
        if not isinstance(error, MidstreamError):
            raise
    else:
        operations.succeed(operation_id, as_json(found), now_ms())


JOBS: Final[Mapping[str, Callable[..., None]]] = {REPLAY: run_replay}
"""The functions a job may name."""


class ListedJob(Job):
    """A job that runs a function of `JOBS` or none; what else Redis says about it (callbacks, webhooks) is ignored."""

    context: JobContext

    @property
    def func(self) -> Callable[..., None]:
        """Raises `Refused` for a function that is not on the list."""
        function = JOBS.get(self.func_name or "")
        if function is None:
            raise Refused("unknown_job", f"no job is named {self.func_name!r}")
        return function

    def restore(self, raw_data: Any) -> None:
        """Read the job from Redis."""
        super().restore(raw_data)
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self._dependency_ids = []
        self.webhooks = []

    def _execute(self) -> None:
        self.func(self.context, **self.kwargs)


class Worker(SimpleWorker):
    """Runs jobs in its own process, one after the other; SIGTERM or Ctrl-C puts a running job back into the queue."""

    job_class = ListedJob
    max_connection_wait_time = RECONNECT_MAX_S
    log_result_lifespan = False

    def __init__(
        self, client: Redis, *, cluster: str, database_url: str, clock: Clock, on_beat: Callable[[], None]
    ) -> None:
        super().__init__(
            queue_name(cluster), connection=client, serializer=JSONSerializer, worker_ttl=WORKER_TTL_S,
            maintenance_interval=MAINTENANCE_S, log_job_description=False,
        )  # fmt: skip
        self.is_stopping = False
        self._database_url = database_url
        self._clock = clock
        self._on_beat = on_beat

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Tell Redis that this worker is there, at least every `WORKER_TTL_S` - 15 s."""
        super().heartbeat(timeout, pipeline)
        self._on_beat()

    def perform_job(self, job: Job, queue: Queue, execution: Execution) -> bool:
        """Lend the job its context and run it."""
        assert isinstance(job, ListedJob)
        job.context = JobContext(
            self._database_url, self._clock, lambda: self._beat(job, execution), lambda: self.is_stopping
        )
        return super().perform_job(job, queue, execution)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Seconds; rq's own value is the job's whole timeout, in which a killed worker would go unnoticed."""
        return HEARTBEAT_TTL_S

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """On a signal: at once if idle, at the job's next beat otherwise."""
        self.is_stopping = True
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def set_shutdown_requested_date(self) -> None:
        """Nothing: it is called in a signal handler, which must not fail because Redis is away."""

    def _beat(self, job: Job, execution: Execution) -> None:
        try:
            self.maintain_heartbeats(job, execution)
        except RedisError as error:
            logger.warning("job goes on without Redis", job=job.id, error=str(error))


def run_worker(
    redis_url: str,
    *,
    cluster: str,
    database_url: str,
    clock: Clock,
    burst: bool = False,
    on_beat: Callable[[], None] = lambda: None,
) -> None:
    """Run jobs until SIGTERM or Ctrl-C, through outages of Redis; with `burst`, until the queue is empty.

    Must be called in the main thread. `on_beat` is called whenever the worker has told Redis that it is there.
    Raises `BadInput` for a bad address.
    """
    client = _client(redis_url, WORKER_TIMEOUT_S)
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _work_on(
            lambda: Worker(client, cluster=cluster, database_url=database_url, clock=clock, on_beat=on_beat), burst
        )
    except StopRequested:
        logger.info("worker stops")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        client.close()


def _work_on(make_worker: Callable[[], Worker], burst: bool) -> None:
    """One worker after the other, until one is told to stop; each new reason for waiting is said once."""
    told = ""
    while True:
        try:
            worker = make_worker()
            worker.work(burst=burst, logging_level="WARNING")
            if burst or worker.is_stopping:
                return
            told = ""
        except RedisError as error:
            if str(error) != told:
                told = str(error)
                logger.warning("worker waits for Redis", error=told)
        time.sleep(RECONNECT_S)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise StopRequested


def _client(redis_url: str, timeout_s: float) -> Redis:
    try:
        return Redis.from_url(
            redis_url, retry=RedisRetry(NoBackoff(), 0), retry_on_error=[], socket_timeout=timeout_s,
            socket_connect_timeout=CONNECT_TIMEOUT_S, client_name="midstream-jobs",
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(f"bad Redis address: {error}") from error
