"""Reading commands: at least once, refused when stale, forgotten once their outcome is a fact."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from midstream.control.commands import Command, StartMigration
from midstream.control.errors import LogUnavailable
from midstream.control.events import CommandRefused
from midstream.control.ids import Node
from midstream.instance.settings import COMMANDS_SEEN_MAX
from midstream.migration.protocol.seat import Start

if TYPE_CHECKING:
    from midstream.instance.llumlet import Llumlet

RETRY_S = 0.5


async def read_orders(llumlet: Llumlet) -> None:
    """Carry out this instance's commands for ever; the log being away only means that none come."""
    cursor = "0-0"
    seen: OrderedDict[str, None] = OrderedDict()
    name = llumlet.me.instance
    while True:
        try:
            commands = await llumlet.log.read_commands(name, cursor, wait_ms=llumlet.settings.command_wait_ms)
            for delivered in commands:
                _obey(llumlet, delivered.command, seen)
                cursor = delivered.cursor
            if commands:
                await llumlet.log.forget_commands(name, cursor)
        except LogUnavailable:
            cursor = "0-0"
            await asyncio.sleep(RETRY_S)


def _obey(llumlet: Llumlet, command: Command, seen: OrderedDict[str, None]) -> None:
    """Repetition, receiver, deadline, in this order; a refusal is a fact."""
    if command.id in seen:
        return
    seen[command.id] = None
    while len(seen) > COMMANDS_SEEN_MAX:
        seen.popitem(last=False)
    assert isinstance(command, StartMigration)
    if command.incarnation != llumlet.me.incarnation:
        _refuse(llumlet, command, "wrong_incarnation", f"this is {llumlet.me}")
    elif llumlet.clock.now_ms() > command.deadline_ms:
        _refuse(llumlet, command, "expired", "the command came after its deadline")
    else:
        target = Node(f"llumlet/{command.target.instance}", command.target.incarnation, command.target_address)
        llumlet.feed(command.request, Start(command, target))


def _refuse(llumlet: Llumlet, command: StartMigration, code: str, reason: str) -> None:
    fact = CommandRefused(migration=command.migration, owner=llumlet.me, code=code, reason=reason)
    llumlet.recorder.record(fact)
