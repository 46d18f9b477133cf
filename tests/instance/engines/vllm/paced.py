"""Our worker extension with steps of a bounded speed: the tiny model would be done before a test has looked."""

from __future__ import annotations

import time
from typing import Any

from midstream.instance.engines.vllm.worker import WorkerExtension


class PacedExtension(WorkerExtension):
    """Each step takes at least `pace_ms` of vLLM's `additional_config`."""

    def mig_attach(self, argument: bytes) -> bool:
        worker: Any = self
        execute, pause_s = worker.model_runner.execute_model, worker.vllm_config.additional_config["pace_ms"] / 1000

        def paced(*args: Any, **kwargs: Any) -> Any:
            time.sleep(pause_s)
            return execute(*args, **kwargs)

        worker.model_runner.execute_model = paced
        return super().mig_attach(argument)
