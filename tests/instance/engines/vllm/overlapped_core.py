"""An engine core with overlapping steps (vLLM's async scheduling), which on a CPU vLLM does not offer by itself.

Streams and events are stood in for by ones that do nothing: on a CPU everything is done when it was called. So
scheduler, batch queue, placeholders and drains are the real ones; the timing of a device's copies is not.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class NoStream:
    """Everything before is done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


class NoEvent:
    """Has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True


def main() -> None:
    """As `core_process.main`."""
    stand_ins = {
        "Stream": NoStream,
        "Event": NoEvent,
        "current_stream": NoStream,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.Event = NoEvent  # type: ignore[misc,assignment]

    from midstream.instance.engines.vllm import core_process
    from midstream.instance.engines.vllm.seams import host

    plain = host.engine_config

    def overlapping(engine_args: dict[str, Any]) -> Any:
        config = plain(engine_args)
        config.scheduler_config.async_scheduling = True
        return config

    host.engine_config = overlapping
    core_process.main()


if __name__ == "__main__":
    main()
