"""Which instances may take a new request: the start of every dispatch policy."""

from __future__ import annotations

from collections.abc import Callable

from midstream.control.policies.base import DispatchWanted
from midstream.control.policies.room import Problem
from midstream.control.state import InstanceView, State


def candidates(state: State, wanted: DispatchWanted) -> list[InstanceView]:
    """Instances in the order of their registration.

    Those that are up; if there are none the suspect ones, which may well be alive (P20, P25). Of these the ones
    that can hold the whole request; if there are none all, so that an engine says why it is too long.
    """
    right = [view for view in state.instances.values() if _is_right(view, wanted)]
    alive = [view for view in right if view.health == "up"] or right
    tokens = wanted.prompt_tokens + wanted.output_tokens_max
    return _prefer(alive, lambda view: tokens <= view.blocks_total * view.fingerprint.block_tokens)


def _is_right(view: InstanceView, wanted: DispatchWanted) -> bool:
    return (
        view.health in ("up", "suspect")
        and not view.is_draining
        and view.owner.instance not in wanted.exclude
        and (wanted.model is None or wanted.model == view.fingerprint.model)
    )


def candidate_problem(view: InstanceView, prompt_tokens: int, output_tokens_max: int) -> Problem | None:
    """Why an instance is no candidate, or only for want of a better one: in words what `candidates` asks."""
    name = view.owner.instance
    if view.health not in ("up", "suspect"):
        return "down", f"{name} is {view.health}"
    if view.is_draining:
        return "draining", f"{name} is draining"
    if view.health == "suspect":
        return "suspect", f"{name} is silent: only if all are"
    holds = view.blocks_total * view.fingerprint.block_tokens
    if prompt_tokens + output_tokens_max > holds:
        return (
            "too_small",
            f"{name} can hold {holds} tokens, the request may grow to {prompt_tokens + output_tokens_max}",
        )
    return None


def _prefer(views: list[InstanceView], test: Callable[[InstanceView], bool]) -> list[InstanceView]:
    return [view for view in views if test(view)] or views
