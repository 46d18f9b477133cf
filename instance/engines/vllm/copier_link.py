"""The llumlet's end of its workers' copiers: one Unix socket, one connection per worker, numbered calls."""

from __future__ import annotations

import asyncio
import itertools

import msgspec

from midstream.control.errors import CannotConnect, TransferFailed
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.frames import frame, read_frame
from midstream.migration.transfers.choice import is_usable, name_of

CONNECT_S = 30.0


class CopierFailed(TransferFailed):
    """A copier said no, or is not there any more."""


class Peer:
    """One connected copier."""

    def __init__(self, hello: calls.Hello, writer: asyncio.StreamWriter) -> None:
        self.rank = hello.rank
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[calls.Done]] = {}
        self._is_lost = False

    async def call(self, what: calls.ToCopier) -> calls.Done:
        """Raises `TransferFailed`. Cancelled: the copier stops the work first, and only then this ends."""
        if self._is_lost:
            raise CopierFailed("the worker is gone")
        number = next(self._numbers)
        answer: asyncio.Future[calls.Done] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send(number, what)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._send(next(self._numbers), calls.CancelCall(call=number))
            await asyncio.wait({answer})
            answer.exception()
            raise

    def _send(self, number: int, what: calls.ToCopier) -> None:
        self._writer.write(frame(msgspec.msgpack.encode(calls.CopierCall(number, what))))

    def take(self, answer: calls.CopierAnswer) -> None:
        """An answer arrived."""
        waiting = self._waiting.pop(answer.number, None)
        if waiting is None:
            return  # of a cancel, which nobody waits for
        if isinstance(answer.what, calls.Done):
            waiting.set_result(answer.what)
        elif isinstance(answer.what, calls.Failed):
            kind = CannotConnect if answer.what.is_unreachable else CopierFailed
            waiting.set_exception(kind(answer.what.reason))
        else:
            waiting.set_exception(CopierFailed("nonsense"))

    def lose(self) -> None:
        """It will answer nothing any more."""
        self._is_lost = True
        for waiting in self._waiting.values():
            waiting.set_exception(CopierFailed("the worker is gone"))
        self._waiting.clear()
        self._writer.close()


class CopierLink:
    """All copiers of one engine, in rank order."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._peers: dict[int, Peer] = {}
        self._news = asyncio.Event()
        self._readers: set[asyncio.Task[None]] = set()
        self.offers: tuple[str, ...] = ()
        """Transfers that all workers have, best first."""
        self.addresses: dict[str, str] = {}
        """By transfer: where peers reach the workers, comma-separated in rank order."""

    async def listen(self, path: str) -> None:
        """Let copiers connect."""
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def open(self, workers: int, order: calls.Open) -> None:
        """Wait for all copiers and start their transfers. Raises `TransferFailed`."""
        try:
            async with asyncio.timeout(CONNECT_S):
                while len(self._peers) < workers:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise TransferFailed(f"{len(self._peers)} of {workers} workers came") from None
        answers = await self.all(order)
        ranks = [dict(answer.endpoints) for answer in answers]
        self.offers = tuple(offer for offer in ranks[0] if all(offer in rank for rank in ranks))
        self.addresses = {
            name_of(offer): ",".join(rank[offer] for rank in ranks) for offer in self.offers if is_usable(offer)
        }

    async def all(self, what: calls.ToCopier) -> list[calls.Done]:
        """The same call to every worker."""
        return await self.each([what] * len(self._peers))

    async def each(self, what: list[calls.ToCopier]) -> list[calls.Done]:
        """One call per worker; when one fails the others are cancelled. Raises `TransferFailed`."""
        if len(what) != len(self._peers):
            raise TransferFailed(f"{len(what)} ranks there, {len(self._peers)} here")
        tasks = [asyncio.ensure_future(self._peers[rank].call(call)) for rank, call in enumerate(what)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def stop(self) -> None:
        """Let all copiers go."""
        for peer in list(self._peers.values()):
            peer.lose()
        if self._server is not None:
            self._server.close()
        if self._readers:
            await asyncio.wait(self._readers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        peer: Peer | None = None
        try:
            while True:
                answer = msgspec.msgpack.decode(await read_frame(reader), type=calls.CopierAnswer)
                if isinstance(answer.what, calls.Hello):
                    peer = self._peers[answer.what.rank] = Peer(answer.what, writer)
                    self._news.set()
                elif peer is not None:
                    peer.take(answer)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the worker has ended
        finally:
            if peer is not None:
                peer.lose()
            writer.close()
