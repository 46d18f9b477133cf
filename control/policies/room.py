"""What every instance has left in this tick, and the limits that hold for every move.

Open moves and those ordered earlier in the same tick are counted together, so that several sources that choose one
target never give it more than it has (P24).
"""

from __future__ import annotations

from typing import Final

from midstream.control.policies.freeness_math import batch_size, blocks_kept, blocks_unclaimed, freeness_of
from midstream.control.state import InstanceView, RequestView, State, WaitingView
from midstream.migration.plan import PlanLimits, blocks_for

HEADROOM_TOKENS: Final = PlanLimits().headroom_tokens
"""Tokens a request may grow by while it is copied; the target needs blocks for them."""

FAILED_STAGES: Final = frozenset({"aborted", "refused"})
"""Ends of a move that moved nothing: repeated at once it would fail again, so its request rests too."""

PING_PONG_COOLDOWNS: Final = 2
"""A request does not return to the instance it came from within so many cool-downs (P23)."""

Problem = tuple[str, str]
"""Why not: a stable code, and a sentence."""


def blocks_needed(view: RequestView, block_tokens: int) -> int:
    """Blocks a target must have: the request's tokens and head-room, never more than it can ever use.

    A waiting request moves without KV but will want the blocks of its tokens and the next one.
    """
    growth = 1 if view.is_waiting else HEADROOM_TOKENS
    tokens_max = view.prompt_tokens + view.output_tokens_max
    return blocks_for(max(view.tokens, min(view.tokens + growth, tokens_max)), block_tokens)


def is_large_enough(view: RequestView, target: InstanceView) -> bool:
    """Can the target, when empty, hold all that the request may grow to."""
    return view.prompt_tokens + view.output_tokens_max <= target.blocks_total * target.fingerprint.block_tokens


def too_small(view: RequestView, target: InstanceView) -> Problem:
    """In words that it cannot."""
    return "too_small", f"{target.owner.instance} could not hold all that {view.request} may grow to"


def pair_problem(source: InstanceView, target: InstanceView) -> Problem | None:
    """Why KV can never pass from `source` to `target` as they are now."""
    name = target.owner.instance
    if source.owner.instance == name:
        return "same_instance", f"the request is on {name} already"
    if target.health != "up":
        return "target_down", f"{name} is {target.health}"
    if target.is_draining:
        return "target_draining", f"{name} is draining"
    if source.fingerprint != target.fingerprint:
        fields = ", ".join(source.fingerprint.differences(target.fingerprint))
        return "different_fingerprint", f"{source.owner.instance} and {name} differ in {fields}"
    return None


class _Account:
    """Moves of one instance that have no outcome yet."""

    __slots__ = ("blocks_in", "blocks_out", "moves", "requests_in", "running_out", "waiting_out")

    def __init__(self) -> None:
        self.moves = 0
        self.blocks_in = 0
        self.requests_in = 0
        self.blocks_out = 0
        self.running_out = 0
        self.waiting_out = 0


_NOTHING: Final = _Account()


class Room:
    """The accounts of one tick. `down` names instances judged suspect or lost in this very tick."""

    def __init__(self, state: State, now_ms: int, down: frozenset[str] = frozenset()) -> None:
        self._state = state
        self._now_ms = now_ms
        self._down = down
        self._accounts: dict[str, _Account] = {}
        self._moving: dict[str, None] = {}
        self._failed_at_ms: dict[str, int] = {}
        self.claims: dict[str, int] = {}
        """Instance to the blocks that those whose turn it is at a gateway will need there."""
        self.moves_left = state.policies.moves_per_tick_max
        for move in state.migrations.values():
            if move.is_open:
                self._count(move.request, move.source.instance, move.target.instance, move.blocks_needed)
            elif move.stage in FAILED_STAGES:
                self._failed_at_ms[move.request] = move.stage_at_ms
        for waiting in state.waiting.values():
            if waiting.head_tokens:
                self._claim(waiting)

    def take(self, view: RequestView, target: str, blocks: int) -> None:
        """Count a move that has been ordered."""
        self.moves_left -= 1
        self._count(view.request, view.owner.instance, target, blocks)

    def blocks_left(self, view: InstanceView) -> int:
        """Blocks that a move may still take: what is promised but not yet reserved is gone."""
        account = self._accounts.get(view.owner.instance, _NOTHING)
        promised = max(0, account.blocks_in - view.load.blocks_reserved) + self.claims.get(view.owner.instance, 0)
        return blocks_unclaimed(view) - promised

    def blocks_open(self, view: InstanceView) -> int:
        """As `blocks_left`, for one who goes before those who wait there: what they claim is not counted."""
        return self.blocks_left(view) + view.load.blocks_head

    def slots_left(self, view: InstanceView) -> int:
        """Requests that may still come."""
        account = self._accounts.get(view.owner.instance, _NOTHING)
        return view.slots_max - view.load.running - view.load.waiting - account.requests_in

    def slots_after(self, view: InstanceView) -> int:
        """Requests that may run besides those that do, once every move without an outcome has ended well."""
        return view.slots_max - self.running_after(view)

    def running_after(self, view: InstanceView) -> int:
        """Running requests once every move without an outcome has ended well."""
        account = self._accounts.get(view.owner.instance, _NOTHING)
        return max(0, view.load.running - account.running_out + account.requests_in)

    def blocks_after(self, view: InstanceView, leaving: RequestView | None = None) -> int:
        """As `blocks_free_after`, less what is kept free for high-priority requests: what virtual usage leaves."""
        return self.blocks_free_after(view, leaving) - blocks_kept(self._state, view)

    def blocks_free_after(self, view: InstanceView, leaving: RequestView | None = None) -> int:
        """Unclaimed blocks once every move without an outcome has ended well, and `leaving` has left too.

        A line that leaves as a whole takes the claim of its head along; else the next in line is assumed to claim as
        much.
        """
        blocks = self.blocks_left(view) + self._accounts.get(view.owner.instance, _NOTHING).blocks_out
        if view.load.waiting and not self.waiting_after(view, leaving):
            blocks += view.load.blocks_head
        return blocks if leaving is None else blocks + leaving.blocks

    def batch_after(self, view: InstanceView, leaving: RequestView | None = None) -> int:
        """Running batch once every move without an outcome has ended well, and `leaving` has left too."""
        running = self.running_after(view) - (leaving is not None and not leaving.is_waiting)
        return batch_size(max(0, running), self.waiting_after(view, leaving))

    def waiting_after(self, view: InstanceView, leaving: RequestView | None = None) -> int:
        """Requests in the queue once every move without an outcome has ended well, and `leaving` has left too."""
        waiting = view.load.waiting - self._accounts.get(view.owner.instance, _NOTHING).waiting_out
        return max(0, waiting - (leaving is not None and leaving.is_waiting))

    def freeness(self, view: InstanceView) -> float:
        """Freeness once every move without an outcome has ended well; draining aside."""
        return freeness_of(self.blocks_after(view), self.batch_after(view))

    def is_up(self, view: InstanceView) -> bool:
        """Is it healthy, this tick's verdicts included."""
        return view.health == "up" and view.owner.instance not in self._down

    def is_moving(self, view: RequestView) -> bool:
        """Does it have a move without an outcome."""
        return view.migration is not None or view.request in self._moving

    def is_idle(self, instance: str) -> bool:
        """Does it take part in no move without an outcome."""
        return instance not in self._accounts

    def is_at_limit(self, instance: str) -> bool:
        """Does it take part in as many moves as it may."""
        return self.moves_free(instance) <= 0

    def moves_free(self, instance: str) -> int:
        """Moves in which it may take part besides those it does."""
        return self._state.policies.moves_per_instance_max - self._accounts.get(instance, _NOTHING).moves

    def may_leave(self, view: RequestView) -> bool:
        """May a policy move this request now: movable, not moving, and rested since its last move."""
        return self.stay_problem(view) is None

    def stay_problem(self, view: RequestView) -> Problem | None:
        """Why no policy may move this request now."""
        if self.is_moving(view):
            return "already_moving", f"{view.request} has an open move"
        if not view.is_movable:
            return "not_movable", f"{view.request} cannot be moved exactly"
        cooldown = self._state.policies.cooldown_ms
        if view.moves and self._now_ms - view.moved_at_ms < cooldown:
            return "cooling_down", f"{view.request} moved less than {cooldown} ms ago"
        failed_at_ms = self._failed_at_ms.get(view.request)
        if failed_at_ms is not None and self._now_ms - failed_at_ms < cooldown:
            return "cooling_down", f"a move of {view.request} failed less than {cooldown} ms ago"
        return None

    def may_pair(self, source: InstanceView, target: InstanceView) -> bool:
        """May a policy move anything from `source` to `target` now."""
        return (
            self.is_up(target)
            and not self.is_at_limit(target.owner.instance)
            and not self._is_excluded(source, target.owner.instance)
            and pair_problem(source, target) is None
        )

    def target_problem(
        self,
        view: RequestView,
        source: InstanceView,
        target: InstanceView,
        *,
        blocks: int,
        may_return: bool = False,
        is_first: bool = False,
    ) -> Problem | None:
        """Why no policy may move this request there now: in words what `may_pair`, `may_host` and `fits` ask.

        One that waits and `is_first` there needs no room yet: it gets what comes free.
        """
        name = target.owner.instance
        problem = pair_problem(source, target)
        if problem is not None:
            return problem
        if not self.is_up(target):
            return "target_down", f"{name} is silent"
        if self.is_at_limit(name):
            return "target_busy", f"{name} takes part in as many moves as it may"
        if self._is_excluded(source, name):
            return "pair_excluded", f"{source.owner.instance} could not reach {name} a short while ago"
        if not is_large_enough(view, target):
            return too_small(view, target)
        if not may_return and self.is_return(view, name):
            return "ping_pong", f"{view.request} has just come from {name}"
        fits = self.takes(view, target, blocks) if is_first else self.fits(target, blocks)
        return None if fits else self.full(target, blocks)

    def full(self, target: InstanceView, blocks: int) -> Problem:
        """In words that the target has no room for one more request of so many blocks."""
        left, slots = self.blocks_left(target), self.slots_left(target)
        name = target.owner.instance
        return "target_full", f"{name} has {left} blocks and {slots} slots left; {blocks} blocks and a slot are needed"

    def is_return(self, view: RequestView, target: str) -> bool:
        """Would the move send it back where it just came from."""
        pause = PING_PONG_COOLDOWNS * self._state.policies.cooldown_ms
        return view.moved_from == target and self._now_ms - view.moved_at_ms < pause

    def may_host(self, view: RequestView, target: InstanceView, *, may_return: bool = False) -> bool:
        """May this request go to `target`, room aside: it did not just come from there, and can end there."""
        return is_large_enough(view, target) and (may_return or not self.is_return(view, target.owner.instance))

    def fits(self, target: InstanceView, blocks: int) -> bool:
        """Has the target blocks and a slot for one more."""
        return self.blocks_left(target) >= blocks and self.slots_left(target) >= 1

    def takes(self, view: RequestView, target: InstanceView, blocks: int) -> bool:
        """Has the target a slot, and blocks unless it waits, for one who goes before those who wait there."""
        return self.slots_left(target) >= 1 and (view.is_waiting or self.blocks_open(target) >= blocks)

    def _claim(self, waiting: WaitingView) -> None:
        """Who waits at a gateway has virtual usage where the fewest blocks are missing: room is kept and made there.

        It waits because it fits nowhere; moves that even out what is free would keep it so.
        """
        ups = [
            view
            for view in self._state.instances.values()
            if self.is_up(view) and not view.is_draining and waiting.head_model in ("", view.fingerprint.model)
        ]
        if ups:
            site = max(ups, key=lambda view: (self._free_soon(view), view.owner))
            needed = blocks_for(waiting.head_tokens + 1, site.fingerprint.block_tokens)
            self.claims[site.owner.instance] = self.claims.get(site.owner.instance, 0) + needed

    def _free_soon(self, view: InstanceView) -> int:
        left_out = self._accounts.get(view.owner.instance, _NOTHING).blocks_out
        return self.blocks_left(view) + left_out - (view.load.blocks_waiting - view.load.blocks_head)

    def _is_excluded(self, source: InstanceView, target: str) -> bool:
        return any(name == target and until > self._now_ms for name, until in source.pair_failures)

    def _count(self, request: str, source: str, target: str, blocks: int) -> None:
        view = self._state.requests.get(request)
        leaving = self._accounts.setdefault(source, _Account())
        leaving.moves += 1
        if view is not None:
            leaving.blocks_out += view.blocks
            leaving.running_out += not view.is_waiting
            leaving.waiting_out += view.is_waiting
        coming = self._accounts.setdefault(target, _Account())
        coming.moves += 1
        coming.requests_in += 1
        coming.blocks_in += blocks
        self._moving[request] = None
