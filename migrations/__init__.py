"""Schema migrations (Alembic) of the archive: one history for SQLite and PostgreSQL."""

from __future__ import annotations

if __name__ != "midstream.migrations":
    raise ImportError("import this package as 'midstream.migrations', never as 'migrations'")

from midstream.migrations.schema import current, downgrade, head, upgrade

__all__ = ["current", "downgrade", "head", "upgrade"]
