"""Reads the flags of `vllm serve` as vLLM itself does, and keeps what concerns an engine."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, NoReturn

import msgspec
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from midstream.control.errors import BadInput

OWN: Final = (
    "data_parallel_address", "data_parallel_rank", "data_parallel_size", "kv_transfer_config", "scheduler_cls",
    "worker_extension_cls",
)  # fmt: skip
"""Flags by which Midstream itself enters the engine, or that its moves and its own instances replace."""
GIB: Final = 1 << 30
CPU_KV_GIB: Final = 1.0
BIND_DEFAULT: Final = "auto"
SHARED_MACHINE: Final[Mapping[str, str]] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
NO_TELEMETRY: Final[Mapping[str, str]] = {"VLLM_NO_USAGE_STATS": "1"}


class EngineSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from instance to instance. `None` leaves it to vLLM, or on a CPU to the defaults above."""

    blocks: int | None = None
    kv_gib: float | None = None
    cpu_threads: int | None = None


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """One model's command line, read."""

    model: str
    served_name: str
    engine_args: dict[str, Any]
    """Fields of `AsyncEngineArgs` that differ from their defaults, without `model`; values that JSON can carry."""


def read_flags(flags: Sequence[str], sizes: EngineSizes) -> EngineFlags:
    """Read a model and flags. Raises `BadInput` for what vLLM does not know and for what is Midstream's own to set."""
    parser = make_arg_parser(_Parser(prog="vllm serve"))
    args = _parsed(parser, flags)
    chosen = {
        field.name: _plain(getattr(args, field.name))
        for field in dataclasses.fields(AsyncEngineArgs)
        if hasattr(args, field.name) and getattr(args, field.name) != parser.get_default(field.name)
    }
    for name in OWN:
        if name in chosen:
            raise BadInput(f"--{name.replace('_', '-')} is Midstream's own to set")
    _require_plain(chosen)
    model = args.model_tag or args.model
    names = chosen.pop("served_model_name", None) or [model]
    chosen.pop("model", None)
    return EngineFlags(
        model=model, served_name=names[0], engine_args=_sized(chosen, sizes) | {"served_model_name": names}
    )


def _sized(chosen: dict[str, Any], sizes: EngineSizes) -> dict[str, Any]:
    """On a CPU vLLM would take 90 % of all memory and compile for minutes: there small and eager unless told."""
    on_cpu = current_platform.is_cpu()
    kv_gib = sizes.kv_gib
    if kv_gib is None and on_cpu and "kv_cache_memory_bytes" not in chosen:
        kv_gib = CPU_KV_GIB
    sized: dict[str, Any] = {"enforce_eager": True} if on_cpu and "compilation_config" not in chosen else {}
    if kv_gib is not None:
        sized["kv_cache_memory_bytes"] = int(kv_gib * GIB)
    if sizes.blocks is not None:
        sized["num_gpu_blocks_override"] = sizes.blocks
    return chosen | sized


def engine_environment(sizes: EngineSizes) -> dict[str, str]:
    """Environment of the engine's processes.

    A number of threads means that the machine is shared. vLLM's own choice, made in each engine as if it were alone,
    binds all of them to the same cores; and a worker beside its core is a second process that waits by spinning.
    """
    if sizes.cpu_threads is None or not current_platform.is_cpu():
        return dict(NO_TELEMETRY)
    threads = {**NO_TELEMETRY, "OMP_NUM_THREADS": str(sizes.cpu_threads)}
    return {**threads, **SHARED_MACHINE} if envs.VLLM_CPU_OMP_THREADS_BIND == BIND_DEFAULT else threads


def _require_plain(chosen: Mapping[str, Any]) -> None:
    for name, value in chosen.items():
        try:
            msgspec.json.encode(value)
        except TypeError as error:
            raise BadInput(f"--{name.replace('_', '-')} has a value that no other process can be told") from error


def _plain(value: Any) -> Any:
    """A flag's value for another process: of a configuration object only what was said."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        usual = type(value)()
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {name: _plain(one) for name, one in found.items() if one != getattr(usual, name)}
    if isinstance(value, Enum):
        return value.name if isinstance(value.value, type | str) else value.value
    return value


def _parsed(parser: _Parser, flags: Sequence[str]) -> Namespace:
    try:
        return parser.parse_args(list(flags))  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"vLLM does not take these flags: {error}") from error


class _Parser(FlexibleArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"vLLM does not take these flags: {message}")
