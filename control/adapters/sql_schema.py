"""Tables of the archive. The Alembic versions build the same ones; a test compares the two."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, PrimaryKeyConstraint, Table, Text

metadata: Final = MetaData()


def _position() -> tuple[Column[int], Column[int]]:
    return (
        Column("generation", BigInteger, nullable=False),
        Column("seq", BigInteger, nullable=False),
    )


facts: Final = Table(
    "facts",
    metadata,
    *_position(),
    Column("source", Text, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("source_seq", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("request", Text),
    Column("migration", Text),
    Column("instance", Text),
    Column("body", Text, nullable=False),
    PrimaryKeyConstraint("generation", "seq", name="pk_facts"),
    Index("ux_facts_identity", "source", "incarnation", "source_seq", unique=True),
    Index("ix_facts_kind", "kind", "generation", "seq"),
    Index("ix_facts_at_ms", "at_ms", "generation", "seq"),
)
"""Every fact once, at its first place in the log; `body` is its JSON."""

for _name in ("request", "migration", "instance"):
    _filled = facts.c[_name].is_not(None)
    Index(
        f"ix_facts_{_name}", facts.c[_name], facts.c.generation, facts.c.seq,
        sqlite_where=_filled, postgresql_where=_filled,
    )  # fmt: skip

repeats: Final = Table(
    "repeats",
    metadata,
    *_position(),
    Column("source", Text, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("source_seq", BigInteger, nullable=False),
    PrimaryKeyConstraint("generation", "seq", name="pk_repeats"),
)
"""Places in the log that hold a fact said again. A fold drops most, but must see them where they were."""

dead_letters: Final = Table(
    "dead_letters",
    metadata,
    *_position(),
    Column("error", Text, nullable=False),
    Column("body", Text, nullable=False),
    PrimaryKeyConstraint("generation", "seq", name="pk_dead_letters"),
)

archive_position: Final = Table(
    "archive_position",
    metadata,
    Column("id", Integer, autoincrement=False, nullable=False),
    *_position(),
    PrimaryKeyConstraint("id", name="pk_archive_position"),
)
"""One row: everything up to here is archived."""

snapshots: Final = Table(
    "snapshots",
    metadata,
    *_position(),
    Column("digest", Text, nullable=False),
    Column("state", Text, nullable=False),
    PrimaryKeyConstraint("generation", "seq", name="pk_snapshots"),
)

operations: Final = Table(
    "operations",
    metadata,
    Column("id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("params", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("progress", Float, nullable=False),
    Column("result", Text),
    Column("error", Text),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("id", name="pk_operations"),
)
"""Slow jobs (replays); their progress and outcome."""

Index("ix_operations_created", operations.c.created_at_ms, operations.c.id)
