"""API keys: made once, shown once, kept only as hashes."""

from __future__ import annotations

import hashlib
import re
import secrets

import msgspec

from midstream.control.errors import BadInput

SCOPES = ("read", "migrate", "replay", "admin", "generate")
"""What a key may be allowed: look, move and drain, start replays, everything, and (gateway) generate text."""
PRIORITY_MIN = -1_000
CLASSES = {"class-high": PRIORITY_MIN, "class-normal": 0, "class-low": 1}
"""The class of a key: the smallest priority, which is the best, that it may ask for; of several the lowest holds."""
CLASS_DEFAULT = "class-normal"
"""Of a key that names none: the high class waits for nobody, so it is for those who were given it."""
KEYS_MAX = 100
KEY_PREFIX = "ms-"
KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One bearer key as it is configured. The key itself is nowhere kept."""

    name: str
    """Who holds it: the actor in facts."""
    sha256: str
    """Lower-case hex SHA-256 of the key."""
    scopes: tuple[str, ...]

    def line(self) -> str:
        """The form that the setting `api_keys` holds."""
        return f"{self.name}:{'+'.join(self.scopes)}:{self.sha256}"


def hash_key(key: str) -> str:
    """How a key is written in the settings. Keys are long and random, so no salt or stretching is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def create_key(name: str, scopes: tuple[str, ...]) -> tuple[str, Key]:
    """A new key's text and its hashed form. Raises `BadInput` for a bad name or scope."""
    text = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return text, parse_key(f"{name}:{'+'.join(scopes)}:{hash_key(text)}")


def parse_key(line: str) -> Key:
    """Read `name:scope+scope:sha256`. Raises `BadInput`."""
    parts = line.split(":")
    if len(parts) != 3:
        raise BadInput("an API key looks like name:scope+scope:sha256")
    name, scopes, digest = parts[0], tuple(parts[1].split("+")), parts[2]
    if not _NAME.fullmatch(name):
        raise BadInput(f"bad API key name {name[:64]!r}: letters, digits, dot, dash, underscore")
    if not _SHA256.fullmatch(digest):
        raise BadInput(f"API key {name!r}: sha256 must be 64 lower-case hex digits")
    for scope in scopes:
        if scope not in (*SCOPES, *CLASSES):
            known = ", ".join((*SCOPES, *CLASSES))
            raise BadInput(f"API key {name!r}: unknown scope {scope[:64]!r}, known are {known}")
    return Key(name=name, sha256=digest, scopes=scopes)


def parse_keys(text: str) -> tuple[Key, ...]:
    """Read a comma-separated list of keys; names are unique. Raises `BadInput`."""
    keys = tuple(parse_key(line.strip()) for line in text.split(",") if line.strip())
    if len(keys) > KEYS_MAX:
        raise BadInput(f"more than {KEYS_MAX} API keys")
    if len({key.name for key in keys}) != len(keys):
        raise BadInput("two API keys have the same name")
    return keys
