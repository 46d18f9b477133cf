"""Touches of vLLM around an engine core: its configuration, its start, and the client that speaks to it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed import kv_events as published
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.version import __version__ as VLLM_VERSION

from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.seams.kv_events import KINDS, publisher_args
from midstream.instance.engines.vllm.seams.version import check_parameters, check_parts, check_version

decode_request = MsgpackDecoder(EngineCoreRequest).decode


def check_host(*, is_untested_allowed: bool) -> None:
    """Raises `BadInput` for another vLLM than this was made for, and where pickle is allowed on its wires."""
    check_version(VLLM_VERSION, is_untested_allowed=is_untested_allowed)
    check_parts(AsyncMPClient, ("call_utility_async", "add_request_async", "get_output_async", "shutdown"))
    check_parameters(EngineCoreClient.make_async_mp_client, ("client_addresses",))
    check_parameters(EngineCoreProc.run_engine_core, ("args", "kwargs"))
    check_parameters(KVEventsConfig, publisher_args(""))
    for kind in KINDS:
        check_parts(getattr(published, kind.__name__, published), kind.__struct_fields__)
    if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise BadInput("VLLM_ALLOW_INSECURE_SERIALIZATION is set: pickle on a wire is never allowed here")


def encode_request(request: EngineCoreRequest) -> bytes:
    """One piece of bytes. Raises `TypeError` for what only pickle could carry."""
    first, *rest = MsgpackEncoder(size_threshold=1 << 40).encode(request)
    if rest:
        raise TypeError("a request with tensors of its own")
    return bytes(first)


def engine_config(engine_args: dict[str, Any]) -> VllmConfig:
    """vLLM's whole configuration. Raises `ValueError`, `TypeError`."""
    events = engine_args.get("kv_events_config")
    if isinstance(events, dict):
        engine_args = {**engine_args, "kv_events_config": KVEventsConfig(**events)}
    return AsyncEngineArgs(**engine_args).create_engine_config()


def run_core(engine_args: dict[str, Any], handshake: str) -> None:
    """Be the engine core, until told to end. Its workers become children of this process."""
    config = engine_config(engine_args)
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=handshake,
        executor_class=Executor.get_class(config),
        log_stats=False,
    )


async def shake_hands(socket: zmq.asyncio.Socket, inputs: str, outputs: str) -> None:
    """Tell a starting core where its client listens, and wait until it is ready."""
    identity, hello = await socket.recv_multipart()
    _expect(hello, "HELLO")
    addresses = EngineZmqAddresses(inputs=[inputs], outputs=[outputs])
    metadata = EngineHandshakeMetadata(addresses=addresses, parallel_config={})
    await socket.send_multipart([identity, msgspec.msgpack.encode(metadata)])
    _, ready = await socket.recv_multipart()
    _expect(ready, "READY")


def _expect(message: bytes, status: str) -> None:
    said = msgspec.msgpack.decode(message).get("status")
    if said != status:
        raise ValueError(f"the engine core said {said}, not {status}")


def connect(config: VllmConfig, inputs: str, outputs: str) -> AsyncMPClient:
    """vLLM's client of a core that is ready. Blocks for some milliseconds."""
    return EngineCoreClient.make_async_mp_client(
        config,
        Executor.get_class(config),
        log_stats=False,
        client_addresses={"input_address": inputs, "output_address": outputs},
    )


def declare_dead(client: AsyncMPClient) -> None:
    """Let go of a client whose core is gone: no socket waits for it."""
    client.resources.engine_dead = True


async def disconnect(client: AsyncMPClient) -> None:
    """Close a client and all it has; vLLM leaves its sockets' context to the garbage collector."""
    reader = client.resources.output_queue_task
    client.shutdown()
    if reader is not None:
        await asyncio.wait({reader})
    client.resources.ctx.destroy(linger=0)


__all__ = [
    "VLLM_VERSION",
    "AsyncMPClient",
    "EngineCoreOutput",
    "EngineCoreRequest",
    "EngineDeadError",
    "SamplingParams",
    "VLLMValidationError",
    "VllmConfig",
]
