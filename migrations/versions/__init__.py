"""Alembic versions, oldest first. A version, once released, is never changed."""
