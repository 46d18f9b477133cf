"""The engine-core process: vLLM's own core, started with the arguments that its llumlet writes to standard input.

The input stays open as a lifeline: when it ends, the llumlet is gone, and the whole process group with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, BinaryIO

import msgspec


class CoreOrder(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the input, as JSON."""

    engine_args: dict[str, Any]
    handshake: str


def main() -> None:
    """Run a core until it is told to end, or its llumlet is gone."""
    source = sys.stdin.buffer.raw if hasattr(sys.stdin.buffer, "raw") else sys.stdin.buffer
    order = msgspec.json.decode(source.readline(), type=CoreOrder)
    threading.Thread(target=_die_with_llumlet, args=(source,), daemon=True).start()
    from midstream.instance.engines.vllm.seams.host import run_core  # noqa: PLC0415 - seconds of imports

    run_core(order.engine_args, order.handshake)


def _die_with_llumlet(source: BinaryIO) -> None:
    source.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
