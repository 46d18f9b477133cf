"""Figures of others, for orientation; see README.md beside this file."""
