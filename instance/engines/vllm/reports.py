"""How the core stood at its last report: what the engine port's synchronous questions are answered from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from midstream.control.state import Load
from midstream.instance.engines.base import BlockAccount, SlotProgress
from midstream.instance.engines.vllm.calls import Report
from midstream.instance.engines.vllm.runs import Run


class Reports:
    """Reports come with every answer of the core, and with outputs: at once when a run ended or was preempted."""

    def __init__(self, on_preempted: Callable[[str], None]) -> None:
        self._on_preempted = on_preempted
        self._runs: dict[str, SlotProgress] = {}
        self._load = Load()
        self.account = BlockAccount(0, 0, 0, 0)

    def take(self, report: Report) -> None:
        """The newest report; the order of arrival is that of the steps."""
        before, self._runs = self._runs, {progress.slot: progress for progress in report.runs}
        self._load = report.load
        self.account = report.account or self.account
        for slot, progress in self._runs.items():
            if slot in before and progress.preemptions > before[slot].preemptions:
                self._on_preempted(slot)

    def load(self, runs: Mapping[str, Run]) -> Load:
        """The load, runs included that the core has not spoken of yet."""
        unseen = sum(slot not in self._runs for slot in runs)
        return msgspec.structs.replace(self._load, waiting=self._load.waiting + unseen)

    def progress(self, runs: Mapping[str, Run]) -> tuple[SlotProgress, ...]:
        """How far these runs are, in arrival order."""
        seen = [progress for slot, progress in self._runs.items() if slot in runs]
        return (*seen, *(run.unseen() for slot, run in runs.items() if slot not in self._runs))
