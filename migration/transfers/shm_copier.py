"""Has another process copy between regions, so that it can copy otherwise than this one.

How the C library copies is decided once per process, and by length: only a very long copy is written past the caches,
which is nearly twice as fast and leaves the engine's data in them. That process is told to do so from 64 KiB on; the
engine's own copies stay as they are. It also needs no turn with this process's interpreter.

It is a help, not a need: while there is none, or it is busy or gone, the answer is no, and the caller copies.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

import structlog

from midstream.migration.transfers.pieces import Addresses
from midstream.migration.transfers.shm_copying import DONE, OP_COPY, OP_MAP, OP_UNMAP, ORDER, READY
from midstream.migration.transfers.shm_memory import Region, Regions

MODULE = "midstream.migration.transfers.shm_copying"
PAST_THE_CACHES = "GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x10000"
"""The least that glibc takes. Other processors and libraries ignore it."""
QUEUE_BYTES = 1024 * 1024
END_S = 5.0

logger = structlog.get_logger(__name__)


class Copier:
    """At most one process beside this one. To be used on one event loop."""

    def __init__(self, regions: Regions, stall_s: float) -> None:
        """It writes into `regions`. Without any it is never started."""
        self._regions = regions
        self._ours: dict[Region, int] = {}
        self._stall_s = stall_s
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self.is_ready = False
        """It has said that it is there."""
        self._heard = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._alarm: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the process; it is used as soon as it says that it is there."""
        if not list(self._regions):
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = _begin(theirs.fileno())
            except OSError as error:
                logger.warning("there is no process that copies for shm; copying is done here", error=str(error))
                ours.close()
                return
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
        self._orders = ours
        asyncio.get_running_loop().add_reader(ours, self._answered)
        self._ours = {region: self.lend(region.file, is_writable=True) for region in self._regions}

    def lend(self, file: int, *, is_writable: bool) -> int:
        """Let the process map the file; the number of this memory from now on."""
        number = next(self._numbers)
        self._send(ORDER.pack(OP_MAP, number, int(is_writable), 0, 0), [file])
        return number

    def take_back(self, number: int) -> None:
        """The process lets go of this memory."""
        self._send(ORDER.pack(OP_UNMAP, number, 0, 0, 0))

    def copy(self, targets: Addresses, number: int, offsets: Addresses, length: int) -> asyncio.Future[bool]:
        """Have pieces copied out of a lent memory to addresses of ours; False if it did not happen and will not.

        The order leaves at once. Until the answer is there the process may touch the memories, so whoever waits for
        it must not be cancelled. A process that answers nothing for `stall_s` is ended.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        start = int(targets.min())
        home = self._regions.find(start, int(targets.max()) - start + length)
        if self.is_ready and home is not None:
            order = ORDER.pack(OP_COPY, self._ours[home[0]], number, len(targets), length)
            if self._send(order + (targets - home[0].address).tobytes() + offsets.tobytes()):
                self._wait(done)
                return done
        done.set_result(False)
        return done

    def _wait(self, done: asyncio.Future[bool]) -> None:
        if not self._waiting:
            self._watch(self._heard - 1)
        self._waiting.append(done)

    def _watch(self, heard: int) -> None:
        """Look again and again whether it has answered anything since."""
        if heard == self._heard:
            self._kill()
        self._alarm = asyncio.get_running_loop().call_later(self._stall_s, self._watch, self._heard)

    def _told(self, is_done: bool) -> None:
        """The oldest order is answered."""
        done = self._waiting.popleft()
        if not self._waiting and self._alarm is not None:
            self._alarm.cancel()
        if not done.done():
            done.set_result(is_done)

    def _send(self, order: bytes, files: Sequence[int] = ()) -> bool:
        if self._orders is None:
            return False
        try:
            socket.send_fds(self._orders, [order], files) if files else self._orders.send(order)
        except OSError:  # it has much to do, or is gone
            return False
        return True

    def _answered(self) -> None:
        assert self._orders is not None
        try:
            answer = self._orders.recv(1)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if answer == READY:
            self.is_ready = True
        elif answer:
            self._heard += 1
            self._told(answer == DONE)
        else:
            logger.warning("the process that copies for shm is gone; copying goes on here")
            self._hang_up()

    def _kill(self) -> None:
        """Its end is an answer to all that it was asked, and comes when it has let go of all memory."""
        assert self._process is not None
        logger.warning("the process that copies for shm hangs", pid=self._process.pid)
        self._process.kill()

    def _hang_up(self) -> None:
        if self._orders is not None:
            asyncio.get_running_loop().remove_reader(self._orders)
            self._orders.close()
            self._orders = None
        self.is_ready = False
        while self._waiting:
            self._told(False)

    async def stop(self) -> None:
        """End the process. Nothing may be being copied."""
        self._hang_up()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)


def _begin(orders: int) -> subprocess.Popen[bytes]:
    """Raises `OSError`."""
    command = ["env", PAST_THE_CACHES, sys.executable, "-m", MODULE, str(orders)]
    return subprocess.Popen(command, pass_fds=[orders], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
