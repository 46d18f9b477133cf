"""What a simulation learns from `bench transfer`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.api.bench.transfer_model import transfer_model
from midstream.control.errors import BadInput

SIZES_MB = (8, 16, 64, 256, 960)


def table(path: Path, fixed_s: float, bytes_per_s: float) -> Path:
    rows = [
        {"backend": backend, "layout": layout, "size_mb": size, "gib_s": speed / 2**30, "ratio": 1.0}
        for backend, layout, factor in (("rpc", "7b", 1.0), ("rpc", "small", 0.1), ("shm", "7b", 2.0))
        for size in SIZES_MB
        for speed in [factor * size * 2**20 / (fixed_s + size * 2**20 / bytes_per_s)]
    ]
    path.write_text(json.dumps({"rows": rows, "summary": {}}))
    return path


def test_speed_and_latency_are_those_of_the_line_through_the_sends(tmp_path: Path) -> None:
    path = table(tmp_path / "transfer.json", 0.004, 2.5e9)
    assert transfer_model(f"rpc={path}") == pytest.approx((20.0, 2.0))
    assert transfer_model(f"shm={path}") == pytest.approx((40.0, 1.0))


@pytest.mark.parametrize("said", ["transfer.json", "rpc=", "rpc=nowhere.json", "gloo=transfer.json", "rpc=broken.json"])
def test_P29_what_says_nothing_of_the_backend_is_refused(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "transfer.json", 0.001, 1e9)
    (tmp_path / "broken.json").write_text('{"rows": [{"backend": "rpc"}]}')
    with pytest.raises(BadInput) as caught:
        transfer_model(said)
    assert "\n" not in str(caught.value)
