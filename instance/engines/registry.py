"""Engines by name. A new engine is a new file and one line here; nothing is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from midstream.control.errors import UnknownThing
from midstream.instance.engines.base import Engine
from midstream.migration.transfers.base import Transfer

EngineFactory = Callable[[Mapping[str, Any], Mapping[str, Transfer]], Engine]
"""Builds an engine, not yet started, from its settings and the transfers it is to own. Raises `BadInput`."""

ENGINES: Mapping[str, str] = {
    "sim": "midstream.instance.engines.sim.factory:sim_engine",
    "vllm": "midstream.instance.engines.vllm.factory:vllm_engine",
}


def engine_factory(name: str) -> EngineFactory:
    """The factory registered as `name`. Raises `UnknownThing` with the known names."""
    if name not in ENGINES:
        raise UnknownThing(f"no engine {name!r}; known: {', '.join(sorted(ENGINES))}")
    module, _, attribute = ENGINES[name].partition(":")
    factory: EngineFactory = getattr(import_module(module), attribute)
    return factory
