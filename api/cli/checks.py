"""Checks of what is on a command line while it is read: before anything was begun."""

from __future__ import annotations

import math
from pathlib import Path
from urllib.parse import quote

import typer


def finite(value: float | None) -> float | None:
    """A number that is one. Raises `BadParameter`."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("it must be a finite number")
    return value


def folder(path: Path | None) -> Path | None:
    """A folder for plots, made now: a measurement of minutes is not lost for it. Raises `BadParameter`, `BadInput`."""
    if path is not None:
        from midstream.api.bench.plots import backend

        backend()
        try:
            path.mkdir(parents=True, exist_ok=True)
            _try(path / ".midstream")
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from None
    return path


def file(path: Path | None) -> Path | None:
    """A file to write at the end. Raises `BadParameter`."""
    if path is not None:
        try:
            _try(path)
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from None
    return path


def quoted(name: str) -> str:
    """A name as one part of a path, whatever is in it: `..` would be taken for the folder above."""
    text = quote(name, safe="")
    return text.replace(".", "%2E") if set(name) == {"."} else text


def _try(path: Path) -> None:
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()
