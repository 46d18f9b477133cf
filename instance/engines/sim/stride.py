"""The step in progress, and those that will surely follow it: how long each takes, and how many are over. Pure.

A stride of one is an ordinary step. A longer one stands for decode steps between which nothing changes; whatever comes
from outside cuts it at the end of the step that is then in progress, so that the outcome is that of single steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from midstream.instance.engines.sim.scheduler import Plan
from midstream.instance.engines.sim.steptime import StepTimeModel


class Stride:
    """`ends`: when each of its steps ends, seconds. `done` of them were carried out; the last is the loop's to do."""

    __slots__ = ("began", "done", "ends", "is_decode", "noted", "plan", "runs")

    def __init__(self, plan: Plan, began: float, ends: list[float]) -> None:
        self.plan = plan
        self.runs = [run for run, _, _ in plan.chunks]
        self.began = began
        self.ends = ends
        self.done = 0
        self.noted = 0
        """Steps whose time has gone into the engine's mean."""
        self.is_decode = all(is_decode for _, _, is_decode in plan.chunks)

    @property
    def ends_at(self) -> float:
        """When its last step ends."""
        return self.ends[-1]

    def over(self, now: float) -> int:
        """Steps that are over by now and not carried out yet, the last left out."""
        return bisect_right(self.ends, now, self.done, len(self.ends) - 1) - self.done

    def take(self, steps: int) -> list[float]:
        """Count steps as carried out; when each of them ended."""
        taken = self.ends[self.done : self.done + steps]
        self.done += steps
        return taken

    def step_began(self) -> float:
        """When the step in progress began."""
        return self.ends[self.done - 1] if self.done else self.began

    def cut(self) -> bool:
        """Let the step in progress be the last; was there one behind it."""
        is_longer = len(self.ends) > self.done + 1
        del self.ends[self.done + 1 :]
        return is_longer


def stride_of(
    plan: Plan, times: StepTimeModel, *, began: float, repeats: int, time_scale: float, until: float
) -> Stride:
    """At most `repeats` steps, the first that ends at `until` or later being the last."""
    ends = [began + times.plan_ms(plan) * time_scale / 1000]
    if repeats > 1:
        requests, computed = len(plan.chunks), sum([run.computed for run, _, _ in plan.chunks])
        batch_ms, token_ms = times.batch_ms(requests), times.decode_token_ms
        contexts = range(computed + requests, computed + requests * repeats, requests)
        steps = [(batch_ms + token_ms * context) * time_scale / 1000 for context in contexts]
        ends = list(accumulate(steps, initial=ends[0]))
        del ends[bisect_left(ends, until) + 1 :]
    return Stride(plan, began, ends)
