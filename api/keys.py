"""API keys: made once, shown once, kept only as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

import msgspec

SCOPES = ("read", "migrate", "replay", "admin")
"""What a key may do; `admin` includes all others."""
KEYS_MAX = 100
KEY_PREFIX = "ms-"
_NAME = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


class ApiKey(msgspec.Struct, frozen=True):
    """A key as the server knows it: whose it is, what it may do, and the SHA-256 of its text."""

    name: str
    scopes: tuple[str, ...]
    sha256: str

    def allows(self, scope: str) -> bool:
        """May this key's holder do what needs `scope`."""
        return scope in self.scopes or "admin" in self.scopes

    def line(self) -> str:
        """The form that the setting `api_keys` holds."""
        return f"{self.name}:{'+'.join(self.scopes)}:{self.sha256}"


def create_key(name: str, scopes: tuple[str, ...]) -> tuple[str, ApiKey]:
    """A new key's text and its hashed form. Raises `ValueError` for a bad name or scope."""
    text = KEY_PREFIX + secrets.token_urlsafe(32)
    return text, parse_key(f"{name}:{'+'.join(scopes)}:{hash_key(text)}")


def hash_key(text: str) -> str:
    """SHA-256 of a key's text, hexadecimal. Keys are random, so no salt or stretching is needed."""
    return hashlib.sha256(text.encode()).hexdigest()


def find_key(keys: tuple[ApiKey, ...], text: str) -> ApiKey | None:
    """The key whose text this is; takes equally long whichever matches."""
    digest = hash_key(text)
    found = None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def parse_key(line: str) -> ApiKey:
    """Read `name:scope+scope:sha256`. Raises `ValueError`."""
    parts = line.split(":")
    if len(parts) != 3:
        raise ValueError("a key looks like name:scope+scope:sha256")
    name, scopes, digest = parts[0], tuple(parts[1].split("+")), parts[2].lower()
    if not _NAME.match(name):
        raise ValueError(f"bad key name {name[:64]!r}")
    if not _SHA256.match(digest):
        raise ValueError(f"key {name}: the third part must be 64 hexadecimal digits")
    for scope in scopes:
        if scope not in SCOPES:
            raise ValueError(f"key {name}: unknown scope {scope[:64]!r}, known are {', '.join(SCOPES)}")
    return ApiKey(name, scopes, digest)


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Read a comma-separated list of keys; names are unique. Raises `ValueError`."""
    keys = tuple(parse_key(line.strip()) for line in text.split(",") if line.strip())
    if len(keys) > KEYS_MAX:
        raise ValueError(f"more than {KEYS_MAX} keys")
    if len({key.name for key in keys}) != len(keys):
        raise ValueError("two keys have one name")
    return keys
