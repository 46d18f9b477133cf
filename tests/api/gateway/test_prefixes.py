"""What a gateway knows of caches, and that requests go to theirs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.api.gateway.prefixes import PrefixIndex
from midstream.control.ids import Node, Owner
from midstream.control.state import PolicyChoice, PolicySettings
from midstream.instance.engines.prefixes import PrefixLog
from midstream.migration.protocol.messages import AnyMessage, CacheChange, Ping, Pong, RequestSpec, Sampling
from midstream.migration.protocol.prefixes import prefix_keys
from tests.api.gateway.test_owners import Instance, Scene, play
from tests.control.fixtures import Story, owner

PROMPT = tuple(range(100, 200))
KEYS = prefix_keys(PROMPT, 16, 100)


def told(*keys: bytes, upto: int = 1, is_whole: bool = False, removed: bytes = b"") -> CacheChange:
    return CacheChange(upto=upto, is_whole=is_whole, stored=b"".join(keys), removed=removed)


def cluster(*names: str) -> Story:
    story = Story()
    for name in names:
        story.instance(name)
    return story


def test_only_a_whole_prefix_counts() -> None:
    story, index = cluster("a", "b", "c"), PrefixIndex()
    index.learn(owner("a"), told(*KEYS[:4]))
    index.learn(owner("b"), told(*KEYS[1:]))
    index.learn(owner("c"), told(KEYS[0], KEYS[2]))
    assert index.cached(story.state, PROMPT) == {"a": 64, "c": 16}
    assert index.cached(story.state, (1, *PROMPT)) == {}


def test_removed_blocks_and_restarted_instances_are_forgotten() -> None:
    story, index = cluster("a"), PrefixIndex()
    index.learn(owner("a"), told(*KEYS, upto=7))
    assert index.seen(owner("a")) == 7
    index.learn(owner("a"), told(upto=8, removed=KEYS[2]))
    assert index.cached(story.state, PROMPT) == {"a": 32}
    assert index.seen(owner("a", 2)) == 0
    story.instance("a", incarnation=2)
    assert index.cached(story.state, PROMPT) == {}, "what was known was the former's"
    index.learn(owner("a", 2), told(KEYS[0]))
    assert index.cached(story.state, PROMPT) == {"a": 16}
    index.learn(Owner("a", 1), told(*KEYS, upto=9))
    assert index.cached(story.state, PROMPT) == {"a": 16}, "a late answer of the former"


def test_a_whole_replaces_and_nothing_is_left_behind() -> None:
    story, index = cluster("a", "b"), PrefixIndex()
    for name in ("a", "b"):
        index.learn(owner(name), told(*KEYS))
    index.learn(owner("a"), told(KEYS[0], upto=5, is_whole=True))
    assert index.cached(story.state, PROMPT) == {"a": 16, "b": 96}
    index.forget("a")
    index.forget("b")
    assert (index._holders, index._keys, index._seen, index._count) == ({}, {}, {}, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["tell", "remove", "whole", "forget"]),
                          st.sets(st.integers(0, 5))), max_size=30))  # fmt: skip
def test_what_is_found_is_the_leading_run_of_what_each_was_last_known_to_hold(
    told_in_turn: list[tuple[str, str, set[int]]],
) -> None:
    story, index = cluster("a", "b", "c", "d"), PrefixIndex()
    held: dict[str, set[int]] = {name: set() for name in "abcd"}
    for name, kind, blocks in told_in_turn:
        keys = [KEYS[block] for block in sorted(blocks)]
        if kind == "forget":
            index.forget(name)
            held[name] = set()
        elif kind == "remove":
            index.learn(owner(name), told(removed=b"".join(keys)))
            held[name] -= blocks
        else:
            index.learn(owner(name), told(*keys, is_whole=kind == "whole"))
            held[name] = blocks if kind == "whole" else held[name] | blocks
    runs = {name: next(run for run in range(7) if run not in blocks) for name, blocks in held.items()}
    assert index.cached(story.state, PROMPT) == {name: 16 * run for name, run in runs.items() if run}


def lookup_s(instances: int, prompt: tuple[int, ...]) -> float:
    """The best of a few looks when all hold all of the prompt."""
    story, index = cluster(*(f"i{number}" for number in range(instances))), PrefixIndex()
    keys = prefix_keys(prompt, 16, 1_024)
    for number in range(instances):
        index.learn(owner(f"i{number}"), told(*keys))
    times = []
    for _ in range(7):
        began = time.perf_counter()
        found = index.cached(story.state, prompt)
        times.append(time.perf_counter() - began)
    assert len(found) == instances
    return min(times)


def test_P15_a_look_costs_the_prompt_and_the_instances_but_not_their_product() -> None:
    prompt = tuple(range(8_192))
    assert lookup_s(300, prompt) < 8 * lookup_s(3, prompt)


def test_an_engines_log_is_followed_through_eviction() -> None:
    story, index, log = cluster("a"), PrefixIndex(), PrefixLog()
    for key in KEYS:
        log.stored(key)
    for _ in range(2):
        change = log.since(index.seen(owner("a")))
        if change is not None:
            index.learn(owner("a"), change)
        log.removed(KEYS[3])
    assert index.cached(story.state, PROMPT) == {"a": 48}


class Cached(Instance):
    """An instance that tells of its cache when it is asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log = PrefixLog()
        self.asked: list[int | None] = []

    async def start(self) -> Cached:
        await super().start()
        return self

    def _receive(self, sender: Node, message: AnyMessage) -> None:
        if isinstance(message, Ping):
            self.asked.append(message.cache_seen)
            cache = None if message.cache_seen is None else self.log.since(message.cache_seen)
            self.wire.send(sender, Pong(request="", owner=self.owner, cache=cache))
        else:
            super()._receive(sender, message)


@pytest.mark.parametrize("policy", ["prefix_affinity", "freeness"])
def test_a_gateway_asks_for_caches_only_while_a_policy_reads_them(policy: str) -> None:
    async def scene(at: Scene) -> None:
        at.follower.state.policies = PolicySettings(dispatch=PolicyChoice(policy))
        nodes = [await Cached(at.network, name, 1).start() for name in ("a", "b")]
        for key in KEYS:
            nodes[1].log.stored(key)
        await asyncio.sleep(2.5)
        for number in range(3):
            at.gateway.admit(RequestSpec(request=f"r{number}", prompt=PROMPT, sampling=Sampling(max_tokens=9)))
        await asyncio.sleep(0.1)
        if policy == "freeness":
            assert {seen for node in nodes for seen in node.asked} == {None}
        else:
            assert nodes[1].asked[-1] == len(KEYS), "what was told is not told again"
            assert {message.request for message in nodes[1].dispatches} == {"r0", "r1", "r2"}

    play(scene)
