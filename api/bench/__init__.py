"""Measurements by name: `midstream bench NAME`. Adding one: write its module with `measure`, name it here."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from midstream.api.bench.report import Measured, show
from midstream.control.errors import UnknownThing

BENCHES: Final = {"control": "midstream.api.bench.control"}
"""Name to module."""


def run(name: str, *, as_json: bool) -> int:
    """Measure and print; 0 if everything was measured, 1 if a figure is missing. Raises `UnknownThing`."""
    if name not in BENCHES:
        raise UnknownThing(f"no bench {name}; there are {', '.join(BENCHES)}")
    module: Any = import_module(BENCHES[name])
    measured: Measured = module.measure()
    return show(name, measured, as_json=as_json)
