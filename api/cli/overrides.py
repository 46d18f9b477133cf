"""`--set balance.low=20`: paths and JSON values on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from midstream.control.errors import BadInput


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Read `PATH=JSON` texts; a value that is not JSON is taken as a string. Raises `BadInput`."""
    found: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not (equals and all(part for part in path.split("."))):
            raise BadInput(f"an override looks like balance.low=20, not {text!r}")
        try:
            found[path] = json.loads(value)
        except ValueError:
            found[path] = value
    return found


def apply_overrides(document: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """A copy of a JSON object with overrides at existing paths. Raises `BadInput` for a path that is not there."""
    changed: dict[str, Any] = json.loads(json.dumps(document))
    for path, value in parse_overrides(texts).items():
        *parents, last = path.split(".")
        place: Any = changed
        for part in parents:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or (last not in place and not parents):
            raise BadInput(f"there is no {path}; there are {', '.join(changed)}")
        place[last] = value
    return changed
