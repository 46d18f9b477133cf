"""Cursors: opaque, of one list each, and stable while the list changes (P29)."""

from __future__ import annotations

import base64
import heapq
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Query

from midstream.api.admin.deps import PAGE_DEFAULT, PAGE_MAX
from midstream.api.problems import Problem

Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="Items per page.")]
Cursor = Annotated[str | None, Query(max_length=512, description="`next` of the page before.")]

LIMIT = PAGE_DEFAULT

Key = tuple[str | int, ...]
T = TypeVar("T")


def page(
    listing: str,
    items: Iterable[T],
    key: Callable[[T], Key],
    *,
    cursor: str | None,
    limit: int,
    newest_first: bool = False,
) -> tuple[list[T], str | None]:
    """One page of `items` in the order of their unique keys, and the next cursor, `None` after the last page.

    Items that are there all the while are seen exactly once, whatever comes and goes meanwhile.
    Raises `Problem` for a cursor of another list.
    """
    after = None if cursor is None else read_cursor(listing, cursor)
    try:
        found = _newest(items, key, after, limit + 1) if newest_first else _first(items, key, after, limit + 1)
    except TypeError as error:
        raise _bad(listing) from error
    shown = found[:limit]
    return shown, write_cursor(listing, key(shown[-1])) if len(found) > limit else None


def write_cursor(listing: str, key: Key) -> str:
    """The cursor behind an item."""
    return base64.urlsafe_b64encode(msgspec.json.encode((listing, *key))).decode().rstrip("=")


def read_cursor(listing: str, cursor: str) -> Key:
    """The key a cursor stands for. Raises `Problem` 400."""
    try:
        data: Any = msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, msgspec.DecodeError):
        data = None
    if not isinstance(data, list) or len(data) < 2 or data[0] != listing:
        raise _bad(listing)
    return tuple(data[1:])


def _first(items: Iterable[T], key: Callable[[T], Key], after: Key | None, count: int) -> list[T]:
    return heapq.nsmallest(count, (item for item in items if after is None or key(item) > after), key=key)


def _newest(items: Iterable[T], key: Callable[[T], Key], after: Key | None, count: int) -> list[T]:
    return heapq.nlargest(count, (item for item in items if after is None or key(item) < after), key=key)


def _bad(listing: str) -> Problem:
    return Problem(400, "bad_cursor", f"this is no cursor of {listing}")
