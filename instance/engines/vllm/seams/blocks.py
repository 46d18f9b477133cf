"""Touches of vLLM's KV cache manager and block pool, inside the engine-core process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from midstream.instance.engines.vllm.seams.version import check_parameters, check_parts

Blocks = list[Any]
"""Of vLLM's `KVCacheBlock`."""


def check_blocks(scheduler: Any) -> None:
    """Raises `BadInput` if this vLLM lacks anything used here."""
    check_parts(BlockPool, ("touch", "free_blocks", "get_num_free_blocks"))
    check_parameters(
        KVCacheManager.allocate_slots,
        ("num_new_tokens", "num_new_computed_tokens", "new_computed_blocks", "delay_cache_blocks"),
    )
    check_parts(KVCacheManager, ("get_computed_blocks", "cache_blocks", "free", "take_new_block_ids"))
    check_parts(scheduler.kv_cache_manager, ("coordinator", "block_pool"))
    check_parts(scheduler.kv_cache_manager.coordinator, ("single_type_managers",))


def blocks_total(scheduler: Any) -> int:
    """KV blocks that requests can have; vLLM keeps one, the null block, for itself."""
    return int(scheduler.kv_cache_config.num_blocks) - 1


def block_tokens(scheduler: Any) -> int:
    """Tokens in one block."""
    return int(scheduler.block_size)


def blocks_of(scheduler: Any, slot: str) -> Blocks:
    """The blocks of a run or reservation, in order; group after group where there are several."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [block for manager in managers for block in manager.req_to_blocks.get(slot, ()) if not block.is_null]


def block_ids(blocks: Iterable[Any]) -> tuple[int, ...]:
    """Their places in KV memory."""
    return tuple(block.block_id for block in blocks)


def blocks_free(scheduler: Any) -> int:
    """Blocks that could be had at once."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def blocks_fenced(scheduler: Any) -> Iterator[Any]:
    """Freed blocks that a step in flight may still write."""
    for _, blocks in scheduler.deferred_frees:
        yield from blocks


def references(scheduler: Any) -> dict[int, int]:
    """Reference counts of all blocks that have any, by block id; for checks."""
    pool = scheduler.kv_cache_manager.block_pool
    return {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null}


def pin(scheduler: Any, blocks: Blocks) -> None:
    """Keep blocks from being given to others."""
    scheduler.kv_cache_manager.block_pool.touch(blocks)


def unpin(scheduler: Any, blocks: Blocks) -> None:
    """Undo `pin`; the last blocks go first when room is needed."""
    scheduler.kv_cache_manager.block_pool.free_blocks(reversed(blocks))


def hold_blocks(scheduler: Any, request: Request, count: int) -> int | None:
    """Take `count` blocks for a request that is no run yet.

    Returns the tokens in those of them that the prefix cache had, or `None` if there are not enough.
    Half-written blocks stay out of the prefix cache until `publish`.
    """
    manager = scheduler.kv_cache_manager
    hit_blocks, hit, *_ = manager.get_computed_blocks(request)
    wanted = max(0, count * block_tokens(scheduler) - hit)
    got = manager.allocate_slots(
        request,
        wanted,
        num_new_computed_tokens=hit,
        new_computed_blocks=hit_blocks,
        delay_cache_blocks=True,
    )
    if got is None:
        return None
    if scheduler.needs_kv_cache_zeroing:
        manager.take_new_block_ids()
    return int(hit)


def give_up_blocks(scheduler: Any, request: Request) -> None:
    """Undo `hold_blocks`."""
    scheduler.kv_cache_manager.free(request)


def publish(scheduler: Any, request: Request, computed: int) -> None:
    """The first `computed` tokens' KV is in the request's blocks: others may share the full ones."""
    request.num_computed_tokens = computed
    if computed:
        scheduler.kv_cache_manager.cache_blocks(request, computed)
