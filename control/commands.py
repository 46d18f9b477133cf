"""Orders to one llumlet. A command leaves only in the same atomic step as the fact that explains it."""

from __future__ import annotations

import msgspec

from midstream.control.ids import Owner


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every command carries: a derived id, who it is for, and until when it may be begun."""

    id: str
    """The migration's id with the command's verb: deciding twice gives the same id."""
    instance: str
    """Receiver; `incarnation` must be its current one."""
    incarnation: int
    deadline_ms: int
    """Wall clock after which the command must be refused."""


class StartMigration(Command, frozen=True, kw_only=True, tag="StartMigration"):
    """Move a request that this instance owns at `epoch` to `target`."""

    migration: str
    request: str
    epoch: int
    target: Owner
    target_address: str
    mode: str = "live"
    """`live blocking recompute` (`migration.plan`)."""


AnyCommand = StartMigration
"""Every command there is: a union, once there are more."""
