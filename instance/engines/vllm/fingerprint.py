"""What must be equal on two vLLM engines before KV may pass between them."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

from midstream.control.state import Fingerprint
from midstream.instance.engines.vllm.calls import CoreFacts
from midstream.instance.engines.vllm.config import VllmConfig

SAMPLE_BYTES = 1024 * 1024
"""Of each end of a weights file; hashing all of a large model would delay every start."""


def fingerprint_of(config: VllmConfig, facts: CoreFacts, name: str, revision: str) -> Fingerprint:
    """The fingerprint of a started engine. `name` and `revision` are used where the settings have none."""
    return Fingerprint(
        engine="vllm",
        engine_version=facts.vllm_version,
        model=config.name or name,
        weights_revision=config.weights_revision or revision,
        dtype=facts.dtype,
        block_tokens=facts.block_tokens,
        block_bytes=facts.block_bytes,
        layout=facts.layout,
        tensor_parallel=facts.tensor_parallel,
    )


def weights_revision(model: str, engine_args: dict[str, Any]) -> str:
    """A hash of a model folder; for a hub name its revision. Reads files: not for the event loop."""
    folder = Path(model)
    if not folder.is_dir():
        return str(engine_args.get("revision") or "main")
    digest = blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin", ".gguf"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(_ends_of(path))
    if engine_args.get("load_format") == "dummy":
        digest.update(f"dummy {engine_args.get('seed', 0)}".encode())
    return digest.hexdigest()


def _ends_of(path: Path) -> bytes:
    with path.open("rb") as file:
        first = file.read(SAMPLE_BYTES)
        file.seek(max(file.tell(), path.stat().st_size - SAMPLE_BYTES))
        return first + file.read(SAMPLE_BYTES)
