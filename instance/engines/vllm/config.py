"""Settings of one vLLM engine, as plain values."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEDULER = "midstream.instance.engines.vllm.scheduler.make_scheduler"
EXTENSION = "midstream.instance.engines.vllm.worker.WorkerExtension"


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to start vLLM and how its workers exchange KV. Seconds unless the name says otherwise."""

    model: str
    """Folder or hub name, as `vllm serve` takes it."""
    name: str = ""
    """What instances compare as their model; empty: the model's own."""
    weights_revision: str = ""
    """Empty: a hash of the model folder's files."""
    engine_args: dict[str, Any] = {}
    """More fields of vLLM's `AsyncEngineArgs`, e.g. `max_num_seqs`."""
    environment: dict[str, str] = {}
    """Set for the engine's processes on top of the inherited environment."""
    is_untested_vllm_allowed: bool = False
    secret: bytes = b""
    """Shared by the whole cluster; proves the ends of a transfer to each other."""
    transfers: tuple[str, ...] = ("rpc",)
    """Backends of the workers, best first."""
    transfer_bytes_per_s: float | None = None
    """What all workers together may send. None: as much as can."""
    transfer_host: str = "127.0.0.1"
    transfer_advertise_host: str = ""
    transfer_port: int = 0
    """First port; worker rank n takes port + n. 0: any."""
    stall_s: float = 1.0
    boot_s: float = 600.0
    call_s: float = 120.0
    """Bound on one call to the engine core, which answers between two steps; a longer silence is taken as death."""
    heartbeat_s: float = 5.0
    """How often the core is called when nothing else calls it."""
    stop_s: float = 8.0
    """Patience after SIGTERM before the whole process group is killed."""
    report_ms: float = 50.0
    """How often a busy engine says how far its runs are; at once when a run ends or is preempted."""

    @property
    def has_cache_events(self) -> bool:
        """Does the engine tell what its prefix cache holds: unless it has none, or its events are somebody else's."""
        return "kv_events_config" not in self.engine_args and self.engine_args.get("enable_prefix_caching") is not False

    def all_engine_args(self) -> dict[str, Any]:
        """The arguments vLLM gets: what was asked for, and our seams."""
        ours = {"report_ms": self.report_ms, "is_untested_vllm_allowed": self.is_untested_vllm_allowed}
        defaults = {"scheduling_policy": "priority", "worker_extension_cls": EXTENSION}
        asked = dict(self.engine_args)
        additional = {**asked.pop("additional_config", {}), "midstream": ours}
        return {**defaults, **asked, "model": self.model, "scheduler_cls": SCHEDULER, "additional_config": additional}
