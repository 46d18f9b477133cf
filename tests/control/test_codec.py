"""Facts, commands and states survive their encoding, and bytes written once keep their meaning for ever.

`golden/facts.jsonl` holds one line per kind of fact. Its lines are only ever added to: a line that no longer
says what it said is a broken promise to everybody's archive.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.control import codec
from midstream.control.codec import (
    UnknownEvent,
    decode_command,
    decode_fact,
    decode_state,
    decode_stored,
    digest,
    encode_command,
    encode_fact,
    encode_state,
)
from midstream.control.errors import BadInput
from midstream.control.events import EVENTS, Event, Fact, LoadReported, MigrationReleased, TaskFailed
from midstream.control.state import State

GOLDEN = Path(__file__).parent / "golden"
FACT_LINES = (GOLDEN / "facts.jsonl").read_bytes().splitlines()
COMMAND_LINES = (GOLDEN / "commands.jsonl").read_bytes().splitlines()
STATE_BYTES = (GOLDEN / "state.json").read_bytes().strip()


def kind_of(line: bytes) -> str:
    return str(json.loads(line)["kind"])


def is_kept(then: Any, now: Any) -> bool:
    """Is everything said then said now: objects and records may have grown, nothing else."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and is_kept(value, now[key]) for key, value in then.items())
    if isinstance(then, list):
        return isinstance(now, list) and all(map(is_kept, then, now)) and len(now) >= len(then)
    return bool(then == now and type(then) is type(now))


def test_every_kind_of_fact_has_a_golden_line() -> None:
    missing = EVENTS.keys() - {kind_of(line) for line in FACT_LINES}
    assert not missing, f"add a line to tests/control/golden/facts.jsonl for {sorted(missing)}"


@pytest.mark.parametrize("line", FACT_LINES, ids=kind_of)
def test_a_golden_fact_keeps_its_meaning(line: bytes) -> None:
    fact = decode_fact(line)
    assert type(fact.event) is EVENTS[kind_of(line)]
    assert is_kept(json.loads(line), json.loads(encode_fact(fact)))
    assert decode_fact(encode_fact(fact)) == fact


@pytest.mark.parametrize("line", COMMAND_LINES, ids=kind_of)
def test_a_golden_command_keeps_its_meaning(line: bytes) -> None:
    command = decode_command(line)
    assert is_kept(json.loads(line), json.loads(encode_command(command)))
    assert decode_command(encode_command(command)) == command


def test_the_golden_state_keeps_its_meaning_and_its_order() -> None:
    state = decode_state(STATE_BYTES)
    assert list(state.instances) == ["sim-b", "sim-a"]
    assert is_kept(json.loads(STATE_BYTES), json.loads(encode_state(state)))
    assert decode_state(encode_state(state)) == state


@pytest.mark.parametrize("line", FACT_LINES, ids=kind_of)
def test_an_old_reader_passes_over_fields_of_tomorrow(line: bytes) -> None:
    document = json.loads(line)
    document["payload"]["field_of_tomorrow"] = {"x": [1]}
    document["envelope_of_tomorrow"] = 1
    assert decode_fact(json.dumps(document)) == decode_fact(line)


@pytest.mark.parametrize("line", FACT_LINES, ids=kind_of)
def test_a_new_reader_fills_in_what_an_old_writer_did_not_know(line: bytes) -> None:
    document = json.loads(line)
    defaults = {
        field.name: field.default
        for field in msgspec.structs.fields(EVENTS[document["kind"]])
        if field.default is not msgspec.NODEFAULT
    }
    for name in defaults:
        document["payload"].pop(name, None)
    event = decode_fact(json.dumps(document)).event
    assert {name: getattr(event, name) for name in defaults} == defaults


@pytest.mark.parametrize("change", [{"kind": "ThingOfTomorrow"}, {"version": 2}])
def test_an_unknown_kind_or_version_passes_through_unchanged(change: dict[str, Any]) -> None:
    line = json.dumps(json.loads(FACT_LINES[0]) | change, separators=(",", ":")).encode()
    fact = decode_fact(line)
    assert isinstance(fact.event, UnknownEvent)
    assert encode_fact(fact) == line
    assert decode_fact(line) == fact


class Renamed(Event, frozen=True, kw_only=True):
    """Version 1 said `amount` in kilobytes, version 2 `size` in bytes, version 3 split it."""

    VERSION = 3
    parts: tuple[int, int]


def test_an_old_version_climbs_to_the_present_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVENTS, "Renamed", Renamed)
    monkeypatch.setitem(codec.UPCASTERS, ("Renamed", 1), lambda old: {"size": old["amount"] * 1000})
    monkeypatch.setitem(codec.UPCASTERS, ("Renamed", 2), lambda old: {"parts": [old["size"] // 2, old["size"] // 2]})
    assert decode_fact(renamed(1, {"amount": 3})).event == Renamed(parts=(1500, 1500))
    assert decode_fact(renamed(2, {"size": 8})).event == Renamed(parts=(4, 4))
    assert decode_fact(renamed(3, {"parts": [1, 2]})).event == Renamed(parts=(1, 2))
    for version, payload in ((1, {"wrong": 3}), (1, [3]), (0, {"amount": 3}), (2, {"size": "x"})):
        with pytest.raises(BadInput):
            decode_fact(renamed(version, payload))


def renamed(version: int, payload: Any) -> str:
    envelope = {"kind": "Renamed", "source": "s", "incarnation": 1, "source_seq": 1, "at_ms": 1}
    return json.dumps(envelope | {"version": version, "payload": payload})


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff\xfe", b"[]", b"null", FACT_LINES[0][:-1], FACT_LINES[0] + b"x", b'{"kind":"TickElapsed"}'],
)
def test_bytes_that_are_no_fact_are_bad_input(data: bytes) -> None:
    for decode in (decode_fact, decode_command):
        with pytest.raises(BadInput):
            decode(data)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"null", STATE_BYTES[:-1], b'{"gaps":"one"}'])
def test_bytes_that_are_no_state_are_bad_input(data: bytes) -> None:
    with pytest.raises(BadInput):
        decode_state(data)


def test_a_payload_that_does_not_fit_its_kind_is_bad_input() -> None:
    document = json.loads(FACT_LINES[0])
    document["payload"]["generation"] = "three"
    with pytest.raises(BadInput, match="GenerationOpened"):
        decode_fact(json.dumps(document))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_cannot_say_does_not_survive(number: float) -> None:
    line = FACT_LINES[[kind_of(line) for line in FACT_LINES].index("LoadReported")]
    fact = decode_fact(line)
    assert isinstance(fact.event, LoadReported)
    load = msgspec.structs.replace(fact.event.load, step_ms=number)
    broken = msgspec.structs.replace(fact, event=msgspec.structs.replace(fact.event, load=load))
    with pytest.raises(BadInput):
        decode_fact(encode_fact(broken))


@given(st.integers(0, len(FACT_LINES) - 1), st.integers(0, 400), st.binary(max_size=6))
def test_P28_nothing_in_the_log_stalls_its_reader(index: int, place: int, junk: bytes) -> None:
    line = FACT_LINES[index]
    damaged = line[:place] + junk + line[place + len(junk) :]
    stored = decode_stored(damaged)
    assert isinstance(stored, Fact)
    assert decode_stored(encode_fact(stored)).event.__class__ is stored.event.__class__
    try:
        assert decode_fact(damaged) == stored
    except BadInput:
        assert isinstance(stored.event, UnknownEvent)


def test_a_stored_fact_with_a_bad_payload_keeps_its_number() -> None:
    line = encode_fact(Fact("s", 1, 7, 0, MigrationReleased(migration="m", blocks_freed=1)))
    stored = decode_stored(line.replace(b'"blocks_freed":1', b'"blocks_freed":"?"'))
    assert (stored.source, stored.incarnation, stored.source_seq) == ("s", 1, 7)
    assert isinstance(stored.event, UnknownEvent)
    assert (decode_stored(b"junk").source, decode_stored(b"junk").source_seq) == ("poison", 0)


@given(st.text(), st.integers(0, 2**63), st.integers(-(2**53), 2**53))
def test_any_text_and_number_comes_back(text: str, seq: int, at_ms: int) -> None:
    fact = Fact(f"llumlet/{text}", seq, seq, at_ms, TaskFailed(task=text, error=text))
    assert decode_fact(encode_fact(fact)) == fact


def test_P17_equal_states_have_equal_bytes_in_every_process() -> None:
    program = (
        "import sys; from midstream.control.codec import *;"
        "print(digest(encode_state(decode_state(sys.stdin.buffer.read()))))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            input=STATE_BYTES,
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": s},
        ).stdout.strip()
        for s in ("1", "2")
    }
    assert digests == {digest(encode_state(decode_state(STATE_BYTES))).encode()}


def test_P17_the_order_of_a_table_is_part_of_the_state() -> None:
    one = State(placed={"a": {"r1": None, "r2": None}})
    two = State(placed={"a": {"r2": None, "r1": None}})
    assert digest(encode_state(one)) != digest(encode_state(two))
    assert list(decode_state(encode_state(two)).placed["a"]) == ["r2", "r1"]
