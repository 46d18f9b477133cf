"""KV tensors of a CPU engine in memory that other processes of the host can read, without the engine's noticing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from midstream.migration.transfers.shm_memory import Region


def share(tensors: Iterable[Any]) -> list[Region]:
    """Give every tensor, in place, a storage of zeros that can be mapped; tensors of one storage still share one.

    To be called before anything is computed. Tensors of a device are left alone.
    """
    regions: dict[int, tuple[Region, Any]] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        old = int(storage.data_ptr())
        if any(region.address == old for region, _ in regions.values()):
            continue  # an object that we have seen
        if old not in regions:
            region = Region(storage.nbytes())
            regions[old] = (region, torch.frombuffer(region.view, dtype=torch.uint8).untyped_storage())
        with torch.inference_mode():
            tensor.set_(regions[old][1], tensor.storage_offset(), tensor.size(), tensor.stride())
    return [region for region, _ in regions.values()]
