"""An asyncio event loop on virtual time: no sockets, no threads, and every scheduling choice follows from a seed.

What is kept of asyncio's order, and what is not:

- Plain callbacks (`call_soon`, `call_later`, done callbacks) run in the order in which they became ready.
- Of all tasks that are ready, and the head of the plain callbacks, a seeded choice runs next. A correct program
  may not depend on that order. The choice depends on who is ready, never on the order in which they became
  ready: iterating a set of tasks (as `asyncio.TaskGroup` does when it cancels them) cannot leak memory
  addresses into a run.
- Time moves only when nothing is ready, and then straight to the next timer; timers of one instant fire in the order
  in which they were set.

With `is_shuffled` off, tasks are plain callbacks like all others: faster, and the order of one instant no longer
depends on how many steps a task took before. That is for runs that ask how well, not whether.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import threading
import weakref
from asyncio.base_events import BaseEventLoop
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from hashlib import blake2b
from typing import Any, NoReturn, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LIVELOCK_CALLBACKS_MAX = 1_000_000
"""Callbacks that may run at one virtual instant before the run counts as spinning."""
RESOLUTION_S = 1e-6
"""Time moves by so much for a timer that is due already: a sleep too short for a float to show still ends."""
COLLECT_EVERY_CALLBACKS = 500_000
"""Garbage is collected at fixed points of a run, because finalizers may schedule work."""
CLEANUP_MAX_S = 600.0
"""Virtual time that cancelled leftovers get to end."""
TIMERS_CANCELLED_MIN = 100
TRACE_LINES_MAX = 50_000
PENDING_SHOWN_MAX = 20

_MASK = (1 << 64) - 1


class SimulationError(RuntimeError):
    """A run that cannot go on or did what no simulated program may do."""


class DeadlockError(SimulationError):
    """Nothing is ready and no timer is set, but the main task has not ended."""


class LivelockError(SimulationError):
    """Callbacks went on and on without time moving."""


class VirtualTimeout(SimulationError):
    """The main task did not end within its virtual time."""


class NotSimulated(SimulationError):
    """Simulated code reached for a thread or the outside."""


class CallbackFailed(SimulationError):
    """An exception that nobody handled: in a callback, or in a task whose result nobody took."""


def _mix(value: int) -> int:
    """Splitmix64's finalizer: spreads seed and lane number over 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class _VirtualTask(asyncio.Task[Any]):
    """A task with its own stream of random priorities, one per step."""

    __slots__ = ("priority",)

    priority: int


class _Ready(asyncio.Handle):
    """A handle made without the questions that a debugged loop asks."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: Any, loop: asyncio.AbstractEventLoop, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """The same for timers."""

    __slots__ = ()

    _loop: VirtualLoop
    _scheduled: bool

    def __init__(
        self, when: float, callback: Callable[..., object], args: Any, loop: VirtualLoop,
        context: Context | None,
    ) -> None:  # fmt: skip
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        """As in asyncio."""
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]
            if self._scheduled:
                self._loop._timer_cancelled_count += 1


class VirtualLoop(BaseEventLoop):
    """The loop. Use `run_virtual` unless you need the loop itself.

    `callbacks` counts the callbacks run so far; `failures` holds what nobody handled, and a first failure
    ends the run with `CallbackFailed`.
    """

    _closed: bool
    _stopping: bool
    _thread_id: int | None
    _timer_cancelled_count: int

    def __init__(self, seed: int, *, is_shuffled: bool = True) -> None:
        super().__init__()
        self.set_debug(False)
        self.seed = seed
        self.callbacks = 0
        self.failures: list[BaseException] = []
        self.deadline_s = float("inf")
        self._now = 0.0
        self._timer_count = 0
        self._timers_set: list[tuple[float, int, _Timer]] = []
        self._is_shuffled = is_shuffled
        self._plain: deque[asyncio.Handle] = deque()
        self._plain_priority = _mix(_mix(seed & _MASK))
        self._steps: list[tuple[int, int, asyncio.Handle]] = []
        self._put_count = 0
        self._task_count = 0
        self._live: weakref.WeakValueDictionary[int, asyncio.Task[Any]] = weakref.WeakValueDictionary()
        self._spinning_since = 0
        self._is_strict = True
        self.set_task_factory(self._make_task)

    # --- time and order ---

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> _VirtualTask:
        self._task_count += 1
        task = _VirtualTask.__new__(_VirtualTask)
        task.priority = _mix(self.seed ^ (self._task_count << 20))  # before __init__, which schedules the first step
        task.__init__(coro, loop=loop, **options)  # type: ignore[misc]
        self._live[self._task_count] = task
        return task

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio, but tasks overtake each other (see the module)."""
        if self._closed:
            raise RuntimeError("the virtual loop is closed")
        handle = _Ready(callback, args, self, context)
        if not self._is_shuffled:
            self._plain.append(handle)
            return handle
        task = getattr(callback, "__self__", None)
        if type(task) is _VirtualTask:
            task.priority = priority = (task.priority * 6364136223846793005 + 1442695040888963407) & _MASK
            self._put_count += 1
            heapq.heappush(self._steps, (priority, self._put_count, handle))
        else:
            self._plain.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio; of two timers of one time the first set fires first."""
        if self._closed:
            raise RuntimeError("the virtual loop is closed")
        timer = _Timer(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers_set, (when, self._timer_count, timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def get_debug(self) -> bool:
        """Never: what it would tell, `describe` tells."""
        return False

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Only from the loop's own thread: there are no others in a simulation."""
        if self._thread_id not in (None, threading.get_ident()):
            self._refuse("call_soon_threadsafe from another thread")
        return self.call_soon(callback, *args, context=context)

    def _next_handle(self) -> asyncio.Handle | None:
        steps, plain = self._steps, self._plain
        if plain and (not steps or self._plain_priority < steps[0][0]):
            self._plain_priority = (self._plain_priority * 6364136223846793005 + 1442695040888963407) & _MASK
            return plain.popleft()
        return heapq.heappop(steps)[2] if steps else None

    def _run_once(self) -> None:
        """Run one ready callback, or move time to the next timer; not shuffled: on and on until somebody stops it."""
        if not self._is_shuffled:
            self._run_in_order()
            return
        handle = self._next_handle()
        if handle is None:
            self._advance()
            return
        if not handle.cancelled():
            self.callbacks += 1
            handle._run()
            self._check()
            if self.callbacks % COLLECT_EVERY_CALLBACKS == 0:
                gc.collect()

    def _run_in_order(self) -> None:
        """Rounds of what is ready, as asyncio's own loop makes them, and time moving between them."""
        plain = self._plain
        collect_at = self.callbacks + COLLECT_EVERY_CALLBACKS
        while not self._stopping:
            ready = len(plain)
            if not ready:
                self._advance()
                continue
            for _ in range(ready):
                handle = plain.popleft()
                if not handle._cancelled:
                    handle._run()
            self.callbacks += ready
            if self.failures or self.callbacks - self._spinning_since > LIVELOCK_CALLBACKS_MAX:
                self._check()
            if self.callbacks >= collect_at:
                collect_at = self.callbacks + COLLECT_EVERY_CALLBACKS
                gc.collect()

    def _check(self) -> None:
        if self.failures and self._is_strict:
            raise CallbackFailed(f"seed {self.seed}, at {self._now:.6f} s") from self.failures[0]
        if self.callbacks - self._spinning_since > LIVELOCK_CALLBACKS_MAX:
            raise LivelockError(f"{LIVELOCK_CALLBACKS_MAX} callbacks at {self._now:.6f} s; {self.describe()}")

    def _advance(self) -> None:
        timers = self._timers_set
        if not timers or timers[0][2]._cancelled or self._timer_cancelled_count > TIMERS_CANCELLED_MIN:
            timers = self._timers()
        if self._stopping:
            return
        if not timers:
            raise DeadlockError(f"seed {self.seed}, at {self._now:.6f} s: nothing left to run; {self.describe()}")
        when = timers[0][0]
        if when > self.deadline_s:
            raise VirtualTimeout(f"seed {self.seed}: not done after {self.deadline_s} s; {self.describe()}")
        self._now = now = when if when > self._now else self._now + RESOLUTION_S
        self._spinning_since = self.callbacks
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            self._plain.append(timer)

    def _timers(self) -> list[tuple[float, int, _Timer]]:
        """The heap of timers, with a live one on top and without too many cancelled ones."""
        timers = self._timers_set
        if TIMERS_CANCELLED_MIN < self._timer_cancelled_count > len(timers) // 2:
            timers[:] = [entry for entry in timers if not entry[2].cancelled()]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)[2]._scheduled = False
            self._timer_cancelled_count -= 1
        return timers

    # --- what a simulated program may not do ---

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Raises `NotSimulated`, and fails the run even if that is swallowed."""
        self._refuse(f"run_in_executor({func!r})")

    def _refuse(self, what: str) -> NoReturn:
        error = NotSimulated(f"{what}: no threads in a simulation")
        self.failures.append(error)
        raise error

    def _process_events(self, event_list: Any) -> None:
        """No sockets, no events."""

    def _write_to_self(self) -> None:
        """No other thread, nobody to wake."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Whatever nobody handled fails the run."""
        self.failures.append(context.get("exception") or SimulationError(str(context.get("message"))))

    # --- tasks ---

    def pending(self) -> list[asyncio.Task[Any]]:
        """Tasks that have not ended, in the order of their creation."""
        return [task for task in list(self._live.values()) if not task.done()]

    def describe(self) -> str:
        """One line that says which tasks wait, and where."""
        tasks = self.pending()
        places = [f"{task.get_name()} at {_place(task)}" for task in tasks[:PENDING_SHOWN_MAX]]
        more = len(tasks) - len(places)
        return "waiting: " + ("; ".join(places) or "no task") + (f"; and {more} more" if more else "")

    def untaken(self) -> list[BaseException]:
        """Exceptions of ended tasks that nobody took."""
        ended = [task for task in list(self._live.values()) if task.done() and not task.cancelled()]
        lost = [task for task in ended if getattr(task, "_log_traceback", False)]
        return [error for task in lost if (error := task.exception()) is not None]

    def cancel_leftovers(self) -> None:
        """Cancel every task and run until all are gone; failures on the way are collected, not raised."""
        self._is_strict = False
        self.deadline_s = self._now + CLEANUP_MAX_S
        while tasks := self.pending():
            for task in tasks:
                task.cancel()
            self.run_until_complete(_ended(tasks))
        self.run_until_complete(self.shutdown_asyncgens())


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)


def _place(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return "?"
    code = frames[0].f_code
    return f"{code.co_qualname}:{frames[0].f_lineno}"


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]], *, seed: int, timeout_s: float = 3600.0, is_shuffled: bool = True
) -> T:
    """Run `main()` on a fresh virtual loop, cancel what it leaves behind, and return its result.

    `timeout_s` is virtual. Raises what `main` raised; `DeadlockError`, `LivelockError`, `VirtualTimeout`; and
    `CallbackFailed` for an exception that nobody handled, during the run or while leftovers were cancelled.
    """
    with _own_garbage():
        loop = VirtualLoop(seed, is_shuffled=is_shuffled)
        loop.deadline_s = timeout_s
        try:
            result = loop.run_until_complete(main())
        except BaseException as error:
            _close(loop)
            for failure in loop.failures:
                if failure is not error.__cause__:
                    error.add_note(f"also unhandled: {failure!r}")
            raise
        _close(loop)
    if loop.failures:
        raise CallbackFailed(f"seed {seed}: {loop.failures[0]!r}") from loop.failures[0]
    return result


def _close(loop: VirtualLoop) -> None:
    try:
        loop.cancel_leftovers()
    except SimulationError as error:
        loop.failures.append(error)
    loop.failures.extend(loop.untaken())
    gc.collect()
    loop.close()


@contextmanager
def _own_garbage() -> Iterator[None]:
    """Collect only at the points that the run chooses, and only what the run made."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class VirtualClock:
    """The `Clock` port on a loop's virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_ms: int) -> None:
        self._loop = loop
        self._start_ms = start_ms

    def now_ms(self) -> int:
        """`start_ms` plus the loop's time, in milliseconds."""
        return self._start_ms + round(self._loop.time() * 1000)

    def now_us(self) -> int:
        """`start_ms` plus the loop's time, in microseconds."""
        return self._start_ms * 1000 + round(self._loop.time() * 1_000_000)


class Trace:
    """What happened in a run, as text lines with a running BLAKE2 hash; equal seeds give equal digests.

    The hash covers every line, `lines` keeps the last `TRACE_LINES_MAX`.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._hash = blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=TRACE_LINES_MAX)

    def mark(self, text: str) -> None:
        """Add a line, stamped with the virtual time."""
        line = f"{self._now_s():12.6f} {text}"
        self._hash.update(line.encode() + b"\n")
        self.lines.append(line)

    def digest(self) -> str:
        """Hex digest of all lines so far."""
        return self._hash.hexdigest()
