"""Builds a vLLM engine from plain settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.config import VllmConfig
from midstream.instance.engines.vllm.engine import VllmEngine
from midstream.migration.transfers.base import Transfer


def vllm_engine(settings: Mapping[str, Any], transfers: Mapping[str, Transfer]) -> VllmEngine:
    """`settings` are the fields of `VllmConfig`. Raises `BadInput` for an unknown or wrong one, and for transfers.

    KV lives in vLLM's workers: they have transfers of their own.
    """
    if transfers:
        raise BadInput("a vLLM engine takes no transfers: its workers have their own")
    try:
        config = msgspec.convert(dict(settings), VllmConfig)
    except msgspec.ValidationError as error:
        raise BadInput(f"vLLM engine: {error}") from error
    return VllmEngine(config)
