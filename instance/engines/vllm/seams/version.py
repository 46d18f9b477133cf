"""Which vLLM the seams were checked with, and a check at start that they are still there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from midstream.control.errors import BadInput

CHECKED = ("0.32",)
"""Run here, on CPU with the V1 model runner. 0.33 was compared by source only: docs/vllm.md."""


def check_version(version: str, *, is_untested_allowed: bool) -> None:
    """Raises `BadInput` for a vLLM these seams were not checked with, unless told that this is meant."""
    if is_untested_allowed or any(version == known or version.startswith(f"{known}.") for known in CHECKED):
        return
    raise BadInput(
        f"vLLM {version} is installed, this adapter was checked with {', '.join(CHECKED)}: install that, or set "
        "is_untested_vllm_allowed to try"
    )


def check_parts(where: object, names: Iterable[str]) -> None:
    """Raises `BadInput` unless the class or object has all attributes."""
    missing = [name for name in names if not hasattr(where, name)]
    if missing:
        raise BadInput(f"this vLLM's {_name(where)} has no {', '.join(missing)}: the adapter does not fit it")


def check_parameters(what: Callable[..., Any], names: Iterable[str]) -> None:
    """Raises `BadInput` unless the function or constructor takes all these parameters."""
    known = inspect.signature(what).parameters
    missing = [name for name in names if name not in known]
    if missing:
        raise BadInput(f"this vLLM's {_name(what)} takes no {', '.join(missing)}: the adapter does not fit it")


def check_absent(where: object, names: Iterable[str]) -> None:
    """Raises `BadInput` if the class has one of the names we are going to add."""
    present = [name for name in names if hasattr(where, name)]
    if present:
        raise BadInput(f"this vLLM's {_name(where)} has {', '.join(present)} of its own")


def _name(what: object) -> str:
    return str(getattr(what, "__qualname__", type(what).__qualname__))
