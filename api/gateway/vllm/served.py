"""One served model: vLLM's configuration from `vllm serve` flags, its frontend over the gateway, its application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.gc_utils import freeze_gc_heap

from midstream.api.gateway.vllm.client import TASKS, CheckedGateway, GatewayClient
from midstream.api.gateway.vllm.llm import GatewayLLM
from midstream.api.gateway.vllm.metrics import take_vllm_metrics
from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.command_line import CommandLine, not_taken

__all__ = ["ServedModel", "freeze_gc_heap", "read_face_flags"]


class ServedModel:
    """A model that clients ask for by one of `names`."""

    def __init__(self, flags: Sequence[str], gateway: CheckedGateway) -> None:
        """Reads configuration and tokenizer files, no weights: seconds of work, so off the event loop.

        Raises `BadInput` for flags that vLLM or Midstream do not take.
        """
        line = read_face_flags(flags)
        self.args, self.names = line.args, line.names
        self.client = GatewayClient(gateway, self.names[0])
        config = AsyncEngineArgs.from_cli_args(self.args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        if config.model_config.runner_type != "generate":
            raise BadInput(f"{self.args.model} is a {config.model_config.runner_type} model, not one that generates")
        self.llm = GatewayLLM(config, self.client, log_requests=self.args.enable_log_requests)
        self.metrics = take_vllm_metrics()
        self.app: FastAPI = build_app(self.args, TASKS, config.model_config)

    async def open(self) -> None:
        """Make the application's handlers."""
        await init_app_state(self.llm, self.app.state, self.args, TASKS)

    async def cards(self) -> list[Any]:
        """Its entries in `/v1/models`."""
        shown = await self.app.state.openai_serving_models.show_available_models()
        return list(shown.model_dump()["data"])

    def close(self) -> None:
        """Let go of threads and tasks. Its requests have ended before."""
        self.llm.shutdown()


def read_face_flags(flags: Sequence[str]) -> CommandLine:
    """A command line, checked as vLLM's own server checks it. Raises `BadInput`."""
    line = CommandLine(flags)
    args = line.args
    try:
        validate_parsed_serve_args(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        validate_api_server_args(args)
    except (KeyError, TypeError, ValueError) as error:
        raise not_taken(error) from error
    return line
