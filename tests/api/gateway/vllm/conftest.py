"""One face for all tests here: vLLM takes many seconds to import. Where it is not installed, nothing is collected."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    import openai

    from midstream.api.gateway.vllm.face import VllmFace
    from tests.api.gateway.vllm.rig import CheckedScriptedGateway

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and vLLM warn of themselves while they are imported
        import midstream.api.gateway.vllm.served  # noqa: F401


@pytest.fixture(scope="session")
def shared_gateway() -> CheckedScriptedGateway:
    from tests.api.gateway.vllm.rig import CheckedScriptedGateway

    return CheckedScriptedGateway()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def face(shared_gateway: CheckedScriptedGateway) -> AsyncIterator[VllmFace]:
    from tests.api.gateway.vllm.rig import serving

    async with serving(shared_gateway) as face:
        yield face


@pytest.fixture
def gateway(shared_gateway: CheckedScriptedGateway, face: VllmFace) -> Iterator[CheckedScriptedGateway]:
    """The scripted core behind `face`, as new; afterwards nothing of the test is left in vLLM's frontend."""
    from tests.api.gateway.scripted import one_by_one

    shared_gateway.play(one_by_one)
    shared_gateway.streams.clear()
    yield shared_gateway
    shared_gateway.closed = None
    processor = face.models[0].llm.output_processor
    assert not processor.request_states
    assert not processor.parent_requests
    assert not processor.external_req_ids


@pytest_asyncio.fixture(loop_scope="session")
async def client(face: VllmFace) -> AsyncIterator[openai.AsyncOpenAI]:
    from tests.api.gateway.vllm.rig import sdk

    async with sdk(face) as client:
        yield client
