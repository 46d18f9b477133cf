"""Models, flags and versions: what a face starts with, and what it refuses to start with."""

from __future__ import annotations

import httpx
import pytest

from midstream.api.gateway.vllm.face import FaceConfig, serve_vllm_face
from midstream.api.gateway.vllm.served import read_face_flags
from midstream.control.errors import BadInput
from tests.api.gateway.vllm.rig import CHAT, NAME, CheckedScriptedGateway, flags, says, sdk, serving


async def test_one_face_serves_several_models_each_with_numbers_of_its_own() -> None:
    gateway = CheckedScriptedGateway()
    async with (
        serving(gateway, flags("one"), flags("two", "--max-model-len", "512")) as face,
        httpx.AsyncClient(base_url=face.url, timeout=30) as http,
    ):
        listed = {card["id"]: card["max_model_len"] for card in (await http.get("/v1/models")).json()["data"]}
        for name, count in (("one", 2), ("two", 3)):
            asked = {"model": name, "prompt": "Tea", "max_tokens": count}
            assert (await http.post("/v1/completions", json=asked)).json()["model"] == name
        lines = (await http.get("/metrics")).text.splitlines()
    assert listed == {"one": 2048, "two": 512}
    assert [stream.spec.model for stream in gateway.streams] == ["one", "two"]
    made = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
    assert {line.partition('model_name="')[2].partition('"')[0]: float(line.split()[-1]) for line in made} == {
        "one": 2.0,
        "two": 3.0,
    }
    assert sum(line.startswith("# TYPE vllm:generation_tokens_total ") for line in lines) == 1


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")
async def test_thoughts_are_parsed_where_the_model_has_some() -> None:
    gateway = CheckedScriptedGateway()
    async with (
        serving(gateway, flags(NAME, "--reasoning-parser", "granite")) as face,
        sdk(face) as client,
    ):
        gateway.play(says(face, "Here is my thought process: It was on the table. Here is my response: Look there."))
        message = (await client.chat.completions.create(model=NAME, messages=CHAT)).choices[0].message
    assert message.model_extra is not None
    assert message.model_extra["reasoning"].strip() == "It was on the table."
    assert message.content is not None
    assert message.content.strip() == "Look there."


async def test_two_models_of_one_name_are_refused() -> None:
    config = FaceConfig(gateway="g1", incarnation=1, models=(flags(NAME), flags(NAME)))
    with pytest.raises(BadInput, match="name of its own"):
        await serve_vllm_face(CheckedScriptedGateway(), config, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--no-such-flag",), "no-such-flag"),
        (("--api-key", "secret"), "--api-key is Midstream's own"),
        (("--enable-auto-tool-choice",), "tool-call-parser"),
        (("--max-model-len", "many"), "max-model-len"),
    ],
)
def test_bad_flags_are_refused_in_one_line(more: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_face_flags(flags(NAME, *more))


async def test_a_wire_form_without_pickle_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(BadInput, match="pickle"):
        await serve_vllm_face(
            CheckedScriptedGateway(), FaceConfig(gateway="g1", incarnation=1, models=(flags(),)), "127.0.0.1", 0
        )
