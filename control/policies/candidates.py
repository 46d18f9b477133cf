"""Which instances may take a new request: the start of every dispatch policy."""

from __future__ import annotations

from collections.abc import Callable

from midstream.control.policies.base import DispatchWanted
from midstream.control.policies.freeness_math import blocks_kept
from midstream.control.policies.room import Problem
from midstream.control.state import InstanceView, State
from midstream.migration.plan import blocks_for


def candidates(state: State, wanted: DispatchWanted) -> list[InstanceView]:
    """Instances in the order of their registration.

    Those that are up; if there are none the suspect ones, which may well be alive (P20, P25). Of these the ones
    that can hold the whole request; if there are none all, so that an engine says why it is too long. Of these the
    ones whose role and whose other requests suit it.
    """
    right = [view for view in state.instances.values() if _is_right(view, wanted)]
    alive = [view for view in right if view.health == "up"] or right
    tokens = wanted.prompt_tokens + wanted.output_tokens_max
    able = _prefer(alive, lambda view: tokens <= view.blocks_total * view.fingerprint.block_tokens)
    suited = _for_role(state, able, wanted)
    if wanted.is_high:
        return _for_high(state, suited)
    return _for_others(state, suited, wanted) if state.high else suited


def _is_right(view: InstanceView, wanted: DispatchWanted) -> bool:
    return (
        view.health in ("up", "suspect")
        and not view.is_draining
        and view.owner.instance not in wanted.exclude
        and (wanted.model is None or wanted.model == view.fingerprint.model)
    )


def candidate_problem(state: State, view: InstanceView, wanted: DispatchWanted) -> Problem | None:
    """Why an instance is no candidate, or only for want of a better one: in words what `candidates` asks."""
    name = view.owner.instance
    if view.health not in ("up", "suspect"):
        return "down", f"{name} is {view.health}"
    if view.is_draining:
        return "draining", f"{name} is draining"
    if view.health == "suspect":
        return "suspect", f"{name} is silent: only if all are"
    holds, grown = view.blocks_total * view.fingerprint.block_tokens, wanted.prompt_tokens + wanted.output_tokens_max
    if grown > holds:
        return "too_small", f"{name} can hold {holds} tokens, the request may grow to {grown}"
    if view.role == "decode":
        return "role", f"{name} is for tokens: only if all that are for prompts are busy"
    if name in state.high and not wanted.is_high:
        return "high_class", f"{name} serves the high class: only if no other has room"
    return None


def _for_role(state: State, views: list[InstanceView], wanted: DispatchWanted) -> list[InstanceView]:
    """New requests go where prompts are computed; if all those are busy, where tokens are made and somebody is not."""
    prompts = [view for view in views if view.role != "decode"]
    if len(prompts) == len(views) or any(_is_ready(state, view, wanted) for view in prompts):
        return prompts
    return [view for view in views if view.role == "decode" and _is_ready(state, view, wanted)] or prompts or views


def _is_ready(state: State, view: InstanceView, wanted: DispatchWanted) -> bool:
    return _has_no_queue(view) and _has_room(state, view, wanted)


def _for_high(state: State, views: list[InstanceView]) -> list[InstanceView]:
    """Where others of its class are and head-room is left, so that few instances are kept clear; else a clear one."""
    clear = [view for view in views if _is_clear(state, view)]
    return _prefer(clear, lambda view: view.owner.instance in state.high) or _prefer(views, _has_no_queue)


def _is_clear(state: State, view: InstanceView) -> bool:
    """Is head-room left there once the high-priority requests that were just sent have their blocks."""
    name, size = view.owner.instance, view.fingerprint.block_tokens
    sent = (state.requests[request] for request in state.high.get(name, ()))
    coming = sum(blocks_for(request.tokens + 1, size) for request in sent if request.is_waiting)
    headroom = int(state.policies.high_headroom * view.blocks_total)
    return _has_no_queue(view) and view.load.blocks_free - coming >= headroom


def _for_others(state: State, views: list[InstanceView], wanted: DispatchWanted) -> list[InstanceView]:
    """Where there is room and none of the high class; else where its head-room is not touched; else anywhere."""
    roomy = [view for view in views if _has_room(state, view, wanted)]
    return _prefer(roomy, lambda view: view.owner.instance not in state.high) or views


def _has_no_queue(view: InstanceView) -> bool:
    return not view.load.waiting


def _has_room(state: State, view: InstanceView, wanted: DispatchWanted) -> bool:
    """Would the request fit without touching what is kept free for the high class."""
    needed = blocks_for(wanted.prompt_tokens + 1, view.fingerprint.block_tokens)
    return view.load.blocks_free - view.load.blocks_waiting - blocks_kept(state, view) >= needed


def _prefer(views: list[InstanceView], test: Callable[[InstanceView], bool]) -> list[InstanceView]:
    return [view for view in views if test(view)] or views
