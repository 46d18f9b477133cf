"""vLLM's application on a scripted gateway: what tests of the face share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from midstream.api.gateway.port import Chunk
from midstream.api.gateway.vllm.face import FaceConfig, VllmFace, serve_vllm_face
from midstream.api.gateway.vllm.outputs import Row
from midstream.control.errors import Refused
from midstream.instance.engines.vllm.model_files import make_models
from midstream.migration.protocol.messages import RequestSpec
from tests.api.gateway.scripted import Script, ScriptedGateway, one_by_one

MODELS = Path(__file__).parents[4] / ".midstream" / "models"
NAME = "tiny"
TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CHAT = [{"role": "user", "content": "Where is my tea?"}]


class CheckedScriptedGateway(ScriptedGateway):
    """Implements `CheckedGateway`; the script may be changed between requests."""

    def __init__(self, script: Script = one_by_one, *, refusals: Sequence[Refused | None] = ()) -> None:
        super().__init__(script, models=(NAME,), refusals=refusals)
        self.closed: Refused | None = None

    def play(self, script: Script, *refusals: Refused | None) -> None:
        """From now on."""
        self._script = script
        self._refusals = list(refusals)

    def check(self, model: str | None = None, tenant: str = "") -> None:
        if self.closed is not None:
            raise self.closed


def flags(name: str = NAME, *more: str) -> tuple[str, ...]:
    """`vllm serve` flags of the small model."""
    _, tiny = make_models(MODELS, lambda _: None)
    return (str(tiny), "--served-model-name", name, "--load-format", "dummy", "--max-model-len", "2048", *more)


@contextlib.asynccontextmanager
async def serving(gateway: CheckedScriptedGateway, *models: tuple[str, ...], **config: Any) -> AsyncIterator[VllmFace]:
    """A face on a free port."""
    served = models or (flags(NAME, *TOOL_FLAGS),)
    face = await serve_vllm_face(
        gateway, FaceConfig(gateway="g1", incarnation=7, models=served, **config), "127.0.0.1", 0
    )
    try:
        yield face
    finally:
        await face.stop()


def sdk(face: VllmFace, key: str = "none") -> openai.AsyncOpenAI:
    """The real client."""
    return openai.AsyncOpenAI(base_url=f"{face.url}/v1", api_key=key, max_retries=0, timeout=30)


def ids_of(face: VllmFace, text: str) -> tuple[int, ...]:
    """The model's own tokens of a text."""
    return tuple(face.models[0].llm.get_tokenizer().encode(text, add_special_tokens=False))


def says(face: VllmFace, text: str, finish: str = "stop", per_chunk: int = 1) -> Script:
    """A script whose tokens are those of a text."""
    ids = ids_of(face, text)

    async def script(_: RequestSpec) -> AsyncIterator[Chunk]:
        for at in range(0, len(ids), per_chunk):
            yield Chunk(ids=ids[at : at + per_chunk])
            await asyncio.sleep(0)
        yield Chunk(finish=finish)

    return script


def row(*pairs: tuple[int, float], rank: int = 1) -> bytes:
    """One encoded logprob row; the sampled token first."""
    return msgspec.msgpack.encode(Row(tuple(i for i, _ in pairs), tuple(p for _, p in pairs), rank))


def payload(spec: RequestSpec) -> EngineCoreRequest:
    """What the engine would read."""
    request: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode(spec.payload)
    return request


async def until(holds: Any, seconds: float = 10.0) -> None:
    """Wait for a condition. Raises `TimeoutError`."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)
