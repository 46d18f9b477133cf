"""Fits the step-time models to a file of measurements and writes the constants as CSV to standard output.

    python -m midstream.instance.engines.sim.fit splitwise_step_times.csv > step_times.csv

Decode: least squares on relative errors of base + per request + per token of context. Prefill: the median at each
number of prompt tokens, made monotone. Errors of the fit are columns of the result.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from midstream.instance.engines.sim.steptime import StepTimeModel

Floats = npt.NDArray[np.float64]
Row = dict[str, str]

OUT_OF_LINE = ("64", "2")
"""(batch, tensor parallel) that the trace's README tells to leave out of a fit."""

COLUMNS = (
    "name",
    "decode_base_ms",
    "decode_request_ms",
    "decode_token_ms",
    "decode_error_mean",
    "decode_error_max",
    "prefill_error_mean",
    "prefill_error_max",
    "prefill_knots",
)


def main(path: Path) -> None:
    """Read measurements, write constants."""
    with path.open(encoding="utf-8") as lines:
        groups = _by_machine(csv.DictReader(lines))
    sys.stdout.write(as_csv({name: fitted(rows) for name, rows in sorted(groups.items())}))


def as_csv(constants: Mapping[str, Row]) -> str:
    """Constants by name as the file that `steptime.load_model` reads."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({"name": name} | row for name, row in constants.items())
    return text.getvalue()


def _by_machine(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if (row["batch_size"], row["tensor_parallel"]) != OUT_OF_LINE:
            groups[f"{row['model']}/{row['hardware']}/{row['tensor_parallel']}"].append(row)
    return groups


def fitted(rows: list[Row], alone: list[Row] | None = None) -> Row:
    """Constants and errors of the fit to one machine's measurements, as text.

    `alone`: the measurements whose prefill was one pass; all of them if not given.
    """
    alone = rows if alone is None else alone
    base, request, token = _fit_decode(rows)
    knots = _fit_prefill(alone)
    model = StepTimeModel(
        decode_base_ms=base, decode_request_ms=request, decode_token_ms=token, prefill_knots=tuple(knots)
    )
    decode = [abs(model.decode_ms(_batch(r), _context(r)) / float(r["decode_step_ms_p50"]) - 1) for r in rows]
    prefill = [abs(model.prefill_ms(_prompt(r)) / float(r["prefill_ms_p50"]) - 1) for r in alone]
    return {
        "decode_base_ms": f"{base:.4f}",
        "decode_request_ms": f"{request:.5f}",
        "decode_token_ms": f"{token:.7f}",
        "decode_error_mean": f"{np.mean(decode):.4f}",
        "decode_error_max": f"{max(decode):.4f}",
        "prefill_error_mean": f"{np.mean(prefill):.4f}",
        "prefill_error_max": f"{max(prefill):.4f}",
        "prefill_knots": " ".join(f"{tokens}:{ms:.2f}" for tokens, ms in knots),
    }


def _fit_decode(rows: list[Row]) -> tuple[float, float, float]:
    took: Floats = np.array([float(row["decode_step_ms_p50"]) for row in rows])
    terms: Floats = np.array([[1.0, _batch(row), _context(row)] for row in rows])
    base, request, token = (max(0.0, factor) for factor in relative_fit(terms, took))
    return base, request, token


def relative_fit(terms: Floats, took: Floats) -> list[float]:
    """The factors (k) of terms (n, k) whose sums come closest to times (n), by least squares of relative errors."""
    factors, *_ = np.linalg.lstsq(terms / took[:, None], np.ones(len(took)), rcond=None)
    return [float(factor) for factor in factors]


def _fit_prefill(rows: list[Row]) -> list[tuple[int, float]]:
    times: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        times[_prompt(row)].append(float(row["prefill_ms_p50"]))
    sizes = sorted(times)
    medians: Floats = np.array([median(times[size]) for size in sizes])
    rising = np.maximum.accumulate(medians)
    falling = np.minimum.accumulate(medians[::-1])[::-1]
    return list(zip(sizes, ((rising + falling) / 2).tolist(), strict=True))


def _batch(row: Row) -> int:
    return int(row["batch_size"])


def _prompt(row: Row) -> int:
    return int(row["prompt_size"]) * _batch(row)


def _context(row: Row) -> int:
    """Mean context over the measured decode steps, whole batch: the prompt and half of what was generated."""
    return _batch(row) * (int(row["prompt_size"]) + int(row["token_size"]) // 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
