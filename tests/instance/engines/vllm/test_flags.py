"""The flags of `vllm serve` reach an engine as vLLM reads them; the unknown and the impossible are refused (P29)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

READ = """
import json, sys
from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.flags import EngineSizes, read_flags
answers = []
for flags, sizes in json.loads(sys.argv[1]):
    sizes = EngineSizes(**sizes)
    try:
        read = read_flags(flags, sizes)
        answers.append([read.model, read.served_name, read.engine_args, read.environment])
    except BadInput as error:
        answers.append(str(error))
print("answers", json.dumps(answers))
"""

CASES: dict[str, tuple[list[str], dict[str, object]]] = {
    "bare": (["some/model"], {}),
    "sized": (["m"], {"blocks": 40, "kv_gib": 0.5, "cpu_threads": 2}),
    "flags": (["m", "--max-model-len", "2k", "--dtype", "float32", "--no-enable-prefix-caching"], {}),
    "names": (["m", "--served-model-name", "a", "--served-model-name", "b", "c"], {}),
    "objects": (["m", "--compilation-config", '{"mode": 0}', "--attention-backend", "CPU_ATTN"], {}),
    "own kv": (["m", "--kv-cache-memory-bytes", "2G"], {}),
    "face only": (["m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"], {}),
    "unknown": (["m", "--max-modl-len", "7"], {}),
    "bad value": (["m", "--max-num-seqs", "many"], {}),
    "ours": (["m", "--scheduler-cls", "a.b"], {}),
    "replaced": (["m", "--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'], {}),
    "parallel": (["m", "--data-parallel-size", "2"], {}),
    "the face's": (["m", "--api-key", "secret"], {}),
}


@pytest.fixture(scope="module")
def read() -> dict[str, object]:
    """All cases, read by one process: vLLM takes seconds to import, and warns while it does."""
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(list(CASES.values()))],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    answer = next((line for line in done.stdout.splitlines() if line.startswith("answers ")), None)
    assert answer is not None, done.stderr[-2_000:]
    return dict(zip(CASES, json.loads(answer.removeprefix("answers ")), strict=True))


def args_of(answer: object) -> dict[str, object]:
    assert isinstance(answer, list)
    found = answer[2]
    assert isinstance(found, dict)
    return found


def test_a_bare_model_is_small_and_eager_on_a_cpu(read: dict[str, object]) -> None:
    model, name, *_ = read["bare"]
    assert (model, name) == ("some/model", "some/model")
    assert args_of(read["bare"]) == {
        "served_model_name": ["some/model"], "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30,
    }  # fmt: skip


def test_sizes_of_one_instance_are_added(read: dict[str, object]) -> None:
    found = args_of(read["sized"])
    assert (found["num_gpu_blocks_override"], found["kv_cache_memory_bytes"]) == (40, 1 << 29)
    assert read["sized"][3]["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in read["bare"][3]


def test_an_eager_engine_on_a_cpu_compiles_nothing_when_logprobs_are_first_asked_for(read: dict[str, object]) -> None:
    assert read["bare"][3]["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in read["objects"][3]


def test_engines_that_share_a_machine_are_not_all_bound_to_its_same_cores(read: dict[str, object]) -> None:
    assert read["sized"][3]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in read["bare"][3]


def test_flags_arrive_as_vllm_reads_them(read: dict[str, object]) -> None:
    found = args_of(read["flags"])
    assert (found["max_model_len"], found["dtype"], found["enable_prefix_caching"]) == (2_000, "float32", False)
    assert args_of(read["own kv"])["kv_cache_memory_bytes"] == 2 << 30


def test_the_last_name_given_wins(read: dict[str, object]) -> None:
    assert read["names"][1] == "b"
    assert args_of(read["names"])["served_model_name"] == ["b", "c"]


def test_configuration_objects_carry_only_what_was_said(read: dict[str, object]) -> None:
    found = args_of(read["objects"])
    assert found["compilation_config"] == {"mode": 0}
    assert found["attention_backend"] == "CPU_ATTN"
    assert "enforce_eager" not in found


def test_flags_of_the_face_do_not_disturb_an_engine(read: dict[str, object]) -> None:
    assert args_of(read["face only"]).keys() == args_of(read["bare"]).keys()


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("unknown", "--max-modl-len"),
        ("bad value", "--max-num-seqs"),
        ("ours", "--scheduler-cls is Midstream's own to set"),
        ("replaced", "--kv-transfer-config is Midstream's own to set"),
        ("parallel", "--data-parallel-size is Midstream's own to set"),
        ("the face's", "--api-key is Midstream's own to set"),
    ],
)
def test_P29_what_an_engine_cannot_take_is_refused(read: dict[str, object], case: str, told: str) -> None:
    assert isinstance(read[case], str)
    assert told in read[case]
