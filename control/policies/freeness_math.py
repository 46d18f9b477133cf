"""Virtual usage and freeness (Llumnix, OSDI'24, section 4.4.2), counted in KV blocks. Pure arithmetic.

Virtual usage of a request is its KV blocks; of the head-of-line waiting request the blocks it needs; of a request
on a draining instance infinite; of a high-priority request also the blocks that its instance keeps free for it.
Freeness of an instance is (total blocks - sum of virtual usage) / running batch.
"""

from __future__ import annotations

from midstream.control.state import InstanceView, State


def blocks_unclaimed(view: InstanceView) -> int:
    """Total blocks minus virtual usage, draining aside; negative if the head of the line does not fit.

    Owned and reserved blocks are usage, and owned + free + reserved == total, so what is left of the total is
    the free blocks minus what the first waiting request needs.
    """
    return view.load.blocks_free - view.load.blocks_head


def blocks_kept(state: State, view: InstanceView) -> int:
    """Virtual usage of an instance's high-priority requests besides their own blocks: its head-room, shared by them."""
    if view.owner.instance not in state.high:
        return 0
    return int(state.policies.high_headroom * view.blocks_total)


def batch_size(running: int, waiting: int) -> int:
    """Requests that grow; a queue before an idle engine counts as one, for its head is about to run."""
    return max(running, 1 if waiting else 0)


def freeness_of(blocks: float, batch: int) -> float:
    """Blocks left for each running request; an empty batch is infinitely free."""
    return blocks / batch if batch > 0 else float("inf")


def freeness(view: InstanceView) -> float:
    """How many blocks each request of the instance can still grow by, on average.

    Infinite when empty, minus infinite when draining, negative when it must shed.
    """
    if view.is_draining:
        return float("-inf")
    return freeness_of(blocks_unclaimed(view), batch_size(view.load.running, view.load.waiting))
