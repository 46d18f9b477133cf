"""Engines are found by name, loaded when asked for, and built from plain settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

from midstream.control.errors import BadInput, UnknownThing
from midstream.instance.engines.registry import engine_factory


def test_an_engine_is_built_from_its_settings() -> None:
    engine = engine_factory("sim")({"blocks_total": 32, "block_tokens": 8, "tokens_max": 1_000}, {})
    assert (engine.blocks_total, engine.tokens_max) == (32, 256)
    assert engine.fingerprint.block_bytes == 64


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownThing, match="known: sim, vllm"):
        engine_factory("babbage")


@pytest.mark.parametrize("settings", [{"blocks": 4}, {"blocks_total": "many"}, {"blocks_total": -1}])
def test_P29_a_wrong_setting_is_bad_input(settings: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        engine_factory("sim")(settings, {})


@pytest.mark.parametrize("settings", [{}, {"model": "m"}, {"model": "m", "secret": b"s", "modle": 1}])
def test_P29_a_wrong_setting_of_vllm_is_bad_input(settings: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        engine_factory("vllm")(settings, {})


@pytest.mark.parametrize("name", ["sim", "vllm"])
def test_nothing_is_loaded_before_it_is_asked_for(name: str) -> None:
    module = f"midstream.instance.engines.{name}"
    code = f"import sys, midstream.instance.engines.registry; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
