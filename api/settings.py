"""The one settings object, and the only reader of the environment (`MIDSTREAM_*`).

An unknown or bad setting refuses to start.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from midstream.api.keys import Key, parse_keys
from midstream.api.setting_groups import (
    ClusterGroup,
    EngineGroup,
    LimitGroup,
    LogGroup,
    MoveGroup,
    NetworkGroup,
    PolicyGroup,
    ScaleGroup,
    TimerGroup,
    VllmGroup,
)
from midstream.control.errors import BadInput
from midstream.control.state import PolicyChoice, PolicySettings
from midstream.instance.settings import LlumletSettings
from midstream.migration.plan import PlanLimits

ENV_PREFIX = "MIDSTREAM_"
SECRET_CHARS_MIN = 16
SECRET_FILE = "secret"
SCALE_POLICY = "scale_freeness"
_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^/\s]*@")


class Settings(
    ClusterGroup, NetworkGroup, EngineGroup, VllmGroup, PolicyGroup, ScaleGroup, MoveGroup, TimerGroup, LimitGroup,
    LogGroup, BaseSettings,
):  # fmt: skip
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

    @field_validator("vllm_args")
    @classmethod
    def _flags_split(cls, text: str) -> str:
        shlex.split(text)
        return text

    @field_validator("vllm_more_models")
    @classmethod
    def _command_lines_split(cls, lines: list[str]) -> list[str]:
        if not all(map(shlex.split, lines)):
            raise ValueError("every command line begins with a model")
        return lines

    @field_validator("scale_command")
    @classmethod
    def _command_splits(cls, text: str | None) -> str | None:
        if text is not None and not shlex.split(text):
            raise ValueError("there is no command in it")
        return text

    @model_validator(mode="after")
    def _relations(self) -> Self:
        _require(self.load_report_min_ms <= self.load_report_max_ms, "load_report_min_ms <= load_report_max_ms")
        _require(2 * self.load_report_max_ms <= self.suspect_after_ms, "2 * load_report_max_ms <= suspect_after_ms")
        _require(self.suspect_after_ms < self.lost_after_ms, "suspect_after_ms < lost_after_ms")
        _require(self.tick_ms < self.command_ttl_ms, "tick_ms < command_ttl_ms")
        try:
            _ = self.llumlet
        except BadInput as error:
            raise ValueError(str(error)) from None
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
    def copy_bytes_per_s(self) -> float | None:
        """What one instance may send."""
        return None if self.copy_mib_s is None else self.copy_mib_s * (1 << 20)

    @property
    def transfer_names(self) -> tuple[str, ...]:
        """Transfer backends, best first."""
        return tuple(self.transfers.split(","))

    @property
    def served_model(self) -> str:
        """The model name that clients ask for."""
        if self.model is not None or self.engine == "sim":
            return self.model or "sim"
        folder = Path(self.vllm_model)
        return folder.name if folder.is_dir() else self.vllm_model

    @property
    def vllm_flags(self) -> tuple[str, ...]:
        """What `vllm serve` would be told for this instance's model; what `vllm_args` repeats wins.

        Raises `BadInput` for a folder that is not there: vLLM would look for it on a model hub.
        """
        if self.vllm_model.startswith((".", "/")) and not Path(self.vllm_model).is_dir():
            raise BadInput(f"no model in {self.vllm_model}: set {ENV_PREFIX}VLLM_MODEL (`make vllm` makes a small one)")
        return (self.vllm_model, "--served-model-name", self.served_model, *shlex.split(self.vllm_args))

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
            scale=self._scale,
            high_headroom=self.high_headroom,
            cooldown_ms=self.cooldown_ms,
            moves_per_tick_max=self.moves_per_tick_max,
            moves_per_instance_max=self.moves_per_instance_max,
            decision_ttl_ms=self.command_ttl_ms,
            suspect_after_ms=self.suspect_after_ms,
            lost_after_ms=self.lost_after_ms,
        )

    @property
    def llumlet(self) -> LlumletSettings:
        """Timers and bounds of a llumlet. Raises `BadInput` for timers that do not fit together."""
        return self.llumlet_with({})

    def llumlet_with(self, usual: Mapping[str, float]) -> LlumletSettings:
        """The same where an engine has usual values of its own: those that were set still win. Raises `BadInput`."""
        free = {name: value for name, value in usual.items() if name not in self.model_fields_set}
        return LlumletSettings(
            plan=PlanLimits(
                stop_budget_ms=free.get("stop_budget_ms", self.stop_budget_ms),
                stop_max_ms=free.get("stop_max_ms", self.stop_max_ms),
                rounds_max=self.rounds_max,
                copy_max_ms=self.copy_max_ms,
                headroom_tokens=self.headroom_tokens,
            ),
            checksum=self.checksum,
            role=self.role,
            prepare_ms=free.get("prepare_ms", self.prepare_ms),
            decision_ms=free.get("decision_ms", self.decision_ms),
            lease_ms=free.get("lease_ms", self.lease_ms),
            report_min_ms=self.load_report_min_ms,
            report_max_ms=self.load_report_max_ms,
        )

    @property
    def _scale(self) -> PolicyChoice | None:
        if self.autoscale is None:
            return None
        least, most = map(int, self.autoscale.split(":"))
        chosen = self._choice(SCALE_POLICY)
        return PolicyChoice(chosen.name, {"instances_min": least, "instances_max": most, **chosen.params})

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
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


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
    shown = "" if name in SECRET_FIELDS else f" (got {without_password(str(problem['input']))[:80]!r})"
    return f"bad setting {ENV_PREFIX}{name.upper()}: {message}{shown}"


def without_password(text: str) -> str:
    """The same, but for the password of an address in it."""
    return _PASSWORD.sub(r"\1:***@", text)


SECRET_FIELDS = frozenset({"secret", "admin_key", "api_keys", "scale_token"})
