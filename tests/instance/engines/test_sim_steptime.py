"""Step times: the constants that ship are those of the fit, and the model behaves between and beyond its points."""

from __future__ import annotations

import csv
from importlib.resources import files
from pathlib import Path

import pytest

from midstream.control.errors import BadInput, UnknownThing
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.fit import main
from midstream.instance.engines.sim.run import Run
from midstream.instance.engines.sim.scheduler import Chunk, Plan
from midstream.instance.engines.sim.steptime import StepTimeModel, load_model
from midstream.migration.protocol.messages import RequestSpec, Sampling

MODEL = StepTimeModel(
    decode_base_ms=10.0,
    decode_request_ms=1.0,
    decode_token_ms=0.01,
    prefill_knots=((100, 20.0), (200, 30.0), (400, 70.0)),
)


@pytest.mark.parametrize(
    ("tokens", "ms"), [(1, 20.0), (100, 20.0), (150, 25.0), (200, 30.0), (300, 50.0), (400, 70.0), (800, 150.0)]
)
def test_prefill_is_linear_between_and_beyond_its_knots(tokens: int, ms: float) -> None:
    assert MODEL.prefill_ms(tokens) == pytest.approx(ms)


def test_a_mixed_step_is_one_pass_and_not_less_than_its_decodes() -> None:
    run = Run("x", RequestSpec(request="x", prompt=(3,) * 500, sampling=Sampling()), (), 1)
    run.computed = 1_000
    decode, chunk = Chunk(run, 1, True), Chunk(run, 199, False)
    assert MODEL.plan_ms(Plan((decode,), ())) == pytest.approx(21.0)
    assert MODEL.plan_ms(Plan((chunk,), ())) == pytest.approx(29.9)
    assert MODEL.plan_ms(Plan((decode, chunk), ())) == pytest.approx(30.0)
    assert MODEL.plan_ms(Plan((decode,) * 3 + (chunk._replace(tokens=1),), ())) == pytest.approx(43.0)


def test_the_default_model_is_known_and_others_are_named() -> None:
    model = load_model(SimConfig().step_times)
    assert 25 < model.decode_ms(1, 512) < 35
    assert model.decode_ms(64, 64 * 576) > model.decode_ms(1, 576)
    with pytest.raises(UnknownThing, match="llama2-70b/h100-80gb/8"):
        load_model("abacus")


def test_every_shipped_model_fits_its_measurements() -> None:
    text = files("midstream.instance.engines.sim.data").joinpath("step_times.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 8
    for row in rows:
        load_model(row["name"])
        assert float(row["decode_error_mean"]) < 0.04
        assert float(row["prefill_error_mean"]) < 0.06


def test_fit_finds_the_model_that_made_the_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,n_runs,prefill_ms_p50,decode_step_ms_p50"
    rows = [
        f"m,h,4,{prompt},{batch},100,5,{MODEL.prefill_ms(tokens := prompt * batch)},"
        f"{MODEL.decode_ms(batch, tokens + 50 * batch)}"
        for prompt, batch in ((100, 1), (200, 1), (400, 1), (100, 2), (100, 4))
    ]
    source = tmp_path / "times.csv"
    source.write_text("\n".join([header, *rows, "m,h,2,512,64,128,5,361,1", ""]))
    main(source)
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert row["name"] == "m/h/4"
    assert float(row["decode_base_ms"]) == pytest.approx(10.0, rel=1e-3)
    assert float(row["decode_request_ms"]) == pytest.approx(1.0, rel=1e-3)
    assert float(row["decode_token_ms"]) == pytest.approx(0.01, rel=1e-3)
    assert row["prefill_knots"] == "100:20.00 200:30.00 400:70.00"


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_token": 12},
        {"bytes_per_token": 0},
        {"blocks_total": 0},
        {"vocab_size": 5},
        {"eos_probability": 1.5},
        {"time_scale": -1.0},
    ],
)
def test_P29_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        SimConfig(**wrong)
