"""The archive: facts, repeats, dead letters, position, snapshots, operations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _position() -> tuple[sa.Column[int], sa.Column[int]]:
    return (
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
    )


def _identity() -> tuple[sa.Column[str], sa.Column[int], sa.Column[int]]:
    return (
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("source_seq", sa.BigInteger, nullable=False),
    )


def upgrade() -> None:
    """Create everything, and the position's one row."""
    _create_facts()
    op.create_table(
        "repeats", *_position(), *_identity(), sa.PrimaryKeyConstraint("generation", "seq", name="pk_repeats")
    )
    op.create_table(
        "dead_letters",
        *_position(),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("generation", "seq", name="pk_dead_letters"),
    )
    position = op.create_table(
        "archive_position",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        *_position(),
        sa.PrimaryKeyConstraint("id", name="pk_archive_position"),
    )
    op.bulk_insert(position, [{"id": 1, "generation": 0, "seq": 0}])
    op.create_table(
        "snapshots",
        *_position(),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("generation", "seq", name="pk_snapshots"),
    )
    _create_operations()


def downgrade() -> None:
    """Drop everything, facts included."""
    for table in ("operations", "snapshots", "archive_position", "dead_letters", "repeats", "facts"):
        op.drop_table(table)


def _create_facts() -> None:
    op.create_table(
        "facts",
        *_position(),
        *_identity(),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("request", sa.Text),
        sa.Column("migration", sa.Text),
        sa.Column("instance", sa.Text),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("generation", "seq", name="pk_facts"),
    )
    op.create_index("ux_facts_identity", "facts", ["source", "incarnation", "source_seq"], unique=True)
    for name in ("kind", "at_ms"):
        op.create_index(f"ix_facts_{name}", "facts", [name, "generation", "seq"])
    for name in ("request", "migration", "instance"):
        filled = sa.text(f"{name} IS NOT NULL")
        op.create_index(
            f"ix_facts_{name}",
            "facts",
            [name, "generation", "seq"],
            sqlite_where=filled,
            postgresql_where=filled,
        )


def _create_operations() -> None:
    op.create_table(
        "operations",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("progress", sa.Float, nullable=False),
        sa.Column("result", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_operations"),
    )
    op.create_index("ix_operations_created", "operations", ["created_at_ms", "id"])
