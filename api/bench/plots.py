"""Plots of measurements, as PNG files. matplotlib is loaded only when one is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream.control.errors import BadInput

DPI = 130


def backend() -> None:
    """Get ready to draw without a screen. Raises `BadInput` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise BadInput("plots need matplotlib: pip install 'midstream[plots]'") from error
    matplotlib.use("Agg")


@contextmanager
def plot(folder: Path, name: str, *, width: float = 8.0, height: float = 5.0, **grid: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes (`grid`: as of `matplotlib.pyplot.subplots`), written to `folder/name.png` at the end.

    Raises `BadInput` without matplotlib.
    """
    backend()
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained", **grid)
    try:
        yield figure, axes
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.png", dpi=DPI)
    finally:
        pyplot.close(figure)
