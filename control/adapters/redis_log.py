"""The log on Redis or Valkey (>= 7.0): one stream of facts, one command stream per instance.

A stream entry's id is the fact's position: `<generation>-<seq>`. Writes go through the function library in
`log.lua`, which refuses to append unless a generation was opened on this very run of the server; so a restarted,
rewound, flushed or failed-over server always begins a new generation, named by its time. Readers own their
positions; there are no consumer groups and therefore no pending lists (rules R5 holds by construction).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final, NoReturn

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from midstream.control.adapters.redis_client import (
    BLOCK_MS_MAX,
    COMMAND_TIMEOUT_S,
    READ_GRACE_S,
    command_client,
    reader_client,
    redacted,
    unavailable,
)
from midstream.control.codec import decode_command, decode_stored, encode_command, encode_fact
from midstream.control.commands import Command
from midstream.control.errors import BadInput, CommitConflict, GenerationChanged, LogUnavailable
from midstream.control.events import Entry, Fact
from midstream.control.ids import Position, parse_position
from midstream.control.ports import DeliveredCommand, LogTail

LIBRARY_VERSION: Final = 2
ATTEMPTS_MAX: Final = 2
"""A write is tried once more after a generation was opened for it."""

CHECK_S: Final = 1.0
"""How often an idle reader makes sure that the log did not fall behind it."""

SERVER_VERSION_MIN: Final = 7

logger = structlog.get_logger(__name__)

Row = tuple[str, bytes]
"""One stream entry: its id and its body."""


class RedisLog:
    """`control.ports.FactLog` on one server. `opened_by` names this client in `GenerationOpened`.

    Building it connects to nothing; `check` does.
    """

    def __init__(self, url: str, *, cluster: str, opened_by: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", cluster):
            raise BadInput(f"a cluster's name is made of letters, digits, '_', '.' and '-', not {cluster!r}")
        self._url = url
        self._client = command_client(url)
        self._reader = reader_client(url)
        self._opened_by = opened_by
        self._prefix = f"midstream:{{{cluster}}}"
        self._facts = f"{self._prefix}:facts"
        self._keys = (self._facts, f"{self._prefix}:meta")
        self._snapshot = f"{self._prefix}:snapshot"
        self._known = 0
        self._checked_at = 0.0

    async def check(self) -> None:
        """Raises `BadInput` if the server is too old or may evict keys (R10), `LogUnavailable` if it is away."""
        about = await self._info()
        version = str(about.get("redis_version", "0"))
        if int(version.partition(".")[0]) < SERVER_VERSION_MIN:
            raise BadInput(
                f"the log needs Redis >= {SERVER_VERSION_MIN}.0 or Valkey; {redacted(self._url)} is {version}"
            )
        policy = about.get("maxmemory_policy")
        if policy != "noeviction":
            raise BadInput(
                f"Redis at {redacted(self._url)} has maxmemory-policy {policy}, which deletes facts silently; "
                "set it to noeviction"
            )

    async def memory_used_ratio(self) -> float:
        """See `FactLog.memory_used_ratio`."""
        about = await self._info()
        limit = int(about.get("maxmemory", 0)) or int(about.get("total_system_memory", 0))
        return int(about["used_memory"]) / limit if limit else 0.0

    async def append(self, facts: Sequence[Fact], *, generation: int | None = None) -> Position:
        """See `FactLog.append`."""
        bodies = _encoded(facts)
        self._hear(generation or 0)
        for _ in range(ATTEMPTS_MAX):
            status, said, *_ = await self._function("append", self._keys, self._known, generation or 0, *bodies)
            if status == "OK":
                return self._heard(parse_position(said))
            if status == "CHANGED":
                self._hear(int(said))
                raise GenerationChanged(int(said))
            await self.open_generation(self._known, cause="no generation was open on this server run")
        raise LogUnavailable(f"the log at {redacted(self._url)} restarts again and again")

    async def commit(
        self, *, after: Position, facts: Sequence[Fact], commands: Sequence[Command], generation: int | None = None
    ) -> Position:
        """See `FactLog.commit`."""
        bodies = _encoded(facts)
        for _ in range(ATTEMPTS_MAX):
            wanted = after.generation or generation or self._known
            status, said, *_ = await self._function(
                "commit",
                (*self._keys, *(self._commands_of(command.instance) for command in commands)),
                *(self._known, wanted, str(after), len(bodies)),
                *(*bodies, *(encode_command(command) for command in commands)),
            )
            if status == "OK":
                return self._heard(parse_position(said))
            if status == "STALE":
                await self.open_generation(self._known, cause="no generation was open on this server run")
            if status != "STALE" or wanted:
                await self._conflict(after, status, said)
        raise LogUnavailable(f"the log at {redacted(self._url)} restarts again and again")

    async def read(self, after: Position, *, count: int = 500, wait_ms: int = 0) -> list[Entry]:
        """See `FactLog.read`."""
        self._hear(after.generation)
        deadline = asyncio.get_running_loop().time() + wait_ms / 1000
        rows = await self._wait_for_rows(self._facts, str(after), count, deadline)
        entries = [Entry(parse_position(row_id), decode_stored(body)) for row_id, body in rows]
        if entries:
            self._hear(entries[-1].position.generation)
        return entries

    async def tail(self) -> LogTail:
        """See `FactLog.tail`."""
        for _ in range(ATTEMPTS_MAX):
            generation, first, last, committed = await self._function("tail", self._keys)
            if int(generation) >= max(self._known, 1):
                end = self._heard(parse_position(last))
                begin = parse_position(first) if first else Position(end.generation, end.seq + 1)
                return LogTail(int(generation), begin, end, parse_position(committed))
            await self.open_generation(self._known, cause="no generation was open on this server run")
        raise LogUnavailable(f"the log at {redacted(self._url)} restarts again and again")

    async def open_generation(self, above: int, *, cause: str) -> int:
        """See `FactLog.open_generation`."""
        names = (msgspec.json.encode(cause), msgspec.json.encode(self._opened_by))
        _, said = await self._function("open_generation", self._keys, above, *names)
        self._hear(int(said))
        return int(said)

    async def trim(self, below: Position) -> int:
        """See `FactLog.trim`. By position only, never by length (R11)."""
        return int(await self._ask("XTRIM", self._facts, "MINID", "=", str(below)))

    async def read_commands(
        self, instance: str, after: str, *, count: int = 64, wait_ms: int = 0
    ) -> list[DeliveredCommand]:
        """See `FactLog.read_commands`. What this build cannot read is logged and passed over."""
        self._hear(parse_position(after).generation)
        deadline = asyncio.get_running_loop().time() + wait_ms / 1000
        while True:
            rows = await self._wait_for_rows(self._commands_of(instance), after, count, deadline)
            delivered = _delivered(instance, rows)
            if delivered or not rows:
                return delivered
            after = rows[-1][0]

    async def forget_commands(self, instance: str, through: str) -> None:
        """See `FactLog.forget_commands`."""
        cursor = parse_position(through)
        keep_from = Position(cursor.generation, cursor.seq + 1)
        await self._ask("XTRIM", self._commands_of(instance), "MINID", "=", str(keep_from))

    async def save_snapshot(self, position: Position, state: bytes) -> None:
        """See `FactLog.save_snapshot`."""
        await self._function("save_snapshot", (self._snapshot,), position.generation, position.seq, state)

    async def load_snapshot(self) -> tuple[Position, bytes] | None:
        """See `FactLog.load_snapshot`."""
        position, state = await self._ask("HMGET", self._snapshot, "position", "state")
        return None if position is None else (parse_position(position.decode()), state)

    async def close(self) -> None:
        """Give up all connections."""
        await self._reader.aclose()
        await self._client.aclose()

    def _commands_of(self, instance: str) -> str:
        return f"{self._prefix}:cmd:{instance}"

    def _hear(self, generation: int) -> None:
        self._known = max(self._known, generation)

    def _heard(self, position: Position) -> Position:
        self._hear(position.generation)
        return position

    async def _conflict(self, after: Position, status: str, said: str) -> NoReturn:
        if status == "CHANGED":
            self._hear(int(said))
        where = f"the last commit is at {said}" if status == "CONFLICT" else f"generation {self._known} is open"
        raise CommitConflict(f"{where}; this one was based on {after}")

    async def _wait_for_rows(self, key: str, after: str, count: int, deadline: float) -> list[Row]:
        loop = asyncio.get_running_loop()
        while True:
            left_ms = int((deadline - loop.time()) * 1000)
            rows = await self._read_rows(key, after, count, min(left_ms, BLOCK_MS_MAX))
            if rows:
                return rows
            await self._catch_up()
            if left_ms <= 0:
                return rows

    async def _read_rows(self, key: str, after: str, count: int, block_ms: int) -> list[Row]:
        if block_ms <= 0:
            reply = await self._ask("XREAD", "COUNT", count, "STREAMS", key, after)
        else:
            words = ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", key, after)
            reply = await self._block(block_ms, words)
        rows = reply[0][1] if reply else ()
        return [(row_id.decode(), fields.get(b"d", b"")) for row_id, fields in rows]

    async def _block(self, block_ms: int, words: tuple[Any, ...]) -> Any:
        try:
            async with asyncio.timeout(block_ms / 1000 + READ_GRACE_S):
                return await self._ask(*words, client=self._reader)
        except TimeoutError:
            raise LogUnavailable(f"the log at {redacted(self._url)} does not answer a read") from None

    async def _catch_up(self) -> None:
        """Open a generation above the highest seen if the server forgot it: else its new entries are never read."""
        now = asyncio.get_running_loop().time()
        if now - self._checked_at < CHECK_S:
            return
        self._checked_at = now
        generation, *_ = await self._function("tail", self._keys)
        if 0 < int(generation) < self._known:
            await self.open_generation(self._known, cause="a reader had seen a higher generation")

    async def _function(self, name: str, keys: Sequence[str], *args: Any) -> list[str]:
        words = ("FCALL", f"midstream_{name}_{LIBRARY_VERSION}", len(keys), *keys, *args)
        try:
            reply = await _execute(self._client, *words)
        except ResponseError as error:
            if "unction not found" not in str(error):
                raise unavailable(error, self._url) from error
            await self._ask("FUNCTION LOAD", "REPLACE", _library())
            reply = await self._ask(*words)
        except (RedisError, OSError) as error:
            raise unavailable(error, self._url) from error
        return [word.decode() for word in reply] if isinstance(reply, list) else [str(reply)]

    async def _ask(self, *words: Any, client: Redis | None = None) -> Any:
        try:
            return await (_execute(self._client, *words) if client is None else _call(client, *words))
        except (RedisError, OSError) as error:
            raise unavailable(error, self._url) from error

    async def _info(self) -> dict[str, Any]:
        about: dict[str, Any] = await self._ask("INFO")
        return about


async def _execute(client: Redis, *words: Any) -> Any:
    """One command, bounded here: the client's own bound on sending loses a cancellation (Python 3.11's `wait_for`)."""
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            return await _call(client, *words)
    except TimeoutError:
        raise TimeoutError(f"no answer within {COMMAND_TIMEOUT_S:g} s") from None


async def _call(client: Redis, *words: Any) -> Any:
    return await client.execute_command(*words)  # type: ignore[no-untyped-call]


def _encoded(facts: Sequence[Fact]) -> list[bytes]:
    if not facts:
        raise BadInput("there is no fact to append")
    return [encode_fact(fact) for fact in facts]


def _delivered(instance: str, rows: Sequence[Row]) -> list[DeliveredCommand]:
    delivered = []
    for cursor, body in rows:
        try:
            delivered.append(DeliveredCommand(cursor, decode_command(body)))
        except BadInput as error:
            logger.error("unreadable command", instance=instance, cursor=cursor, error=str(error))
    return delivered


def _library() -> str:
    return resources.files("midstream.control.adapters").joinpath("log.lua").read_text()
