"""The settings by topic: names, types, defaults, bounds and meanings. `api.settings` joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr

from midstream.control.state import PolicySettings
from midstream.instance.settings import LlumletSettings
from midstream.migration.plan import PlanLimits

PORT_MAX = 65_535
_POLICY = PolicySettings()
_LLUMLET = LlumletSettings()
_PLAN = PlanLimits()


class ClusterGroup(BaseModel):
    """Cluster: where facts, archive and local files live."""

    cluster: str = Field(
        "midstream", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="Name, and prefix of all Redis keys."
    )
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name of this process: instance, gateway or controller id. Unset: the host's name.",
    )
    data_dir: Path = Field(Path(".midstream"), description="Local files of `up`: Valkey, SQLite, secret, logs.")
    redis_url: str | None = Field(
        None, pattern=r"^(redis|rediss|unix)://", description="Redis >= 7 or Valkey. Unset: `up` starts a local Valkey."
    )
    database_url: str | None = Field(
        None,
        description="SQLAlchemy URL of the archive. Unset: SQLite in `data_dir`.",
        pattern=r"^(sqlite|postgresql)[+:]",
    )
    secret: SecretStr | None = Field(
        None,
        description="Shared secret of the data plane. Unset: the file `secret` in `data_dir`, which `up` makes.",
    )
    api_keys: str = Field(
        "",
        description="Keys of the HTTP APIs, comma-separated `name:scope+scope:sha256` (`midstream keys create`). "
        "Empty: anonymous, allowed on loopback only.",
    )


class NetworkGroup(BaseModel):
    """Network: what each process binds. Port 0 takes a free port and publishes it."""

    gateway_host: str = Field("127.0.0.1", description="Interface of the OpenAI endpoint.")
    gateway_port: int = Field(8000, ge=0, le=PORT_MAX, description="Port of the OpenAI endpoint.")
    admin_host: str = Field("127.0.0.1", description="Interface of the admin API.")
    admin_port: int = Field(8001, ge=0, le=PORT_MAX, description="Port of the admin API.")
    bind_host: str = Field("127.0.0.1", description="Interface of the data plane (gateway and llumlet).")
    data_port: int = Field(0, ge=0, le=PORT_MAX, description="Port of the data plane of this process.")
    advertise_host: str | None = Field(
        None, description="Host that peers use to reach this process. Needed when `bind_host` is a wildcard."
    )
    admin_url: str | None = Field(
        None, pattern=r"^https?://", description="Admin API that operator commands talk to. Unset: that of `up`."
    )
    admin_key: SecretStr | None = Field(None, description="Key that operator commands present. Unset: that of `up`.")


class EngineGroup(BaseModel):
    """Engine: what one llumlet runs."""

    engine: Literal["sim", "vllm"] = Field("sim", description="Engine of the llumlet, and face of the gateway.")
    role: Literal["mixed", "prefill", "decode"] = Field(
        _LLUMLET.role, description="What the instance is for: prompts and tokens, prompts only, tokens only."
    )
    model: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Model name that clients ask for. Unset: `sim`, or the name of `vllm_model`'s folder or hub page.",
    )
    sim_blocks: int = Field(1024, ge=8, le=1_000_000, description="KV blocks of the simulated engine.")
    sim_block_tokens: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    sim_slots: int = Field(64, ge=1, le=4096, description="Requests that run at once.")
    sim_time_scale: float = Field(1.0, gt=0, le=1000, description="Factor on step times: 0.1 is 10x faster.")


class VllmGroup(BaseModel):
    """vLLM: what `engine=vllm` runs. docs/vllm.md goes through `vllm serve`, flag by flag."""

    vllm_model: str = Field(
        ".midstream/models/smollm2-135m",
        min_length=1,
        description="Model that vLLM loads: a folder or a hub's name. The default is what `make vllm` makes.",
    )
    vllm_args: str = Field(
        "",
        description="Further flags of `vllm serve`, as on a command line, the same for gateway and instances: "
        "`--max-model-len 4096 --tensor-parallel-size 2`.",
    )
    vllm_more_models: list[str] = Field(
        [],
        description="Further models that this gateway serves, as JSON: a list of command lines of `vllm serve`, "
        '["Qwen/Qwen3-8B --max-model-len 4096"].',
    )
    vllm_blocks: int | None = Field(None, ge=2, description="KV blocks of one instance. Unset: as many as fit.")
    vllm_kv_gib: float | None = Field(
        None, gt=0, description="KV memory of one instance, GiB. Unset: vLLM's own choice on a GPU, 1 on a CPU."
    )
    vllm_cpu_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads of one instance on a CPU. Unset: the cores, shared out by `up`."
    )
    vllm_boot_s: float = Field(600.0, gt=0, description="An engine must have loaded its model in so long, seconds.")
    vllm_any_version: bool = Field(False, description="Run a vLLM that Midstream was not checked with.")


class PolicyGroup(BaseModel):
    """Policies: what the log starts with. Later changes are facts (`midstream policies set`)."""

    dispatch_policy: str = Field(_POLICY.dispatch.name, description="Where new requests go.")
    move_policies: str = Field(
        ",".join(choice.name for choice in _POLICY.moves),
        description="Why requests move, in this order, comma-separated.",
    )
    policy_params: dict[str, dict[str, Any]] = Field(
        {}, description='Parameters by policy, as JSON: {"balance": {"low": 20}}.'
    )
    high_headroom: float = Field(
        _POLICY.high_headroom,
        ge=0,
        le=1,
        description="Share of its blocks that an instance with a high-priority request keeps free of others.",
    )
    cooldown_ms: int = Field(_POLICY.cooldown_ms, ge=0, description="A moved request is left alone for so long.")
    moves_per_tick_max: int = Field(_POLICY.moves_per_tick_max, ge=0, le=1000, description="Moves decided at once.")
    moves_per_instance_max: int = Field(
        _POLICY.moves_per_instance_max, ge=1, le=100, description="Open moves in which one instance takes part."
    )


class ScaleGroup(BaseModel):
    """Scaling: how many instances there are, and who starts and ends them."""

    autoscale: str | None = Field(
        None,
        pattern=r"^\d{1,4}:\d{1,4}$",
        description="Instances at least and at most, like `1:8`: of a new log; `up`: of any. Unset: nobody scales.",
    )
    scale_command: str | None = Field(
        None,
        min_length=1,
        description="Command of `midstream scaler`, run as `COMMAND add INSTANCE SCALING`, or `remove` for `add`.",
    )
    scale_webhook: str | None = Field(
        None, pattern=r"^https?://", description="URL that `midstream scaler` posts to instead."
    )
    scale_token: SecretStr | None = Field(None, description="Bearer token that it presents there.")


class MoveGroup(BaseModel):
    """Moves: bounds of one move. Their relations are checked at start."""

    stop_budget_ms: float = Field(_PLAN.stop_budget_ms, gt=0, description="Freeze once the predicted stop fits in.")
    stop_max_ms: float = Field(_PLAN.stop_max_ms, gt=0, description="Never freeze when the stop would be longer.")
    rounds_max: int = Field(_PLAN.rounds_max, ge=1, le=100, description="Copies made while the source decodes on.")
    copy_max_ms: float = Field(_PLAN.copy_max_ms, gt=0, description="A move copies for at most so long.")
    headroom_tokens: int = Field(_PLAN.headroom_tokens, ge=0, description="Growth that the target reserves for.")
    transfers: str = Field(
        "shm,rpc",
        pattern=r"^(shm|rpc|gloo|nccl)(,(shm|rpc|gloo|nccl))*$",
        description="How KV may travel, best first, comma-separated: `shm` (within one host), `rpc` (TCP), `gloo` "
        "(needs torch), `nccl` (between GPUs; not run on one yet). The first of the source's that the target also has "
        "is used.",
    )
    copy_mib_s: float | None = Field(
        None, gt=0, description="KV that one instance sends, MiB a second at most, over all its moves. Unset: no limit."
    )
    checksum: bool = Field(_LLUMLET.checksum, description="Check every copied block.")
    prepare_ms: float = Field(_LLUMLET.prepare_ms, gt=0, description="A target has so long to answer.")
    decision_ms: float = Field(_LLUMLET.decision_ms, gt=0, description="Silence after the hand-over: reclaim.")
    lease_ms: float = Field(_LLUMLET.lease_ms, gt=0, description="Life of a reservation that nobody uses.")


class TimerGroup(BaseModel):
    """Timers, in milliseconds. Their relations are checked at start."""

    tick_ms: int = Field(250, ge=10, le=10_000, description="How often a controller decides.")
    load_report_min_ms: int = Field(100, ge=10, description="Shortest time between two load reports.")
    load_report_max_ms: int = Field(1_000, ge=100, description="Longest time between two load reports.")
    suspect_after_ms: int = Field(_POLICY.suspect_after_ms, ge=200, description="Silence that makes it suspect.")
    lost_after_ms: int = Field(_POLICY.lost_after_ms, ge=200, description="Silence that, witnessed, makes it lost.")
    start_wait_ms: int = Field(
        20_000, ge=0, description="A starting process waits so long for Redis and the archive; 0: for ever."
    )
    stop_drain_ms: int = Field(8_000, ge=0, description="A stopping llumlet lets its requests move away for so long.")
    command_ttl_ms: int = Field(_POLICY.decision_ttl_ms, ge=100, description="An older command is refused.")


class LimitGroup(BaseModel):
    """Limits of gateway and engine."""

    requests_max: int = Field(1_024, ge=1, le=100_000, description="Requests in flight; more get 429.")
    tenant_waiting_max: int = Field(
        1_024, ge=1, le=100_000, description="Requests of one key that wait at a gateway; more get 429."
    )
    queue_depth: int = Field(
        4,
        ge=0,
        le=100_000,
        description="Requests that wait at an engine; more wait at the gateway, in fair shares. 0: all wait there.",
    )
    context_tokens_max: int = Field(32_768, ge=16, le=1 << 24, description="Longest prompt + output, tokens.")
    body_bytes_max: int = Field(8 << 20, ge=1024, description="Largest request body, bytes.")


class LogGroup(BaseModel):
    """What a process says of itself: logs on stderr, and its health."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe line shown.")
    log_format: Literal["json", "console"] = Field("json", description="One JSON object a line, or coloured text.")
    health_file: Path | None = Field(
        None, description="File that a process keeps fresh while it is well; `midstream health` reads it. Unset: none."
    )


GROUPS = (
    ClusterGroup, NetworkGroup, EngineGroup, VllmGroup, PolicyGroup, ScaleGroup, MoveGroup, TimerGroup, LimitGroup,
    LogGroup,
)  # fmt: skip
