"""The virtual loop: time that jumps, order from a seed, and no failure that stays silent."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap

import pytest

from midstream.control.simulate.loop import (
    CallbackFailed,
    DeadlockError,
    LivelockError,
    NotSimulated,
    Trace,
    VirtualClock,
    VirtualLoop,
    VirtualTimeout,
    run_virtual,
)


async def crowd(trace: Trace, *, cancel: bool = False) -> str:
    """Tasks that race on a queue, a lock, timers and (optionally) a cancelled task group."""
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=3)
    lock = asyncio.Lock()

    async def worker(number: int) -> None:
        for _ in range(5):
            await asyncio.sleep(0.001 * (number % 3))
            async with lock:
                trace.mark(f"worker {number} holds")
                await asyncio.sleep(0)
            await queue.put(number)

    async def taker() -> None:
        while True:
            trace.mark(f"took {await queue.get()}")

    async def waiter(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            trace.mark(f"waiter {number} cancelled")

    take = asyncio.create_task(taker())
    await asyncio.gather(*(worker(n) for n in range(8)))
    if cancel:
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for n in range(20):
                    group.create_task(waiter(n))
                await asyncio.sleep(1)
                raise ValueError("ends the group")
    take.cancel()
    return trace.digest()


def digest(seed: int) -> str:
    async def main() -> str:
        return await crowd(Trace(asyncio.get_running_loop().time), cancel=True)

    return run_virtual(main, seed=seed)


def test_P17_equal_seeds_give_equal_traces_and_different_ones_differ():
    assert digest(7) == digest(7)
    assert len({digest(seed) for seed in range(20)}) == 20


def test_P17_the_trace_does_not_depend_on_memory_addresses_or_hash_seeds():
    script = textwrap.dedent(
        """
        import sys
        padding = [object() for _ in range(int(sys.argv[1]))]
        from tests.simulation.test_loop import digest
        print(digest(11))
        """
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script, padding],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for padding, hash_seed in (("0", "1"), ("12345", "2"))
    }
    assert seen == {digest(11) + "\n"}


def test_time_jumps_and_the_wall_clock_follows():
    async def main() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        clock = VirtualClock(loop, 1_700_000_000_000)
        for _ in range(10):
            await asyncio.sleep(0.1)
        await asyncio.sleep(86_400)
        return loop.time(), clock.now_ms()

    seconds, now_ms = run_virtual(main, seed=1, timeout_s=100_000)
    assert seconds == pytest.approx(86_401)
    assert now_ms == 1_700_086_401_000


def test_plain_callbacks_keep_their_order_while_tasks_overtake():
    async def main() -> tuple[list[int], list[int]]:
        plain: list[int] = []
        stepped: list[int] = []

        async def step(number: int) -> None:
            stepped.append(number)

        tasks = []
        for number in range(50):
            asyncio.get_running_loop().call_soon(plain.append, number)
            tasks.append(asyncio.create_task(step(number)))
        await asyncio.gather(*tasks)
        await asyncio.sleep(1)
        return plain, stepped

    plain, stepped = run_virtual(main, seed=3)
    assert plain == sorted(plain)
    assert sorted(stepped) == plain
    assert stepped != plain


def test_timeouts_locks_and_wait_for_work_in_virtual_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main, seed=2) == pytest.approx(12)


def test_nothing_left_to_run_is_a_deadlock_that_names_the_waiters():
    async def stuck_on_this_line() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="stuck_on_this_line"):
        run_virtual(stuck_on_this_line, seed=1)


def test_a_run_past_its_virtual_time_is_ended():
    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(1)

    with pytest.raises(VirtualTimeout, match="not done after 60"):
        run_virtual(main, seed=1, timeout_s=60)


def test_spinning_without_time_is_ended(monkeypatch):
    monkeypatch.setattr("midstream.control.simulate.loop.LIVELOCK_CALLBACKS_MAX", 1000)

    async def main() -> None:
        for _ in range(10_000):
            await asyncio.sleep(0)

    with pytest.raises(LivelockError):
        run_virtual(main, seed=1)


def test_P14_a_callback_that_raises_fails_the_run_at_once():
    reached = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)
        reached.append("after")

    with pytest.raises(CallbackFailed) as caught:
        run_virtual(main, seed=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert reached == []


@pytest.mark.parametrize("is_kept", [True, False])
def test_P14_a_task_failure_that_nobody_took_fails_the_run(is_kept):
    kept = []

    async def fails() -> None:
        raise ValueError("lost")

    async def main() -> None:
        task = asyncio.create_task(fails())
        if is_kept:
            kept.append(task)
        del task
        await asyncio.sleep(1)

    with pytest.raises(CallbackFailed) as caught:
        run_virtual(main, seed=1)
    assert repr(caught.value.__cause__) == "ValueError('lost')"


def test_P14_a_failure_while_leftovers_are_cancelled_fails_the_run():
    async def leftover() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            raise ValueError("in clean-up")

    async def main() -> str:
        asyncio.get_running_loop().kept = asyncio.create_task(leftover())  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        return "fine"

    with pytest.raises(CallbackFailed, match="in clean-up"):
        run_virtual(main, seed=1)


def test_leftovers_are_cancelled_and_awaited():
    ended = []

    async def leftover() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(3)
            ended.append("leftover")

    async def main() -> str:
        asyncio.get_running_loop().kept = asyncio.create_task(leftover())  # type: ignore[attr-defined]
        await asyncio.sleep(1)
        return "fine"

    assert run_virtual(main, seed=1) == "fine"
    assert ended == ["leftover"]


def test_threads_are_refused_even_when_the_refusal_is_swallowed():
    async def main() -> None:
        with contextlib.suppress(NotSimulated):
            await asyncio.to_thread(print)
        await asyncio.sleep(1)

    with pytest.raises(CallbackFailed) as caught:
        run_virtual(main, seed=1)
    assert isinstance(caught.value.__cause__, NotSimulated)


def test_sockets_are_refused():
    async def main() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises((NotSimulated, NotImplementedError)):
        run_virtual(main, seed=1)


def test_many_cancelled_timers_do_not_pile_up():
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(5000):
            loop.call_later(1000, print).cancel()
            await asyncio.sleep(0.001)
        return len(loop._scheduled)

    assert run_virtual(main, seed=1) < 500


def test_a_closed_loop_refuses_work():
    loop = VirtualLoop(1)
    loop.close()
    with pytest.raises(RuntimeError):
        loop.call_soon(print)


def test_timers_of_one_instant_fire_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(1.0, fired.append, number)
        await asyncio.sleep(2.0)
        return fired

    assert run_virtual(main, seed=1) == run_virtual(main, seed=2, is_shuffled=False) == list(range(50))


def test_not_shuffled_tasks_run_in_the_order_in_which_they_became_ready() -> None:
    async def main() -> list[int]:
        ran: list[int] = []

        async def work(number: int) -> None:
            for _ in range(number):
                await asyncio.sleep(0)
            await asyncio.sleep(1.0)
            ran.append(number)

        await asyncio.gather(*(work(number) for number in range(20)))
        return ran

    assert (
        run_virtual(main, seed=1, is_shuffled=False) == run_virtual(main, seed=2, is_shuffled=False) == list(range(20))
    )
    assert len({tuple(run_virtual(main, seed=seed)) for seed in range(5)}) > 1


def test_not_shuffled_failures_and_spinning_end_the_run_all_the_same() -> None:
    async def failing() -> None:
        asyncio.get_running_loop().call_soon(int, "x")
        await asyncio.sleep(1.0)

    async def spinning() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(CallbackFailed):
        run_virtual(failing, seed=1, is_shuffled=False)
    with pytest.raises(LivelockError):
        run_virtual(spinning, seed=1, is_shuffled=False)
