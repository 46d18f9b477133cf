"""Builds a simulated engine from plain settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from midstream.control.errors import BadInput
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.engine import SimEngine
from midstream.migration.transfers.base import Transfer


def sim_engine(settings: Mapping[str, Any], transfers: Mapping[str, Transfer]) -> SimEngine:
    """`settings` are the fields of `SimConfig`. Raises `BadInput` for an unknown or wrong one."""
    try:
        config = msgspec.convert(dict(settings), SimConfig)
    except msgspec.ValidationError as error:
        raise BadInput(f"simulated engine: {error}") from error
    return SimEngine(config, transfers)
