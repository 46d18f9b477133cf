"""The one settings object, and the only reader of the environment (`MIDSTREAM_*`).

An unknown or bad setting refuses to start.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from midstream.api.keys import Key, parse_keys
from midstream.control.errors import BadInput
from midstream.control.state import PolicyChoice, PolicySettings

ENV_PREFIX = "MIDSTREAM_"
PORT_MAX = 65_535
SECRET_CHARS_MIN = 16
SECRET_FILE = "secret"
_POLICY = PolicySettings()


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

    engine: Literal["sim"] = Field("sim", description="Engine of the llumlet.")
    model: str = Field("sim", min_length=1, max_length=200, description="Model name that clients ask for.")
    sim_blocks: int = Field(1024, ge=8, le=1_000_000, description="KV blocks of the simulated engine.")
    sim_block_tokens: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    sim_slots: int = Field(64, ge=1, le=4096, description="Requests that run at once.")
    sim_time_scale: float = Field(1.0, gt=0, le=1000, description="Factor on step times: 0.1 is 10x faster.")


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
    cooldown_ms: int = Field(_POLICY.cooldown_ms, ge=0, description="A moved request is left alone for so long.")
    moves_per_tick_max: int = Field(_POLICY.moves_per_tick_max, ge=0, le=1000, description="Moves decided at once.")
    moves_per_instance_max: int = Field(
        _POLICY.moves_per_instance_max, ge=1, le=100, description="Open moves in which one instance takes part."
    )


class TimerGroup(BaseModel):
    """Timers, in milliseconds. Their relations are checked at start."""

    tick_ms: int = Field(250, ge=10, le=10_000, description="How often a controller decides.")
    load_report_min_ms: int = Field(100, ge=10, description="Shortest time between two load reports.")
    load_report_max_ms: int = Field(1_000, ge=100, description="Longest time between two load reports.")
    suspect_after_ms: int = Field(_POLICY.suspect_after_ms, ge=200, description="Silence that makes it suspect.")
    lost_after_ms: int = Field(_POLICY.lost_after_ms, ge=200, description="Silence that, witnessed, makes it lost.")
    stop_drain_ms: int = Field(8_000, ge=0, description="A stopping llumlet lets its requests move away for so long.")
    command_ttl_ms: int = Field(_POLICY.decision_ttl_ms, ge=100, description="An older command is refused.")


class LimitGroup(BaseModel):
    """Limits of gateway and engine."""

    requests_max: int = Field(1_024, ge=1, le=100_000, description="Requests in flight; more get 429.")
    context_tokens_max: int = Field(32_768, ge=16, le=1 << 24, description="Longest prompt + output, tokens.")
    body_bytes_max: int = Field(8 << 20, ge=1024, description="Largest request body, bytes.")


class LogGroup(BaseModel):
    """Logs, on stderr."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe line shown.")
    log_format: Literal["json", "console"] = Field("json", description="One JSON object a line, or coloured text.")


GROUPS = (ClusterGroup, NetworkGroup, EngineGroup, PolicyGroup, TimerGroup, LimitGroup, LogGroup)


class Settings(ClusterGroup, NetworkGroup, EngineGroup, PolicyGroup, TimerGroup, LimitGroup, LogGroup, BaseSettings):
    """Every setting of every process, read once at start. `load_settings` makes it."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    @field_validator("secret")
    @classmethod
    def _secret_is_long(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < SECRET_CHARS_MIN:
            raise ValueError(f"needs at least {SECRET_CHARS_MIN} characters")
        return secret

    @field_validator("api_keys")
    @classmethod
    def _keys_parse(cls, text: str) -> str:
        try:
            parse_keys(text)
        except BadInput as error:
            raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _relations(self) -> Self:
        _require(self.load_report_min_ms <= self.load_report_max_ms, "load_report_min_ms <= load_report_max_ms")
        _require(2 * self.load_report_max_ms <= self.suspect_after_ms, "2 * load_report_max_ms <= suspect_after_ms")
        _require(self.suspect_after_ms < self.lost_after_ms, "suspect_after_ms < lost_after_ms")
        _require(self.tick_ms < self.command_ttl_ms, "tick_ms < command_ttl_ms")
        if self.advertise_host is None and is_wildcard(self.bind_host):
            raise ValueError("bind_host is a wildcard, so advertise_host must say how peers reach this process")
        for name in ("gateway_host", "admin_host"):
            if not self.keys and not is_loopback(getattr(self, name)):
                raise ValueError(f"{name} is not loopback, so api_keys must name at least one key")
        return self

    @property
    def keys(self) -> tuple[Key, ...]:
        """The admin API's keys."""
        return parse_keys(self.api_keys)

    @property
    def archive_url(self) -> str:
        """SQLAlchemy URL of the archive."""
        return self.database_url or f"sqlite:///{self.archive_path}"

    @property
    def archive_path(self) -> Path:
        """The archive's file, where no database is set."""
        return self.data_dir.absolute() / "archive.sqlite3"

    @property
    def policies(self) -> PolicySettings:
        """What a new log starts with."""
        return PolicySettings(
            dispatch=self._choice(self.dispatch_policy),
            moves=tuple(self._choice(name.strip()) for name in self.move_policies.split(",") if name.strip()),
            cooldown_ms=self.cooldown_ms,
            moves_per_tick_max=self.moves_per_tick_max,
            moves_per_instance_max=self.moves_per_instance_max,
            decision_ttl_ms=self.command_ttl_ms,
            suspect_after_ms=self.suspect_after_ms,
            lost_after_ms=self.lost_after_ms,
        )

    def _choice(self, name: str) -> PolicyChoice:
        return PolicyChoice(name, self.policy_params.get(name, {}))

    def data_secret(self) -> bytes:
        """The data plane's shared secret. Raises `BadInput` when neither setting nor file has one."""
        if self.secret is not None:
            return self.secret.get_secret_value().encode()
        path = self.data_dir / SECRET_FILE
        try:
            return path.read_text().strip().encode()
        except FileNotFoundError:
            raise BadInput(f"no data-plane secret: set {ENV_PREFIX}SECRET (`midstream up` makes {path})") from None

    def require_redis(self) -> str:
        """The Redis to use. Raises `BadInput` when none is set."""
        if self.redis_url is None:
            raise BadInput(f"no Redis: set {ENV_PREFIX}REDIS_URL (`midstream up` starts a local Valkey by itself)")
        return self.redis_url


def child_environment(settings: Settings, **changes: object) -> dict[str, str]:
    """The environment for a process that is to have these settings, with some changed."""
    own = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}  # noqa: TID251
    values = {name: getattr(settings, name) for name in settings.model_fields_set} | changes
    return own | {ENV_PREFIX + name.upper(): _as_text(value) for name, value in values.items() if value is not None}


def _as_text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _require(holds: bool, relation: str) -> None:
    if not holds:
        raise ValueError(f"must hold: {relation}")


def is_wildcard(host: str) -> bool:
    """Does binding `host` listen on every interface."""
    return host in {"", "*", "0.0.0.0", "::"}


def is_loopback(host: str) -> bool:
    """Can only this machine reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_settings(**overrides: object) -> Settings:
    """Read the environment, with `overrides` (those that are not None) on top. Raises `BadInput`, one line."""
    _refuse_unknown(os.environ)  # noqa: TID251 - the one place
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise BadInput(_first_problem(error)) from None
    except SettingsError as error:
        raise BadInput(f"bad setting: {error}: {error.__cause__}") from None


def _refuse_unknown(environ: Any) -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    for name in sorted(environ):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), sorted(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else "; `midstream settings` lists them"
            raise BadInput(f"unknown setting {name}{hint}")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return f"bad settings: {message}"
    name = str(problem["loc"][0])
    shown = "" if name in SECRET_FIELDS else f" (got {str(problem['input'])[:80]!r})"
    return f"bad setting {ENV_PREFIX}{name.upper()}: {message}{shown}"


SECRET_FIELDS = frozenset({"secret", "admin_key", "api_keys"})
