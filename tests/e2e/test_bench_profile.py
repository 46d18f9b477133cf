"""`bench profile` on a live instance whose step times are known: the fit is what the instance was made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.api.bench.profile import Plan
from midstream.api.bench.report import is_missing
from midstream.control.errors import BadInput, UnknownThing
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.steptime import load_model
from tests.e2e.helpers import running

SCALE = 4.0
"""Long steps, so that what HTTP and a busy machine add is little."""
OPTIONS = ("--batch", "1", "--batch", "8", "--prompt", "128", "--prompt", "1024", "--tokens", "8", "--repeats", "1")


async def test_P31_a_profile_is_the_step_times_of_the_instance(tmp_path: Path) -> None:
    constants = tmp_path / "mine.csv"
    async with running(tmp_path, (1_024,), sim_time_scale=SCALE) as rig:
        done = await rig.cli("bench", "profile", rig.state.gateway, *OPTIONS, "--constants", str(constants), "--json")
    assert done.code == 0, done
    printed = json.loads(done.out)
    assert len(printed["rows"]) == 4
    assert not is_missing(printed["summary"])
    true, found = load_model(SimConfig().step_times), load_model(str(constants))
    for requests, context in ((1, 134), (8, 8 * 1_030)):
        expected_ms = SCALE * true.decode_ms(requests, context)
        assert found.decode_ms(requests, context) == pytest.approx(expected_ms, rel=0.25)
    assert found.prefill_ms(1_024) == pytest.approx(SCALE * true.prefill_ms(1_024), rel=0.4)


def test_a_plan_that_cannot_be_fitted_is_refused() -> None:
    for changes in ({"batches": (2, 4)}, {"batches": (1,)}, {"prompts": (5, 5)}, {"tokens": 3}, {"repeats": 0}):
        with pytest.raises(BadInput):
            Plan(url="http://127.0.0.1:1", **changes)


def test_constants_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnknownThing, match="cannot be read"):
        load_model(str(tmp_path / "none.csv"))
