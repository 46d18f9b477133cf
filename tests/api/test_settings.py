"""One settings object, read once; what it does not know or cannot use refuses to start (P29)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from midstream.api.cli import reference
from midstream.api.keys import create_key, hash_key, parse_keys
from midstream.api.setting_groups import GROUPS
from midstream.api.settings import Settings, child_environment, load_settings
from midstream.control.errors import BadInput

SECRET = "s" * 32


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("MIDSTREAM_")]:  # noqa: TID251
        monkeypatch.delenv(name)


def test_P29_defaults_are_usable() -> None:
    settings = load_settings()
    assert settings.gateway_host == "127.0.0.1"
    assert settings.archive_url == f"sqlite:///{Path('.midstream').absolute()}/archive.sqlite3"
    assert [choice.name for choice in settings.policies.moves] == [
        "drain", "priority", "prefill_decode", "defragment", "balance",
    ]  # fmt: skip


def test_P29_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_TICK_MS", "50")
    monkeypatch.setenv("MIDSTREAM_POLICY_PARAMS", '{"balance": {"low": 20}}')
    monkeypatch.setenv("MIDSTREAM_MOVE_POLICIES", "balance")
    settings = load_settings()
    assert settings.tick_ms == 50
    assert settings.policies.moves[0].params == {"low": 20}
    assert len(settings.policies.moves) == 1


def test_P29_an_option_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_GATEWAY_PORT", "9000")
    assert load_settings(gateway_port=9001).gateway_port == 9001
    assert load_settings(gateway_port=None).gateway_port == 9000


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MIDSTREAM_GATWAY_PORT", "1", "did you mean MIDSTREAM_GATEWAY_PORT"),
        ("MIDSTREAM_ZZZ", "1", "unknown setting MIDSTREAM_ZZZ"),
        ("midstream_zzz", "1", "unknown setting midstream_zzz"),
        ("MIDSTREAM_GATEWAY_PORT", "99999", "MIDSTREAM_GATEWAY_PORT"),
        ("MIDSTREAM_GATEWAY_PORT", "http", "MIDSTREAM_GATEWAY_PORT"),
        ("MIDSTREAM_POLICY_PARAMS", "{", "policy_params"),
        ("MIDSTREAM_POLICY_PARAMS", "[1]", "MIDSTREAM_POLICY_PARAMS"),
        ("MIDSTREAM_REDIS_URL", "localhost:6379", "MIDSTREAM_REDIS_URL"),
        ("MIDSTREAM_DATABASE_URL", "mysql://x", "MIDSTREAM_DATABASE_URL"),
        ("MIDSTREAM_LOG_LEVEL", "loud", "MIDSTREAM_LOG_LEVEL"),
        ("MIDSTREAM_ENGINE", "abacus", "MIDSTREAM_ENGINE"),
        ("MIDSTREAM_NAME", "a/b", "MIDSTREAM_NAME"),
        ("MIDSTREAM_VLLM_ARGS", "--chat-template 'open", "MIDSTREAM_VLLM_ARGS"),
        ("MIDSTREAM_SCALE_COMMAND", "'./scale.sh", "MIDSTREAM_SCALE_COMMAND"),
        ("MIDSTREAM_SCALE_COMMAND", "  ", "there is no command in it"),
        ("MIDSTREAM_VLLM_MORE_MODELS", '["some/model", ""]', "every command line begins with a model"),
        ("MIDSTREAM_VLLM_MORE_MODELS", "some/model", "vllm_more_models"),
        ("MIDSTREAM_API_KEYS", "bob:read", "name:scope+scope:sha256"),
        ("MIDSTREAM_API_KEYS", f"bob:rule:{'0' * 64}", "unknown scope 'rule'"),
    ],
)
def test_P29_a_bad_or_unknown_setting_refuses_to_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput) as refusal:
        load_settings()
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_served_name_is_the_models_own_unless_said(tmp_path: Path) -> None:
    assert load_settings().served_model == "sim"
    assert load_settings(engine="vllm", vllm_model="some/model").served_model == "some/model"
    assert load_settings(engine="vllm", vllm_model=str(tmp_path)).served_model == tmp_path.name
    assert load_settings(engine="vllm", vllm_model=str(tmp_path), model="chat").served_model == "chat"


def test_flags_of_vllm_serve_are_split_as_a_shell_would() -> None:
    settings = load_settings(engine="vllm", vllm_model="m", vllm_args="--chat-template 'a b.jinja' -O1")
    assert settings.vllm_flags == ("m", "--served-model-name", "m", "--chat-template", "a b.jinja", "-O1")


def test_P29_a_model_folder_that_is_not_there_is_not_looked_for_on_a_hub(tmp_path: Path) -> None:
    settings = load_settings(engine="vllm", vllm_model=str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match=r"no model in .*nothing"):
        _ = settings.vllm_flags


@pytest.mark.parametrize(
    "changes",
    [
        {"suspect_after_ms": 1_500},
        {"suspect_after_ms": 7_000},
        {"load_report_min_ms": 2_000},
        {"tick_ms": 6_000, "command_ttl_ms": 5_000},
        {"lease_ms": 9_000.0},
        {"stop_max_ms": 400.0},
        {"decision_ms": 20_000.0},
    ],
)
def test_P29_timers_must_fit_together(changes: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=r"must hold|must be shorter|longer than"):
        load_settings(**changes)


def test_timers_of_separate_parts_fit_together() -> None:
    """What is a constant of one part and bounds another."""
    from midstream.control.adapters import redis_client
    from midstream.control.archive import READ_WAIT_MS
    from midstream.migration.transfers.base import Where
    from midstream.migration.transfers.endpoint import CONNECT_S

    settings = load_settings()
    assert redis_client.READ_GRACE_S >= 2.0
    assert READ_WAIT_MS <= redis_client.BLOCK_MS_MAX
    assert redis_client.reader_settings()["socket_timeout"] is None
    assert settings.lease_ms > 1_000 * (CONNECT_S + Where(bind_host="", secret=b"").stall_s)
    assert settings.stop_max_ms < settings.decision_ms < settings.lease_ms


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("1", True), ("0", False)])
def test_P29_a_boolean_can_be_set_both_ways(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("MIDSTREAM_CHECKSUM", text)
    assert load_settings().llumlet.checksum is value


def test_P30_a_wildcard_needs_an_advertised_host() -> None:
    with pytest.raises(BadInput, match="advertise_host"):
        load_settings(bind_host="0.0.0.0")
    assert load_settings(bind_host="0.0.0.0", advertise_host="i0.internal").advertise_host == "i0.internal"


def test_anonymous_admin_only_on_loopback() -> None:
    with pytest.raises(BadInput, match="api_keys"):
        load_settings(admin_host="0.0.0.0")
    _, key = create_key("ops", ("admin",))
    assert load_settings(admin_host="0.0.0.0", api_keys=key.line()).keys == (key,)


def test_a_short_secret_is_refused_and_never_shown() -> None:
    with pytest.raises(BadInput) as refusal:
        load_settings(secret="hunter2")
    assert "hunter2" not in str(refusal.value)


def test_secret_comes_from_the_setting_or_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="MIDSTREAM_SECRET"):
        load_settings(data_dir=tmp_path).data_secret()
    (tmp_path / "secret").write_text(SECRET + "\n")
    assert load_settings(data_dir=tmp_path).data_secret() == SECRET.encode()
    assert load_settings(data_dir=tmp_path, secret="t" * 32).data_secret() == b"t" * 32


def test_a_child_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = load_settings(
        secret=SECRET, policy_params={"balance": {"low": 3}}, gateway_port=0, tick_ms=50, vllm_more_models=["a -O1"]
    )
    environment = child_environment(parent, name="i7", sim_blocks=99)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    child = load_settings()
    assert child.model_dump(exclude={"name", "sim_blocks"}) == parent.model_dump(exclude={"name", "sim_blocks"})
    assert (child.name, child.sim_blocks) == ("i7", 99)


def test_P29_every_setting_is_in_a_group_and_in_the_reference() -> None:
    grouped = [name for group in GROUPS for name in group.model_fields]
    assert sorted(grouped) == sorted(Settings.model_fields)
    page = reference.markdown()
    for name, field in Settings.model_fields.items():
        assert f"`MIDSTREAM_{name.upper()}`" in page
        assert field.description


def test_effective_settings_mask_secrets() -> None:
    rows = reference.effective(load_settings(secret=SECRET, admin_key="ms-very-secret"))
    shown = {row["setting"]: row["value"] for row in rows}
    assert shown["MIDSTREAM_SECRET"] == shown["MIDSTREAM_ADMIN_KEY"] == reference.MASK


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("redis://:hidden@redis:6379/0", "redis://:***@redis:6379/0"),
        ("redis://me:hid@den@redis", "redis://me:***@redis"),
        ("redis://redis:6379/0", "redis://redis:6379/0"),
    ],
)
def test_passwords_of_addresses_are_never_shown(address: str, told: str) -> None:
    rows = {row["setting"]: row["value"] for row in reference.effective(load_settings(redis_url=address))}
    assert rows["MIDSTREAM_REDIS_URL"] == told
    with pytest.raises(BadInput) as refusal:
        load_settings(database_url=address)
    assert told in str(refusal.value)


def test_keys_keep_only_the_hash() -> None:
    text, key = create_key("ops", ("read", "migrate"))
    assert parse_keys(f"{key.line()}, ") == (key,)
    assert key.sha256 == hash_key(text)
    assert text not in key.line()


@pytest.mark.parametrize("bad", ["a b:read:" + "0" * 64, "a:read:xyz", "a::" + "0" * 64, ":read:" + "0" * 64, "a"])
def test_bad_key_lines_are_refused(bad: str) -> None:
    with pytest.raises(BadInput):
        parse_keys(bad)


def test_P28_keys_are_bounded_and_names_unique() -> None:
    lines = [f"k{index}:read:{index:064x}" for index in range(101)]
    with pytest.raises(BadInput, match="more than 100"):
        parse_keys(",".join(lines))
    with pytest.raises(BadInput, match="same name"):
        parse_keys(",".join([lines[0], lines[0]]))


def test_P29_what_is_set_beats_what_an_engine_would_rather_have(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"prepare_ms": 15_000.0, "lease_ms": 60_000.0, "stop_budget_ms": 60.0}
    found = load_settings().llumlet_with(usual)
    assert (found.prepare_ms, found.lease_ms, found.plan.stop_budget_ms) == (15_000, 60_000, 60)
    assert found.decision_ms == load_settings().llumlet.decision_ms
    monkeypatch.setenv("MIDSTREAM_PREPARE_MS", "900")
    found = load_settings().llumlet_with(usual)
    assert (found.prepare_ms, found.lease_ms) == (900, 60_000)
