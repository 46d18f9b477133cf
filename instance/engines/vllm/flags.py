"""Reads the flags of `vllm serve` as vLLM itself does, and keeps what concerns an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.command_line import CommandLine

GIB: Final = 1 << 30
CPU_KV_GIB: Final = 1.0
BIND_DEFAULT: Final = "auto"
SHARED_MACHINE: Final[Mapping[str, str]] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
NO_TELEMETRY: Final[Mapping[str, str]] = {"VLLM_NO_USAGE_STATS": "1"}
NO_COMPILER: Final[Mapping[str, str]] = {"TORCHDYNAMO_DISABLE": "1"}
"""Eager or not, vLLM compiles two small functions when they are first needed: with a C++ compiler, for many seconds,
in the step of whoever asks first for logprobs. They gain a CPU nothing."""
CPU_TIMERS: Final[Mapping[str, float]] = {
    "prepare_ms": 15_000.0,
    "lease_ms": 60_000.0,
    "stop_budget_ms": 60.0,
    "stop_max_ms": 2_500.0,
    "decision_ms": 5_000.0,
}
"""An engine answers between two steps, and on a CPU a long prompt is a step of seconds."""


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
    environment: dict[str, str]
    """Of the engine's processes, on top of the inherited one."""


def read_flags(flags: Sequence[str], sizes: EngineSizes) -> EngineFlags:
    """Read a model and flags. Raises `BadInput` for what vLLM does not know and for what is Midstream's own to set."""
    line = CommandLine(flags)
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - {"model", "served_model_name"}
    chosen = {name: _plain(getattr(line.args, name)) for name in sorted(fields) if line.is_said(name)}
    _require_plain(chosen)
    sized = _sized(chosen, sizes)
    return EngineFlags(
        model=line.args.model,
        served_name=line.names[0],
        engine_args=sized | {"served_model_name": list(line.names)},
        environment=engine_environment(sizes, is_eager=bool(sized.get("enforce_eager"))),
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


def engine_environment(sizes: EngineSizes, *, is_eager: bool) -> dict[str, str]:
    """Environment of the engine's processes.

    A number of threads means that the machine is shared. vLLM's own choice, made in each engine as if it were alone,
    binds all of them to the same cores; and a worker beside its core is a second process that waits by spinning.
    """
    if not current_platform.is_cpu():
        return dict(NO_TELEMETRY)
    found = {**NO_TELEMETRY, **(NO_COMPILER if is_eager else {})}
    if sizes.cpu_threads is None:
        return found
    found["OMP_NUM_THREADS"] = str(sizes.cpu_threads)
    return {**found, **SHARED_MACHINE} if envs.VLLM_CPU_OMP_THREADS_BIND == BIND_DEFAULT else found


def usual_timers() -> Mapping[str, float]:
    """Settings of Midstream whose usual values do not fit the engines of this machine."""
    return CPU_TIMERS if current_platform.is_cpu() else {}


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
