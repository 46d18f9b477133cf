"""Facts, commands and states as bytes and back: JSON text with versions. Pure.

A fact is one line `{"kind","version","source","incarnation","source_seq","at_ms","payload"}`. Decoding reads
the envelope first and the payload with the decoder of its kind. What this build does not know yet (a new
kind, a newer version) becomes an `UnknownEvent` that encodes to the same bytes again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from midstream.control.commands import AnyCommand, Command
from midstream.control.errors import BadInput
from midstream.control.events import EVENTS, Event, Fact
from midstream.control.state import State

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: Final[dict[tuple[str, int], Upcaster]] = {}
"""(kind, version) to the pure function that turns that version's payload into the next version's."""

POISON_KIND: Final = "Poison"
"""Kind of the stand-in for bytes in the log that are no fact at all."""

POISON_CHARS_MAX: Final = 300


class UnknownEvent(Event, frozen=True, kw_only=True):
    """A fact whose kind or version this build does not know: kept, passed on, changes nothing."""

    kind: str
    version: int
    payload: msgspec.Raw


class _Envelope(msgspec.Struct, frozen=True):
    kind: str
    version: int
    source: str
    incarnation: int
    source_seq: int
    at_ms: int
    payload: msgspec.Raw


class _Outgoing(msgspec.Struct, frozen=True):
    kind: str
    version: int
    source: str
    incarnation: int
    source_seq: int
    at_ms: int
    payload: Any


_encoder = msgspec.json.Encoder()
_envelopes = msgspec.json.Decoder(_Envelope)
_commands = msgspec.json.Decoder(AnyCommand)
_states = msgspec.json.Decoder(State)
_payloads: dict[str, msgspec.json.Decoder[Any]] = {}


def encode_fact(fact: Fact) -> bytes:
    """One fact as one line of JSON, without a line end."""
    event = fact.event
    if isinstance(event, UnknownEvent):
        return _encode(fact, event.kind, event.version, event.payload)
    return _encode(fact, type(event).__name__, event.VERSION, event)


def decode_fact(data: bytes | str) -> Fact:
    """Read one fact. Raises `BadInput` if it is no fact, or a known kind with a payload that does not fit it."""
    envelope = _open(data)
    return _fact(envelope, _event(envelope))


def decode_stored(data: bytes) -> Fact:
    """Read one fact out of the log, whatever it holds: what cannot be read becomes an `UnknownEvent`.

    So one bad entry never stalls a reader, and its place stays visible. Bytes that are no fact at all come as
    source `poison`, number 0.
    """
    try:
        envelope = _open(data)
    except BadInput:
        text = data.decode("latin-1")[:POISON_CHARS_MAX]
        raw = msgspec.Raw(_encoder.encode({"text": text}))
        return Fact("poison", 0, 0, 0, UnknownEvent(kind=POISON_KIND, version=0, payload=raw))
    try:
        return _fact(envelope, _event(envelope))
    except BadInput:
        return _fact(envelope, _unknown(envelope))


def encode_command(command: Command) -> bytes:
    """One command as JSON, its verb in `kind`."""
    return _encoder.encode(command)


def decode_command(data: bytes | str) -> AnyCommand:
    """Read one command. Raises `BadInput` if it is none that this build knows."""
    try:
        return _commands.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"not a command: {error}") from error


def encode_state(state: State) -> bytes:
    """The fold as canonical JSON: fields in their declared order, tables in their own order.

    Equal states give equal bytes in every process. Numbers keep their kind: an integer put into a float field
    encodes as `0`, a float as `0.0`, so state must be folded from decoded facts, as it is.
    """
    return _encoder.encode(replace(state, uncarried=[]))


def decode_state(data: bytes | str) -> State:
    """Read an encoded fold. Raises `BadInput` if it is none."""
    try:
        return _states.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"not a state: {error}") from error


def digest(data: bytes) -> str:
    """BLAKE2b-128 of bytes, in hex: equal states have equal digests."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _encode(fact: Fact, kind: str, version: int, payload: Any) -> bytes:
    return _encoder.encode(
        _Outgoing(kind, version, fact.source, fact.incarnation, fact.source_seq, fact.at_ms, payload)
    )


def _open(data: bytes | str) -> _Envelope:
    try:
        return _envelopes.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"not a fact: {error}") from error


def _fact(envelope: _Envelope, event: Event) -> Fact:
    return Fact(envelope.source, envelope.incarnation, envelope.source_seq, envelope.at_ms, event)


def _event(envelope: _Envelope) -> Event:
    cls = EVENTS.get(envelope.kind)
    if cls is None or envelope.version > cls.VERSION:
        return _unknown(envelope)
    decoder = _payloads.get(envelope.kind)
    if decoder is None:
        decoder = _payloads[envelope.kind] = msgspec.json.Decoder(cls)
    payload = envelope.payload if envelope.version == cls.VERSION else _upcast(envelope, cls.VERSION)
    try:
        event: Event = decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"not a {envelope.kind}: {error}") from error
    return event


def _unknown(envelope: _Envelope) -> UnknownEvent:
    return UnknownEvent(kind=envelope.kind, version=envelope.version, payload=envelope.payload.copy())


def _upcast(envelope: _Envelope, version_now: int) -> bytes:
    try:
        payload = msgspec.json.decode(envelope.payload, type=dict[str, Any])
        for version in range(envelope.version, version_now):
            payload = UPCASTERS[(envelope.kind, version)](payload)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, ValueError) as error:
        raise BadInput(f"{envelope.kind} version {envelope.version} cannot be read: {error!r}") from error
    return _encoder.encode(payload)
