"""Schema migrations (Alembic) of the archive."""

if __name__ != "midstream.migrations":
    raise ImportError("import this package as 'midstream.migrations', never as 'migrations'")
